"""Run a model and leave it as it was.

A forward pass can leave traces: counters, caches, activations that a module
or a hook keeps, random states. Everything that can be reached from the
model's modules by attributes, containers and closures is noted before and put
back after. Nothing here knows why the model is run.
"""

from __future__ import annotations

import functools
import gc
import random
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
_OPAQUE = (Tensor, str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, np.ndarray)


@contextmanager
def undisturbed(module: nn.Module) -> Generator[None]:
    """Put everything back that running the model leaves in it: modes, counters, buffers, caches, random states.

    Compiled parts run as they were written, and attention without its fused short cut.
    """
    restore = list(_restorers(module))
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    fast = torch.backends.mha.get_fastpath_enabled()
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
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
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def forget(tensors: Iterable[Tensor]) -> None:
    """Empty the caches of functions (`functools.lru_cache`) that have kept one of these tensors."""
    for holder in gc.get_referrers(*tensors):
        if isinstance(holder, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
            holder.cache_clear()


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
            return (getattr(thing, "__dict__", None),), None


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
