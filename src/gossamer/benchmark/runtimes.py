"""The runtimes that `measure` knows. To add one, write a function that loads a file, and a line in `RUNTIMES`.

Each runtime keeps its defaults, except for the number of threads. A runtime is imported when it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from gossamer.benchmark.contents import Contents, contents_of_onnx, contents_of_tensors
from gossamer.benchmark.inputs import Array, Slot
from gossamer.errors import GossamerError, first_line, nearest
from gossamer.export.examples import ExampleInputs
from gossamer.export.onnx.model_files import read_model
from gossamer.export.weights import is_model_file, read_state
from gossamer.io import dtype_name

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
class Settings:
    """How programs run."""

    threads: int = 1
    trust: bool = False
    """Whether to load files whose format can run code."""


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
    load: Callable[[Any, Settings], Program]

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
        _check_supported(candidate, selected)
    pairs = [(one, candidate) for one in selected for candidate in candidates if _suffix(candidate) in one.suffixes]
    unused = [one.name for one in selected if names and one not in (runtime for runtime, _ in pairs)]
    if unused:
        supported = " and ".join(suffix or "models" for suffix in RUNTIMES[unused[0]].suffixes)
        raise GossamerError(f"--runtime: '{unused[0]}' runs {supported}, and no file given is one; leave it out")
    return pairs


def _by_name(name: str) -> Runtime:
    if name not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise GossamerError(f"--runtime: there is no '{name}'{nearest(name, RUNTIMES)}; there are {known}")
    runtime = RUNTIMES[name]
    if not runtime.is_installed:
        raise GossamerError(f"--runtime: {name} is not installed: pip install {runtime.install}")
    return runtime


def _check_supported(candidate: Candidate, selected: Sequence[Runtime]) -> None:
    suffix, name = _suffix(candidate), name_of(candidate)
    supporting = [one for one in RUNTIMES.values() if suffix in one.suffixes]
    if not supporting:
        known = ", ".join(sorted({suffix for one in RUNTIMES.values() for suffix in one.suffixes if suffix}))
        shown = f"found '{suffix}'" if suffix else "found none"
        raise GossamerError(f"{name}: expected a file that ends in {known}, {shown}; gossamer export writes them")
    if any(one in selected for one in supporting):
        return
    if any(one.is_installed for one in supporting):
        names = " or ".join(one.name for one in supporting if one.is_installed)
        raise GossamerError(f"{name}: no selected runtime supports it; add --runtime {names}")
    raise GossamerError(f"{name}: no runtime for it is installed: pip install {supporting[0].install}")


def _suffix(candidate: Candidate) -> str:
    return "" if isinstance(candidate, InMemory) else candidate.suffix.lower()


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise GossamerError(f"{path}: file not found; write it with gossamer export")


# ONNX files, on the CPU


_ONNX_DTYPES = {
    "float": "float32",
    "double": "float64",
    **{
        name: name
        for name in ("float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
}


def _load_onnxruntime(path: Path, settings: Settings) -> Program:
    _check_exists(path)
    import onnxruntime

    options = cast(Any, onnxruntime).SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = settings.threads, 1
    # Threads that spin after a run would take the processor from the next program.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _load_error(path, "onnxruntime", error) from error

    def dtype(name: str) -> str:
        plain = name.removeprefix("tensor(").removesuffix(")")
        return _ONNX_DTYPES.get(plain, plain)

    slots = tuple(_onnx_slot(path, given.name, given.shape, dtype(given.type)) for given in session.get_inputs())

    def bind(arrays: Sequence[Array]) -> Run:
        feeds = {slot.name: array for slot, array in zip(slots, arrays, strict=True)}
        return lambda: session.run(None, feeds)

    return Program(slots, bind, _as_arrays, partial(contents_of_onnx, path))


def _load_openvino(path: Path, settings: Settings) -> Program:
    _check_exists(path)
    import openvino  # pyright: ignore[reportMissingImports]

    library = cast(Any, openvino)
    options = {"INFERENCE_NUM_THREADS": settings.threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = library.Core().compile_model(str(path), "CPU", options)
    except Exception as error:
        raise _load_error(path, "openvino", error) from error
    slots = tuple(
        _onnx_slot(
            path,
            port.get_any_name(),
            [size.get_length() if size.is_static else None for size in port.get_partial_shape()],
            np.dtype(port.get_element_type().to_dtype()).name,
        )
        for port in model.inputs
    )
    request = model.create_infer_request()

    def bind(arrays: Sequence[Array]) -> Run:
        feeds = dict(enumerate(arrays))
        return lambda: request.infer(feeds, share_inputs=True)

    return Program(slots, bind, lambda outputs: _as_arrays(outputs.values()), partial(contents_of_onnx, path))


def _onnx_slot(path: Path, name: str, shape: Sequence[int | str | None], dtype: str) -> Slot:
    if dtype not in _ONNX_DTYPES.values():
        raise GossamerError(f"{path}: its input '{name}' is {dtype}, which is not supported; export in float32")
    return Slot(name, tuple(size or f"{name}.{axis}" for axis, size in enumerate(shape)), dtype)


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


def _load_torch(candidate: Candidate, settings: Settings) -> Program:
    if isinstance(candidate, InMemory):
        return _from_memory(candidate)
    _check_exists(candidate)
    if not settings.trust:  # torch.export.load unpickles, so a .pt2 file can run code
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
            slots.append(Slot(str(name), shape, _numpy_dtype(leaf, str(path))))
    bind = partial(_bind, program.module(), leaves, program.call_spec.in_spec, str(path))
    tensors = [tensor for tensor in program.state_dict.values() if isinstance(tensor, Tensor)]
    return Program(tuple(slots), bind, _tensors_as_arrays, partial(contents_of_tensors, path.stat().st_size, tensors))


def _from_memory(given: InMemory) -> Program:
    inputs = ExampleInputs.of(given.example_inputs).on_cpu()
    leaves, spec = tree.tree_flatten((inputs.positional, inputs.named))
    slots = [
        Slot(f"input_{number}", ("batch", *leaf.shape[1:]) if leaf.dim() else (), _numpy_dtype(leaf, given.name))
        for number, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor))
    ]
    bind = partial(_bind, given.model, leaves, spec, given.name)
    state = [*given.model.parameters(), *given.model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in state)
    contents = partial(contents_of_tensors, size, list(given.model.parameters()))
    return Program(tuple(slots), bind, _tensors_as_arrays, contents)


def _bind(module: nn.Module, leaves: Sequence[Any], spec: Any, name: str, arrays: Sequence[Array]) -> Run:
    """A call of a module with arrays in place of the tensors among its flattened arguments."""
    rest = iter(arrays)
    values = [torch.from_numpy(next(rest)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = tree.tree_unflatten(values, spec)

    def run() -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    try:
        run()
    except Exception as error:
        raise GossamerError(f"{name}: torch cannot run it on random inputs: {first_line(error)}") from error
    return run


def _numpy_dtype(tensor: Tensor, name: str) -> str:
    dtype = dtype_name(tensor.dtype)
    if dtype not in {"float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64"}:
        raise GossamerError(f"{name}: an input is {dtype}, which is not supported; export it in float32")
    return dtype


def _tensors_as_arrays(outputs: Any) -> list[Array]:
    tensors = [leaf for leaf in tree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy() for tensor in tensors]


# Files of weights: no program, so reading is timed, from the system's cache


def _load_weights(path: Path, _settings: Settings) -> Program:
    _check_exists(path)

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
        Runtime("torch", "torch", "torch", (".pt2", ""), _load_torch),
        Runtime("load", "safetensors", "safetensors", (".safetensors",), _load_weights),
    )
}
"""By name. `load` runs no program: it reads a file of weights."""
