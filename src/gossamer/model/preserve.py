"""Run a model and leave it as it was: modes, attributes, containers, buffers and random states are restored."""

from __future__ import annotations

import functools
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

_MAX_OBJECTS = 100_000
_MAX_LENGTH = 10_000
"""Longer containers hold data, not what a forward pass changes."""
_lock = threading.RLock()
"""Random states and the compiler's stance belong to the process."""
_OPAQUE = (Tensor, str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, np.ndarray)


@contextmanager
def preserved(module: nn.Module, *others: Any) -> Generator[None]:
    """Restore, on exit, what running the model changes: modes, attributes, containers, buffers, random states.

    Covers all that attributes, containers and closures of the model (and of `others`) lead to. Within, compiled parts
    run uncompiled, and attention without its fused fast path.
    """
    with ExitStack() as stack:
        stack.enter_context(_lock)
        restore = list(_restorers(module, *others))
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        fast = torch.backends.mha.get_fastpath_enabled()
        python, numpy = random.getstate(), np.random.get_state()
        stack.enter_context(cast(AbstractContextManager[None], torch.random.fork_rng()))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            random.setstate(python)
            np.random.set_state(numpy)
            for undo in restore:
                undo()
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer.layout == torch.strided and not torch.equal(buffer, before):
                        buffer.copy_(before)


def _restorers(*roots: Any) -> Iterator[Callable[[], None]]:
    """One for each mutable object that the roots lead to."""
    queue: deque[Any] = deque(roots)
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MAX_OBJECTS:
        thing = queue.popleft()
        if isinstance(thing, _OPAQUE) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        content, undo = _opened(thing)
        queue.extend(content)
        if undo is not None:
            yield undo


def _opened(thing: Any) -> tuple[Iterable[Any], Callable[[], None] | None]:
    """What an object holds, and how to restore that."""
    match thing:
        case dict() | list() | set() | deque() if len(cast(Any, thing)) > _MAX_LENGTH:
            return (), None
        case dict():
            mapping = cast(dict[Any, Any], thing)
            before = dict(mapping)
            return before.values(), lambda: _refill(mapping, before, mapping.update)
        case list() | deque():
            sequence = cast(list[Any], thing)
            items = list(sequence)
            return items, lambda: _refill(sequence, items, sequence.extend)
        case set():
            members = cast(set[Any], thing)
            kept = set(members)
            return kept, lambda: _refill(members, kept, members.update)
        case tuple() | frozenset():
            return cast(Iterable[Any], thing), None
        case types.MethodType():
            return (thing.__self__, thing.__func__), None
        case functools.partial():
            return (thing.func, thing.args, thing.keywords), None
        case types.FunctionType():
            return (thing.__closure__ or (), thing.__defaults__, thing.__dict__), None
        case types.CellType():
            return _cell(thing)
        case _:
            return _object(thing)


def _object(thing: Any) -> tuple[Iterable[Any], Callable[[], None] | None]:
    """An object's attributes, slots included."""
    slots = [name for kind in type(thing).__mro__ for name in _slots(vars(kind).get("__slots__", ()))]
    before = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}

    def undo() -> None:
        for name, value in before.items():
            object.__setattr__(thing, name, value)

    return (getattr(thing, "__dict__", None), *before.values()), undo if before else None


def _slots(declared: Any) -> list[str]:
    names = [declared] if isinstance(declared, str) else list(declared)
    return [name for name in names if not name.startswith("__")]


def _cell(cell: types.CellType) -> tuple[Iterable[Any], Callable[[], None] | None]:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return (), None

    def undo() -> None:
        cell.cell_contents = content

    return (content,), undo


def _refill(container: Any, before: Any, fill: Callable[[Any], object]) -> None:
    container.clear()
    fill(before)
