"""A model that a recipe with QuantizationModifier drives, and what the tests look at; shared by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gossamer import Manager
from gossamer.quantization import Emulation, emulation_of
from tests.loops import STEPS_PER_EPOCH, batch, network, sgd

INPUTS = batch(0)[0]


def quantized(fields: str = "start_epoch: 0", *others: str) -> str:
    return "modifiers:\n" + "\n".join(f"  - !{text}" for text in (f"QuantizationModifier {{{fields}}}", *others)) + "\n"


def begin(recipe: str, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Manager]:
    model = network() if model is None else model
    manager = Manager(recipe)
    return model, manager.modify(model, sgd(model), STEPS_PER_EPOCH, **options), manager


def emulation(model: nn.Module) -> Emulation:
    found = emulation_of(model)
    assert found is not None
    return found


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in emulation(model).ranges.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], value) for key, value in other.items())


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return sum(len(getattr(layer, kind)) for layer in model.modules() for kind in kinds)
