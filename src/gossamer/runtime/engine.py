"""The engine: a compiled model that is called like the model."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from gossamer.runtime._compiler import function_address
from gossamer.runtime.graph import Convolution, Graph, Node, Ref, simplify, trace
from gossamer.runtime.operators import Operator, SparseConvolution
from gossamer.runtime.plan import NativeStep, Plan, TorchStep, build_plan, supported
from gossamer.runtime.program import SLOT, Program


def compile(model: nn.Module, example_inputs: Any, threads: int | None = None) -> Engine:
    example = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    model = model.eval()
    with torch.no_grad():
        graph = simplify(trace(model, example))
    plan = build_plan(graph, supported(graph))
    return Engine(plan, threads or torch.get_num_threads())


class Engine:
    def __init__(self, plan: Plan, threads: int = 1) -> None:
        self._plan, self.threads = plan, threads
        self._programs: dict[tuple[int, int], list[Program | None]] = {}
        self._arenas: list[np.ndarray] = []
        self._lock = threading.Lock()
        places = plan.places(1)
        for step in plan.steps:
            if isinstance(step, NativeStep):
                for op in step.operators:
                    op.prepare(places)

    def __call__(self, *args: Any) -> Any:
        with torch.inference_mode():
            return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        plan, graph = self._plan, self._plan.graph
        leaves = pytree.tree_leaves(args)
        env: dict[str, Any] = {**graph.constants, **dict(zip(graph.inputs, leaves, strict=True))}
        batch = leaves[0].shape[0]
        arena = self._take(plan.arena_bytes(batch))
        base = torch.from_numpy(arena).view(torch.float32)
        arena[: plan.header] = 0
        programs = self._program(batch)
        packed: set[str] = set()

        def view(name: str) -> Tensor:
            place = plan.place(name, batch)
            layout = place.layout
            shape = (batch, layout.channels, layout.height, layout.width)
            return base.as_strided(shape, layout.strides(), place.offset // 4 + layout.start)

        def value(ref: Any) -> Any:
            if isinstance(ref, Ref):
                if ref.name not in env:
                    env[ref.name] = view(ref.name).clone(memory_format=torch.contiguous_format)
                return env[ref.name]
            if isinstance(ref, tuple):
                return [value(item) for item in ref]
            return ref

        native: set[str] = set()
        for step, program in zip(plan.steps, programs, strict=True):
            if isinstance(step, TorchStep):
                env[step.node.output] = _torch(step.node, value)
                continue
            for op in step.operators:
                for name in op.inputs:
                    if name in env and name not in packed and name not in native:
                        place = plan.place(name, batch)
                        size = batch * place.layout.image_bytes // 4
                        base[place.offset // 4 : place.offset // 4 + size].zero_()
                        view(name).copy_(env[name])
                        packed.add(name)
                native.add(op.output)
            assert program is not None
            program.run(arena.ctypes.data, self.threads)
        outputs = [value(ref) for ref in graph.outputs]
        self._give(arena)
        return pytree.tree_unflatten(outputs, graph.out_spec)

    def _program(self, batch: int) -> list[Program | None]:
        key = (batch, self.threads)
        if key not in self._programs:
            places, slot, programs = self._plan.places(batch), 0, list[Program | None]()
            for step in self._plan.steps:
                if isinstance(step, TorchStep):
                    programs.append(None)
                    continue
                operators: list[tuple[int, np.ndarray]] = []
                for op in step.operators:
                    table = op.table(places, batch, self.threads)
                    table[0] = slot
                    slot += SLOT
                    operators.append((function_address(op.kernel(places[op.output].layout)), table))
                programs.append(Program(operators))
            self._programs[key] = programs
        return self._programs[key]

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            if self._arenas:
                arena = self._arenas.pop()
                if arena.nbytes >= size:
                    return arena
        raw = np.zeros(size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        return raw[start : start + size]

    def _give(self, arena: np.ndarray) -> None:
        with self._lock:
            self._arenas.append(arena)


_BUILTINS = {"getitem": operator.getitem, "mul": operator.mul, "add": operator.add, "sub": operator.sub, "floordiv": operator.floordiv}


def _torch(node: Node, value: Any) -> Any:
    args = [value(arg) for arg in node.args]
    if isinstance(node, Convolution):
        y = torch.nn.functional.conv2d(args[0], value(Ref(node.weight)), value(Ref(node.bias)), node.stride, node.padding, node.dilation, node.groups)
        if args[1] is not None:
            y += args[1]
        act = {None: lambda t: t, "relu": torch.relu_, "relu6": torch.nn.functional.relu6, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "hardswish": torch.nn.functional.hardswish}
        return act[node.activation](y)
    namespace, _, rest = node.op.partition(".")
    if namespace == "builtin":
        return _BUILTINS[rest](*args)
    name, _, overload = rest.partition(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    return function(*args, **{key: value(item) for key, item in node.kwargs.items()})
