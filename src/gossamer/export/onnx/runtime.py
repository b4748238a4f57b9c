"""What onnxruntime makes of a model: which of its products are computed in integers.

Nothing here changes a model.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from gossamer.errors import GossamerError
from gossamer.export.onnx.models import read_model, require

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
