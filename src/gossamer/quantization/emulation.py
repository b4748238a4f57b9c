"""A model that computes as its integer version would, while it trains: rounding at every call, nothing renamed.

Hooks on the user's own modules tell where in the model a function is called,
and a mode of torch looks at each call while the model computes; parameters,
their names and the optimizer are left alone. A copy of the model, or one that
was pickled, has its own emulation. Nothing here knows a training run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils.hooks import RemovableHandle

from gossamer.errors import GossamerError
from gossamer.model import named_modules, unwrap
from gossamer.model.additions import recompile, uncompiled
from gossamer.quantization.forward import Forward
from gossamer.quantization.schemes import Scheme

logger = logging.getLogger("gossamer")


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
        self.unknown: list[str] = []
        """While the model is exported: call sites that training never reached, and that stay in floats."""
        self._told_of_autocast = False
        self.install(module)

    def install(self, module: nn.Module) -> None:
        """Let a model compute so, and no longer by another emulation that it had."""
        withdraw(module)
        for path, layer in named_modules(module):
            if isinstance(layer, torch.jit.ScriptModule):  # takes no hooks
                continue
            place = _Place(self, path)
            # First of all hooks behind a module: what others do with its output is not part of the model.
            place.handles = (
                layer.register_forward_pre_hook(place.enter),
                layer.register_forward_hook(place.leave, prepend=True, always_call=True),
            )
            _guard(layer)
        recompile(module.modules())

    @contextmanager
    def exporting(self) -> Generator[None]:
        """Ranges and scales stay as they are. The first forward pass inside notes the scales, and tracing uses them."""
        frozen, self.frozen, self.constants = self.frozen, True, {}
        self.unknown.clear()
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

    def begin(self, layer: nn.Module) -> Forward:
        """A pass that begins with this module."""
        held = ExitStack()
        device = next((parameter.device.type for parameter in layer.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            if not self._told_of_autocast:
                self._told_of_autocast = True
                logger.warning(
                    "quantization is active: mixed precision is off inside the model from here on (autocast is left "
                    "where it stands, without effect there); this takes more memory, a smaller batch may be needed"
                )
            held.enter_context(torch.autocast(device, enabled=False))
        return Forward(self, device, layer.training, held)


def emulation_of(module: nn.Module) -> Emulation | None:
    """The emulation that a model computes with, or None."""
    return next((place.emulation for place in _places(unwrap(module))), None)


def emulations_in(module: nn.Module) -> list[Emulation]:
    """The emulations of a model and of models inside it, each once."""
    found = {id(place.emulation): place.emulation for layer in module.modules() for place in _places(layer)}
    return list(found.values())


def withdraw(module: nn.Module) -> None:
    """Let a model, or a copy of one, compute in floats again."""
    removed = False
    for layer in module.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, kind))
            for key in [key for key, hook in hooks.items() if _place(hook) is not None]:
                removed = True
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)  # pyright: ignore[reportPrivateUsage]
        if isinstance(guard := layer.__dict__.get("_compiled_call_impl"), _Guard):
            layer._compiled_call_impl = guard.before  # pyright: ignore[reportPrivateUsage]
        if isinstance(layer.__dict__.get("_replicate_for_data_parallel"), _Replicate):
            del layer.__dict__["_replicate_for_data_parallel"]
    if removed:
        recompile(module.modules())


def _place(hook: object) -> _Place | None:
    place = getattr(hook, "__self__", None)
    return place if isinstance(place, _Place) else None


def _places(layer: nn.Module) -> list[_Place]:
    hooks = cast(Mapping[int, object], layer._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    return [place for hook in hooks.values() if (place := _place(hook)) is not None]


class _Place:
    """The two hooks on a module, which know its name and not the module."""

    def __init__(self, emulation: Emulation, path: str) -> None:
        self.emulation, self.path = emulation, path
        self.handles: tuple[RemovableHandle, ...] = ()
        """Pickled with the hooks, they keep their numbers free in another process."""

    @uncompiled
    def enter(self, layer: nn.Module, args: object) -> None:
        forward = Forward.of(self.emulation)
        if forward is None:
            if self.emulation.constants is None and torch.compiler.is_exporting():
                raise GossamerError(
                    "a model that emulates quantization is exported by gossamer.export.to_onnx: torch.export alone "
                    "would write its floats"
                )
            if not _is_guarded(layer):
                _guard(layer)  # From the next call on: a copy of a model has no guards yet.
            forward = self.emulation.begin(layer)
        forward.go_in(self.path)
        if self.emulation.norms_frozen and isinstance(layer, _BatchNorm) and layer.training:
            layer.__dict__["_norm_was_training"] = True
            layer.training = False

    @uncompiled
    def leave(self, layer: nn.Module, args: object, output: Any) -> Any:
        _unfreeze(layer)
        forward = Forward.of(self.emulation)
        if forward is None or not forward.is_in(self.path):
            return None  # A hook of somebody else has raised before `enter`.
        changed = forward.go_out(output)
        if forward.done:
            forward.close()
        return changed


class _Guard:
    """Stands where a module keeps its compiled call: calls it as it was written, and tidies up behind an interrupt.

    torch's own hooks that run always do not run behind Ctrl-C.
    """

    def __init__(self, module: nn.Module, emulation: Emulation) -> None:
        self.before = module.__dict__.get("_compiled_call_impl")
        self._module, self._emulation = module, emulation
        self._call = uncompiled(cast(Callable[..., Any], module._call_impl))  # pyright: ignore[reportPrivateUsage]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outermost = Forward.of(self._emulation) is None
        try:
            return self._call(*args, **kwargs)
        except BaseException:  # Ctrl-C is one, and is raised again.
            _unfreeze(self._module)
            if outermost and (left := Forward.of(self._emulation)) is not None:
                left.close()
            raise

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the module gets a guard of its own when it is called."""


class _Replicate:
    """Makes what DataParallel runs on each device: a replica that calls itself, and not the module it was made from."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> nn.Module:
        replica = type(self._module)._replicate_for_data_parallel(self._module)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]
        for name in ("_compiled_call_impl", "_replicate_for_data_parallel"):
            replica.__dict__.pop(name, None)
        return replica


def _guard(module: nn.Module) -> None:
    """Hooks that come after torch.compile would not be heard, and compiled code does not take a mode of torch."""
    module._compiled_call_impl = _Guard(module, _places(module)[0].emulation)  # pyright: ignore[reportPrivateUsage]
    module.__dict__["_replicate_for_data_parallel"] = _Replicate(module)


def _is_guarded(module: nn.Module) -> bool:
    replica = getattr(module, "_is_replica", False)
    return replica or isinstance(module.__dict__.get("_compiled_call_impl"), _Guard)


def _unfreeze(module: nn.Module) -> None:
    """Batch norm says again that it trains."""
    if module.__dict__.pop("_norm_was_training", False):
        module.training = True
