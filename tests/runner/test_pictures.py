"""Pictures of detections: boxes where they belong, in their colours, whatever the images are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.runner.data import ImageFileError
from gossamer.runner.pictures import COLOURS, TRUTH, draw_detections, draw_tests

FIRST, SECOND = COLOURS[:2]
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
    truth = {"boxes": torch.tensor([[64.0, 64, 96, 96]])}
    detected = found([[16, 16, 48, 48], [1, 1, 9, 9]], [2, 1], [0.9, 0.2])
    draw_detections([torch.zeros(3, 128, 128)] * 2, [detected] * 2, [truth] * 2, CLASSES, path)
    seen = pixels(path)
    assert seen[10 + 3 * 64, 10 + 3 * 80].tolist() == list(TRUTH)
    assert seen[10 + 3 * 48, 10 + 3 * 32].tolist() == list(SECOND)
    assert seen[10 + 3 * 40, 10 + 3 * 40].tolist() == [0, 0, 0], "a box is an outline"
    assert FIRST not in colours(path), "its score is too low"


@pytest.mark.parametrize("image", [torch.full((3, 40, 60), 0.5), torch.linspace(-2, 2, 7200).reshape(3, 40, 60)])
def test_boxes_of_a_diverged_model_are_drawn_inside_the_image(tmp_path: Path, image: Tensor) -> None:
    strange = found([[-50, -9, 20, 20], [30, 30, 10, 10], [float("nan"), 0, 500, 500]], [1, 2, 7], [0.9, 0.8, 0.7])
    draw_detections([image], [strange], [{"boxes": torch.tensor([[5.0, 5, 5, 5]])}], CLASSES, tmp_path / "a.png")
    assert {FIRST, SECOND, TRUTH} <= colours(tmp_path / "a.png")


def test_a_picture_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_text("")
    nothing = {"boxes": torch.zeros(0, 4)}
    with pytest.raises(GossamerError, match=r"a\.png: cannot write the picture"):
        draw_detections(
            [torch.zeros(3, 8, 8)], [found([], [], [])], [nothing], CLASSES, tmp_path / "pictures" / "a.png"
        )


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


def test_tests_are_drawn_on_the_first_six_images_that_can_be_read(tmp_path: Path) -> None:
    samples = [(torch.zeros(3, 64 + 8 * size, 64), {"boxes": torch.tensor([[2.0, 2, 60, 60]])}) for size in range(8)]
    model = nn.Linear(1, 1)
    draw_tests(model, Task(), Samples([None, *samples]), CLASSES, tmp_path / "a.png")
    assert {FIRST, TRUTH} <= colours(tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").shape == (2 * 394 + 10, 3 * 394 + 10, 3)
    assert model.training
    draw_tests(model, Task(), Samples([None]), CLASSES, tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()
