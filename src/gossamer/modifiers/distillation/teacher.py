"""The teacher: runs on the student's batch without gradient and in evaluation mode, and is left as it was.

The hooks on modules refer to their owner weakly, and do nothing in a copied or pickled model.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import GossamerError, ModifierError, first_line, nearest
from gossamer.model import unwrap
from gossamer.model.additions import remove_substitutions, uncompiled
from gossamer.model.distribution import fully_sharded, reshard
from gossamer.model.parameters import named_state
from gossamer.model.weights import duplicate
from gossamer.modifiers.distillation.outputs import replaced, tensors
from gossamer.modifiers.state import Item, Spec

if TYPE_CHECKING:
    from gossamer.modifiers.distillation.passes import Distillation

_KEYWORDS = ("self", "disable")

logger = logging.getLogger("gossamer")


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

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and buffers of a copy, by name; part of the run's state, because the copy exists nowhere else."""
        reshard(self.module)
        return {name: tensor.detach() for name, tensor in named_state(self.module)}

    def load_state(self, saved: Mapping[str, Tensor] | None, needed: bool, model: nn.Module) -> list[str]:
        """Load parsed weights into a copy of `model`; returns messages about what does not match."""
        if not self.own or not needed:
            return []
        as_it = "is now" if self.released else "was given to modify"
        if self.released:
            self.module, self.released = frozen_copy(model), False
        if saved is None:
            return [f"the state holds no frozen copy of the model: the teacher is the model as it {as_it}"]
        with torch.no_grad():
            for name, tensor in named_state(self.module):
                tensor.copy_(saved[name])
        return []

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


def distillation_for(module: nn.Module, given: object, used: bool) -> Distillation | None:
    """The distillation of a run on `module`, with what the user gave as teacher; None without distillation."""
    _check_teacher(module, given)
    if not used:
        if given is not None and given is not False:
            logger.warning("distillation_teacher has no effect: the recipe holds no distillation modifier")
        return None
    if given is False or given == "disable":
        logger.warning("distillation is switched off: its modifiers have no effect in this run")
        return None
    from gossamer.modifiers.distillation.passes import Distillation

    if isinstance(given, nn.Module):
        return Distillation(Teacher(given), unwrap(module))
    if given is None:
        logger.info("no distillation_teacher was given: the model learns from a frozen copy of itself as it is now")
    return Distillation(Teacher(frozen_copy(module), own=True), unwrap(module))


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of the model that never trains, without what recipes have attached to the model."""
    from gossamer.quantization import withdraw

    inner = unwrap(module)
    try:
        if fully_sharded(inner):
            from gossamer.model.sharded_copy import sharded_copy

            copy = sharded_copy(inner)
        else:
            copy = duplicate(inner)
    except Exception as error:
        raise GossamerError(
            f"distillation_teacher: the model cannot be copied to be its own teacher ({first_line(error)}); "
            "give a teacher module"
        ) from error
    withdraw(copy)
    remove_substitutions(copy)
    copy.zero_grad(set_to_none=True)
    return copy.eval().requires_grad_(False)


def _check_teacher(module: nn.Module, given: Any) -> None:
    if isinstance(given, str):
        if given not in _KEYWORDS:
            close = nearest(given, _KEYWORDS)
            message = f"expected a module, 'self' or 'disable', found '{given}'{close}"
            raise GossamerError(message, "distillation_teacher")
        return
    if given is None or given is False:
        return
    if not isinstance(given, nn.Module):
        raise GossamerError(
            f"distillation_teacher: expected a torch.nn.Module, 'self' or 'disable', found {type(given).__name__}"
        )
    if unwrap(given) is unwrap(module):
        raise GossamerError("distillation_teacher: it is the model that trains; write 'self' for a frozen copy of it")
    ours = {parameter.device for parameter in module.parameters()}
    theirs = {parameter.device for parameter in given.parameters()}
    if ours and theirs and not ours & theirs:
        raise GossamerError(other_device_message(min(theirs, key=str), min(ours, key=str)))


def parse_teacher_state(
    teacher: Teacher, item: Item | None, model: Mapping[str, Spec]
) -> tuple[dict[str, Tensor] | None, str | None]:
    """The saved weights of a copy, None when there are none that fit, and then why; `model` is the model to copy."""
    if item is None:
        return None, None
    if not teacher.own:
        return None, "the frozen copy of the model in the state is dropped: another teacher was given"
    held = (
        dict(model)
        if teacher.released
        else {name: Spec.of(name, tensor) for name, tensor in named_state(teacher.module)}
    )
    saved = item.entries()
    odd = [name for name in held if name not in saved or saved[name].shape() != held[name].shape]
    if odd or saved.keys() - held.keys():
        name = (odd or sorted(saved.keys() - held.keys()))[0]
        return None, f"the frozen copy of the model in the state is dropped: {name!r} does not fit this model"
    return {name: saved[name].weight(spec) for name, spec in held.items()}, None


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
