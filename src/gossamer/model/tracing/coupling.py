"""Which channels of a model belong together, whatever the model.

A model is followed as a whole if it can be. One whose path depends on values,
such as a detector, is not: then, if asked to, its largest parts that can be
are followed each on its own, with what enters and leaves them held in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.errors import GossamerError
from gossamer.model.inputs import as_arguments, guesses, unguessable
from gossamer.model.parameters import named_state, unwrap
from gossamer.model.tracing.tensors import tensors_in
from gossamer.model.tracing.tracer import Arguments, Coupling, Follower, storage_of
from gossamer.model.tracing.undisturbed import quietly, undisturbed
from gossamer.model.weights import duplicate

INPUT = "the network's input"
READS_INPUT = f"its input is {INPUT}"
"""Why channels that a layer reads from the network's input are held in place."""
LEAVES = "it reaches the network's output, or the model keeps it"
"""Why channels that the model returns or stores are held in place."""
_MOST_CALLS = 8
"""Of one part, with inputs of different shapes."""


class Untraceable(GossamerError):  # noqa: N818  (it is an answer, not a mistake)
    """The model cannot be followed, not even in parts; the message says why."""


def couple(model: nn.Module, example_inputs: Any = None, *, parts: bool = False) -> Coupling:
    """Follow the model in both modes; raises `Untraceable`.

    `example_inputs`: a tensor, or a tuple of arguments for `forward` (a dict: keyword arguments). Only shapes and
    types matter where the model is followed as a whole. Without them common shapes are tried. With `parts`, a model
    whose path depends on values is followed in parts. That is right as long as its own code calls those parts as a
    whole and does not reach for layers inside them on a path that the example does not take.
    """
    module = unwrap(model)
    with quietly():
        try:
            return _coupled(module, example_inputs, parts)
        except Untraceable:
            raise
        except Exception as error:  # any model, any reason
            raise Untraceable(f"the model could not be followed: {_told(error)}") from error


def _coupled(module: nn.Module, example_inputs: Any, parts: bool) -> Coupling:
    tried = [example_inputs] if example_inputs is not None else guesses(module)
    failure = unguessable(module)
    for inputs in tried:
        try:
            follower = Follower(module)
            follower.follow(module, [as_arguments(inputs)], INPUT, LEAVES)
            return follower.coupling()
        except Exception as error:  # noqa: BLE001  (any model, any reason)
            failure = _told(error)
            if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
                failure = f"its path depends on values ({failure})"
                break
    found = _couple_parts(module, example_inputs, failure) if parts else None
    if found is None:
        told = "" if example_inputs is not None or "depends on values" in failure else " (give example_inputs)"
        raise Untraceable(f"the model could not be followed{told}: {failure}")
    return found


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# Parts


def _couple_parts(module: nn.Module, example_inputs: Any, failure: str) -> Coupling | None:
    """Run the model once with values, and follow on its own what can be followed."""
    tried = [example_inputs] if example_inputs is not None else map(_with_values, guesses(module))
    for inputs in tried:
        try:
            follower = Follower(module)
            recording = _Recording(follower)
            recording.run(*as_arguments(inputs))
        except Exception:  # noqa: BLE001  (any model, any reason)
            continue
        return _follow_parts(follower, recording, failure)
    return None


def _follow_parts(follower: Follower, recording: _Recording, failure: str) -> Coupling | None:
    parts = dict(_parts(follower, follower.module, recording.calls))
    for name, part in parts.items():
        alone = f"'{name}', which was followed on its own"
        follower.follow(part, recording.calls[name], f"the input of {alone}", f"it leaves {alone}")
    for leaf, users in recording.users.items():
        if any(parts.keys().isdisjoint(user) for user in users):
            follower.hold(leaf, "it is also used outside the parts of the model that could be followed")
    if not parts:
        return None
    return follower.coupling(
        f"the model could not be followed as a whole ({failure}); followed on their own, with what enters and leaves "
        f"held in place: {', '.join(parts)}"
    )


def _parts(
    follower: Follower, module: nn.Module, calls: Mapping[str, list[Arguments]], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that can be followed, from the top down."""
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if next(child.parameters(), None) is None:
            continue
        if len(calls.get(name, [])) < _MOST_CALLS and _can_be_followed(follower, child, calls.get(name, [])):
            yield name, child
        else:
            yield from _parts(follower, child, calls, f"{name}.")


def _can_be_followed(follower: Follower, part: nn.Module, calls: list[Arguments]) -> bool:
    try:
        Follower(follower.module, follower.fake).follow(part, calls, "", "")
    except Exception:  # noqa: BLE001  (any model, any reason)
        return False
    return bool(calls)


class _Recording(TorchDispatchMode):
    """Runs a copy of a model once; notes how each module was called, and inside which modules each parameter was used.

    A parameter that is used by the code around a part cannot be moved with the part.
    """

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower
        self.calls: dict[str, list[Arguments]] = {}
        self.users: dict[str, set[tuple[str, ...]]] = {}
        self._active: list[str] = []
        self._shapes: set[str] = set()
        self._leaves: dict[int, list[str]] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module: nn.Module = duplicate(self.follower.module).eval()
        for name, tensor in (*named_state(module), *self.follower.state.items()):  # a closure may hold the original
            self._leaves.setdefault(storage_of(tensor), []).append(name)
        with undisturbed(module), torch.no_grad():
            for name, child in cast(Iterator[tuple[str, nn.Module]], module.named_modules()):
                child.register_forward_pre_hook(self._entering(name), with_kwargs=True, prepend=True)
                child.register_forward_hook(self._leave, always_call=True)
            with self:
                module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            with self, suppress(Exception):  # a detector wants answers to train, which nobody gave
                module.train()
                module(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._active.append(name)
            known = self.calls.setdefault(name, [])
            fake = self.follower.faked((args, kwargs))
            shapes = f"{name} {pytree.tree_map_only(Tensor, lambda t: (t.shape, t.dtype), fake)}"
            if shapes not in self._shapes and len(known) < _MOST_CALLS:
                self._shapes.add(shapes)
                known.append(fake)

        return enter

    def _leave(self, *_: Any) -> None:
        self._active.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        for tensor in tensors_in([args, list(named.values())]):
            for name in self._leaves.get(storage_of(tensor), ()):
                self.users.setdefault(name, set()).add(tuple(self._active))
        return func(*args, **named)


def _with_values(guess: Tensor) -> Tensor:
    """One sample of a guess, filled."""
    return torch.rand(guess[:1].shape).to(guess) if guess.is_floating_point() else torch.zeros_like(guess[:1])
