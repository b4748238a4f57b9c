"""A teacher at work: it answers a student's batch without gradient, in evaluation mode, and is left as it was.

Knows how to call a model and how to listen to its layers; what is learned
from the answers is the learners' affair. Hooks on the user's modules hold
nothing that a copy of the model, or a pickled one, would act upon.
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

from gossamer.errors import ModifierError, nearest
from gossamer.model.compiling import uncompiled
from gossamer.modifiers.distillation.outputs import replaced, tensors


@dataclass
class Answer:
    """What the teacher returned for one batch, and what its layers gave meanwhile, in the order of their calls."""

    outputs: Any
    features: dict[Hashable, list[Tensor]] = field(default_factory=dict[Hashable, list[Tensor]])


class Teacher:
    """A module that is asked and never trained; `own` when it is a copy that nobody else uses."""

    def __init__(self, module: nn.Module, own: bool = False) -> None:
        self.module = module
        self.own = own
        self.dismissed = False
        """Whether a copy is gone, for nobody learned from it any more."""
        self._heard: dict[Hashable, list[Tensor]] | None = None

    def dismiss(self) -> None:
        """Let go of the module."""
        self.module, self.dismissed = nn.Module(), True

    def listen(self, key: Hashable, layer: nn.Module) -> RemovableHandle:
        """Let answers hold what this layer of the teacher gives, under the key."""

        def record(teacher: object, output: Tensor) -> None:
            heard = cast(Teacher, teacher)._heard
            if heard is not None:
                # What follows may work in place.
                heard.setdefault(key, []).append(output.detach().clone())

        return layer.register_forward_hook(LayerHook(self, record))

    def answer(
        self, student: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], keys: Sequence[str] | None
    ) -> Answer:
        """Run on what the student was called with; `keys` are the arguments that the teacher takes, by name."""
        self._follow(student)
        if keys:
            args, kwargs = _selected(student, args, kwargs, keys)
        # The student must find its inputs as they were, whatever the teacher does to them.
        args, kwargs = (
            replaced(given, {path: tensor.detach().clone() for path, tensor in tensors(given).items()})
            for given in (tuple(args), dict(kwargs))
        )
        answer = Answer(None)
        with _evaluating(self.module), torch.no_grad(), _without_cached_casts():
            self._heard = answer.features
            try:
                answer.outputs = self.module(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, RuntimeError, ValueError, LookupError, AttributeError) as error:
                told = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ModifierError(
                    f"has a teacher that fails on the model's inputs: {told}; give one that takes the same inputs, "
                    "or select keywords by teacher_input_keys",
                    "teacher_input_keys",
                ) from error
            finally:
                self._heard = None
        return answer

    def _follow(self, student: nn.Module) -> None:
        """A copy goes where the student has gone; another's module is not moved."""
        ours, theirs = next(student.parameters(), None), next(self.module.parameters(), None)
        if ours is None or theirs is None or (ours.device, ours.dtype) == (theirs.device, theirs.dtype):
            return
        if self.own:
            self.module.to(ours.device, ours.dtype)
        elif ours.device != theirs.device:
            raise ModifierError(on_another_device(theirs.device, ours.device))


def on_another_device(theirs: torch.device, ours: torch.device) -> str:
    """The sentence for a teacher that is not where the model is."""
    return f"distillation_teacher: it is on '{theirs}' and the model on '{ours}'; move it there: teacher.to('{ours}')"


class Idle:
    """What a hook is in a copy of its module, or in one that was pickled."""

    def __call__(self, *_: object) -> None:
        return None


class Hook:
    """A hook with an owner that it does not keep alive; a copy of it does nothing."""

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> Any:
        return Idle, ()


class LayerHook(Hook):
    """Tells its owner what a layer gives: the output, or the first tensor of several."""

    def __init__(self, owner: object, told: Callable[[object, Tensor], None]) -> None:
        super().__init__(owner)
        self.told = told

    @uncompiled
    def __call__(self, layer: nn.Module, args: object, output: Any) -> None:
        owner = self.owner()
        found = (tensor for tensor in tensors(output).values() if tensor.is_floating_point())
        first = next(found, None)
        if owner is not None and first is not None:
            self.told(owner, first)


def without_hooks(module: nn.Module) -> nn.Module:
    """A copy of a model, freed of what taught the original."""
    for layer in module.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, name))
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook | Idle)]:
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
    """Autocast keeps casts of weights; older torch would serve one made without gradient to a student sharing it."""
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
