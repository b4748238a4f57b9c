"""The weights of a model among the constants of its ONNX file: are its zeros still zeros there?

torch.onnx may scale weights by the batch norm behind them, transpose them or give them other names; a zero stays one
through all that. Nothing here knows how the file was made.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export.examples import ExampleInputs, computed, largest_difference, leaves, tolerance_of
from gossamer.export.onnx.model_files import read_model, require, write_model
from gossamer.export.onnx.qat import integer_weights
from gossamer.export.onnx.writer import as_onnx, copied, own_error, quiet, reason_of
from gossamer.model import get_parameter, prunable, weight_of
from gossamer.model.parameters import own_tensors
from gossamer.quantization import is_emulated

if TYPE_CHECKING:
    from onnx import ModelProto


Array = NDArray[Any]


def count_zeros(model: nn.Module, exported: ModelProto, target: Path) -> tuple[int, int, tuple[str, ...]]:
    """Weights and zeros in the file of the model's prunable weights, and notes on those that were not found.

    Raises when a zero of the model is none in the file, which was to become `target`.
    """
    constants = _constants(exported)
    names = prunable(model)
    unnamed = {name: value for name, value in constants.items() if name not in names}
    weights, zeros = 0, 0
    notes: list[str] = []
    for name in names:
        weight: Array = weight_of(model, name).float().cpu().numpy()
        found = _named(weight, constants.get(name))
        if found is None:
            found = _unnamed(weight, unnamed)
        if found is None:
            notes.append(f"{name} is not in the file as it is in the model, so its zeros were not counted")
            continue
        lost = int(np.count_nonzero(found[weight == 0]))
        if lost:
            raise GossamerError(f"{target}: not written: {lost} zeros of '{name}' are none in the file")
        weights += found.size
        zeros += int(np.count_nonzero(found == 0))
    return weights, zeros, tuple(notes)


def _constants(exported: ModelProto) -> dict[str, Array]:
    """Every constant with two dimensions or more by name; integers that stand for weights as steps from zero."""
    from onnx.numpy_helper import to_array

    found = {entry.name: to_array(entry) for entry in exported.graph.initializer if len(entry.dims) > 1}
    for node in exported.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            found[node.output[0]] = to_array(node.attribute[0].t)
    return found | (integer_weights(exported) if _is_quantized(exported) else {})


def _is_quantized(exported: ModelProto) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in exported.graph.node)


def _named(weight: Array, constant: Array | None) -> Array | None:
    """The constant of the weight's own name, turned as the weight is; the turn that keeps the zeros where both fit."""
    turned = [] if constant is None else list(_turned(constant, weight.shape))
    return min(turned, key=lambda found: int(np.count_nonzero(found[weight == 0])), default=None)


def _unnamed(weight: Array, constants: Mapping[str, Array]) -> Array | None:
    """A constant of any name with the same numbers, or with other numbers and the very same zeros."""
    pattern = weight == 0
    for constant in constants.values():
        for found in _turned(constant, weight.shape):
            if np.array_equal(found, weight) or (pattern.any() and np.array_equal(found == 0, pattern)):
                return found
    return None


def _turned(constant: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    if constant.shape == shape:
        yield constant
    if constant.ndim == 2 and constant.T.shape == shape:
        yield constant.T


Step = Callable[[str, float], None]
Run = Callable[[ExampleInputs], list[Tensor]]


@dataclass(frozen=True)
class Checked:
    """What was found in a file that was read back."""

    weights: int
    zeros: int
    largest_difference: float
    notes: tuple[str, ...]


def write_onnx(
    model: nn.Module,
    scratch: Path,
    target: Path,
    inputs: ExampleInputs,
    *,
    opset: int,
    dynamic_batch: bool,
    names: Mapping[str, Sequence[str] | None],
    integers: bool,
    about: Mapping[str, str],
    step: Step,
) -> Checked:
    """Write an ONNX file to `scratch` and check it in onnxruntime; `target` is its name in errors."""
    require("save", "onnx", "onnxscript", "onnx_ir", "onnxruntime")
    from onnx.helper import set_model_props

    step("Tracing the model", 0.0)
    given = inputs.named if inputs.named else inputs.positional
    exported = as_onnx(model, target, given, opset, dynamic_batch, names, integers)
    if about:
        set_model_props(exported, dict(about))
    step("Writing the file", 0.6)
    write_model(exported, scratch)
    step("Checking the file", 0.7)
    copy = copied(model, target)
    quantized = any(node.op_type == "QuantizeLinear" for node in exported.graph.node)
    del exported
    difference = _compare(copy, _in_onnxruntime(scratch, copy, target), inputs, dynamic_batch, target, quantized)
    step("Counting zeros", 0.95)
    weights, zeros, notes = count_zeros(copy, read_model(scratch), target)
    if quantized and integers:
        notes = (*notes, "its weights are integers, compared with the model that emulates them")
    return Checked(weights, zeros, difference, notes)


def write_pt2(
    model: nn.Module,
    scratch: Path,
    target: Path,
    inputs: ExampleInputs,
    *,
    dynamic_batch: bool,
    about: Mapping[str, str],
    step: Step,
) -> Checked:
    """Write a program of torch.export to `scratch` and check it; the batch is fixed where torch cannot free it."""
    if is_emulated(model):
        raise GossamerError(f"{target}: a model that emulates quantization is not written as pt2; use the format onnx")
    step("Tracing the model", 0.0)
    copy = copied(model, target)
    program, fixed = _traced(copy, inputs, dynamic_batch, target)
    step("Writing the file", 0.6)
    content = io.BytesIO()  # on a full disk torch's own writer of files would end the process
    try:
        with quiet():
            torch.export.save(program, content, extra_files={"about.json": json.dumps(dict(about))})
    except Exception as error:
        raise GossamerError(f"{target}: torch.export cannot write the model: {reason_of(error)}") from error
    scratch.write_bytes(content.getbuffer())
    del content
    step("Checking the file", 0.8)
    with quiet():
        found: Any = torch.export.load(scratch)
        running = found.module()

    def run(example: ExampleInputs) -> list[Tensor]:
        with torch.no_grad(), quiet():
            return leaves(running(*example.positional, **example.named))

    difference = _compare(copy, run, inputs, dynamic_batch and fixed is None, target, False)
    weights, zeros, notes = _held(copy, cast(Mapping[str, Tensor], found.state_dict), target)
    if fixed:
        notes = (*notes, f"it takes batches of {inputs.batch} only: {fixed}")
    return Checked(weights, zeros, difference, notes)


def _traced(copy: nn.Module, inputs: ExampleInputs, dynamic: bool, target: Path) -> tuple[Any, str | None]:
    """The program, and why its batch is fixed though it should not be."""
    if dynamic and inputs.batch is not None:
        try:
            larger = inputs.doubled() if inputs.batch == 1 else inputs
            return _export(copy, larger, larger.shapes(copy, torch.export.Dim("batch"))), None
        except Exception as error:  # noqa: BLE001  # torch has no base class for what it cannot trace
            reason = reason_of(error)
    else:
        reason = None
    try:
        return _export(copy, inputs, None), reason
    except Exception as error:
        if (own := own_error(error)) is not None:
            raise GossamerError(f"{target}: {own}") from None
        raise GossamerError(f"{target}: torch.export cannot export the model: {reason_of(error)}") from error


def _export(copy: nn.Module, inputs: ExampleInputs, shapes: Any) -> Any:
    with quiet():
        return torch.export.export(copy, inputs.positional, inputs.named or None, dynamic_shapes=shapes)


def _compare(copy: nn.Module, run: Run, inputs: ExampleInputs, dynamic: bool, target: Path, quantized: bool) -> float:
    """The largest difference on the example and, where the batch may vary, on a batch of another size."""
    examples = [inputs, inputs.grown()] if dynamic and inputs.batch is not None else [inputs]
    tolerance = tolerance_of(copy)
    found: list[float] = []
    for example in examples:
        try:
            expected = computed(copy, example)
        except Exception as error:
            words = "the model does not take example_inputs" if example is inputs else "the model takes one batch only"
            hint = "" if example is inputs else "; use dynamic_batch=False"
            raise GossamerError(f"{target}: {words}: {reason_of(error)}{hint}") from error
        try:
            found.append(largest_difference(expected, run(example), tolerance, quantized=quantized))
        except GossamerError as error:
            remedy = "; to_onnx(…, integers=False) keeps floats" if quantized else ""
            raise GossamerError(f"{target}: not written: {error} (a batch of {example.batch}){remedy}") from None
        except RuntimeError as error:
            raise GossamerError(f"{target}: not written: the file cannot be run: {reason_of(error)}") from error
    return max(found)


def _in_onnxruntime(path: Path, copy: nn.Module, target: Path) -> Run:
    import onnxruntime

    options = cast(Any, onnxruntime).SessionOptions()
    options.log_severity_level = 4
    with _told_as(target):
        session = cast(Any, onnxruntime).InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(example: ExampleInputs) -> list[Tensor]:
        tensors = example.tensors(copy)
        if len(tensors) != len(names):
            raise GossamerError(f"the file takes {len(names)} tensors, and example_inputs are {len(tensors)}")
        with _told_as(target):
            feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
            return [torch.from_numpy(found) for found in session.run(None, feeds)]

    return run


@contextlib.contextmanager
def _told_as(target: Path) -> Any:
    """onnxruntime has no base class for its errors."""
    try:
        yield
    except Exception as error:
        raise GossamerError(f"{target}: onnxruntime cannot run it: {reason_of(error)}; use model.float()") from error


def _held(copy: nn.Module, state: Mapping[str, Tensor], target: Path) -> tuple[int, int, tuple[str, ...]]:
    """Weights and zeros of a program, whose tensors are the model's to the bit."""
    from gossamer.export.weights.packing import words

    own = dict(own_tensors(copy))
    for name, tensor in state.items():
        if name in own and (tensor.dtype != own[name].dtype or not torch.equal(words(tensor), words(own[name]))):
            raise GossamerError(f"{target}: not written: '{name}' in the file is not the model's")
    weights, zeros = 0, 0
    missing: list[str] = []
    for name in prunable(copy):
        tensor = state.get(name)
        if tensor is None:
            missing.append(name)
            continue
        weights += tensor.numel()
        zeros += int((tensor == 0).sum())
        if int((tensor == 0).sum()) != int((get_parameter(copy, name) == 0).sum()):
            raise GossamerError(f"{target}: not written: '{name}' has other zeros in the file")
    return weights, zeros, tuple(f"{name} is not in the file: the program does not use it" for name in missing)
