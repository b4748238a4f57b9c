"""Whether a network computes the same after its channels have changed places.

Orders are drawn at random instead of searched, so that every channel that may
move does move, and a network that is treated wrongly is noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model import parameters
from gossamer.model import permute as permutation
from gossamer.model.permute import Permutation
from gossamer.sparse.permutation import Matrix

LIMIT = 1e-9


@dataclass
class ChannelOrder:
    order: Tensor
    kept_before: float = 0.0
    kept: float = 0.0
    bound: float = 0.0


def random_search(matrices: Sequence[Matrix], n: int, m: int, *, effort: float, progress: Any) -> list[ChannelOrder]:
    """Every channel somewhere else."""
    found: list[ChannelOrder] = []
    for index, matrix in enumerate(matrices):
        channels = matrix.weights().shape[1]
        order = torch.randperm(channels, generator=torch.Generator().manual_seed(channels))
        found.append(ChannelOrder(order.roll(1) if bool((order == torch.arange(channels)).all()) else order))
        progress(index, (index + 1) / len(matrices))
    return found


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """In float64, with numbers that make every parameter and statistic matter."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.dim() > 1:
                fan_in = tensor[0].numel()
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * (2 / fan_in) ** 0.5)
            elif tensor.is_floating_point() and tensor.numel():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.5)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def outputs(model: nn.Module, inputs: tuple[Any, ...], training: bool, **keywords: Any) -> list[Tensor]:
    """All that the model returns, leaving it as it was."""
    twin = copy.deepcopy(model).train(training)
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors_in(twin(*copy.deepcopy(inputs), **keywords))]


def distance(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    assert len(before) == len(after)
    found = 0.0
    for a, b in zip(before, after, strict=True):
        assert a.shape == b.shape
        if a.numel():
            scale = max(float(a.double().abs().max()), 1e-30)
            found = max(found, float((a.double() - b.double()).abs().max()) / scale)
    return found


def keeps(
    model: nn.Module,
    *inputs: Any,
    moving: bool | list[str] | None = None,
    names: list[str] | None = None,
    example_inputs: Any = None,
    m: int = 4,
    sensitive: bool = True,
) -> Permutation:
    """Permute the model, and check that nothing which it computes has changed.

    `moving`: weights whose input channels must have moved; True for at least one, False for none.
    """
    wanted = parameters.prunable(model) if names is None else names
    before = {training: outputs(model, inputs, training) for training in (False, True)}
    assert any(float(tensor.double().abs().max()) > 1e-6 for tensor in before[False] if tensor.numel())
    original = copy.deepcopy(model)
    modes = {name: module.training for name, module in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "search_each", random_search)
        found = permutation.find_permutation(
            model, wanted, m // 2, m, example_inputs=inputs if example_inputs is None else example_inputs
        )
    assert found.untraceable is None
    assert found.note is None
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert distance(before[False], outputs(model, inputs, False)) == 0, "finding changes nothing"
    found.apply(model)
    for training, expected in before.items():
        assert distance(expected, outputs(model, inputs, training)) < LIMIT, f"training={training}"
    loaded = copy.deepcopy(original)
    loaded.load_state_dict(model.state_dict())
    assert distance(before[False], outputs(loaded, inputs, False)) < LIMIT, "a checkpoint holds all that moved"
    moved = [layer.name for layer in found.layers if layer.reason is None]
    for name in [moving] if isinstance(moving, str) else moving if isinstance(moving, list) else []:
        assert name in moved, {layer.name: layer.reason for layer in found.layers}
    if isinstance(moving, bool):
        assert bool(moved) == moving, {layer.name: layer.reason for layer in found.layers}
    if sensitive:
        _a_wrong_order_is_noticed(model, found, inputs, before)
    found.inverse.apply(model)
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    found.apply(model)
    return found


def reason(found: Permutation, name: str) -> str | None:
    """Why a weight's input channels stay where they are."""
    return next(layer.reason for layer in found.layers if layer.name == name)


def _a_wrong_order_is_noticed(
    model: nn.Module, found: Permutation, inputs: tuple[Any, ...], before: dict[bool, list[Tensor]]
) -> None:
    """Taking one weight's move back changes the output; otherwise the test would prove nothing."""
    for name in list(found.moves)[:6]:
        wrong = copy.deepcopy(model)
        tensor = parameters.get_tensor(wrong, name)
        if tensor.dim() < 2:
            continue
        with torch.no_grad():
            tensor.copy_(found.inverse.of(name, tensor))
        changed = max(distance(before[training], outputs(wrong, inputs, training)) for training in (False, True))
        assert changed > 1e-7, f"nothing depends on the order of {name}"
