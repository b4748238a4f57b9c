"""torch's fake-quantize operators as QuantizeLinear and DequantizeLinear, while a model is traced for ONNX.

torch.export has no way to trace these operators, so each call is answered with one operator of our own, which
torch.onnx is told to write as those two. It works for every model that calls them, whoever wrote it. Nothing here
knows how scales are found.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gossamer.errors import GossamerError
from gossamer.export.examples import ExampleInputs
from gossamer.export.onnx.model_files import check_place, require, write_model
from gossamer.export.onnx.qat import quantize_qat_export
from gossamer.export.weights import states
from gossamer.io import dtype_name
from gossamer.model.additions import strip
from gossamer.quantization import emulations_in

if TYPE_CHECKING:
    from onnx import ModelProto

    from gossamer.quantization import Emulation


class AsOnnx(TorchFunctionMode):
    """Entered around torch.onnx.export, which also gets the `translations`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.fake_quantize_per_tensor_affine:
            return _per_tensor(*args, **kwargs)
        if func is torch.fake_quantize_per_channel_affine:
            return _per_channel(*args, **kwargs)
        return func(*args, **kwargs)

    @property
    def translations(self) -> dict[Any, Callable[..., Any]]:
        """How torch.onnx writes our operators."""
        by_numbers, by_tensors = _operators()
        return {by_numbers: _written_by_numbers, by_tensors: _written_by_tensors}


def _per_tensor(
    input: Tensor, scale: float | Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> Tensor:
    _check(quant_min, quant_max)
    if not isinstance(scale, Tensor) and not isinstance(zero_point, Tensor):
        found = _operators()[0](input.float(), float(scale), int(zero_point), quant_min, quant_max)
    else:
        step, zero = (torch.as_tensor(given, device=input.device) for given in (scale, zero_point))
        found = _operators()[1](input.float(), step.float(), zero, 0, quant_min, quant_max)
    return found.to(input.dtype)


def _per_channel(input: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> Tensor:
    _check(quant_min, quant_max)
    return _operators()[1](input.float(), scale, zero_point, axis, quant_min, quant_max).to(input.dtype)


def _check(low: int, high: int) -> None:
    bounds = torch.iinfo(_kind(low))
    if low < bounds.min or high > bounds.max:
        raise GossamerError(
            f"an ONNX file holds integers of at most 8 bits, and the model uses {(high - low).bit_length()} (from "
            f"{low} to {high}); train with 8 bits or fewer"
        )


def _kind(low: int) -> torch.dtype:
    return torch.int8 if low < 0 else torch.uint8


@cache
def _operators() -> tuple[Any, Any]:
    """The two operators, known to torch from the first export on."""

    def by_numbers(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
        raise NotImplementedError("this operator is traced, never computed")

    def by_tensors(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int) -> Tensor:
        raise NotImplementedError("this operator is traced, never computed")

    def traced(x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x)

    for name, body in {"emulated_by_numbers": by_numbers, "emulated_by_tensors": by_tensors}.items():
        operator = torch.library.custom_op(f"gossamer::{name}", body, mutates_args=())
        operator.register_fake(traced)
    ours: Any = cast(Any, torch.ops).gossamer
    return ours.emulated_by_numbers.default, ours.emulated_by_tensors.default


def _written_by_numbers(x: Any, scale: float, zero_point: int, low: int, high: int) -> Any:
    import numpy as np

    return _written(x, _constant(np.float32(scale)), _constant(_numpy(low)(zero_point)), {}, low, high)


def _written_by_tensors(x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int) -> Any:
    import onnx_ir as ir
    from onnxscript import opset18

    zero = cast(Any, opset18).Cast(zero_point, to=int(ir.DataType.INT8 if low < 0 else ir.DataType.UINT8))
    return _written(x, scale, zero, {"axis": axis}, low, high)


def _written(x: Any, scale: Any, zero_point: Any, attributes: dict[str, int], low: int, high: int) -> Any:
    from onnxscript import opset18

    write = cast(Any, opset18)
    integers, bounds = write.QuantizeLinear(x, scale, zero_point, **attributes), torch.iinfo(_kind(low))
    if (low, high) != (bounds.min, bounds.max):
        integers = write.Clip(integers, _constant(_numpy(low)(low)), _constant(_numpy(low)(high)))
    return write.DequantizeLinear(integers, scale, zero_point, **attributes)


def _constant(number: Any) -> Any:
    import numpy as np
    import onnx_ir as ir
    from onnxscript import opset18

    return cast(Any, opset18).Constant(value=ir.tensor(np.asarray(number)))


def _numpy(low: int) -> Any:
    import numpy as np

    return np.int8 if low < 0 else np.uint8


logger = logging.getLogger("gossamer")

NEWEST_QUANTIZED = 20
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
    """Write a model in evaluation mode to one ONNX file, whole or not at all; the model itself is not touched.

    `example_inputs` is a tensor, the arguments of `forward` in a list or tuple, or by name in a dict. With
    `dynamic_batch` the first axis of the inputs may have any size in the file. A model that emulates quantization is
    written with integer weights; `integers=False` leaves the emulation, with float weights, in the file.
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
    """What `to_onnx` writes to `target`; see there."""
    require("to_onnx", "onnx", "onnxscript", "onnx_ir")
    check_place(target)
    copy = copied(model, target)
    inputs = ExampleInputs.of(example_inputs).on_cpu().ordered(copy)
    emulations = emulations_in(copy)
    _check_floats(copy, bool(emulations), target)
    with contextlib.ExitStack() as stack:
        for emulation in emulations:
            stack.enter_context(emulation.exporting())
        _try(copy, inputs, f"{target}: the model does not take example_inputs")
        _warn_of_floats(emulations, target)
        shapes = None
        if dynamic_batch:
            if inputs.batch == 1:
                inputs = inputs.doubled()
                _try(copy, inputs, f"{target}: the model takes a batch of 1 only (use dynamic_batch=False)")
            shapes = inputs.shapes(copy)
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
    if integers and _is_emulated(exported):
        exported = quantize_qat_export(exported)
    return exported


def export(model: nn.Module, inputs: tuple[Any, ...], target: Path, **options: Any) -> ModelProto:
    """What torch.onnx makes of a model, quietly; `target` is where it will be written, for the words of an error."""

    try:
        with quiet(), AsOnnx() as mode:
            table = mode.translations
            # torch.onnx takes a dict at the end for arguments by name, unless another dict follows.
            arguments: tuple[Any, ...] = (*inputs, {}) if inputs and isinstance(inputs[-1], dict) else inputs
            program: Any = torch.onnx.export(
                model, arguments, dynamo=True, verbose=False, custom_translation_table=table, **options
            )
            return _bare(program.model_proto)
    except Exception as error:
        own = own_error(error)
        if own is not None:
            raise GossamerError(f"{target}: {own}") from None
        hint = "; if it takes one batch size only, use dynamic_batch=False" if options.get("dynamic_shapes") else ""
        raise GossamerError(f"{target}: torch.onnx cannot export the model: {reason_of(error)}{hint}") from error


def copied(model: nn.Module, target: Path) -> nn.Module:
    """A copy to trace, in evaluation mode on the CPU, without wrappers and without what training added."""
    return strip(states.copied(model, target))


def _check_floats(model: nn.Module, emulated: bool, target: Path) -> None:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if emulated and kinds - {torch.float32}:
        found = ", ".join(sorted(dtype_name(kind) for kind in kinds))
        raise GossamerError(f"{target}: a quantized model is written from float32, not {found}; pass model.float()")


def _warn_of_floats(emulations: Sequence[Emulation], target: Path) -> None:
    """Say what stays in floats because training never reached it."""
    if unknown := sorted({site for emulation in emulations for site in emulation.unknown}):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        logger.warning(
            "%s: %s%s stay in floats: no training batch has passed there since quantization began",
            *(target, ", ".join(unknown[:3]), more),
        )


def _try(model: nn.Module, inputs: ExampleInputs, otherwise: str) -> None:
    """One pass: it says whether the inputs fit, and an emulation notes its scales in it."""
    try:
        with torch.no_grad(), quiet():
            model(*inputs.positional, **inputs.named)
    except Exception as error:
        raise GossamerError(f"{otherwise}: {reason_of(error)}") from error


def _bare(model: ModelProto) -> ModelProto:
    """Without the traces of source lines that torch.onnx notes for each operator: they are long, and name paths."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


def _check_opset(model: ModelProto, opset: int, target: Path) -> None:
    found = next((entry.version for entry in model.opset_import if entry.domain == ""), opset)
    if found != opset:
        raise GossamerError(f"{target}: torch.onnx writes this model in opset {found} and not in {opset}; use {found}")
    if _is_emulated(model) and opset > NEWEST_QUANTIZED:
        raise GossamerError(f"{target}: a quantized model is written in opset {NEWEST_QUANTIZED} at most, not {opset}")


def _is_emulated(model: ModelProto) -> bool:
    return any(node.op_type == "QuantizeLinear" for node in model.graph.node)


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """torch.onnx tells its progress on stdout and by warnings that nobody can act on."""
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
    """Our own error, if that is what torch reports."""
    while error is not None and not isinstance(error, GossamerError):
        error = error.__cause__ or error.__context__
    return error


def reason_of(error: BaseException) -> str:
    """The first line of what went wrong: torch's own error is advice, and behind the first line stands a trace."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error.__cause__ or error)).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error.__cause__ or error).__name__)
