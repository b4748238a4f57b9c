"""Scenes: exact boxes, the same for the same seed, and written as COCO files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Coco, Scenes
from gossamer.runner.data import build_dataset, write_coco
from gossamer.runner.data import digits as composing
from gossamer.runner.data.digits import digits


def compose(seed, split, index, size):
    return composing.compose(digits(split), seed, split, index, size)


def scenes(**settings):
    return Scenes(type="scenes", **({"split": "train", "count": 6} | settings))


@pytest.mark.parametrize("size", [32, 128, 300])
def test_boxes_are_tight_around_the_ink_of_each_digit(size):
    for index in range(8):
        scene = compose(0, "train", index, size)
        assert scene.image.shape == (size, size, 3)
        assert len(scene.digits) >= 1
        for number, (x1, y1, x2, y2) in enumerate(scene.corners.tolist()):
            rows, columns = np.nonzero(scene.ink == number)
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x1, y1, x2, y2)


def test_digits_of_a_scene_differ_in_size_and_do_not_overlap():
    heights = []
    for index in range(40):
        corners = compose(1, "train", index, 128).corners
        heights += (corners[:, 3] - corners[:, 1]).tolist()
        covered = np.zeros((128, 128), int)
        for x1, y1, x2, y2 in corners:
            covered[y1:y2, x1:x2] += 1
        assert covered.max() == 1
    assert min(heights) < 42
    assert max(heights) > 60
    assert len(heights) / 40 > 2


def test_ink_stands_out_from_what_is_behind_it():
    contrasts = []
    for index in range(20):
        scene = compose(0, "test", index, 128)
        grey = scene.image.mean(axis=-1)
        for number, (x1, y1, x2, y2) in enumerate(scene.corners.tolist()):
            inside, ink = grey[y1:y2, x1:x2], scene.ink[y1:y2, x1:x2] == number
            contrasts.append(abs(inside[ink].mean() - grey[scene.ink < 0].mean()))
    assert np.median(contrasts) > 60


def test_a_scene_follows_from_seed_split_and_index_alone():
    first = compose(3, "train", 5, 64)
    again = compose(3, "train", 5, 64)
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.corners, again.corners)
    others = [
        compose(4, "train", 5, 64),
        compose(3, "test", 5, 64),
        compose(3, "train", 6, 64),
        compose(-3, "train", 5, 64),
    ]
    assert not any(np.array_equal(first.image, other.image) for other in others)


def test_scenes_are_a_dataset_for_detection():
    data = build_dataset(scenes(size=64, limit=4), task="detection")
    assert len(data) == 4
    assert data.classes == [*"0123456789"]
    image, target = data[3]
    scene = compose(0, "train", 3, 64)
    assert torch.equal(image, torch.from_numpy(scene.image).permute(2, 0, 1) / 255)
    assert target["labels"].tolist() == (scene.digits + 1).tolist()
    assert target["boxes"].tolist() == scene.corners.tolist()
    assert target["iscrowd"].tolist() == [0] * len(scene.digits)


def test_scenes_written_as_coco_read_back_the_same(tmp_path):
    source = Scenes(type="scenes", split="test", count=5, size=64, seed=2)
    path = write_coco(source, tmp_path / "scenes")
    scenes = build_dataset(source, task="detection")
    files = build_dataset(Coco(type="coco", path=path, on_error="refuse"), task="detection")
    assert files.notes == []
    assert files.classes == scenes.classes
    assert len(files) == len(scenes) == 5
    for index in range(5):
        (image, target), (expected, truth) = files[index], scenes[index]
        assert torch.equal(image, expected)
        assert all(torch.equal(target[key], truth[key]) for key in truth)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "scenes").touch()
    with pytest.raises(GossamerError, match="scenes: cannot write the scenes"):
        write_coco(Scenes(type="scenes", split="test", count=1), tmp_path / "scenes")
