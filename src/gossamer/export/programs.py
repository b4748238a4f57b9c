"""ONNX and pt2 programs of a model, written to a scratch file and verified.

The file must compute what the model does, on the example inputs and on another batch size if that is dynamic. Every
zero weight of the model must be zero in the file.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export.examples import (
    ExampleInputs,
    OutputMismatchError,
    largest_difference,
    outputs_of,
    tensors_in,
    tolerance_of,
)
from gossamer.export.onnx.model_files import read_model, require, write_model
from gossamer.export.onnx.qat import integer_weights
from gossamer.export.onnx.writer import as_onnx, is_quantized, own_error, quiet, reason_of, stripped_copy
from gossamer.export.saving import Verified
from gossamer.export.weights.file import bits
from gossamer.model import prunable, weight_of
from gossamer.model.parameters import own_tensors
from gossamer.progress import Progress
from gossamer.quantization import is_emulated

if TYPE_CHECKING:
    from onnx import ModelProto

Array = NDArray[Any]
Run = Callable[[ExampleInputs], list[Tensor]]


def write_onnx(
    model: nn.Module,
    scratch: Path,
    target: Path,
    inputs: ExampleInputs,
    opset: int,
    dynamic_batch: bool,
    names: Mapping[str, Sequence[str] | None],
    integers: bool,
    about: Mapping[str, str],
    progress: Progress,
) -> Verified:
    """Write an ONNX file to `scratch` and verify it in onnxruntime; errors name `target`."""
    require("save", "onnx", "onnxscript", "onnx_ir", "onnxruntime")
    from onnx.helper import set_model_props

    progress("Tracing the model", 0.0)
    given = inputs.named if inputs.named else inputs.positional
    exported = as_onnx(model, target, given, opset, dynamic_batch, names, integers)
    if about:
        set_model_props(exported, dict(about))
    progress("Writing the file", 0.6)
    write_model(exported, scratch)
    progress("Checking the file", 0.7)
    copy = stripped_copy(model, target)
    quantized = is_quantized(exported)
    del exported
    difference = _compare(copy, _onnxruntime(scratch, copy, target), inputs, dynamic_batch, target, quantized)
    progress("Counting zeros", 0.95)
    weights, zeros, notes = count_zeros(copy, read_model(scratch), target)
    if quantized and integers:
        notes = (*notes, "its weights are integers, compared with the model that emulates them")
    return Verified(weights, zeros, notes, difference)


def write_pt2(
    model: nn.Module,
    scratch: Path,
    target: Path,
    inputs: ExampleInputs,
    dynamic_batch: bool,
    about: Mapping[str, str],
    progress: Progress,
) -> Verified:
    """Write a program of torch.export to `scratch` and verify it; the batch is fixed if torch requires that."""
    if is_emulated(model):
        raise GossamerError(f"{target}: pt2 does not support a model that emulates quantization; use the format onnx")
    progress("Tracing the model", 0.0)
    copy = stripped_copy(model, target)
    program, fixed = _trace(copy, inputs, dynamic_batch, target)
    progress("Writing the file", 0.6)
    content = io.BytesIO()  # on a full disk, torch's own file writer would end the process
    try:
        with quiet():
            torch.export.save(program, content, extra_files={"about.json": json.dumps(dict(about))})
    except Exception as error:
        raise GossamerError(f"{target}: torch.export cannot write the model: {reason_of(error)}") from error
    scratch.write_bytes(content.getbuffer())
    del content
    progress("Checking the file", 0.8)
    with quiet():
        loaded: Any = torch.export.load(scratch)
        module = loaded.module()

    def run(example: ExampleInputs) -> list[Tensor]:
        with torch.no_grad(), quiet():
            return tensors_in(module(*example.positional, **example.named))

    difference = _compare(copy, run, inputs, dynamic_batch and fixed is None, target, False)
    weights, zeros, notes = _count_pt2_zeros(copy, cast(Mapping[str, Tensor], loaded.state_dict), target)
    if fixed:
        notes = (*notes, f"it accepts only batches of {inputs.batch}: {fixed}")
    return Verified(weights, zeros, notes, difference)


def _trace(copy: nn.Module, inputs: ExampleInputs, dynamic: bool, target: Path) -> tuple[Any, str | None]:
    """The program, and why its batch is fixed if it should be dynamic."""
    reason = None
    if dynamic and inputs.batch is not None:
        try:
            larger = inputs.doubled() if inputs.batch == 1 else inputs
            return _export(copy, larger, larger.dynamic_shapes(copy, torch.export.Dim("batch"))), None
        except Exception as error:  # noqa: BLE001  # torch has no base class for what it cannot trace
            reason = reason_of(error)
    try:
        return _export(copy, inputs, None), reason
    except Exception as error:
        if (own := own_error(error)) is not None:
            raise own from None
        raise GossamerError(f"{target}: torch.export cannot export the model: {reason_of(error)}") from error


def _export(copy: nn.Module, inputs: ExampleInputs, shapes: Any) -> Any:
    with quiet():
        return torch.export.export(copy, inputs.positional, inputs.named or None, dynamic_shapes=shapes)


# Outputs


def _compare(copy: nn.Module, run: Run, inputs: ExampleInputs, dynamic: bool, target: Path, quantized: bool) -> float:
    """The largest difference on the example and, if the batch is dynamic, on a batch of another size."""
    tolerance = tolerance_of(copy)
    differences: list[float] = []
    for example in [inputs, inputs.grown()] if dynamic and inputs.batch is not None else [inputs]:
        try:
            expected = outputs_of(copy, example)
        except Exception as error:
            reason = reason_of(error)
            if example is inputs:
                raise GossamerError(f"{target}: the model does not accept example_inputs: {reason}") from error
            raise GossamerError(
                f"{target}: the model accepts only one batch size: {reason}; use dynamic_batch=False"
            ) from error
        try:
            differences.append(largest_difference(expected, run(example), tolerance, quantized=quantized))
        except OutputMismatchError as error:
            remedy = "; to_onnx(…, integers=False) keeps floats" if quantized else ""
            raise GossamerError(f"{target}: not written: {error} (a batch of {example.batch}){remedy}") from None
        except RuntimeError as error:
            raise GossamerError(f"{target}: not written: the file does not run: {reason_of(error)}") from error
    return max(differences)


def _onnxruntime(path: Path, copy: nn.Module, target: Path) -> Run:
    import onnxruntime

    options = cast(Any, onnxruntime).SessionOptions()
    options.log_severity_level = 4

    def run(example: ExampleInputs) -> list[Tensor]:
        tensors = example.tensors(copy)
        try:
            session: Any = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
            names = [entry.name for entry in session.get_inputs()]
            feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
            return [torch.from_numpy(output) for output in session.run(None, feeds)]
        except Exception as error:  # onnxruntime's errors have no base class
            raise GossamerError(
                f"{target}: onnxruntime cannot run it: {reason_of(error)}; use model.float()"
            ) from error

    return run


# Zeros


def count_zeros(model: nn.Module, exported: ModelProto, target: Path) -> tuple[int, int, tuple[str, ...]]:
    """Counts of prunable weights and zeros in an ONNX file, and notes on weights that were not recognized.

    torch.onnx may scale weights by a following batch norm, transpose or rename them. Raises if a zero of the model is
    not zero in the file.
    """
    constants = _constants(exported)
    names = prunable(model)
    weights, zeros = 0, 0
    notes: list[str] = []
    for name in names:
        weight: Array = weight_of(model, name).float().cpu().numpy()
        written = _find(weight, name, constants, names)
        if written is None:
            notes.append(f"{name} is not recognized in the file, so its zeros were not counted")
            continue
        lost = int(np.count_nonzero(written[weight == 0]))
        if lost:
            raise GossamerError(f"{target}: not written: {lost} zeros of '{name}' are not zero in the file")
        weights += written.size
        zeros += int(np.count_nonzero(written == 0))
    return weights, zeros, tuple(notes)


def _constants(exported: ModelProto) -> dict[str, Array]:
    """Constants with two or more axes by name; integer weights minus their zero point."""
    from onnx.numpy_helper import to_array

    constants = {entry.name: to_array(entry) for entry in exported.graph.initializer if len(entry.dims) > 1}
    for node in exported.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = to_array(node.attribute[0].t)
    if any(node.op_type == "DequantizeLinear" for node in exported.graph.node):
        constants |= integer_weights(exported)
    return constants


def _find(weight: Array, name: str, constants: Mapping[str, Array], names: Sequence[str]) -> Array | None:
    """The constant of the weight's name, transposed if that fits better, or one with the same values or zeros."""
    pattern = weight == 0
    if name in constants:
        oriented = _orientations(constants[name], weight.shape)
        return min(oriented, key=lambda array: int(np.count_nonzero(array[pattern])), default=None)
    for constant in (value for other, value in constants.items() if other not in names):
        for array in _orientations(constant, weight.shape):
            if np.array_equal(array, weight) or (pattern.any() and np.array_equal(array == 0, pattern)):
                return array
    return None


def _orientations(constant: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    if constant.shape == shape:
        yield constant
    if constant.ndim == 2 and constant.T.shape == shape:
        yield constant.T


def _count_pt2_zeros(copy: nn.Module, state: Mapping[str, Tensor], target: Path) -> tuple[int, int, tuple[str, ...]]:
    """Counts of prunable weights and zeros in a program, whose tensors must equal the model's to the bit."""
    own = dict(own_tensors(copy))
    for name, tensor in state.items():
        if name in own and (tensor.dtype != own[name].dtype or not torch.equal(bits(tensor), bits(own[name]))):
            raise GossamerError(f"{target}: not written: '{name}' in the file differs from the model's")
    names = prunable(copy)
    stored = [state[name] for name in names if name in state]
    notes = [f"{name} is not in the file: the program does not use it" for name in names if name not in state]
    return sum(weight.numel() for weight in stored), sum(int((weight == 0).sum()) for weight in stored), tuple(notes)
