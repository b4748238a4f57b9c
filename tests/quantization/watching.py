"""What an emulated model computes with, seen from outside: every call that reaches torch, shared by the tests.

A mode around the model's call is told of each function behind the emulation's
own, with the tensors it really takes. Nothing here knows how the emulation
decides where to round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from gossamer.quantization import Emulation, Rules, Scheme, scheme_of

TENSOR, CHANNEL = torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine
ROUNDING = (TENSOR, CHANNEL)
MOVES = {
    *(getattr(home, name) for name in ("flatten", "reshape", "permute", "transpose") for home in (torch, Tensor)),
    *(Tensor.view, Tensor.contiguous, Tensor.__getitem__, Tensor.to, Tensor.chunk, torch.chunk, Tensor.expand),
    *(functional.max_pool2d, torch.max_pool2d, functional.adaptive_max_pool2d, Tensor.unsqueeze, Tensor.squeeze),
    *(Tensor.split, torch.split, Tensor.unflatten, Tensor.clone, torch.channel_shuffle, functional.pixel_shuffle),
}
"""What takes values and gives back some of them, and no others."""


@dataclass
class Call:
    """One function that was called, and its tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass
class Seen:
    """All calls of one pass."""

    calls: list[Call] = field(default_factory=list)
    integers: dict[int, Call] = field(default_factory=dict)
    """By the id of a tensor that holds integers times a scale: the rounding that it comes from."""

    def of(self, *functions: Callable[..., Any]) -> list[Call]:
        return [call for call in self.calls if call.func in functions]

    def rounding_of(self, value: Any) -> Call | None:
        return self.integers.get(id(value))

    def is_rounded(self, value: Any) -> bool:
        return id(value) in self.integers

    @property
    def activations(self) -> list[Call]:
        """Roundings of whole tensors, weights not counted."""
        return [call for call in self.of(TENSOR) if not isinstance(call.args[0], nn.Parameter)]

    @property
    def places(self) -> list[Call]:
        """Roundings of tensors that did not hold integers before."""
        return [call for call in self.activations if not self.is_rounded(call.args[0])]


class _Watch(TorchFunctionMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = Call(func, tuple(args), dict(kwargs or {}), result)
        self.seen.calls.append(call)
        origin = call if func in ROUNDING else None
        if func in MOVES and args:
            origin = self.seen.integers.get(id(args[0]))
        if origin is not None:
            for part in result if isinstance(result, tuple | list) else (result,):
                self.seen.integers[id(part)] = origin
        return result


def watched(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Seen:
    """Run a model, and return what it called; the tensors stay alive, so that none is taken for another."""
    seen = Seen()
    with _Watch(seen):
        model(*args, **kwargs)
    return seen


def emulated(
    model: nn.Module, scheme: Any = None, rules: dict[str, Any] | None = None, **given: Any
) -> tuple[nn.Module, Emulation]:
    """The model, which computes in integers from now on."""
    base = scheme if isinstance(scheme, Scheme) else scheme_of(scheme, "scheme")
    found = Rules(base, **(rules or {}), **given).schemes(model)
    return model, Emulation(model, found, {})


def calibrated(model: nn.Module, *args: Any, scheme: Any = None, **given: Any) -> Emulation:
    """An emulation that has seen one batch, and keeps what it saw; the model is in evaluation mode."""
    emulation = emulated(model, scheme, **given)[1]
    model.eval()
    with emulation.calibration(), torch.no_grad():
        model(*args)
    emulation.frozen = True
    return emulation


def modes() -> list[Any]:
    """The modes of torch that are on now."""
    return list(_get_current_function_mode_stack())


def stance() -> str:
    """Whether torch compiles what it is asked to."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance


def convolutions(seen: Seen) -> list[Call]:
    names = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    return seen.of(*(getattr(torch, name) for name in names), *(getattr(functional, name) for name in names))


def layers(seen: Seen) -> list[Call]:
    return [*convolutions(seen), *seen.of(functional.linear)]


def sums(seen: Seen) -> Iterator[Call]:
    """Additions of two tensors that a model computed."""
    for call in seen.of(torch.add, Tensor.add, Tensor.__add__, Tensor.add_, Tensor.__iadd__):
        if all(isinstance(value, Tensor) and value.dim() > 1 for value in call.args[:2]):
            yield call


def assert_same(one: Tensor, other: Tensor) -> None:
    """Equal to the bit."""
    torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)
