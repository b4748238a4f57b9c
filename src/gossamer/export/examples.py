"""The arguments with which a model is called once to be traced: by position or by name, tensors in lists and dicts.

Nothing here knows a model but its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError


class ExampleInputs:
    """The arguments of `forward`, by position or by name."""

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
        sizes: list[int] = []
        _mapped((self.positional, self.named), lambda tensor: sizes.extend(tensor.shape[:1]))
        return sizes[0] if sizes else None

    def ordered(self, model: nn.Module) -> ExampleInputs:
        """Named arguments in the order in which `forward` names them, which is that of the file's inputs."""
        order = list(inspect.signature(model.forward).parameters)
        place = {name: number for number, name in enumerate(order)}
        names = sorted(self.named, key=lambda name: place.get(name, len(order)))
        return ExampleInputs(self.positional, {name: self.named[name] for name in names})

    def on_cpu(self) -> ExampleInputs:
        return self._each(lambda tensor: tensor.detach().cpu())

    def doubled(self) -> ExampleInputs:
        """Twice the batch: torch.export would take a batch of one for a fixed size."""
        batch = self.batch
        return self._each(lambda tensor: torch.cat([tensor, tensor]) if _has(tensor, batch) else tensor)

    def grown(self) -> ExampleInputs:
        """A batch of another size than this one, and than the one that `doubled` makes of a single example."""
        batch = self.batch
        more = 2 if batch == 1 else 1
        return self._each(lambda tensor: torch.cat([tensor, *[tensor[:1]] * more]) if _has(tensor, batch) else tensor)

    def shapes(self, model: nn.Module, axis: Any = "batch") -> dict[str, Any]:
        """Which axes may have another size in another run, as torch.export wants it told."""
        batch = self.batch
        return _mapped(self._bound(model), lambda tensor: {0: axis} if _has(tensor, batch) else None, keep=False)

    def tensors(self, model: nn.Module) -> list[Tensor]:
        """The tensors among the arguments, in the order in which `forward` names them."""
        found: list[Tensor] = []
        _mapped(self._bound(model), found.append)
        return found

    def _bound(self, model: nn.Module) -> dict[str, Any]:
        return inspect.signature(model.forward).bind(*self.positional, **self.named).arguments

    def _each(self, change: Callable[[Tensor], Tensor]) -> ExampleInputs:
        return ExampleInputs(_mapped(self.positional, change), _mapped(self.named, change))


def _mapped(value: Any, change: Callable[[Tensor], Any], keep: bool = True) -> Any:
    """The same lists, tuples and dicts with each tensor changed; whatever else is in them is kept, or None instead."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        entries = cast(dict[Any, Any], value).items()
        return {key: _mapped(entry, change, keep) for key, entry in entries}
    if type(value) in (list, tuple):
        return type(value)(_mapped(entry, change, keep) for entry in value)
    return value if keep else None


def _has(tensor: Tensor, batch: int | None) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == batch


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""How far outputs may be apart, as a share of the largest: runtimes sum in another order."""
QUANTIZED = 0.15
"""The same for integers against their emulation, of the outputs as a whole: each may round to the step beside it."""
OTHER_CHOICES = 1e-3
"""The share of integers that may be others: an index of the largest of two that are nearly equal."""


def computed(model: nn.Module, inputs: ExampleInputs) -> list[Tensor]:
    """The tensors that a model gives, in the order in which exporters number them."""
    with torch.no_grad():
        return leaves(model(*inputs.positional, **inputs.named))


def leaves(outputs: Any) -> list[Tensor]:
    """The tensors in nested outputs."""
    from torch.utils._pytree import tree_leaves

    found = tree_leaves(outputs)
    return [leaf.detach() for leaf in found if isinstance(leaf, Tensor)]


def tolerance_of(model: nn.Module) -> float:
    """What is allowed for a model: that of the coarsest numbers in it."""
    kinds = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    return max((TOLERANCES.get(kind, TOLERANCES[torch.bfloat16]) for kind in kinds), default=TOLERANCES[torch.float32])


def largest_difference(
    expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float, *, quantized: bool = False
) -> float:
    """How far outputs are apart at most; raises a sentence without a place when that is too far."""
    if len(expected) != len(found):
        raise GossamerError(f"the file gives {len(found)} outputs and the model {len(expected)}")
    return max((_one(*pair, tolerance, quantized) for pair in zip(expected, found, strict=True)), default=0.0)


def _one(expected: Tensor, found: Tensor, tolerance: float, quantized: bool) -> float:
    if expected.shape != found.shape:
        shapes = f"{tuple(found.shape)} and the model's {tuple(expected.shape)}"
        raise GossamerError(f"an output of the file has the shape {shapes}")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        others = float((expected != found).double().mean())
        if others > OTHER_CHOICES and not quantized:
            raise GossamerError(f"{others:.1%} of the integers that the file gives are not the model's")
        return 0.0
    wide, given = expected.double(), found.double()
    same = (wide == given) | (wide.isnan() & given.isnan())
    apart = torch.where(same, 0.0, (wide - given).abs())
    if not bool(apart.isfinite().all()):
        raise GossamerError("an output of the file is infinite or NaN where the model's is not, or the other way round")
    finite = wide[wide.isfinite()]
    difference = float(apart.max())
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    share = difference / max(largest, 1e-30)
    if quantized:
        share = (float(apart.square().sum()) / max(float(finite.square().sum()), 1e-60)) ** 0.5
    if difference and share > (QUANTIZED if quantized else tolerance):
        raise GossamerError(f"the file's outputs are not the model's: they differ by {difference:.3g} of {largest:.3g}")
    return difference
