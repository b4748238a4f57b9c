"""The teacher: runs on the student's batch without gradient and in evaluation mode, and is left as it was.

The hooks on modules refer to their owner weakly, and do nothing in a copied or pickled model.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import ModifierError, first_line, nearest
from gossamer.model.additions import uncompiled
from gossamer.modifiers.distillation.outputs import replaced, tensors


@dataclass
class TeacherOutput:
    """What the teacher returned for one batch, and the features of its layers in the order of their calls."""

    outputs: Any
    features: dict[Hashable, list[Tensor]] = field(default_factory=dict[Hashable, list[Tensor]])


class Teacher:
    """A module that is never trained; `own` when it is a copy of the model that nothing else uses."""

    def __init__(self, module: nn.Module, own: bool = False) -> None:
        self.module = module
        self.own = own
        self.released = False
        """Whether the copy was freed, because no modifier uses it any more."""
        self._recorded: dict[Hashable, list[Tensor]] | None = None

    def release(self) -> None:
        """Free the module."""
        self.module, self.released = nn.Module(), True

    def record(self, key: Hashable, layer: nn.Module) -> RemovableHandle:
        """Record the output of this layer of the teacher under the key."""

        def record(teacher: object, output: Tensor) -> None:
            recorded = cast(Teacher, teacher)._recorded
            if recorded is not None:
                # Later layers may change it in place.
                recorded.setdefault(key, []).append(output.detach().clone())

        return layer.register_forward_hook(LayerHook(self, record))

    def compute(
        self, student: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], keys: Sequence[str] | None
    ) -> TeacherOutput:
        """Run on what the student was called with; `keys` are the arguments that the teacher takes, by name."""
        self._follow(student)
        if keys:
            args, kwargs = _selected(student, args, kwargs, keys)
        # The teacher may change its inputs in place.
        args, kwargs = (
            replaced(given, {path: tensor.detach().clone() for path, tensor in tensors(given).items()})
            for given in (tuple(args), dict(kwargs))
        )
        result = TeacherOutput(None)
        with _evaluating(self.module), torch.no_grad(), _without_cached_casts():
            self._recorded = result.features
            try:
                result.outputs = self.module(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
                raise ModifierError(
                    f"has a teacher that fails on the model's inputs: {first_line(error)}; give one that takes the "
                    "same inputs, or select keywords by teacher_input_keys",
                    "teacher_input_keys",
                ) from error
            finally:
                self._recorded = None
        return result

    def _follow(self, student: nn.Module) -> None:
        """Move a copy to the student's device and dtype; the user's own teacher is not moved."""
        ours, theirs = next(student.parameters(), None), next(self.module.parameters(), None)
        if ours is None or theirs is None or (ours.device, ours.dtype) == (theirs.device, theirs.dtype):
            return
        if self.own:
            self.module.to(ours.device, ours.dtype)
        elif ours.device != theirs.device:
            raise ModifierError(other_device_message(theirs.device, ours.device))


def other_device_message(theirs: torch.device, ours: torch.device) -> str:
    """The message about a teacher on another device than the model."""
    return f"distillation_teacher: it is on '{theirs}' and the model on '{ours}'; move it there: teacher.to('{ours}')"


class DisabledHook:
    """What a hook becomes in a copied or pickled module."""

    def __call__(self, *_: object) -> None:
        return None


class Hook:
    """A hook that refers to its owner weakly; a copy of it does nothing."""

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> Any:
        return DisabledHook, ()


class LayerHook(Hook):
    """Calls back with the output of a layer, or the first floating-point tensor in it."""

    def __init__(self, owner: object, callback: Callable[[object, Tensor], None]) -> None:
        super().__init__(owner)
        self.callback = callback

    @uncompiled
    def __call__(self, layer: nn.Module, args: object, output: Any) -> None:
        owner = self.owner()
        found = (tensor for tensor in tensors(output).values() if tensor.is_floating_point())
        first = next(found, None)
        if owner is not None and first is not None:
            self.callback(owner, first)


def without_hooks(module: nn.Module) -> nn.Module:
    """Remove the distillation hooks that a copy of a model has from the original."""
    for layer in module.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, name))
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook | DisabledHook)]:
                del hooks[key]
                for options in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
                    cast(dict[int, bool], getattr(layer, options)).pop(key, None)
    return module


@contextmanager
def _evaluating(module: nn.Module) -> Generator[None]:
    training = [layer for layer in module.modules() if layer.training]
    if training:
        module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@contextmanager
def _without_cached_casts() -> Generator[None]:
    """Autocast caches casts of weights; older torch would reuse one without gradient for a student that shares it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _selected(
    student: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], keys: Sequence[str]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Only these arguments, by the names that the student has for them, or out of the one mapping it is given."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        batch = cast(Mapping[str, Any], args[0])
        return ({key: _found(key, batch) for key in keys},), {}
    given = dict(kwargs)
    if args:
        bound = inspect.signature(student.forward).bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            elif kind is not inspect.Parameter.VAR_POSITIONAL:
                given[name] = value
    return (), {key: _found(key, given) for key in keys}


def _found(key: str, given: Mapping[str, Any]) -> Any:
    if key not in given:
        names = ", ".join(repr(name) for name in given) or "none by name"
        raise ModifierError(
            f"the model is called without '{key}', with {names}{nearest(key, given)}",
            "teacher_input_keys",
        )
    return given[key]
