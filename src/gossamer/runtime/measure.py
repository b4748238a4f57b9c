"""Times of a graph in dense torch, node by node, and the loop that measures engines beside it."""

from __future__ import annotations

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


def least(run: Callable[[], Sequence[float]], allowance: float) -> list[float]:
    """Position by position, the least numbers that several calls return; the first call only warms up.

    The others end with the one in which they have taken this number of seconds.
    """
    run()
    best, end = list[float](), time.perf_counter() + allowance
    for _ in range(_REPETITIONS):
        found = run()
        best = list(found) if not best else [min(pair) for pair in zip(best, found, strict=True)]
        if time.perf_counter() > end:
            break
    return best


def dense_times(
    graph: Graph, leaves: Sequence[Any], compute: Callable[[Node, Callable[[Any], Any]], Any], allowance: float
) -> tuple[dict[str, float], float]:
    """Seconds of every node and of all together when torch computes them, in the faster of two memory formats."""
    weights = {name: value.dense() for name, value in graph.constants.items() if isinstance(value, SparseWeight)}
    ways = [_Dense(graph, leaves, compute, weights, channels_last) for channels_last in (False, True)]
    fastest = min(ways, key=lambda way: least(way.run, 0.0)[-1])
    found = least(fastest.run, allowance)
    return dict(zip((node.output for node in graph.nodes), found, strict=False)), found[-1]


class _Dense:
    """A graph with dense weights, computed by torch."""

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        compute: Callable[[Node, Callable[[Any], Any]], Any],
        weights: Mapping[str, Tensor],
        channels_last: bool,
    ) -> None:
        self._compute = compute
        # Rounding to integers is emulated in torch, and no part of a float network.
        self._nodes = [
            replace(node, steps=None) if isinstance(node, Convolution | Linear | Elementwise) else node
            for node in graph.nodes
        ]
        self._given: dict[str, Any] = {
            name: _window_last(weights[name], channels_last) if name in weights else _formatted(value, channels_last)
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
