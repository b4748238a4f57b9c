"""`gossamer quantize-qat-export`: convert an ONNX file with emulated quantization to integers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, reports_errors, say, show_json, show_warnings
from gossamer.errors import GossamerError


@reports_errors
def quantize_qat_export(
    model: Annotated[Path, typer.Argument(metavar="FILE", help="An ONNX model with emulated quantization.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write; by default FILE-quantized.onnx."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert the weights of a QAT export to integers, so that a runtime computes with integers.

    Weights with QuantizeLinear become 8-bit integers, batch norm is folded into their scales, and biases become 32-bit
    integers. Works with any ONNX file that uses QuantizeLinear and DequantizeLinear.
    """
    from gossamer import export
    from gossamer.export.onnx.model_files import size_of
    from gossamer.export.onnx.qat import INTEGER

    target = output or model.with_name(f"{model.stem}-quantized{model.suffix or '.onnx'}")
    before = size_of(model)  # the file may be overwritten
    result = export.quantize_qat_export(model, target)
    weights = export.integer_weights(result)
    count, zeros = sum(array.size for array in weights.values()), sum(int((a == 0).sum()) for a in weights.values())
    warnings = [] if weights else [f"{model}: no weight uses QuantizeLinear, so none is converted"]
    operators: dict[str, int] | None = None
    try:
        operators = export.integer_operators(target)
    except GossamerError as error:
        warnings.append(str(error))
    after = size_of(target)
    if as_json:
        layers = [{"name": name, "weights": a.size, "zeros": int((a == 0).sum())} for name, a in weights.items()]
        sizes = {"bytes_before": before, "bytes_after": after}
        results = {"operators": operators, "layers": layers, "warnings": warnings}
        show_json({"input": str(model), "output": str(target), **sizes, **results})
        return
    show_warnings(warnings)
    say(f"{target}: {after / 1e3:,.1f} kB; {model.name}: {before / 1e3:,.1f} kB")
    if weights:
        layers = "1 layer" if len(weights) == 1 else f"{len(weights)} layers"
        say(f"integers: {count:,} weights in {layers}, {zeros / count:.1%} zero")
    if operators:
        integer = sum(number for name, number in operators.items() if name in INTEGER)
        names = ", ".join(f"{number} {name}" for name, number in operators.items())
        say(f"onnxruntime computes {integer} of {sum(operators.values())} products in integers: {names}")
