"""Example inputs of a model, and comparison of the outputs that a model and its exported file compute from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from gossamer.errors import GossamerError

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Allowed difference relative to the largest output; runtimes sum in a different order."""
QUANTIZED_TOLERANCE = 0.15
"""Allowed relative L2 difference between integers and their emulation, where values may round to the next step."""
INTEGER_TOLERANCE = 1e-3
"""Allowed share of different integer outputs, such as an argmax of two nearly equal values."""


class ExampleInputs:
    """Arguments of `forward`: `positional` ones, or `named` ones."""

    def __init__(self, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.positional, self.named = positional, named

    @classmethod
    def of(cls, given: Any) -> ExampleInputs:
        if isinstance(given, Tensor):
            return cls((given,), {})
        if isinstance(given, Mapping):
            return cls((), dict(cast(Mapping[str, Any], given)))
        if isinstance(given, list | tuple):
            return cls(tuple(cast(Sequence[Any], given)), {})
        raise GossamerError(
            f"example_inputs: expected a tensor, a list of arguments or a dict of them, found {type(given).__name__}"
        )

    @property
    def batch(self) -> int | None:
        """The size of the first axis of the first tensor that has one."""
        leaves = tree_leaves((self.positional, self.named))
        return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)

    def ordered(self, model: nn.Module) -> ExampleInputs:
        """Named arguments in the order of `forward`'s signature, which is the order of the file's inputs."""
        order = list(inspect.signature(model.forward).parameters)
        names = sorted(self.named, key=lambda name: order.index(name) if name in order else len(order))
        return ExampleInputs(self.positional, {name: self.named[name] for name in names})

    def on_cpu(self) -> ExampleInputs:
        return self._map(lambda tensor: tensor.detach().cpu())

    def doubled(self) -> ExampleInputs:
        """Twice the batch: torch.export treats a batch of 1 as a fixed size."""
        return self._map(lambda tensor: torch.cat([tensor, tensor]) if self._has_batch(tensor) else tensor)

    def grown(self) -> ExampleInputs:
        """A batch of a size that differs from this one and from that of `doubled`."""
        more = 2 if self.batch == 1 else 1
        return self._map(
            lambda tensor: torch.cat([tensor, *[tensor[:1]] * more]) if self._has_batch(tensor) else tensor
        )

    def dynamic_shapes(self, model: nn.Module, axis: Any = "batch") -> dict[str, Any]:
        """The `dynamic_shapes` of torch.export for a dynamic batch."""

        def shape(leaf: Any) -> dict[int, Any] | None:
            return {0: axis} if self._has_batch(leaf) else None

        return tree_map(shape, self._bound(model))

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """The tensors among the arguments, in the order of `forward`'s signature."""
        return tensors_in(self._bound(model))

    def _bound(self, model: nn.Module) -> dict[str, Any]:
        return inspect.signature(model.forward).bind(*self.positional, **self.named).arguments

    def _has_batch(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.batch

    def _map(self, change: Callable[[Tensor], Tensor]) -> ExampleInputs:
        return ExampleInputs(*tree_map_only(Tensor, change, (self.positional, self.named)))


# Outputs


class OutputMismatchError(Exception):
    """Outputs of a file that differ too much from the model's; callers add the file and the remedy."""


def outputs_of(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """The tensors that a model returns, in the order in which exporters number them."""
    with torch.no_grad():
        return tensors_in(model(*inputs.positional, **inputs.named))


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors in nested outputs."""
    return [leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def tolerance_of(model: nn.Module) -> float:
    """The tolerance of the model's least precise dtype."""
    dtypes = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    tolerances = (TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]) for dtype in dtypes)
    return max(tolerances, default=TOLERANCES[torch.float32])


def largest_difference(
    expected: Sequence[Tensor], actual: Sequence[Tensor], tolerance: float, *, quantized: bool = False
) -> float:
    """The largest difference between outputs of the model and the file; raises `OutputMismatchError` if too large."""
    if len(expected) != len(actual):
        raise OutputMismatchError(f"the file returns {len(actual)} outputs and the model {len(expected)}")
    pairs = zip(expected, actual, strict=True)
    return max((_difference(*pair, tolerance, quantized) for pair in pairs), default=0.0)


def _difference(expected: Tensor, actual: Tensor, tolerance: float, quantized: bool) -> float:
    if expected.shape != actual.shape:
        shapes = f"{tuple(actual.shape)} and the model's {tuple(expected.shape)}"
        raise OutputMismatchError(f"an output of the file has shape {shapes}")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        different = float((expected != actual).double().mean())
        if different > INTEGER_TOLERANCE and not quantized:
            raise OutputMismatchError(f"{different:.1%} of the file's integer outputs differ from the model's")
        return 0.0
    first, second = expected.double(), actual.double()
    same = (first == second) | (first.isnan() & second.isnan())
    distance = torch.where(same, 0.0, (first - second).abs())
    if not bool(distance.isfinite().all()):
        raise OutputMismatchError("an output of the file is infinite or NaN where the model's is not, or vice versa")
    finite = first[first.isfinite()]
    difference = float(distance.max())
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    share = difference / max(largest, 1e-30)
    if quantized:
        share = (float(distance.square().sum()) / max(float(finite.square().sum()), 1e-60)) ** 0.5
    if difference and share > (QUANTIZED_TOLERANCE if quantized else tolerance):
        raise OutputMismatchError(f"the file's outputs differ from the model's by {difference:.3g} of {largest:.3g}")
    return difference
