"""`to_onnx`: a torch model as one ONNX file, with integer weights if it emulates quantization.

torch.onnx traces a copy of the model. torch.export cannot trace torch's fake-quantize operators, so a function mode
replaces their calls, in any model, by a custom operator that is translated to QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gossamer.errors import GossamerError, first_line
from gossamer.export.examples import ExampleInputs
from gossamer.export.onnx.model_files import make_parent, require, write_model
from gossamer.export.onnx.qat import quantize_qat_export
from gossamer.export.weights.file import copied
from gossamer.io import dtype_name
from gossamer.model.additions import strip
from gossamer.quantization import emulations_in

if TYPE_CHECKING:
    from onnx import ModelProto

    from gossamer.quantization import Emulation

logger = logging.getLogger("gossamer")

MAX_QUANTIZED_OPSET = 20
"""From opset 21 on, onnxruntime does not run every quantized model."""


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    opset: int = 18,
    dynamic_batch: bool = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    integers: bool = True,
) -> Path:
    """Write a model in evaluation mode to one ONNX file, atomically; the model itself is not changed.

    `example_inputs` is a tensor, a list or tuple of positional arguments of `forward`, or a dict of keyword arguments.
    With `dynamic_batch`, the first axis of the inputs has any size in the file. A model that emulates quantization is
    written with integer weights; `integers=False` keeps the emulation, with float weights.
    """
    names = {"input_names": input_names, "output_names": output_names}
    exported = as_onnx(model, Path(path), example_inputs, opset, dynamic_batch, names, integers)
    return write_model(exported, path)


def as_onnx(
    model: nn.Module,
    target: Path,
    example_inputs: Any,
    opset: int,
    dynamic_batch: bool,
    names: Mapping[str, Sequence[str] | None],
    integers: bool = True,
) -> ModelProto:
    """What `to_onnx` writes to `target`."""
    require("to_onnx", "onnx", "onnxscript", "onnx_ir")
    make_parent(target)
    copy = stripped_copy(model, target)
    inputs = ExampleInputs.of(example_inputs).on_cpu().ordered(copy)
    emulations = emulations_in(copy)
    _check_dtypes(copy, bool(emulations), target)
    with contextlib.ExitStack() as stack:
        for emulation in emulations:
            stack.enter_context(emulation.exporting())
        _forward(copy, inputs, f"{target}: the model does not accept example_inputs")
        _warn_of_floats(emulations, target)
        shapes = None
        if dynamic_batch:
            if inputs.batch == 1:
                inputs = inputs.doubled()
                _forward(copy, inputs, f"{target}: the model accepts only a batch of 1 (use dynamic_batch=False)")
            shapes = inputs.dynamic_shapes(copy)
        exported = export(
            copy,
            inputs.positional,
            target,
            kwargs=inputs.named,
            dynamic_shapes=shapes,
            opset_version=opset,
            **{key: list(given) for key, given in names.items() if given is not None},
        )
    _check_opset(exported, opset, target)
    if integers and is_quantized(exported):
        exported = quantize_qat_export(exported)
    return exported


def export(model: nn.Module, inputs: tuple[Any, ...], target: Path, **options: Any) -> ModelProto:
    """`torch.onnx.export` without its output; `target` appears in errors."""
    try:
        with quiet(), _FakeQuantizeTranslation(target):
            # torch.onnx takes a last dict for keyword arguments, unless another dict follows.
            arguments: tuple[Any, ...] = (*inputs, {}) if inputs and isinstance(inputs[-1], dict) else inputs
            program: Any = torch.onnx.export(
                model,
                arguments,
                dynamo=True,
                verbose=False,
                custom_translation_table={_fake_quantize(): _translate},
                **options,
            )
            return _without_traces(program.model_proto)
    except Exception as error:
        if (own := own_error(error)) is not None:
            raise own from None
        hint = "; if it accepts only one batch size, use dynamic_batch=False" if options.get("dynamic_shapes") else ""
        raise GossamerError(f"{target}: torch.onnx cannot export the model: {reason_of(error)}{hint}") from error


def stripped_copy(model: nn.Module, target: Path) -> nn.Module:
    """A copy in evaluation mode on the CPU, without wrappers and without what training methods added."""
    return strip(copied(model, target))


def is_quantized(model: ModelProto) -> bool:
    return any(node.op_type == "QuantizeLinear" for node in model.graph.node)


def _check_dtypes(model: nn.Module, emulated: bool, target: Path) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if emulated and dtypes - {torch.float32}:
        names = ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        raise GossamerError(f"{target}: a quantized model is exported from float32, not {names}; pass model.float()")


def _warn_of_floats(emulations: Sequence[Emulation], target: Path) -> None:
    """Warn about layers that stay in floats because no training batch has passed through them."""
    if unknown := sorted({site for emulation in emulations for site in emulation.unknown}):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        logger.warning(
            "%s: %s%s stay in floats: no training batch has passed through them since quantization started",
            *(target, ", ".join(unknown[:3]), more),
        )


def _forward(model: nn.Module, inputs: ExampleInputs, message: str) -> None:
    """Check that the inputs fit, by a forward pass, in which an emulation also records its scales."""
    try:
        with torch.no_grad(), quiet():
            model(*inputs.positional, **inputs.named)
    except Exception as error:
        raise GossamerError(f"{message}: {reason_of(error)}") from error


def _without_traces(model: ModelProto) -> ModelProto:
    """Remove the stack traces that torch.onnx adds to each operator: they are long, and contain local paths."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


def _check_opset(model: ModelProto, opset: int, target: Path) -> None:
    written = next((entry.version for entry in model.opset_import if entry.domain == ""), opset)
    if written != opset:
        raise GossamerError(
            f"{target}: torch.onnx exports this model in opset {written}, not {opset}; use opset={written}"
        )
    if is_quantized(model) and opset > MAX_QUANTIZED_OPSET:
        raise GossamerError(f"{target}: opset {opset} is above {MAX_QUANTIZED_OPSET}, the limit for a quantized model")


# Output and errors of torch


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence torch.onnx, which prints its progress and warns of what users cannot change."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def own_error(error: BaseException | None) -> GossamerError | None:
    """Our own error, if that caused the one that torch raised."""
    while error is not None and not isinstance(error, GossamerError):
        error = error.__cause__ or error.__context__
    return error


def reason_of(error: BaseException) -> str:
    """The first line of the cause: torch.export's own error gives general advice only."""
    return first_line(error.__cause__ or error)


# Fake quantization


class _FakeQuantizeTranslation(TorchFunctionMode):
    """Replaces fake-quantize calls by a custom operator that torch.onnx writes with `_translate`."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.fake_quantize_per_tensor_affine:
            return self._per_tensor(*args, **kwargs)
        if func is torch.fake_quantize_per_channel_affine:
            return self._per_channel(*args, **kwargs)
        return func(*args, **kwargs)

    def _per_tensor(
        self, input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
    ) -> Tensor:
        step, zero = (torch.as_tensor(given, device=input.device) for given in (scale, zero_point))
        return self._per_channel(input, step.float(), zero, 0, quant_min, quant_max)

    def _per_channel(
        self, input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
    ) -> Tensor:
        self._check_bits(quant_min, quant_max)
        return _fake_quantize()(input.float(), scale, zero_point, axis, quant_min, quant_max).to(input.dtype)

    def _check_bits(self, low: int, high: int) -> None:
        bounds = torch.iinfo(_torch_dtype(low))
        if low < bounds.min or high > bounds.max:
            raise GossamerError(
                f"{self._target}: an ONNX file holds integers of at most 8 bits, and the model uses "
                f"{(high - low).bit_length()} (from {low} to {high}); train with 8 bits or fewer"
            )


@cache
def _fake_quantize() -> Any:
    """The custom operator, registered with torch on the first export."""

    def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int) -> Tensor:
        raise NotImplementedError("this operator is traced, never computed")

    def shape_of(x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x)

    torch.library.custom_op("gossamer::fake_quantize", fake_quantize, mutates_args=()).register_fake(shape_of)
    return cast(Any, torch.ops).gossamer.fake_quantize.default


def _translate(x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int) -> Any:
    """The operator in ONNX: QuantizeLinear, Clip for fewer than 8 bits, and DequantizeLinear."""
    import numpy as np
    import onnx_ir as ir
    from onnxscript import opset18

    opset, dtype = cast(Any, opset18), _torch_dtype(low)
    kind = np.int8 if low < 0 else np.uint8
    zero = opset.Cast(zero_point, to=int(ir.DataType.from_numpy(np.dtype(kind))))
    integers = opset.QuantizeLinear(x, scale, zero, axis=axis)
    if (low, high) != (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
        limits = (opset.Constant(value=ir.tensor(np.asarray(limit, kind))) for limit in (low, high))
        integers = opset.Clip(integers, *limits)
    return opset.DequantizeLinear(integers, scale, zero, axis=axis)


def _torch_dtype(low: int) -> torch.dtype:
    return torch.int8 if low < 0 else torch.uint8
