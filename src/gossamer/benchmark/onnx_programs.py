"""ONNX files as programs: in onnxruntime, and in OpenVINO where it is installed, both on the CPU.

Each adapter uses the runtime as it comes, but for the number of threads. Nothing here times anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from gossamer.benchmark.candidates import Candidate, Program, Run, Settings
from gossamer.benchmark.contents import contents_of_onnx
from gossamer.benchmark.inputs import Array, Slot
from gossamer.errors import GossamerError
from gossamer.export.onnx.models import read_model
from gossamer.export.onnx.writing import reason_of

_TYPES = {
    "float": "float32",
    "double": "float64",
    **{
        name: name
        for name in ("float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    },
}


def in_onnxruntime(candidate: Candidate, settings: Settings) -> Program:
    path = _path(candidate)
    import onnxruntime

    options = cast(Any, onnxruntime).SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = settings.threads, 1
    # Threads that go on to wait for work would take the processor from whoever has the next turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refused(path, "onnxruntime", error) from error
    slots = tuple(_slot(path, given.name, given.shape, _onnx_type(given.type)) for given in session.get_inputs())

    def bind(arrays: Sequence[Array]) -> Run:
        feeds = {slot.name: array for slot, array in zip(slots, arrays, strict=True)}
        return lambda: session.run(None, feeds)

    return Program(slots, bind, _arrays, partial(contents_of_onnx, path))


def in_openvino(candidate: Candidate, settings: Settings) -> Program:
    path = _path(candidate)
    import openvino  # pyright: ignore[reportMissingImports]

    library = cast(Any, openvino)
    options = {"INFERENCE_NUM_THREADS": settings.threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = library.Core().compile_model(str(path), "CPU", options)
    except Exception as error:
        raise _refused(path, "openvino", error) from error
    slots = tuple(
        _slot(
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

    return Program(slots, bind, lambda found: _arrays(found.values()), partial(contents_of_onnx, path))


def _path(candidate: Candidate) -> Path:
    assert isinstance(candidate, Path), "the runtimes of ONNX take files only"
    if not candidate.is_file():
        raise GossamerError(f"{candidate}: there is no such file; gossamer export writes one")
    return candidate


def _slot(path: Path, name: str, shape: Sequence[int | str | None], dtype: str) -> Slot:
    if dtype not in _TYPES.values():
        raise GossamerError(f"{path}: its input '{name}' is {dtype}, of which no noise can be made; export in float32")
    return Slot(name, tuple(size or f"{name}.{axis}" for axis, size in enumerate(shape)), dtype)


def _onnx_type(name: str) -> str:
    word = name.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(word, word)


def _arrays(found: Any) -> list[Array]:
    return [np.asarray(output) for output in found]


def _refused(path: Path, runtime: str, error: Exception) -> GossamerError:
    """Why a runtime does not take a file: our own sentence for one that is damaged, or the runtime's."""
    try:
        read_model(path)
    except GossamerError as damage:
        return damage
    return GossamerError(f"{path}: {runtime} cannot run it: {reason_of(error)}")
