"""The engine: a compiled model that is called like the model."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError, short_error
from gossamer.progress import Progress
from gossamer.runtime.arena import Binding, bind
from gossamer.runtime.attention import with_attention
from gossamer.runtime.decoding_operators import STATE
from gossamer.runtime.evaluate import call_operator
from gossamer.runtime.file import load_plan, save_plan
from gossamer.runtime.formulas import with_computed_weights, with_formulas, with_linear_layers
from gossamer.runtime.graph import (
    Attention,
    CachedAttention,
    Convolution,
    Elementwise,
    Graph,
    Linear,
    Node,
    Ref,
    round_weights,
    simplify,
    trace,
)
from gossamer.runtime.integer_layers import IntegerLayer
from gossamer.runtime.layers import SMALL_GAIN, LayerReport, Times, layer_names, reports, separate, table
from gossamer.runtime.measure import dense_times, least, torch_threads
from gossamer.runtime.operators import SparseLayer
from gossamer.runtime.plan import Plan, TorchStep, build_plan
from gossamer.runtime.rotary import with_rotary
from gossamer.runtime.tuning import tune
from gossamer.runtime.weights import SparseWeight

logger = logging.getLogger("gossamer")
if TYPE_CHECKING:
    from gossamer.runtime.module import EngineModule

Tuned = bool | Literal["again"]
_BRIEF = 0.1
"""Seconds that the measurements behind compiling may take, each."""
_BINDINGS = 64
"""Sizes that an engine remembers; others are laid out again."""
_KEPT = 1 << 20
"""Bytes of values that are kept for each of them, at most."""
_tracing = threading.Lock()
"""torch.export works in one thread at a time."""


def compile(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    threads: int | None = None,
    tuned: Tuned = True,
    weight_dtype: torch.dtype = torch.float32,
    progress: Progress = lambda _label, _share: None,
) -> Engine:
    """Compile a model for this CPU.

    `example_inputs` is a tensor, a tuple of arguments, or a mapping of keyword arguments. The batch size and the number
    of tokens may differ from call to call; other sizes, and arguments that are not tensors, are fixed. `threads` is
    torch's number of threads by default. The measurements that choose how each layer is computed are kept for the next
    time; `tuned="again"` repeats them, `tuned=False` skips them and those for `summary()`.
    `weight_dtype=torch.bfloat16` rounds the weights of layers to 16 bits and computes with them in 32: less memory, and
    faster where that is the limit. Logs a warning if the engine is no faster than dense torch on the example inputs.
    """
    args, kwargs = _arguments(example_inputs)
    if not isinstance(cast(object, model), nn.Module):
        raise GossamerError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise GossamerError("example_inputs: expected a tensor, or a tuple or mapping of arguments with a tensor")
    if tuned not in (True, False, "again"):
        raise GossamerError(f"tuned: expected True, False or 'again', found {tuned!r}")
    if weight_dtype not in (torch.float32, torch.bfloat16):
        raise GossamerError(f"weight_dtype: expected torch.float32 or torch.bfloat16, found {weight_dtype}")
    training = [module for module in model.modules() if module.training]
    progress("tracing the model", 0.0)
    try:
        with _tracing, torch.no_grad():
            traced = with_rotary(with_linear_layers(with_computed_weights(trace(model.eval(), args, kwargs))))
            graph = simplify(with_formulas(with_attention(traced)))
            if weight_dtype == torch.bfloat16:
                round_weights(graph)
            _copy_constants(graph)
    except GossamerError:
        raise
    except Exception as error:  # any model, any reason
        message = f"torch.export cannot trace the model with these example inputs: {short_error(error)}"
        call = "model(**example_inputs)" if kwargs else "model(*example_inputs)"
        raise GossamerError(f"{message}; check their shapes with {call}") from error
    finally:
        for module in training:
            module.training = True
    inputs = graph.signature.inputs(args, kwargs)
    engine = Engine.of(graph, [inputs[name] for name in graph.inputs], threads, tuned, progress)
    if engine.times is not None and engine.times.gain < SMALL_GAIN:
        logger.warning("gossamer.runtime: %s engine.summary() has the time of each layer.", engine.times.verdict())
    return engine


def _copy_constants(graph: Graph) -> None:
    """Let the engine share no memory with the model; weights of layers are copied when they are packed."""
    read = {name for node in graph.nodes for name in node.inputs}
    packed = {node.weight for node in graph.nodes if isinstance(node, Convolution | Linear)} - read
    for name, value in graph.constants.items():
        if isinstance(value, Tensor) and name not in packed:
            graph.constants[name] = value.clone(memory_format=torch.contiguous_format)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example as arguments by position and by keyword."""
    if isinstance(example, Mapping):
        return (), dict(cast(Mapping[str, Any], example))
    return ((example,) if isinstance(example, Tensor) else tuple(example)), {}


def load(path: str | os.PathLike[str], *, threads: int | None = None) -> Engine:
    """An engine that `Engine.save` wrote. The file is data: it is checked, and nothing in it is executed."""
    plan = load_plan(path)
    if any(isinstance(node, CachedAttention) for node in plan.graph.nodes):
        raise GossamerError(f"{path}: holds a decoder; load it with gossamer.runtime.load_decoder")
    return Engine(plan, torch.get_num_threads() if threads is None else threads)


class Engine:
    """A compiled model. Calls from several threads at once are independent of each other."""

    def __init__(self, plan: Plan, threads: int = 1, times: Times | None = None) -> None:
        if type(threads) is not int or threads < 1:
            raise GossamerError(f"threads: expected a number of at least 1, found {threads!r}")
        self.threads = threads
        self._plan, self._times = plan, times
        self._bindings: OrderedDict[tuple[object, ...], Binding] = OrderedDict()
        """The last used ones, by sizes and threads."""
        self._arenas: list[np.ndarray] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, graph: Graph, leaves: Sequence[Any], threads: int | None, tuned: Tuned, progress: Progress) -> Engine:
        """The engine of a graph, tuned and measured on these inputs if it is to be."""
        engine = cls(build_plan(graph), torch.get_num_threads() if threads is None else threads)
        if tuned:
            engine._tune(leaves, progress, again=tuned == "again")
        return engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, for the arguments of the example by position or by name."""
        graph = self._plan.graph
        inputs = graph.signature.inputs(args, kwargs)
        return pytree.tree_unflatten(self.flat([inputs[name] for name in graph.inputs]), graph.out_spec)

    def flat(
        self,
        leaves: Sequence[Any],
        given: Mapping[str, Tensor] | None = None,
        after_step: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """All outputs in order, for all inputs in order; `given` has values that are not inputs of the graph."""
        graph = self._plan.graph
        if STATE in self._plan.packed and STATE not in (given or {}):
            raise GossamerError("this engine needs a cache of keys and values; call the decoder that it belongs to")
        sizes = _sizes(graph, leaves)
        try:
            with torch.inference_mode(), torch.autocast("cpu", enabled=False):
                binding = self._bind(sizes)
                arena = self._take(binding.arena_bytes)
                try:
                    values = {**graph.constants, **dict(zip(graph.inputs, leaves, strict=True)), **(given or {})}
                    return _Call(self._plan, binding, arena, values).run(self.threads, after_step)
                finally:
                    with self._lock:
                        self._arenas.append(arena)
        except GossamerError:
            raise
        except Exception as error:  # torch's, for an index out of range and the like, or of memory
            raise GossamerError(f"the engine cannot compute these inputs: {short_error(error)}") from error

    @property
    def plan(self) -> Plan:
        """The steps of the engine."""
        return self._plan

    @property
    def graph(self) -> Graph:
        """What the engine computes: inputs, nodes and constants."""
        return self._plan.graph

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights of native layers take."""
        return sum(op.weight_bytes for op in self._plan.operators if isinstance(op, SparseLayer | IntegerLayer))

    @property
    def _layers(self) -> list[SparseLayer]:
        return [op for op in self._plan.operators if isinstance(op, SparseLayer)]

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self._plan, "threads": self.threads, "times": self._times}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine to one file, with every choice and without the model's class."""
        save_plan(self._plan, path)

    def as_module(self) -> EngineModule:
        """The engine as a module without parameters, for code that calls an `nn.Module`."""
        from gossamer.runtime.module import EngineModule

        return EngineModule(self)

    def layers(self) -> list[LayerReport]:
        """What computes each operator of the model, the zeros of its weight, and its time if it was measured."""
        return reports(self._plan, self._times)

    @property
    def times(self) -> Times | None:
        """Times of whole calls, of the engine and of dense torch; None if nothing was measured."""
        return self._times

    def summary(self) -> str:
        """`layers()` as a table, with the time in dense torch beside each, and what is gained overall."""
        memory = f"Weights take {self.weight_bytes / 1e6:.1f} MB of memory."
        verdict = "Nothing was measured: call measure(*inputs)." if self._times is None else self._times.verdict()
        return "\n".join([table(self.layers(), self._times), "", verdict, memory])

    def measure(self, *args: Any, **kwargs: Any) -> Times:
        """Measure every operator on these inputs, here and in dense torch, for `layers()` and `summary()`."""
        inputs = self.graph.signature.inputs(args, kwargs)
        return self._measure([inputs[name] for name in self.graph.inputs])

    def _tune(self, leaves: Sequence[Any], progress: Progress, again: bool) -> None:
        """Choose how each layer is computed, and measure the result."""
        names = layer_names(self.graph)
        tune(
            self._plan,
            _sizes(self.graph, leaves),
            lambda name, share: progress(f"measuring {names.get(name, name)}", 0.1 + 0.8 * share),
            again,
        )
        progress("comparing with dense torch", 0.9)
        try:
            self._times = self._measure(leaves, _BRIEF)
        except GossamerError:
            return  # inputs that are made up for an ONNX file need not fit it
        progress("comparing with dense torch", 1.0)

    def _measure(self, leaves: Sequence[Any], allowance: float = 0.5) -> Times:
        """Times; the calls of each kind may take about this number of seconds."""
        apart, now = Engine(separate(self._plan), self.threads), time.perf_counter

        def total() -> list[float]:
            start = now()
            self.flat(leaves)
            return [now() - start]

        def steps() -> list[float]:
            marks = [now()]
            apart.flat(leaves, after_step=lambda: marks.append(now()))
            return [end - start for start, end in pairwise(marks)]

        (seconds,), by_step = least(total, allowance), least(steps, allowance)
        with torch.inference_mode(), torch_threads(self.threads):
            dense, dense_total = dense_times(self.graph, leaves, _compute, allowance)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = _sizes(self.graph, leaves)
        self._times = Times(self.threads, shapes, sizes, by_step, dense, seconds, dense_total)
        return self._times

    def _bind(self, sizes: Mapping[str, int]) -> Binding:
        key = (self.threads, *sorted(sizes.items()))
        with self._lock:
            binding = self._bindings.get(key)
            if binding is None:
                binding = self._bindings[key] = bind(self._plan, sizes, self.threads)
                for op in self._layers:
                    op.release()
            self._bindings.move_to_end(key)
            if len(self._bindings) > _BINDINGS:
                self._bindings.popitem(last=False)
            return binding

    def _take(self, size: int) -> np.ndarray:
        """Memory for one call that no other call uses at the same time."""
        with self._lock:
            while self._arenas:
                arena = self._arenas.pop()
                if arena.nbytes >= size:
                    return arena
        raw = np.zeros(size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        return raw[start : start + size]


def _sizes(graph: Graph, leaves: Sequence[Any]) -> dict[str, int]:
    """The sizes that differ from call to call, by name; raises if an input does not fit the example."""
    if len(leaves) != len(graph.inputs):
        raise GossamerError(f"expected {len(graph.inputs)} inputs as in the example, found {len(leaves)}")
    found: dict[str, int] = {}
    for name, leaf in zip(graph.inputs, leaves, strict=True):
        if name not in graph.shapes:
            continue  # a number or None
        expected, dtype = graph.shapes[name], graph.dtypes[name]
        fits = (
            isinstance(leaf, Tensor)
            and leaf.dtype == dtype
            and leaf.layout == torch.strided
            and leaf.device.type == "cpu"
            and leaf.dim() == len(expected)
        )
        for size, actual in zip(expected, leaf.shape, strict=True) if fits else ():
            fits = fits and actual > 0 and actual == (found.setdefault(size, actual) if isinstance(size, str) else size)
        if not fits:
            shape = ", ".join("any" if isinstance(size, str) else str(size) for size in expected)
            actual = (
                f"{'' if leaf.layout == torch.strided else f'{leaf.layout} of '}{leaf.dtype} {tuple(leaf.shape)} "
                f"on {leaf.device}"
                if isinstance(leaf, Tensor)
                else type(leaf).__name__
            )
            raise GossamerError(f"input '{name}': expected {dtype} ({shape}) on the CPU, found {actual}")
    return found


class _Call:
    """One call of an engine: values by name, and the arena.

    Values are copied by numpy, on this thread: torch would wake its own.
    """

    def __init__(self, plan: Plan, binding: Binding, arena: np.ndarray, values: dict[str, Any]) -> None:
        self._plan, self._binding, self._arena, self._values = plan, binding, arena, values
        self._floats = torch.from_numpy(arena[: arena.nbytes // 4 * 4].view(np.float32))
        self._copied: set[str] = set()

    def run(self, threads: int, after_step: Callable[[], object]) -> list[Any]:
        known = self._binding.known
        self._values |= known or {}
        self._binding.clear(self._arena)
        for k, step in enumerate(self._plan.steps):
            if isinstance(step, TorchStep):
                if known is None or step.node.output not in self._plan.of_sizes:
                    self._values[step.node.output] = self._compute(step.node)
                after_step()
                continue
            for name in (name for op in step.operators for name in op.inputs):
                if name in self._plan.packed and name not in self._copied:
                    self._pack(name, self._values[self._plan.packed[name]])
                    self._copied.add(name)
            self._binding.run(k, self._arena.ctypes.data, threads)
            after_step()
        if known is None:
            self._keep()
        return [self._own(self._value(ref)) for ref in self._plan.graph.outputs]

    def _keep(self) -> None:
        """Keep what depends on the sizes only for the next call, if it is small."""
        found = {name: self._values[name] for name in self._plan.kept}
        if sum(value.nbytes for value in found.values() if isinstance(value, Tensor)) <= _KEPT:
            self._binding.known = found

    def _own(self, value: Any) -> Any:
        """An output that shares no memory with what the engine keeps."""
        if not isinstance(value, Tensor) or not any(isinstance(step, TorchStep) for step in self._plan.steps):
            return value
        held = (*self._plan.graph.constants.values(), *(self._binding.known or {}).values())
        shared = {tensor.untyped_storage().data_ptr() for tensor in held if isinstance(tensor, Tensor)}
        return value.clone() if value.untyped_storage().data_ptr() in shared else value

    def _compute(self, node: Node) -> Any:
        try:
            return _compute(node, self._value)
        except Exception as error:  # any operator, any reason
            raise GossamerError(f"'{node.output}': torch cannot compute {node.op}: {short_error(error)}") from error

    def _value(self, ref: Any) -> Any:
        """The value of an argument; a planar activation is copied out of the arena."""
        if isinstance(ref, Ref):
            if isinstance(held := self._values.get(ref.name), SparseWeight):
                self._values[ref.name] = held.dense()
            if ref.name not in self._values:
                self._values[ref.name] = torch.from_numpy(self._view(ref.name).numpy().copy("C"))
            return self._values[ref.name]
        return [self._value(item) for item in cast(tuple[Any, ...], ref)] if isinstance(ref, tuple) else ref

    def _view(self, name: str) -> Tensor:
        """A planar activation on the arena, in the shape that it has in the graph."""
        place, kind = self._binding.places[name], self._plan.activations[name].kind
        layout = place.layout
        shape = (place.images, layout.channels, layout.height, layout.width)
        strides = (place.stride // 4, *layout.strides())
        view = self._floats.as_strided(shape, strides, place.offset // 4 + layout.start)
        if kind == "image":
            return view
        return view[0, :, 0].T if kind == "rows" else view[:, :, 0].mT

    def _pack(self, name: str, value: Tensor) -> None:
        """Copy a tensor into the arena, with zeros around it."""
        place = self._binding.places[name]
        for image in range(place.images):
            ctypes.memset(self._arena.ctypes.data + place.offset + image * place.stride, 0, place.layout.image_bytes)
        if (
            self._plan.activations[name].kind == "mask"
        ):  # (batch, heads, queries, keys) as (batch, queries, heads · keys)
            value = torch.zeros(()).where(value, -3e38) if value.dtype == torch.bool else value.clamp(min=-3e38)
            value = value[(None,) * (4 - value.dim())].transpose(1, 2).flatten(2)
        np.copyto(self._view(name).numpy(), value.detach().resolve_neg().numpy())


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


def _compute(node: Node, value: Callable[[Any], Any]) -> Any:
    """A node by torch."""
    args = [value(arg) for arg in node.args]
    if isinstance(node, Convolution | Linear | Elementwise):
        if isinstance(node, Elementwise):
            result = args[0]
        elif isinstance(node, Linear):
            result = functional.linear(args[0], value(Ref(node.weight)).flatten(1), value(Ref(node.bias)))
        else:
            weight = value(Ref(node.weight))
            weight = weight.reshape(*weight.shape[:2], *node.size)
            options = (node.stride, node.padding, node.dilation, node.groups)
            result = functional.conv2d(args[0], weight, value(Ref(node.bias)), *options)
        result = _FUNCTIONS[node.activation](result if args[1] is None else result + args[1])
        if node.steps is None:
            return result
        size, zero, least, most = node.steps
        return ((torch.round(result / size) + zero).clamp(least, most) - zero) * size
    if isinstance(node, Attention):
        return _attention(node, *args)
    return call_operator(node, value)


def _attention(node: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of `(batch, tokens, heads · size)`; a mask of a causal node holds all that a query does not see."""

    def split(value: Tensor, shared: int) -> Tensor:
        batch, tokens, width = value.shape
        heads = node.heads // shared
        return value.reshape(batch, tokens, heads, width // heads).transpose(1, 2).repeat_interleave(shared, 1)

    q, k, v = split(query, 1), split(key, node.shared), split(value, node.shared)
    causal = node.causal and mask is None
    found = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=node.scale)
    return found.transpose(1, 2).flatten(2)
