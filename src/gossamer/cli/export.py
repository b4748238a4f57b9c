"""`gossamer export`: a model in files that other programs take, each verified after it is written."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from gossamer.cli.console import AsJson, err, out, reports_errors, show_errors, show_json, show_warnings
from gossamer.cli.models import Classes, Data, Imports, Input, ModelArgument, Sets, Weights, load_model
from gossamer.runner.figures import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gossamer.export import Conversion, Written
    from gossamer.models import LoadedModel

LISTED = "semi-structured"


@reports_errors
def export(
    model: ModelArgument,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "-f",
            metavar="NAME",
            help="onnx, pt2, safetensors, bitmask, sparse24, thin, or semi-structured, which only lists; repeatable.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where to write; by default the run folder, or here."),
    ] = None,
    weights: Weights = None,
    shape: Input = None,
    classes: Classes = None,
    opset: Annotated[int, typer.Option(help="The opset of ONNX files.")] = 18,
    half: Annotated[bool, typer.Option("--half", help="Write the weights as 16-bit floats.")] = False,
    static: Annotated[bool, typer.Option("--static-batch", help="Programs take one batch size only.")] = False,
    sets: Sets = None,
    data: Data = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Write a model, zeros and all, and check each file: read back, outputs compared, zeros counted.

    Of a detector, onnx and pt2 hold its network, without post-processing. thin removes filters that are zero as a
    whole, and writes what is left as onnx, pt2 and safetensors; where there are none it writes nothing, and the exit
    code is 1. bitmask and sparse24 are small files for gossamer.load().
    """
    from gossamer.export import semi_structured
    from gossamer.runner.model_files import Export

    wanted = formats or ["onnx"]
    plan = Export([name for name in wanted if name != LISTED], opset, not static)
    opened = load_model(model, weights, data, shape, sets or [], classes, imports)
    if half:
        opened = opened.half()
    with err.status("writing, and reading back") if err.is_terminal and not as_json else nullcontext():
        left_out: list[str] = []
        written = opened.export(plan, output, left_out.append)
    layers = semi_structured(opened.model, dry_run=True) if LISTED in wanted else None
    if as_json:
        found: dict[str, object] = {
            "model": model,
            "source": None if opened.source is None else str(opened.source),
            "checkpoint": opened.checkpoint,
            "files": [{**asdict(one), "path": str(one.path)} for one in written],
            "left_out": left_out,
        }
        show_json(found if layers is None else {**found, "semi_structured": [asdict(layer) for layer in layers]})
    else:
        _show(opened, written, layers)
        show_errors(left_out)
    if left_out:
        raise typer.Exit(1)


def _show(opened: LoadedModel, written: Sequence[Written], layers: Sequence[Conversion] | None) -> None:
    if opened.source is not None:
        _say(f"weights from {opened.origin}")
    if written:
        out.print(_table(written))
        _say(f"in {written[0].path.parent.resolve()}")
    for path, notes in {one.path: one.notes for one in written}.items():
        for note in notes:
            _say(f"{path.name}: {note}")
    if layers is not None:
        _show_layers(layers)
    if opened.given is None and any(one.largest_difference is not None for one in written):
        shape = "×".join(map(str, opened.example.shape)) if hasattr(opened.example, "shape") else "of the usual size"
        show_warnings([f"nobody said what the input is like, so it was taken to be {shape}; --input says it"])
    show_warnings(opened.warnings)


def _table(written: Sequence[Written]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("file", overflow="fold")
    for column in ("size", "of dense", "zeros", "differs by"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in written:
        table.add_row(
            escape(one.path.name),
            size(one.bytes),
            f"{one.bytes / max(one.dense_bytes, 1):.2f}",
            f"{one.zeros / max(one.weights, 1):.1%}",
            "–" if one.largest_difference is None else f"{one.largest_difference:.1e}",
        )
    return table


def _show_layers(layers: Sequence[Conversion]) -> None:
    """Which layers torch runs as semi-structured on CUDA, and the others by reason."""
    able = [layer.name for layer in layers if layer.reason is None]
    _say(f"{len(able)} of {len(layers)} layers become semi-structured tensors on CUDA, in half precision")
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        reasons.setdefault(layer.reason or "able", []).append(layer.name)
    for reason, names in reasons.items():
        _say(f"  {reason}: {', '.join(names)}")
    if able:
        _say("On a CUDA device: gossamer.export.semi_structured(model.half().cuda())")


def _say(sentence: str) -> None:
    out.print(sentence, highlight=False, markup=False, soft_wrap=True)
