"""`gossamer export` and `quantize-qat-export`: a model as files for other programs, each verified after writing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typer import Argument, Option

from gossamer.cli.console import (
    by_reason,
    err,
    out,
    reports_errors,
    say,
    shape,
    show_errors,
    show_json,
    show_warnings,
    simple_table,
)
from gossamer.cli.options import AsJson, Classes, Data, Imports, Input, ModelArgument, Sets, Weights, load_model
from gossamer.errors import GossamerError
from gossamer.runner.formatting import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gossamer.export import Conversion, Written
    from gossamer.models import LoadedModel

SEMI_STRUCTURED = "semi-structured"
"""A format that lists layers and writes nothing."""


@reports_errors
def export(
    model: ModelArgument,
    formats: Annotated[
        list[str] | None,
        Option(
            "--format",
            "-f",
            metavar="NAME",
            help="onnx, pt2, safetensors, bitmask, sparse24, thin, or semi-structured, which only lists; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FOLDER", help="The folder; by default that of the run."),
    ] = None,
    weights: Weights = None,
    input_shape: Input = None,
    classes: Classes = None,
    opset: Annotated[int, Option(help="Opset of ONNX files.")] = 18,
    half: Annotated[bool, Option("--half", help="Write weights as 16-bit floats.")] = False,
    static: Annotated[bool, Option("--static-batch", help="Export programs for a fixed batch size.")] = False,
    sets: Sets = None,
    data: Data = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Export a model with its zeros, and verify each file: read it back, compare outputs, count zeros.

    For a detector, onnx and pt2 contain the network without post-processing. thin removes filters that are all zero and
    writes the smaller model as onnx, pt2 and safetensors; without such filters it writes nothing and exits with code 1.
    bitmask and sparse24 are small files for gossamer.load().
    """
    from gossamer.export import semi_structured
    from gossamer.runner.model_files import Export

    names = formats or ["onnx"]
    plan = Export([name for name in names if name != SEMI_STRUCTURED], opset, not static)
    loaded = load_model(model, weights, data, input_shape, sets or [], classes, imports)
    if half:
        loaded = loaded.half()
    with err.status("writing and verifying") if err.is_terminal and not as_json else nullcontext():
        omitted: list[str] = []
        written = loaded.export(plan, output, omitted.append)
    layers = semi_structured(loaded.model, dry_run=True) if SEMI_STRUCTURED in names else None
    if as_json:
        result: dict[str, object] = {
            "model": model,
            "source": None if loaded.source is None else str(loaded.source),
            "checkpoint": loaded.checkpoint,
            "files": [{**asdict(one), "path": str(one.path)} for one in written],
            "left_out": omitted,
        }
        show_json(result if layers is None else {**result, "semi_structured": [asdict(layer) for layer in layers]})
    else:
        _show(loaded, written, layers)
        show_errors(omitted)
    if omitted:
        raise typer.Exit(1)


def _show(loaded: LoadedModel, written: Sequence[Written], layers: Sequence[Conversion] | None) -> None:
    if loaded.source is not None:
        say(f"weights from {loaded.origin}")
    if written:
        _show_files(written)
        say(f"in {written[0].path.parent.resolve()}")
    for path, notes in {one.path: one.notes for one in written}.items():
        for note in notes:
            say(f"{path.name}: {note}")
    if layers is not None:
        _show_layers(layers)
    if loaded.given is None and any(one.largest_difference is not None for one in written):
        assumed = f"assuming {shape(loaded.example.shape)}" if hasattr(loaded.example, "shape") else "using the default"
        show_warnings([f"input shape not given; {assumed}; override with --input"])
    show_warnings(loaded.warnings)


def _show_files(written: Sequence[Written]) -> None:
    table = simple_table("file", "size", "of dense", "zeros", "difference")
    for one in written:
        table.add_row(
            escape(one.path.name),
            format_size(one.bytes),
            f"{one.bytes / max(one.dense_bytes, 1):.2f}",
            f"{one.zeros / max(one.weights, 1):.1%}",
            "–" if one.largest_difference is None else f"{one.largest_difference:.1e}",
        )
    out.print(table)


def _show_layers(layers: Sequence[Conversion]) -> None:
    """The layers that torch runs as semi-structured tensors on CUDA, and the others by reason."""
    able = [layer.name for layer in layers if layer.reason is None]
    say(f"{len(able)} of {len(layers)} layers become semi-structured tensors on CUDA, in half precision")
    for reason, names in by_reason({layer.name: layer.reason or "able" for layer in layers}).items():
        say(f"  {reason}: {', '.join(names)}")
    if able:
        say("On a CUDA device: gossamer.export.semi_structured(model.half().cuda())")


@reports_errors
def quantize_qat_export(
    model: Annotated[Path, Argument(metavar="FILE", help="An ONNX model with emulated quantization.")],
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="The file to write; by default FILE-quantized.onnx."),
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
        say(f"integers: {count:,} weights, {zeros / count:.1%} zero")
    if operators:
        integer = sum(number for name, number in operators.items() if name in INTEGER)
        names = ", ".join(f"{number} {name}" for name, number in operators.items())
        say(f"onnxruntime computes {integer} of {sum(operators.values())} products in integers: {names}")
