"""Bytes that a mask takes per weight: in a run, and in its saved state.

What a run holds is found by looking at every bool tensor that came to life
with it, not by asking the library.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor

from benchmarks.measuring import Row, Watch
from benchmarks.training_step import PRUNE
from gossamer import Manager


def mask_size(watch: Watch) -> Iterator[Row]:
    model = torchvision.models.resnet18()
    before = _bool_bytes()
    manager = Manager(PRUNE)
    manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=1)
    held = _bool_bytes() - before
    weights = sum(mask.numel() for mask in manager.masks().values())
    state = manager.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    note = "ResNet-18, every convolution and linear layer"
    yield Row("mask bytes held / weights", held, weights, "bytes", 1.0, note=note)
    yield Row("mask bytes in state_dict / weights", _tensor_bytes(state), weights, "bytes", 0.125)
    yield Row("  the same as a file of torch.save", file.getbuffer().nbytes, weights, "bytes")


def _bool_bytes() -> int:
    """Memory of all bool tensors there are; views of one storage count once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor and thing.dtype == torch.bool:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())  # pyright: ignore[reportUnknownVariableType]
    return sum(_tensor_bytes(item) for item in value) if isinstance(value, list) else 0  # pyright: ignore[reportUnknownVariableType]
