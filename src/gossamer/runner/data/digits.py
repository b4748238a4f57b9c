"""scikit-learn's handwritten digits, the embedded data. Of each class, the last fifth is the test split."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Digits
from gossamer.runner.data.examples import LabelledArrays
from gossamer.runner.data.readers import DataProblems, KnownClasses

CLASSES = [str(digit) for digit in range(10)]


def read_digits(source: Digits, known: KnownClasses, problems: DataProblems) -> tuple[LabelledArrays, list[str]]:
    """Images (1, 8, 8) of one split."""
    images, labels = digits(source.split)
    positions, classes = digit_classes(known)
    content = LabelledArrays(
        torch.from_numpy(images[:, None].copy()),
        torch.from_numpy(np.array(positions, np.int64)[labels]),
        np.arange(len(labels)),
        f"digits, {source.split}",
    )
    return content, classes


def digit_classes(known: KnownClasses) -> tuple[list[int], list[str]]:
    """The index of each digit among the classes, and the classes."""
    classes = known.names or CLASSES
    for name in CLASSES:
        fault = known.fault(name)
        if fault is not None:
            raise GossamerError(f"the embedded digits do not match the training set: {fault}")
    return [classes.index(name) for name in CLASSES], classes


@functools.cache
def digits(split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 8, 8) from 0 to 255 and their digits, in the order of scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = "the embedded digits need scikit-learn; install it with: pip install 'gossamer[vision]'"
        raise GossamerError(message) from None
    content = cast("Any", load_digits())
    labels: NDArray[np.int64] = np.asarray(content.target, np.int64)
    images = np.rint(np.asarray(content.images) * (255 / 16)).astype(np.uint8)
    test = np.zeros(len(labels), np.bool_)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        test[members[len(members) - len(members) // 5 :]] = True
    chosen = test if split == "test" else ~test
    return images[chosen], labels[chosen]
