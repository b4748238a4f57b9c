from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Digits
from gossamer.runner.data import build_dataset


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
