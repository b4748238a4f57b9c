"""Run a model and leave it as it was.

A forward pass can leave traces: counters, caches, activations that a module
or a hook keeps, random states. Everything that can be reached from the
model's modules by attributes, containers and closures is noted before and put
back after. Nothing here knows why the model is run.
"""

from __future__ import annotations

import functools
import gc
import logging
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

_MOST_OBJECTS = 100_000
_LONGEST = 10_000
"""Longer containers hold data, not what a forward pass leaves."""
_DEEPEST = 4
"""Containers inside each other that a cache may hold a tensor in."""
_running = threading.RLock()
"""Some of what is put back belongs to the process."""
_OPAQUE = (Tensor, str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, np.ndarray)


@contextmanager
def undisturbed(module: nn.Module) -> Generator[None]:
    """Put everything back that running the model leaves in it: modes, counters, buffers, caches, random states.

    Compiled parts run as they were written, and attention without its fused short cut.
    """
    with ExitStack() as stack:
        stack.enter_context(_running)
        restore = list(_restorers(module))
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


def forget(tensors: list[Tensor]) -> None:
    """Take tensors out of what keeps them outside the model: caches of functions, and containers anywhere.

    A container that cannot change (a tuple) is taken out of those that hold it, in turn. Above a container that can,
    only caches of functions are looked for.
    """
    things: list[Any] = list(tensors)
    remove = [True] * len(things)
    for _ in range(_DEEPEST):
        above: list[Any] = []
        above_remove: list[bool] = []
        ours = {id(it) for it in (tensors, things, above)}
        for thing, out in zip(things, remove, strict=True):
            for holder in gc.get_referrers(thing):
                if id(holder) in ours:
                    continue
                if isinstance(holder, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
                    cast(Any, holder).cache_clear()
                elif isinstance(holder, tuple | frozenset):
                    above.append(holder)
                    above_remove.append(out)
                elif isinstance(holder, dict | list | set | deque) and not _is_namespace(holder):
                    if out:
                        _take_out(holder, thing)
                    above.append(holder)
                    above_remove.append(False)
        things, remove = above, above_remove


def _is_namespace(holder: Any) -> bool:
    """Whether it holds the names of a module or a class, which code relies on."""
    return isinstance(holder, dict) and ("__builtins__" in holder or "__module__" in holder)


def _take_out(holder: Any, thing: Any) -> None:
    if isinstance(holder, dict):
        entries = cast(dict[Any, Any], holder)
        for key in [key for key, value in entries.items() if value is thing]:
            del entries[key]
    elif isinstance(holder, list | deque):
        items = cast(list[Any], holder)
        _refill(items, [item for item in items if item is not thing], items.extend)
    elif isinstance(holder, set):
        members = cast(set[Any], holder)
        _refill(members, {item for item in members if item is not thing}, members.update)


def _restorers(module: nn.Module) -> Iterator[Callable[[], None]]:
    """One for each object that can change and is reached from the model."""
    queue: deque[Any] = deque([module])
    seen: dict[int, Any] = {}
    while queue and len(seen) < _MOST_OBJECTS:
        thing = queue.popleft()
        if isinstance(thing, _OPAQUE) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        content, undo = _opened(thing)
        queue.extend(content)
        if undo is not None:
            yield undo


def _opened(thing: Any) -> tuple[Iterable[Any], Callable[[], None] | None]:
    """What an object holds, and how to put that back."""
    match thing:
        case dict() | list() | set() | deque() if len(cast(Any, thing)) > _LONGEST:
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
            partial = cast(functools.partial[Any], thing)
            return (partial.func, partial.args, partial.keywords), None
        case types.FunctionType():
            return (thing.__closure__ or (), thing.__defaults__, thing.__dict__), None
        case types.CellType():
            return _cell(thing)
        case _:
            return _object(thing)


def _object(thing: Any) -> tuple[Iterable[Any], Callable[[], None] | None]:
    """An object's attributes, those in slots included."""
    slots = [name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    before = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}

    def undo() -> None:
        for name, value in before.items():
            object.__setattr__(thing, name, value)

    return (getattr(thing, "__dict__", None), *before.values()), undo if before else None


def _names(slots: Any) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
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


@contextmanager
def quietly() -> Generator[None]:
    """Without torch's own report of each operation that fails on tensors without values."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
