"""Emulates integer arithmetic on a model in place, through hooks on its modules and a torch function mode.

Module hooks track which module is running, and the mode (`forward.Forward`) rounds the operands of each function call.
Parameters, their names and the optimizer do not change. A copied or unpickled model has its own emulation.
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
    """Integer arithmetic on one model; `schemes` has the scheme by module name, None for floating point."""

    def __init__(self, module: nn.Module, schemes: Mapping[str, Scheme | None], ranges: dict[str, Tensor]) -> None:
        self.schemes = dict(schemes)
        self.ranges = ranges
        """By call site: the minimum and maximum that were observed; updated in place."""
        self.frozen = False
        """Whether ranges are no longer updated."""
        self.norms_frozen = False
        """Whether batch norm uses its running statistics and does not update them."""
        self.calibrating = False
        """Whether ranges are also updated in evaluation mode."""
        self.constants: dict[str, Any] | None = None
        """During export: the scales by call site; otherwise None."""
        self.unknown: list[str] = []
        """During export: call sites without a range, which stay in floating point."""
        self._autocast_warned = False
        self.install(module)

    def install(self, module: nn.Module) -> None:
        """Attach to a model, in place of an earlier emulation."""
        withdraw(module)
        for path, layer in named_modules(module):
            if isinstance(layer, torch.jit.ScriptModule):  # takes no hooks
                continue
            hooks = _ModuleHooks(self, path)
            # Before other forward hooks: what they do with the output is not part of the model.
            hooks.handles = (
                layer.register_forward_pre_hook(hooks.enter),
                layer.register_forward_hook(hooks.leave, prepend=True, always_call=True),
            )
            _guard(layer)
        recompile(module.modules())

    @contextmanager
    def exporting(self) -> Generator[None]:
        """Freeze the ranges. The first forward pass inside records the scales as constants for tracing."""
        frozen, self.frozen, self.constants = self.frozen, True, {}
        self.unknown.clear()
        try:
            yield
        finally:
            self.frozen, self.constants = frozen, None

    @contextmanager
    def calibration(self) -> Generator[None]:
        """Update ranges in evaluation mode."""
        self.calibrating = True
        try:
            yield
        finally:
            self.calibrating = False

    def begin(self, layer: nn.Module) -> Forward:
        """Start a forward pass with this module as the outermost."""
        contexts = ExitStack()
        device = next((parameter.device.type for parameter in layer.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            if not self._autocast_warned:
                self._autocast_warned = True
                logger.warning(
                    "Quantization is active: autocast has no effect inside the model from now on. This needs more "
                    "memory; reduce the batch size if necessary"
                )
            contexts.enter_context(torch.autocast(device, enabled=False))
        return Forward(self, device, layer.training, contexts)


def emulation_of(module: nn.Module) -> Emulation | None:
    """The emulation that a model computes with, or None."""
    return next((hooks.emulation for hooks in _hooks_on(unwrap(module))), None)


def emulations_in(module: nn.Module) -> list[Emulation]:
    """The emulations of a model and of models inside it, each once."""
    return list({id(hooks.emulation): hooks.emulation for m in module.modules() for hooks in _hooks_on(m)}.values())


def withdraw(module: nn.Module) -> None:
    """Remove the emulation from a model, or from a copy of one."""
    removed = False
    for layer in module.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, kind))
            for key in [key for key, hook in hooks.items() if _owner(hook) is not None]:
                removed = True
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)  # pyright: ignore[reportPrivateUsage]
        if isinstance(guard := layer.__dict__.get("_compiled_call_impl"), _Guard):
            layer._compiled_call_impl = guard.before  # pyright: ignore[reportPrivateUsage]
        if isinstance(layer.__dict__.get("_replicate_for_data_parallel"), _Replicate):
            del layer.__dict__["_replicate_for_data_parallel"]
    if removed:
        recompile(module.modules())


def _owner(hook: object) -> _ModuleHooks | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _ModuleHooks) else None


def _hooks_on(layer: nn.Module) -> list[_ModuleHooks]:
    hooks = cast(Mapping[int, object], layer._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    return [owner for hook in hooks.values() if (owner := _owner(hook)) is not None]


class _ModuleHooks:
    """The forward hooks of one module; they refer to its name and not to the module, so that copies work."""

    def __init__(self, emulation: Emulation, path: str) -> None:
        self.emulation, self.path = emulation, path
        self.handles: tuple[RemovableHandle, ...] = ()
        """Pickled with the hooks, so that another process does not reuse their ids."""

    @uncompiled
    def enter(self, layer: nn.Module, args: object) -> None:
        forward = Forward.of(self.emulation)
        if forward is None:
            if self.emulation.constants is None and torch.compiler.is_exporting():
                raise GossamerError(
                    "torch.export does not support a model with emulated quantization; use gossamer.export.to_onnx"
                )
            if not _is_guarded(layer):
                _guard(layer)  # a copy of a model has no guards yet; this one is used from the next call on
            forward = self.emulation.begin(layer)
        forward.enter_module(self.path)
        if self.emulation.norms_frozen and isinstance(layer, _BatchNorm) and layer.training:
            layer.__dict__["_norm_was_training"] = True
            layer.training = False

    @uncompiled
    def leave(self, layer: nn.Module, args: object, output: Any) -> Any:
        _unfreeze(layer)
        forward = Forward.of(self.emulation)
        if forward is None or not forward.is_inside(self.path):
            return None  # another hook raised before `enter` was called
        changed = forward.leave_module(output)
        if forward.done:
            forward.close()
        return changed


class _Guard:
    """Replaces a module's compiled call: runs it uncompiled, and cleans up after Ctrl-C.

    torch does not run `always_call` hooks after a KeyboardInterrupt.
    """

    def __init__(self, module: nn.Module, emulation: Emulation) -> None:
        self.before = module.__dict__.get("_compiled_call_impl")
        self._module, self._emulation = module, emulation
        self._call = uncompiled(cast(Callable[..., Any], module._call_impl))  # pyright: ignore[reportPrivateUsage]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outermost = Forward.of(self._emulation) is None
        try:
            return self._call(*args, **kwargs)
        except BaseException:  # includes KeyboardInterrupt
            _unfreeze(self._module)
            if outermost and (left := Forward.of(self._emulation)) is not None:
                left.close()
            raise

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the module gets its own guard when it is called."""


class _Replicate:
    """Makes a replica for DataParallel that calls itself, and not the module that it was made from."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> nn.Module:
        replica = type(self._module)._replicate_for_data_parallel(self._module)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]
        for name in ("_compiled_call_impl", "_replicate_for_data_parallel"):
            replica.__dict__.pop(name, None)
        return replica


def _guard(module: nn.Module) -> None:
    """torch.compile ignores hooks that are added later, and compiled code ignores torch function modes."""
    module._compiled_call_impl = _Guard(module, _hooks_on(module)[0].emulation)  # pyright: ignore[reportPrivateUsage]
    module.__dict__["_replicate_for_data_parallel"] = _Replicate(module)


def _is_guarded(module: nn.Module) -> bool:
    replica = getattr(module, "_is_replica", False)
    return replica or isinstance(module.__dict__.get("_compiled_call_impl"), _Guard)


def _unfreeze(module: nn.Module) -> None:
    """Set a batch norm that was frozen for this call back to training mode."""
    if module.__dict__.pop("_norm_was_training", False):
        module.training = True
