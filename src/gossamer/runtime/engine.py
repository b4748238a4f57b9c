"""The engine: a compiled model that is called like the model."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional

from gossamer.runtime.graph import Convolution, Graph, Linear, Node, Ref, simplify, trace
from gossamer.runtime.plan import Binding, Plan, TorchStep, build_plan
from gossamer.runtime.tuning import tune


def compile(model: nn.Module, example_inputs: Any, *, threads: int | None = None, tuned: bool = True) -> Engine:
    """Compile a model for this CPU.

    `example_inputs` is a tensor or a tuple of arguments; the batch size and the number of tokens may differ in calls.
    """
    example = cast(tuple[Any, ...], example_inputs if isinstance(example_inputs, tuple) else (example_inputs,))
    training = model.training
    with torch.no_grad():
        graph = simplify(trace(model.eval(), example))
    model.train(training)
    plan = build_plan(graph)
    if tuned:
        tune(plan, _sizes(graph, pytree.tree_leaves(example)))
    return Engine(plan, threads or torch.get_num_threads())


def _sizes(graph: Graph, leaves: list[Any]) -> dict[str, int]:
    """The sizes that differ from call to call, by name."""
    found: dict[str, int] = {}
    for name, leaf in zip(graph.inputs, leaves, strict=True):
        if isinstance(leaf, Tensor):
            found |= {n: size for n, size in zip(graph.shapes[name], leaf.shape, strict=True) if isinstance(n, str)}
    return found


class Engine:
    """A compiled model. Calls from several threads at once are independent of each other."""

    def __init__(self, plan: Plan, threads: int = 1) -> None:
        self._plan, self.threads = plan, threads
        self._bindings: dict[tuple[object, ...], Binding] = {}
        self._arenas: list[np.ndarray] = []
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        with torch.inference_mode():
            return self._run(pytree.tree_leaves(args))

    def _run(self, leaves: list[Any]) -> Any:
        graph = self._plan.graph
        sizes = _sizes(graph, leaves)
        binding = self._bind(sizes)
        arena = self._take(binding.arena_bytes)
        try:
            call = _Call(
                self._plan, binding, arena, {**graph.constants, **dict(zip(graph.inputs, leaves, strict=True))}
            )
            outputs = call.run(self.threads)
        finally:
            with self._lock:
                self._arenas.append(arena)
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def _bind(self, sizes: Mapping[str, int]) -> Binding:
        key = (self.threads, *sorted(sizes.items()))
        with self._lock:
            binding = self._bindings.get(key)
            if binding is None:
                binding = self._bindings[key] = self._plan.bind(sizes, self.threads)
            return binding

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            while self._arenas:
                arena = self._arenas.pop()
                if arena.nbytes >= size:
                    return arena
        raw = np.zeros(size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        return raw[start : start + size]


class _Call:
    """One call of an engine: values by name, and the arena."""

    def __init__(self, plan: Plan, binding: Binding, arena: np.ndarray, values: dict[str, Any]) -> None:
        self._plan, self._binding, self._arena, self._values = plan, binding, arena, values
        self._floats = torch.from_numpy(arena[: arena.nbytes // 4 * 4].view(np.float32))
        self._copied: set[str] = set()

    def run(self, threads: int) -> list[Any]:
        self._arena[: self._binding.header] = 0
        for step, program in zip(self._plan.steps, self._binding.programs, strict=True):
            if isinstance(step, TorchStep):
                self._values[step.node.output] = _compute(step.node, self._value)
                continue
            for name in (name for op in step.operators for name in op.inputs):
                if name in self._plan.packed and name not in self._copied:
                    self._pack(name, self._values[self._plan.packed[name]])
                    self._copied.add(name)
            assert program is not None
            program.run(self._arena.ctypes.data, threads)
        return [self._value(ref) for ref in self._plan.graph.outputs]

    def _value(self, ref: Any) -> Any:
        """The value of an argument; a planar activation is copied out of the arena."""
        if isinstance(ref, Ref):
            if ref.name not in self._values:
                self._values[ref.name] = self._view(ref.name).clone(memory_format=torch.contiguous_format)
            return self._values[ref.name]
        return [self._value(item) for item in cast(tuple[Any, ...], ref)] if isinstance(ref, tuple) else ref

    def _view(self, name: str) -> Tensor:
        """A planar activation on the arena, in the shape that it has in the graph."""
        place, kind = self._binding.places[name], self._plan.activations[name].kind
        layout = place.layout
        shape = (place.images, layout.channels, layout.height, layout.width)
        view = self._floats.as_strided(shape, layout.strides(), place.offset // 4 + layout.start)
        if kind == "image":
            return view
        return view[0, :, 0].T if kind == "rows" else view[:, :, 0].mT

    def _pack(self, name: str, value: Tensor) -> None:
        """Copy a tensor into the arena, with zeros around it."""
        place = self._binding.places[name]
        self._floats[place.offset // 4 : (place.offset + place.bytes) // 4].zero_()
        if (
            self._plan.activations[name].kind == "mask"
        ):  # (batch, heads, queries, keys) as (batch, queries, heads · keys)
            value = torch.zeros(()).where(value, -3e38) if value.dtype == torch.bool else value.clamp(min=-3e38)
            value = value.transpose(1, 2).flatten(2)
        self._view(name).copy_(value)


_FUNCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda value: value,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "sigmoid": functional.sigmoid,
}
_BUILTINS = {name: getattr(operator, name) for name in ("getitem", "mul", "add", "sub", "floordiv", "truediv", "neg")}


def _compute(node: Node, value: Callable[[Any], Any]) -> Any:
    """A node by torch."""
    args = [value(arg) for arg in node.args]
    if isinstance(node, Convolution | Linear):
        weight, bias = value(Ref(node.weight)), value(Ref(node.bias))
        if isinstance(node, Linear):
            result = functional.linear(args[0], weight, bias)
        else:
            options = (node.stride, node.padding, node.dilation, node.groups)
            result = functional.conv2d(args[0], weight, bias, *options)
        return _FUNCTIONS[node.activation](result if args[1] is None else result + args[1])
    namespace, name, *overload = node.op.split(".")
    if namespace == "builtin":
        return _BUILTINS[name](*args)
    function = getattr(getattr(torch.ops.aten, name), overload[0])
    return function(*args, **{key: value(item) for key, item in node.kwargs.items()})
