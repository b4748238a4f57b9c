"""Arguments for a model's `forward`: from example inputs, from a batch of data, or guessed from its first layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a `forward`."""
IMAGE_SIZES = (224, 32, 28, 64, 299, 8, 16, 48, 96, 128, 256, 384, 512, 12, 14, 20, 24, 40, 56, 112)
"""Sides of square images, most common first."""
LENGTHS = (16, 64, 128, 256, 512, 1024, 4096)
CLIPS = ((16, 112), (16, 224), (8, 32), (4, 16), (8, 8))


def as_arguments(inputs: Any) -> Arguments:
    """Example inputs, a tensor, a tuple or a dict, as arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(cast(Mapping[str, Any], inputs))
    return (cast(tuple[Any, ...], inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def batch_arguments(batch: Any, module: nn.Module) -> Arguments:
    """A batch as arguments of a call, on the model's device; of a pair, the second are labels."""
    items = list(cast(Sequence[Any], batch)) if isinstance(batch, list | tuple) else [batch]
    inputs: Any = items[0] if len(items) in (1, 2) else tuple(items)
    args, kwargs = as_arguments(inputs)
    like = next(iter(module.parameters()), None)
    if like is not None:
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(like.device), (args, kwargs))
    return args, kwargs


def guess_inputs(module: nn.Module) -> Iterator[Any]:
    """Arguments for `forward`, likely ones first; nothing when the model takes more than one tensor."""
    first = next((layer for layer in module.modules() if isinstance(layer, _FIRST)), None)
    if len(_needed(module)) > 1 or first is None:
        return
    weight: Any = getattr(first, "weight", None)
    for guess in _tensors_for(first, module):
        if isinstance(weight, Tensor):
            yield guess.to(weight.device, weight.dtype if guess.is_floating_point() else guess.dtype)
        else:
            yield guess


def with_values(inputs: Any) -> Any:
    """One sample of guessed inputs, filled with random values; the same every time."""
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        one = tensor[:1]
        return torch.rand(one.shape, generator=generator).to(one) if one.is_floating_point() else torch.zeros_like(one)

    return pytree.tree_map_only(Tensor, filled, inputs)


def reason_not_guessed(module: nn.Module) -> str:
    """Why no input is guessed, if none is."""
    needed = _needed(module)
    if len(needed) > 1:
        return f"its forward takes {len(needed)} inputs ({', '.join(needed)}), which are not guessed"
    return "it has no layer from which the shape of its input could be guessed"


def _needed(module: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


_FIRST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)


def _tensors_for(first: nn.Module, module: nn.Module) -> Iterator[Tensor]:
    match first:
        case nn.Conv2d() | nn.ConvTranspose2d():
            for size in IMAGE_SIZES:
                yield torch.empty(2, first.in_channels, size, size)
        case nn.Conv1d() | nn.ConvTranspose1d():
            for length in LENGTHS:
                yield torch.empty(2, first.in_channels, length)
        case nn.Conv3d() | nn.ConvTranspose3d():
            for frames, size in CLIPS:
                yield torch.empty(2, first.in_channels, frames, size, size)
        case nn.Linear():
            yield torch.empty(2, first.in_features)
            for norm in module.modules():  # one over the batch gives its size
                if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) > 1:
                    yield torch.empty(norm.normalized_shape[0], first.in_features)
            for length in LENGTHS:
                yield torch.empty(2, length, first.in_features)
            for size in IMAGE_SIZES:
                if first.in_features % size**2 == 0:
                    yield torch.empty(2, first.in_features // size**2, size, size)
        case nn.Embedding():
            for length in LENGTHS:
                yield torch.empty(2, length, dtype=torch.long)
        case _:
            return
