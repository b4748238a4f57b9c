"""`gossamer benchmark`: time exported files in the installed runtimes, in a table for 80 columns."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from gossamer.cli.console import AsJson, out, progress, reports_errors, show_json
from gossamer.cli.models import Imports
from gossamer.errors import GossamerError
from gossamer.runner.formatting import format_size

if TYPE_CHECKING:
    from gossamer.benchmark import InMemory, Timing

_FILES = (".onnx", ".pt2", ".safetensors")
_STYLES = {"faster": "green", "slower": "red", "same": "default", "unclear": "dim"}


@reports_errors
def benchmark(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Exported files: .onnx, .pt2 or .safetensors; the first is the reference. "
            "A MODEL (a torchvision name, package.module:function or a run) is timed in torch.",
        ),
    ],
    batch: Annotated[int | None, typer.Option("--batch", help="Batch size, if the file leaves it open.")] = None,
    threads: Annotated[int, typer.Option("--threads", help="Number of threads.")] = 1,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Number of rounds; each file runs once per round.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Total time instead of rounds; 10 by default."),
    ] = None,
    runtime: Annotated[
        list[str] | None,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="onnxruntime, openvino, torch, or load (reading weights); repeatable; all by default.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="[NAME=]SHAPE", help="Sizes that a file leaves open, such as 1,3,224,224."),
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Load .pt2 files, which can run code.")] = False,
    imports: Imports = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the results as JSON, for gossamer report."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time exported files against each other, and report which differences are significant.

    Files run in a random order in each round. The table shows the median, the 5th and 95th percentile, and the speed
    relative to the first file with its 95 % interval. For files of weights, which contain no program, reading is timed.
    """
    from gossamer.benchmark import explain, labels, measure

    if output is not None and output.suffix != ".json":
        raise GossamerError(f"expected a .json file, found '{output}'", "--output")
    shapes = dict(_parse_shape(text) for text in shape or ())
    with progress("", as_json) as show:
        show("loading", 0.0)
        candidates = [_candidate(name, shapes, imports or ()) for name in files]
        timings = measure(
            candidates,
            batch=batch,
            threads=threads,
            rounds=rounds,
            seconds=seconds,
            runtimes=runtime,
            shapes=shapes,
            trust=trust,
            progress=show,
        )
    conclusions = explain(timings)
    names = labels(timings)
    results = {
        "threads": threads,
        "timings": [{"name": names[timing.file], **_as_data(timing)} for timing in timings],
        "sentences": conclusions,
    }
    if output is not None:
        _write(output, results)
    if as_json:
        show_json(results)
        return
    for _, group in groupby(timings, key=lambda timing: timing.runtime):
        _show(list(group), threads)
    for conclusion in conclusions:
        out.print(f"• {conclusion}", highlight=False, markup=False)


def _candidate(name: str, shapes: Mapping[str, Sequence[int]], imports: Sequence[str]) -> Path | InMemory:
    """An exported file, or a model to time in torch."""
    path = Path(name)
    if path.suffix.lower() in _FILES:
        return path
    if path.is_file() and path.suffix.lower() not in (".yaml", ".yml", ".pt", ".pth"):
        raise GossamerError(f"{name}: expected a file of gossamer export: {', '.join(_FILES)}")
    from gossamer.benchmark import InMemory
    from gossamer.models import load_model

    given = shapes.get("")
    with redirect_stdout(sys.stderr):  # keep output of the user's code out of ours
        loaded = load_model(name, input_shape=None if given is None else ",".join(map(str, given)), imports=imports)
    networks = loaded.networks()
    if len(networks) != 1:
        raise GossamerError(f"{name}: it has {len(networks)} networks; export it and time the files")
    network = next(iter(networks.values()))
    return InMemory(loaded.name, network.module.eval(), network.inputs)


def _parse_shape(text: str) -> tuple[str, list[int]]:
    name, _, sizes = text.rpartition("=")
    try:
        shape = [int(size) for size in sizes.replace("x", ",").split(",")]
    except ValueError:
        shape = [0]
    if min(shape) < 1:
        raise GossamerError(f"expected a shape such as 1,3,224,224, or NAME=1,3,224,224, found '{text}'", "--input")
    return name, shape


def _show(timings: Sequence[Timing], threads: int) -> None:
    """Print the results of one runtime."""
    from gossamer.benchmark import format_ratio, labels

    one, names = timings[0], labels(timings)
    unit, factor = _unit(min(timing.median for timing in timings))
    heads = ("size", "zeros", "median", "5–95 %", *(["per s"] if one.batch else []), "speed")
    digits = _digits(min(timing.low for timing in timings) * factor)
    rows = [
        [
            format_size(timing.contents.bytes),
            f"{timing.contents.sparsity:.1%}",
            f"{timing.median * factor:.{digits}f}",
            f"{timing.low * factor:.{digits}f}–{timing.high * factor:.{digits}f}",
            *([] if timing.throughput is None else [_rounded(timing.throughput)]),
            "1" if timing.speed is None else format_ratio(timing.speed),
        ]
        for timing in timings
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    width = out.width - sum(widths) - 2 * len(widths) - 2  # two spaces between columns, one on each side
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("file", overflow="fold")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for timing, (*cells, speed) in zip(timings, rows, strict=True):
        name = "\n".join(split_name(names[timing.file], width))
        table.add_row(escape(name), *cells, f"[{_STYLES[timing.verdict or 'same']}]{speed}[/]")
    what = "reading the file" if one.batch is None else f"batch {one.batch}, {_counted(threads, 'thread')}"
    version = "" if one.batch is None else f" {one.version}"
    out.print(
        f"{one.runtime}{version}: {what}, {_counted(one.rounds, 'round')}, times in {unit}",
        highlight=False,
        markup=False,
    )
    out.print(table)


def split_name(name: str, width: int) -> list[str]:
    """Split a file name after separators into lines of up to `width` characters.

    >>> split_name("filters/model-thin.onnx", 18)
    ['filters/', 'model-thin.onnx']
    """
    lines = [name]
    for parts in (r"[^/]*/|[^/]+", r"[^-/_.:]*[-/_.:]+|[^-/_.:]+"):
        if max(map(len, lines)) <= width:
            break
        lines = [""]
        for part in re.findall(parts, name):
            if lines[-1] and len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
    return lines


def _write(path: Path, content: Mapping[str, object]) -> None:
    from gossamer.io import atomic_write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, follow=True) as part:
            part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise GossamerError(
            f"{path}: cannot be written: {error.strerror or error}; choose another file with -o"
        ) from None


def _as_data(timing: Timing) -> dict[str, object]:
    data: dict[str, object] = {**asdict(timing), "throughput": timing.throughput, "sparsity": timing.contents.sparsity}
    for name, ratio in (("speed", timing.speed), ("itself", timing.itself)):
        if ratio is not None and not ratio.bounded:  # JSON has no infinity
            data[name] = {"value": ratio.value, "low": None, "high": None}
    return data


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def _digits(number: float) -> int:
    return 2 if number < 10 else 1 if number < 100 else 0


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
