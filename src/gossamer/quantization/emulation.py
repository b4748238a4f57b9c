"""A model that computes as its integer version would, while it trains: rounding at every call, nothing renamed.

Hooks on the user's own modules tell where in the model a function is called,
and a mode of torch looks at each call while the model computes; parameters,
their names and the optimizer are left alone. A copy of the model, or one that
was pickled, has its own emulation. Nothing here knows a training run.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from gossamer.graph import named_modules, unwrap
from gossamer.quantization.forward import Forward, uncompiled
from gossamer.quantization.schemes import Scheme

logger = logging.getLogger("gossamer")

_local = threading.local()
"""Per thread, for DataParallel computes in several: what is computed now, by the id of the emulation."""


class Emulation:
    """Integer arithmetic on one model; `schemes` says by module name what is rounded there, None for nothing."""

    def __init__(self, module: nn.Module, schemes: Mapping[str, Scheme | None], ranges: dict[str, Tensor]) -> None:
        self.schemes = dict(schemes)
        self.ranges = ranges
        """By call site: the least and the greatest value seen; kept up to date in place."""
        self.frozen = False
        """Whether ranges stay as they are."""
        self.norms_frozen = False
        """Whether batch norm uses and keeps its running statistics."""
        self.calibrating = False
        """Whether ranges are taken in evaluation mode too."""
        self.constants: dict[str, Any] | None = None
        """While the model is exported: the scales by call site."""
        self._told_of_autocast = False
        withdraw(module)
        for path, layer in named_modules(module):
            place = _Place(self, path)
            layer.register_forward_pre_hook(place.enter)
            # First of all hooks: what others do with the output is not part of the model.
            layer.register_forward_hook(place.leave, prepend=True, always_call=True)
        _run_uncompiled(unwrap(module))

    @contextmanager
    def exporting(self) -> Generator[None]:
        """Ranges and scales stay as they are. The first forward pass inside notes the scales, and tracing uses them."""
        frozen, self.frozen, self.constants = self.frozen, True, {}
        try:
            yield
        finally:
            self.frozen, self.constants = frozen, None

    @contextmanager
    def calibration(self) -> Generator[None]:
        """Take ranges in evaluation mode."""
        self.calibrating = True
        try:
            yield
        finally:
            self.calibrating = False

    def begin(self, layer: nn.Module) -> ExitStack:
        """What holds while the model computes."""
        stack = ExitStack()
        device = next((parameter.device.type for parameter in layer.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            if not self._told_of_autocast:
                self._told_of_autocast = True
                logger.warning(
                    "quantization is active: mixed precision is off inside the model from here on (autocast is left "
                    "where it stands, without effect there); this takes more memory, a smaller batch may be needed"
                )
            stack.enter_context(torch.autocast(device, enabled=False))
        if self.constants is None and not torch.compiler.is_compiling():
            # Parts that were compiled on their own run as they were written.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return stack


def emulation_of(module: nn.Module) -> Emulation | None:
    """The emulation that a model computes with, or None."""
    hooks = cast(Mapping[int, object], unwrap(module)._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    places = (_place(hook) for hook in hooks.values())
    return next((place.emulation for place in places if place is not None), None)


def withdraw(module: nn.Module) -> None:
    """Let a model, or a copy of one, compute in floats again."""
    for layer in module.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, kind))
            for key in [key for key, hook in hooks.items() if _place(hook) is not None]:
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)  # pyright: ignore[reportPrivateUsage]
    inner = unwrap(module)
    if isinstance(inner.__dict__.get("_compiled_call_impl"), _Uncompiled):
        inner._compiled_call_impl = inner.__dict__["_compiled_call_impl"].before  # pyright: ignore[reportPrivateUsage]
        _compile_anew()


def _place(hook: object) -> _Place | None:
    place = getattr(hook, "__self__", None)
    return place if isinstance(place, _Place) else None


class _Place:
    """The two hooks on a module, which know its name and not the module."""

    def __init__(self, emulation: Emulation, path: str) -> None:
        self.emulation, self.path = emulation, path

    @uncompiled
    def enter(self, layer: nn.Module, args: object) -> None:
        forwards: dict[int, Forward] = _local.__dict__.setdefault("forwards", {})
        key = id(self.emulation)
        if self.path == "" and key in forwards:
            # The model does not call itself: an interrupt (Ctrl-C) has ended the pass before this one.
            forwards.pop(key).close()
        if key not in forwards:
            held = self.emulation.begin(layer)
            forwards[key] = Forward(self.emulation, training=layer.training, held=held)
        forwards[key].go_in(self.path)
        if self.emulation.norms_frozen and isinstance(layer, _BatchNorm) and layer.training:
            layer.__dict__["_norm_was_training"] = True
            layer.training = False

    @uncompiled
    def leave(self, layer: nn.Module, args: object, output: Any) -> Any:
        if layer.__dict__.pop("_norm_was_training", False):
            layer.training = True
        forwards: dict[int, Forward] = _local.__dict__.get("forwards", {})
        forward = forwards.get(id(self.emulation))
        if forward is None:
            return None
        changed = forward.go_out(output)
        if forward.done:
            forwards.pop(id(self.emulation)).close()
        return changed


class _Uncompiled:
    """Stands where a module keeps its compiled call, and calls it as it was written."""

    def __init__(self, module: nn.Module) -> None:
        self.before = module.__dict__.get("_compiled_call_impl")
        self._call = uncompiled(cast(Callable[..., Any], module._call_impl))  # pyright: ignore[reportPrivateUsage]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _run_uncompiled(module: nn.Module) -> None:
    """Hooks that come after torch.compile would not be heard, and compiled code does not take a mode of torch."""
    module._compiled_call_impl = _Uncompiled(module)  # pyright: ignore[reportPrivateUsage]
    _compile_anew()


def _compile_anew() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
