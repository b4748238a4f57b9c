"""`quantize_qat_export`: integers in place of the emulated quantization of an ONNX model.

Training with emulated quantization leaves float weights behind QuantizeLinear and DequantizeLinear, and batch norm
behind the convolutions. A runtime computes in integers only if the file stores integers. `integer_weights` and
`integer_operators` show what a file stores, and what onnxruntime computes.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from gossamer.errors import GossamerError, first_line
from gossamer.export.onnx.model_files import external_files, read_model, require, write_model

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray
    from onnx import ModelProto

MIN_OPSET = 13
"""The first opset with per-channel scales; older models are converted to it."""
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


def quantize_qat_export(
    model: ModelProto | str | os.PathLike[str],
    output_file_path: str | os.PathLike[str] | None = None,
    inplace: bool = True,
) -> ModelProto:
    """Convert a QAT export, given as a model or as its path, to a fully quantized model.

    - Float weights behind QuantizeLinear become integers.
    - Batch norm and other per-channel constants are folded into scales and biases.
    - Biases become 32-bit integers where input and weights are integers.

    Writes the result to `output_file_path` if given, and returns it. With `inplace`, a given model is changed. A model
    that is quantized already is returned unchanged.
    """
    require("quantize_qat_export", "onnx", "onnx_ir")
    from onnx import ModelProto

    if not isinstance(model, ModelProto | str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GossamerError(
            f"quantize_qat_export: expected an ONNX model or the path of one, found {type(model).__name__}"
        )
    result = _quantize(model if isinstance(model, ModelProto) else read_model(model), _source(model))
    if output_file_path is not None:
        write_model(result, output_file_path)
    if not inplace or not isinstance(model, ModelProto):
        return result
    model.CopyFrom(result)
    return model


def integer_weights(model: ModelProto | str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The integer weights of an ONNX model, or of a .safetensors file of `save`; 0 where the weight is zero."""
    if isinstance(model, str | os.PathLike) and os.fspath(model).endswith(".safetensors"):
        from gossamer.export.weights import read_integers

        return {name: integers.int().numpy() for name, (integers, _) in read_integers(model).items()}
    require("integer_weights", "onnx", "onnx_ir")
    from onnx import ModelProto

    from gossamer.export.onnx.graph import operators
    from gossamer.export.onnx.integers import integer_table, integer_weight

    graph = _parse(model if isinstance(model, ModelProto) else read_model(model), _source(model))
    weights = [integer_weight(node.outputs[0]) for node in operators(graph, "DequantizeLinear")]
    weights += [integer_table(node) for node in operators(graph, "Gather")]
    return {weight.name: weight.steps for weight in weights if weight is not None and weight.is_stored}


def integer_operators(path: str | os.PathLike[str]) -> dict[str, int]:
    """Counts of the operators that multiply weights, in the graph that onnxruntime runs on a CPU.

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
            raise GossamerError(f"{os.fspath(path)}: onnxruntime cannot run it: {first_line(error)}") from error
        graph = read_model(Path(folder) / "optimized.onnx").graph
    counts = Counter(node.op_type for node in graph.node)
    return {name: counts[name] for name in (*INTEGER, *FLOAT) if counts[name]}


def _quantize(given: ModelProto, source: str) -> ModelProto:
    import onnx_ir as ir
    from onnx_ir.passes.common import DeduplicateInitializersPass, RemoveUnusedNodesPass

    from gossamer.export.onnx.integers import fold_channels, quantize_biases, quantize_tables, quantize_weights

    if not given.graph.node or not given.opset_import:
        raise GossamerError(f"{source}: the graph is empty")
    if files := external_files(given):
        raise GossamerError(f"{source}: its weights are in '{files[0]}'; pass the model's path instead")
    model = _parse(_upgrade(given, source), source)
    _inline(model)
    if not any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph.all_nodes()):
        raise GossamerError(
            f"{source}: it has no QuantizeLinear, so there is nothing to quantize; export a model that was trained "
            "with emulated quantization"
        )
    quantize_weights(model, source)
    quantize_tables(model)
    fold_channels(model)
    quantize_biases(model)
    RemoveUnusedNodesPass()(model)
    DeduplicateInitializersPass(size_limit=2**40)(model)
    return ir.to_proto(model)


def _source(model: ModelProto | str | os.PathLike[str]) -> str:
    return os.fspath(model) if isinstance(model, str | os.PathLike) else "the model"


def _parse(model: ModelProto, source: str) -> ir.Model:
    import onnx_ir as ir

    try:
        return ir.from_proto(model)
    except ir.serde.SerdeError as error:
        reason = first_line(error.__cause__ or error)
        raise GossamerError(f"{source}: not a valid ONNX model ({reason}); export it again") from None


def _upgrade(model: ModelProto, source: str) -> ModelProto:
    """The model in opset `MIN_OPSET` or later."""
    from onnx import version_converter

    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), MIN_OPSET)
    if opset >= MIN_OPSET:
        return model
    try:
        return version_converter.convert_version(model, MIN_OPSET)
    except (RuntimeError, ValueError) as error:
        raise GossamerError(
            f"{source}: opset {opset} cannot be converted to {MIN_OPSET} ({first_line(error)}); "
            f"export the model with opset {MIN_OPSET} or later"
        ) from None


def _inline(model: ir.Model) -> None:
    """Inline functions, and remove constants from the inputs, where a caller could change them."""
    from onnx_ir.passes.common import InlinePass, RemoveInitializersFromInputsPass

    if model.functions:
        InlinePass()(model)
    RemoveInitializersFromInputsPass()(model)
    model.ir_version = max(model.ir_version, 4)
