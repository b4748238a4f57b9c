"""The embedded digits and their splits; scenes of them, with exact boxes and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Digits, Scenes
from gossamer.runner.data import build_dataset
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


def read(split, classes=None):
    return build_dataset(Digits(type="digits", split=split), task="classification", classes=classes)


def test_the_last_fifth_of_each_class_is_for_tests():
    train, test = read("train"), read("test")
    assert len(train) + len(test) == 1797
    target = load_digits().target
    for digit in range(10):
        count = int((target == digit).sum())
        assert sum(test[index][1] == digit for index in range(len(test))) == count // 5
    last = np.flatnonzero(target == 4)[-1]
    pixels = torch.from_numpy(np.rint(load_digits().images[last] * 255 / 16).astype(np.uint8))
    fours = [test[index][0] for index in range(len(test)) if test[index][1] == 4]
    assert torch.equal(fours[-1], pixels.expand(3, 8, 8) / 255)


def test_white_is_white_and_black_is_black():
    images = torch.stack([read("train")[index][0] for index in range(50)])
    assert images.shape == (50, 3, 8, 8)
    assert (images.min(), images.max()) == (0, 1)


def test_digits_take_the_places_of_the_training_classes():
    names = [*"9876543210"]
    assert read("test", names)[0][1] == 9 - read("test")[0][1]
    with pytest.raises(GossamerError, match="the training set has no class '9'"):
        read("test", names[1:])
