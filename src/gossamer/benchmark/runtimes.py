"""The runtimes that `measure` knows. To add one, write a function that loads a file, and a line in `RUNTIMES`.

Each runtime keeps its defaults, except for the number of threads. A runtime is imported when it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as tree

from gossamer.errors import GossamerError, first_line, nearest
from gossamer.export.examples import ExampleInputs
from gossamer.export.onnx.model_files import read_model, size_of
from gossamer.export.weights import is_model_file, read_state
from gossamer.io import dtype_name

if TYPE_CHECKING:
    from gossamer.runtime import Engine

Array = NDArray[Any]
Run = Callable[[], Any]


@dataclass(frozen=True)
class InMemory:
    """A torch model to time without a file."""

    name: str
    model: nn.Module
    """In evaluation mode, on the CPU."""
    example_inputs: Any
    """Arguments of `forward`, as for `to_onnx`; the first axis of each tensor is the batch."""


Candidate = Path | InMemory


@dataclass(frozen=True)
class Slot:
    """One input of a program."""

    name: str
    shape: tuple[int | str, ...]
    """The size of each axis; a name for a dynamic axis, and axes with the same name have the same size."""
    dtype: str
    """numpy's name."""

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class Contents:
    """Counts of a file or model.

    A weight is an array with more than one axis of a size above 1, which leaves out biases, scales and statistics.
    """

    bytes: int
    weights: int = 0
    zeros: int = 0
    integers: int = 0
    """Weights stored as integers."""
    filters: int = 0
    """Output channels of convolutions."""
    empty_filters: int = 0
    """Filters whose weights are all zero."""

    @property
    def sparsity(self) -> float:
        return self.zeros / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Program:
    """A file or model loaded by a runtime."""

    inputs: tuple[Slot, ...]
    bind: Callable[[Sequence[Array]], Run]
    """Returns the call to time, for these inputs."""
    outputs: Callable[[Any], list[Array]]
    """Converts what the call returns to arrays."""
    contents: Callable[[], Contents]


@dataclass(frozen=True)
class Runtime:
    """A library that runs programs."""

    name: str
    package: str
    """The package to import."""
    install: str
    """The argument of `pip install`."""
    suffixes: tuple[str, ...]
    """Supported files; the empty suffix stands for a model in memory."""
    load: Callable[..., Program]
    """Called with the candidate, `threads`, and `trust`: whether to load files whose format can run code."""
    skips_zeros: bool = False

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    @property
    def version(self) -> str:
        try:
            return version(self.package).split("+")[0]
        except PackageNotFoundError:
            return ""


def name_of(candidate: Candidate) -> str:
    return candidate.name if isinstance(candidate, InMemory) else str(candidate)


def select_runtimes(candidates: Sequence[Candidate], names: Sequence[str] | None) -> list[tuple[Runtime, Candidate]]:
    """Each candidate with each runtime that supports it, among those named or all that are installed."""
    selected = [_by_name(name) for name in names] if names else [one for one in RUNTIMES.values() if one.is_installed]
    for candidate in candidates:
        if not any(_suffix(candidate) in one.suffixes for one in selected):
            raise _unsupported(candidate)
        if isinstance(candidate, Path) and not candidate.is_file():
            raise GossamerError(f"{candidate}: file not found; write it with gossamer export")
    return [(one, candidate) for one in selected for candidate in candidates if _suffix(candidate) in one.suffixes]


def _by_name(name: str) -> Runtime:
    if name not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise GossamerError(f"--runtime: there is no '{name}'{nearest(name, RUNTIMES)}; there are {known}")
    runtime = RUNTIMES[name]
    if not runtime.is_installed:
        raise GossamerError(f"--runtime: {name} is not installed: pip install {runtime.install}")
    return runtime


def _unsupported(candidate: Candidate) -> GossamerError:
    suffix, name = _suffix(candidate), name_of(candidate)
    supporting = [one for one in RUNTIMES.values() if suffix in one.suffixes]
    if not supporting:
        return GossamerError(
            f"{name}: expected a file of gossamer export or compile: .onnx, .gossamer, .pt2 or .safetensors"
        )
    if any(one.is_installed for one in supporting):
        names = " or ".join(one.name for one in supporting if one.is_installed)
        return GossamerError(f"{name}: no selected runtime supports it; add --runtime {names}")
    return GossamerError(f"{name}: no runtime for it is installed: pip install {supporting[0].install}")


def _suffix(candidate: Candidate) -> str:
    return "" if isinstance(candidate, InMemory) else candidate.suffix.lower()


# ONNX files, on the CPU


def _load_onnxruntime(path: Path, threads: int, trust: bool) -> Program:
    import onnxruntime

    options = cast(Any, onnxruntime).SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that spin after a run would take the processor from the next program.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _load_error(path, "onnxruntime", error) from error
    names = {"float": "float32", "double": "float64"}  # other names are those of numpy
    slots: list[Slot] = []
    for given in session.get_inputs():
        dtype: str = given.type.removeprefix("tensor(").removesuffix(")")
        slots.append(_onnx_slot(path, given.name, given.shape, names.get(dtype, dtype)))

    def bind(arrays: Sequence[Array]) -> Run:
        feeds = {slot.name: array for slot, array in zip(slots, arrays, strict=True)}
        return lambda: session.run(None, feeds)

    return Program(tuple(slots), bind, _as_arrays, partial(contents_of_onnx, path))


def _load_openvino(path: Path, threads: int, trust: bool) -> Program:
    import openvino  # pyright: ignore[reportMissingImports]

    library = cast(Any, openvino)
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = library.Core().compile_model(str(path), "CPU", options)
    except Exception as error:
        raise _load_error(path, "openvino", error) from error
    slots: list[Slot] = []
    for port in model.inputs:
        shape = [size.get_length() if size.is_static else None for size in port.get_partial_shape()]
        dtype = np.dtype(port.get_element_type().to_dtype()).name
        slots.append(_onnx_slot(path, port.get_any_name(), shape, dtype))
    request = model.create_infer_request()

    def bind(arrays: Sequence[Array]) -> Run:
        feeds = dict(enumerate(arrays))
        return lambda: request.infer(feeds, share_inputs=True)

    return Program(tuple(slots), bind, lambda outputs: _as_arrays(outputs.values()), partial(contents_of_onnx, path))


def _load_gossamer(path: Path, threads: int, trust: bool) -> Program:
    from gossamer import runtime

    if path.suffix.lower() == ".gossamer":
        return _from_engine(path, runtime.load(path, threads=threads))
    session = runtime.InferenceSession(path, threads=threads)
    names = {"float": "float32", "double": "float64"}
    slots: list[Slot] = []
    for given in session.get_inputs():
        dtype = given.type.removeprefix("tensor(").removesuffix(")")
        slots.append(_onnx_slot(path, given.name, given.shape, names.get(dtype, dtype)))

    def bind(arrays: Sequence[Array]) -> Run:
        feeds = {slot.name: array for slot, array in zip(slots, arrays, strict=True)}
        return lambda: session.run(None, feeds)

    return Program(tuple(slots), bind, _as_arrays, partial(contents_of_onnx, path))


def _from_engine(path: Path, engine: Engine) -> Program:
    """A saved engine, whose choices were made when it was compiled."""
    graph = engine.graph
    slots = [
        Slot(name, graph.shapes[name], dtype_name(graph.dtypes[name])) for name in graph.inputs if name in graph.shapes
    ]
    if len(slots) != len(graph.inputs):
        raise GossamerError(f"{path}: takes arguments that are no tensors, which are not supported here")
    for slot in slots:
        _check_dtype(slot.dtype, str(path))
    weights = [value if isinstance(value, Tensor) else value.dense() for value in graph.constants.values()]

    def bind(arrays: Sequence[Array]) -> Run:
        inputs = [torch.from_numpy(array) for array in arrays]
        return lambda: engine.flat(inputs)

    contents = contents_of_tensors(path.stat().st_size, weights)
    return Program(tuple(slots), bind, _tensors_as_arrays, lambda: contents)


def _onnx_slot(path: Path, name: str, shape: Sequence[int | str | None], dtype: str) -> Slot:
    _check_dtype(dtype, str(path))
    return Slot(name, tuple(size or f"{name}.{axis}" for axis, size in enumerate(shape)), dtype)


def _check_dtype(dtype: str, name: str) -> None:
    try:
        known = np.dtype(dtype).kind in "fiub"
    except TypeError:  # bfloat16, strings and others that numpy does not have
        known = False
    if not known:
        raise GossamerError(f"{name}: an input is {dtype}, which is not supported; export it in float32")


def _as_arrays(outputs: Iterable[Any]) -> list[Array]:
    return [np.asarray(output) for output in outputs]


def _load_error(path: Path, runtime: str, error: Exception) -> GossamerError:
    """Our own error if the file is damaged; otherwise that of the runtime."""
    try:
        read_model(path)
    except GossamerError as damage:
        return damage
    return GossamerError(f"{path}: {runtime} cannot run it: {first_line(error)}")


# torch: a .pt2 file of torch.export, or a model in memory, without compiling


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Set the number of threads of torch, for all its programs; restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_torch(candidate: Candidate, threads: int, trust: bool) -> Program:
    if isinstance(candidate, InMemory):
        return _from_memory(candidate)
    if not trust:  # torch.export.load unpickles, so a .pt2 file can run code
        raise GossamerError(f"{candidate}: loading a .pt2 can run code from the file; pass --trust if you trust it")
    return _from_pt2(candidate)


def _from_pt2(path: Path) -> Program:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path)
    except Exception as error:
        raise GossamerError(f"{path}: not a program of torch.export, or damaged; export it again") from error
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    leaves = [values.get(name) if isinstance(name, str) else name for name in names]
    slots: list[Slot] = []
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor):
            sizes = cast(tuple[Any, ...], leaf.shape)  # int, or torch.SymInt for a dynamic axis
            shape = tuple(size if isinstance(size, int) else str(size) for size in sizes)
            slots.append(_torch_slot(str(name), shape, leaf, str(path)))
    bind = partial(_bind, program.module(), leaves, program.call_spec.in_spec)
    tensors = [tensor for tensor in program.state_dict.values() if isinstance(tensor, Tensor)]
    return Program(tuple(slots), bind, _tensors_as_arrays, partial(contents_of_tensors, path.stat().st_size, tensors))


def _from_memory(given: InMemory) -> Program:
    inputs = ExampleInputs.of(given.example_inputs).on_cpu()
    leaves, spec = tree.tree_flatten((inputs.positional, inputs.named))
    slots = [
        _torch_slot(f"input_{number}", ("batch", *leaf.shape[1:]) if leaf.dim() else (), leaf, given.name)
        for number, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor))
    ]
    state = [*given.model.parameters(), *given.model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in state)
    contents = partial(contents_of_tensors, size, list(given.model.parameters()))
    return Program(tuple(slots), partial(_bind, given.model, leaves, spec), _tensors_as_arrays, contents)


def _torch_slot(name: str, shape: tuple[int | str, ...], tensor: Tensor, program: str) -> Slot:
    dtype = dtype_name(tensor.dtype)
    _check_dtype(dtype, program)
    return Slot(name, shape, dtype)


def _bind(module: nn.Module, leaves: Sequence[Any], spec: Any, arrays: Sequence[Array]) -> Run:
    """A call of a module with arrays in place of the tensors among its flattened arguments."""
    rest = iter(arrays)
    values = [torch.from_numpy(next(rest)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree.tree_unflatten(values, spec)

    def run() -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    return run


def _tensors_as_arrays(outputs: Any) -> list[Array]:
    tensors = [leaf for leaf in tree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy() for tensor in tensors]


# Files of weights: no program, so reading is timed, from the system's cache


def _load_weights(path: Path, threads: int, trust: bool) -> Program:
    def read() -> list[Tensor]:
        tensors = list(read_state(path).values())
        # Files of other tools are memory-mapped, and read when copied.
        return tensors if is_model_file(path) else [tensor.clone() for tensor in tensors]

    def contents() -> Contents:
        distinct = {id(tensor): tensor for tensor in read_state(path).values()}  # a tied weight counts once
        return contents_of_tensors(path.stat().st_size, distinct.values())

    return Program((), lambda _arrays: read, lambda _outputs: [], contents)


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("onnxruntime", "onnxruntime", "'gossamer[onnx]'", (".onnx",), _load_onnxruntime),
        Runtime("openvino", "openvino", "openvino", (".onnx",), _load_openvino),
        Runtime("gossamer", "gossamer", "'gossamer[onnx]'", (".onnx", ".gossamer"), _load_gossamer, skips_zeros=True),
        Runtime("torch", "torch", "torch", (".pt2", ""), _load_torch),
        Runtime("load", "safetensors", "safetensors", (".safetensors",), _load_weights),
    )
}
"""By name. `load` runs no program: it reads a file of weights."""


# Contents


def contents_of_onnx(path: Path) -> Contents:
    """Counts of an ONNX file, including its external data; integer weights are zero at their zero point."""
    from onnx import numpy_helper

    from gossamer.export.onnx.qat import integer_weights

    model = read_model(path)

    def arrays() -> Iterator[tuple[Array, bool]]:
        tensors = list(model.graph.initializer)
        tensors += [node.attribute[0].t for node in model.graph.node if node.op_type == "Constant" and node.attribute]
        for tensor in tensors:
            if len(tensor.dims) > 1 and (array := numpy_helper.to_array(tensor)).dtype.kind == "f":
                yield array, False
        for steps in integer_weights(model).values():
            yield steps, True

    return _count(size_of(path), arrays())


def contents_of_tensors(size: int, tensors: Iterable[Tensor]) -> Contents:
    """Counts of the weights among tensors; `size` is that of the file or the model, in bytes."""

    def as_array(tensor: Tensor) -> Array:
        """Only zeros are counted, so dtypes that numpy lacks become float32."""
        plain = tensor.detach().cpu()
        return (plain if plain.element_size() > 2 else plain.float()).numpy()

    return _count(size, ((as_array(tensor), False) for tensor in tensors if tensor.is_floating_point()))


def _count(size: int, arrays: Iterable[tuple[Array, bool]]) -> Contents:
    weights = zeros = integers = filters = empty = 0
    for array, is_integer in arrays:
        if sum(length > 1 for length in array.shape) < 2:
            continue
        weights += array.size
        zeros += array.size - int(np.count_nonzero(array))
        integers += array.size if is_integer else 0
        if array.ndim > 2:
            filters += len(array)
            empty += int((~array.reshape(len(array), -1).any(1)).sum())
    return Contents(size, weights, zeros, integers, filters, empty)
