"""Pictures of detections: boxes where they belong, in their colours, whatever the images are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.runner import pictures
from gossamer.runner.data.examples import ImageFileError
from gossamer.runner.pictures import draw_detections, draw_tests

GREEN, FIRST, SECOND = (60, 220, 90), pictures._COLOURS[0], pictures._COLOURS[1]
CLASSES = ["cat", "dog"]


def found(boxes: list[list[float]], labels: list[int], scores: list[float]) -> dict[str, Tensor]:
    return {
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "scores": torch.tensor(scores),
    }


def colours(path: Path) -> set[tuple[int, int, int]]:
    return {tuple(pixel) for pixel in pixels(path).reshape(-1, 3).tolist()}


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_small_scenes_are_drawn_large_with_each_box_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "one.png"
    truth = {"boxes": torch.tensor([[64.0, 64, 96, 96]]), "labels": torch.tensor([1])}
    draw_detections([torch.zeros(3, 128, 128)], [found([[16, 16, 48, 48]], [2], [0.9])], [truth], CLASSES, path)
    seen = pixels(path)
    assert seen[10 + 3 * 64, 10 + 3 * 80].tolist() == list(GREEN)
    assert seen[10 + 3 * 48, 10 + 3 * 32].tolist() == list(SECOND)
    assert seen[10 + 3 * 32, 10 + 3 * 32].tolist() == [0, 0, 0], "a box is an outline"
    assert FIRST not in colours(path)


def test_what_is_not_sure_enough_is_left_out(tmp_path: Path) -> None:
    truth = {"boxes": torch.zeros(0, 4)}
    draw_detections(
        [torch.zeros(3, 64, 64)], [found([[8, 8, 40, 40]], [1], [0.2])], [truth], CLASSES, tmp_path / "a.png"
    )
    assert FIRST not in colours(tmp_path / "a.png")
    draw_detections(
        [torch.zeros(3, 64, 64)], [found([[8, 8, 40, 40]], [1], [0.2])], [truth], CLASSES, tmp_path / "b.png", score=0.1
    )
    assert FIRST in colours(tmp_path / "b.png")


@pytest.mark.parametrize(
    "image",
    [
        torch.full((3, 40, 60), 128, dtype=torch.uint8),
        torch.full((1, 40, 60), 0.5),
        torch.linspace(-2, 2, 3 * 40 * 60).reshape(3, 40, 60),
        torch.full((3, 40, 60), float("nan")),
        torch.full((4, 40, 60), 0.5, dtype=torch.bfloat16),
    ],
    ids=["bytes", "gray", "normalized", "nan", "alpha"],
)
def test_images_of_every_kind_are_drawn(tmp_path: Path, image: Tensor) -> None:
    strange = found([[-50, -9, 20, 20], [30, 30, 10, 10], [float("nan"), 0, 500, 500]], [1, 2, 7], [0.9, 0.8, 0.7])
    draw_detections([image], [strange], [{"boxes": torch.tensor([[5.0, 5, 5, 5]])}], CLASSES, tmp_path / "a.png")
    assert {FIRST, SECOND, GREEN} <= colours(tmp_path / "a.png")


def test_images_of_several_sizes_stand_in_one_grid_of_six_at_most(tmp_path: Path) -> None:
    images = [torch.rand(3, 60 + 20 * index, 90) for index in range(8)]
    nothing = [found([], [], [])] * 8
    draw_detections(images, nothing, [{"boxes": torch.zeros(0, 4)}] * 8, CLASSES, tmp_path / "grid.png")
    height, width, _ = pixels(tmp_path / "grid.png").shape
    assert width == 3 * 384 + 4 * 10
    assert height <= 2 * 384 + 3 * 10 + 34


def test_a_picture_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_text("")
    with pytest.raises(GossamerError, match=r"a\.png: cannot write the picture"):
        draw_detections([], [], [], CLASSES, tmp_path / "pictures" / "a.png")


class Task:
    def predict(self, model: nn.Module, images: list[Tensor]) -> list[dict[str, Tensor]]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return [found([[8, 8, 40, 40]], [1], [0.9]) for _ in images]


class Samples(list):
    """None stands for an image that cannot be read."""

    def __getitem__(self, index: int) -> object:
        sample = super().__getitem__(index)
        if sample is None:
            raise ImageFileError("a.png: the image cannot be read")
        return sample


def test_tests_are_drawn_on_the_first_images_that_can_be_read(tmp_path: Path) -> None:
    sample = (torch.zeros(3, 64, 64), {"boxes": torch.tensor([[2.0, 2, 60, 60]])})
    model = nn.Linear(1, 1)
    assert draw_tests(model, Task(), Samples([None, sample, None]), CLASSES, tmp_path / "a.png") == tmp_path / "a.png"
    assert {FIRST, GREEN} <= colours(tmp_path / "a.png")
    assert model.training
    assert draw_tests(model, Task(), Samples([None]), CLASSES, tmp_path / "b.png") is None
    assert not (tmp_path / "b.png").exists()
