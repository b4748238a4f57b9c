"""Times of a graph in dense torch, node by node, and the loop that measures engines beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.runtime.graph import Convolution, Elementwise, Graph, Linear, Node, Ref
from gossamer.runtime.weights import SparseWeight

_REPETITIONS = 10
_ALLOWANCE = 0.5
"""Seconds that the calls of one kind may take, after the first one."""


def least(run: Callable[[], Sequence[float]]) -> list[float]:
    """Position by position, the least numbers that several calls return; the first call only warms up."""
    run()
    best, end = list[float](), time.perf_counter() + _ALLOWANCE
    for _ in range(_REPETITIONS):
        found = run()
        best = list(found) if not best else [min(pair) for pair in zip(best, found, strict=True)]
        if time.perf_counter() > end:
            break
    return best


def dense_times(
    graph: Graph, leaves: Sequence[Any], compute: Callable[[Node, Callable[[Any], Any]], Any]
) -> tuple[dict[str, float], float]:
    """Seconds of every node and of all together when torch computes them, in the faster of two memory formats."""
    best: list[float] = [math.inf]
    for channels_last in (False, True):
        found = least(_Dense(graph, leaves, compute, channels_last).run)
        best = min(best, found, key=lambda times: times[-1])
    return dict(zip((node.output for node in graph.nodes), best, strict=False)), best[-1]


class _Dense:
    """A graph with dense weights, computed by torch."""

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        compute: Callable[[Node, Callable[[Any], Any]], Any],
        channels_last: bool,
    ) -> None:
        self._compute = compute
        # Rounding to integers is emulated in torch, and no part of a float network.
        self._nodes = [
            replace(node, steps=None) if isinstance(node, Convolution | Linear | Elementwise) else node
            for node in graph.nodes
        ]
        self._given: dict[str, Any] = {
            name: _window_last(value.dense(), channels_last)
            if isinstance(value, SparseWeight)
            else _formatted(value, channels_last)
            for name, value in graph.constants.items()
        }
        inputs = zip(graph.inputs, leaves, strict=True)
        self._given |= {name: _formatted(leaf, channels_last) for name, leaf in inputs}
        last = {name: node.output for node in graph.nodes for name in node.inputs if name not in self._given}
        self._finished: dict[str, list[str]] = {}
        for name, output in last.items():
            self._finished.setdefault(output, []).append(name)

    def run(self) -> list[float]:
        """Seconds by node, and those of the whole graph behind them."""
        values, times = dict(self._given), list[float]()
        begin = now = time.perf_counter()
        for node in self._nodes:
            values[node.output] = self._compute(node, lambda arg: _value(values, arg))
            for name in self._finished.get(node.output, ()):
                del values[name]
            before, now = now, time.perf_counter()
            times.append(now - before)
        return [*times, now - begin]


def _value(values: Mapping[str, Any], arg: Any) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    return [_value(values, item) for item in cast(tuple[Any, ...], arg)] if isinstance(arg, tuple) else arg


def _formatted(value: Any, channels_last: bool) -> Any:
    """A value in one of torch's memory formats."""
    image = channels_last and isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if image else value


def _window_last(weight: Tensor, channels_last: bool) -> Tensor:
    """A weight `(out, in, window)` in the same format."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2) if channels_last and weight.shape[2] > 1 else weight


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Torch with this number of threads."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
