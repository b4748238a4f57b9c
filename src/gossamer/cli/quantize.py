"""`gossamer quantize-qat-export`: an ONNX file with emulated quantization becomes one in integers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, out, reports_errors, show_json, show_warnings
from gossamer.errors import GossamerError


@reports_errors
def quantize_qat_export(
    model: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX model with emulated quantization.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write; FILE-quantized.onnx when left out."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make integers of the weights of a QAT export, so that a runtime computes in integers.

    Weights behind QuantizeLinear become 8-bit integers, batch norm goes into their scales, and biases become 32-bit
    integers. Any ONNX file with QuantizeLinear and DequantizeLinear will do, from whichever tool.
    """
    from gossamer import export
    from gossamer.export.onnx.model_files import size_of
    from gossamer.export.onnx.qat import INTEGER

    target = output or model.with_name(f"{model.stem}-quantized{model.suffix or '.onnx'}")
    before = size_of(model)  # It may be written over.
    result = export.quantize_qat_export(model, target)
    weights = export.integer_weights(result)
    count, zeros = sum(array.size for array in weights.values()), sum(int((a == 0).sum()) for a in weights.values())
    warnings = [] if weights else [f"{model}: no weight is behind QuantizeLinear, so none became an integer"]
    operators: dict[str, int] | None = None
    try:
        operators = export.integer_operators(target)
    except GossamerError as error:
        warnings.append(str(error))
    after = size_of(target)
    if as_json:
        layers = [{"name": name, "weights": a.size, "zeros": int((a == 0).sum())} for name, a in weights.items()]
        sizes = {"bytes_before": before, "bytes_after": after}
        found = {"operators": operators, "layers": layers, "warnings": warnings}
        show_json({"input": str(model), "output": str(target), **sizes, **found})
        return
    show_warnings(warnings)
    _say(f"{target}: {after / 1e3:,.1f} kB, where {model.name} has {before / 1e3:,.1f} kB")
    if weights:
        layers = "1 layer" if len(weights) == 1 else f"{len(weights)} layers"
        _say(f"integers: {count:,} weights of {layers}, {zeros / count:.1%} of them zero")
    if operators:
        whole = sum(number for name, number in operators.items() if name in INTEGER)
        names = ", ".join(f"{number} {name}" for name, number in operators.items())
        _say(f"onnxruntime computes {whole} of {sum(operators.values())} products in integers: {names}")


def _say(sentence: str) -> None:
    out.print(sentence, highlight=False, markup=False, soft_wrap=True)
