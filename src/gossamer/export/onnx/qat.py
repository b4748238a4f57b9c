"""`quantize_qat_export`: an ONNX model with emulated quantization becomes one that is quantized.

Training with emulated quantization leaves float weights behind QuantizeLinear and DequantizeLinear, and batch norm
behind the convolutions. A runtime that computes in integers wants integers instead. The steps stand in their own
modules; here is their order, and what a model must have for them.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from gossamer.errors import GossamerError
from gossamer.export.onnx.model_files import external_files, read_model, require, write_model

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray
    from onnx import ModelProto


OLDEST = 13
"""The first opset with a scale for each channel; older models are brought to it."""


def quantize_qat_export(
    model: ModelProto | str | os.PathLike[str],
    output_file_path: str | os.PathLike[str] | None = None,
    inplace: bool = True,
) -> ModelProto:
    """Turn a QAT export, the model itself or its file, into a fully quantized model.

    - Float weights behind QuantizeLinear become the integers that it makes of them.
    - Batch norm, and other constants for each channel, go into scales and biases.
    - Biases become 32-bit integers where input and weights are integers.

    The model that is returned is written to `output_file_path` when given. With `inplace`, a model that was given is
    changed and returned; otherwise it stays as it is. A model that is quantized already comes back as it was.
    """
    require("quantize_qat_export", "onnx", "onnx_ir")
    from onnx import ModelProto

    if not isinstance(model, ModelProto | str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GossamerError(
            f"quantize_qat_export: expected an ONNX model or the path of one, found {type(model).__name__}"
        )
    given = model if isinstance(model, ModelProto) else read_model(model)
    result = _quantized(given, _where(model))
    if output_file_path is not None:
        write_model(result, output_file_path)
    if not inplace or not isinstance(model, ModelProto):
        return result
    model.CopyFrom(result)
    return model


def integer_weights(model: ModelProto | str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The weights that an ONNX model or a file of `save` holds as integers, by name: 0 where the weight is zero."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".safetensors"):
        from gossamer.export.weights.reading import read_integers

        return {name: integers.int().numpy() for name, (integers, _) in read_integers(model).items()}
    require("integer_weights", "onnx", "onnx_ir")
    from onnx import ModelProto

    from gossamer.export.onnx.graph import operators
    from gossamer.export.onnx.integers import integer_table, integer_weight

    given = model if isinstance(model, ModelProto) else read_model(model)
    graph = _parsed(given, _where(model))
    found = [integer_weight(node.outputs[0]) for node in operators(graph, "DequantizeLinear")]
    found += [integer_table(node) for node in operators(graph, "Gather")]
    return {weight.name: weight.steps for weight in found if weight is not None and weight.is_held}


def _quantized(given: ModelProto, where: str) -> ModelProto:
    import onnx_ir as ir

    _check(given, where)
    model = _parsed(_current(given, where), where)
    _prepare(model)
    if not any(node.op_type in _QUANTIZERS for node in model.graph.all_nodes()):
        raise GossamerError(
            f"{where}: no QuantizeLinear is in it, so there is nothing to quantize; export a model that was trained "
            "with emulated quantization"
        )
    try:
        _apply(model)
    except GossamerError as error:
        raise GossamerError(f"{where}: {error}") from None
    return ir.to_proto(model)


def _where(model: ModelProto | str | os.PathLike[str]) -> str:
    return os.fspath(model) if isinstance(model, str | os.PathLike) else "the model"


def _parsed(model: ModelProto, where: str) -> ir.Model:
    import onnx_ir as ir

    try:
        return ir.from_proto(model)
    except ir.serde.SerdeError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise GossamerError(f"{where}: not a valid ONNX model ({reason}); export it again") from None


_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")


def _apply(model: ir.Model) -> None:
    from onnx_ir.passes.common import DeduplicateInitializersPass, RemoveUnusedNodesPass

    from gossamer.export.onnx.integers import fold_channels, look_up_integers, quantize_biases, quantize_weights

    quantize_weights(model)
    look_up_integers(model)
    fold_channels(model)
    quantize_biases(model)
    RemoveUnusedNodesPass()(model)
    DeduplicateInitializersPass(size_limit=2**40)(model)


def _check(model: ModelProto, where: str) -> None:
    if not model.graph.node or not model.opset_import:
        raise GossamerError(f"{where}: the graph is empty")
    if files := external_files(model):
        raise GossamerError(f"{where}: its weights are in '{files[0]}'; give the model's path instead")


def _current(model: ModelProto, where: str) -> ModelProto:
    """The model, or what it is in the first opset that knows scales for each channel."""
    from onnx import version_converter

    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), OLDEST)
    if opset >= OLDEST:
        return model
    try:
        return version_converter.convert_version(model, OLDEST)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise GossamerError(
            f"{where}: opset {opset} cannot be brought to {OLDEST} ({reason}); export the model with opset {OLDEST} "
            "or later"
        ) from None


def _prepare(model: ir.Model) -> None:
    """Functions are written out, and constants are no inputs that a caller could change."""
    from onnx_ir.passes.common import InlinePass, RemoveInitializersFromInputsPass

    if model.functions:
        InlinePass()(model)
    RemoveInitializersFromInputsPass()(model)
    model.ir_version = max(model.ir_version, 4)


INTEGER = (
    "ConvInteger",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QAttention",
    "QGemm",
    "QLinearConv",
    "QLinearMatMul",
)
FLOAT = (
    *("Attention", "Conv", "ConvTranspose", "Einsum", "FusedConv", "FusedGemm", "FusedMatMul", "GRU", "Gemm", "LSTM"),
    *("MatMul", "MultiHeadAttention", "RNN"),
)


def integer_operators(path: str | os.PathLike[str]) -> dict[str, int]:
    """How often each operator that multiplies weights is in the graph that onnxruntime runs on a CPU.

    `QLinearConv`, `QGemm`, `QLinearMatMul`, `MatMulIntegerToFloat` and others of `INTEGER` compute in integers;
    `Conv`, `FusedConv`, `Gemm`, `MatMul`, `ConvTranspose` and others of `FLOAT` do not.
    """
    require("integer_operators", "onnx", "onnxruntime")
    import onnxruntime

    with TemporaryDirectory() as folder:
        options = cast(Any, onnxruntime).SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        try:
            onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise GossamerError(f"{os.fspath(path)}: onnxruntime cannot run it: {reason}") from error
        graph = read_model(Path(folder) / "optimized.onnx").graph
    found = Counter(node.op_type for node in graph.node)
    return {name: found[name] for name in (*INTEGER, *FLOAT) if found[name]}
