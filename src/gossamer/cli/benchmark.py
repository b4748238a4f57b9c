"""`gossamer benchmark`: time exported files in the installed runtimes, in a table for 80 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from gossamer.cli.console import out, progress, reports_errors, say, show_json, simple_table, writing
from gossamer.cli.options import AsJson, Imports
from gossamer.errors import GossamerError
from gossamer.runner.formatting import format_size

if TYPE_CHECKING:
    from gossamer.benchmark import InMemory, Timing

_FILES = (".onnx", ".gossamer", ".pt2", ".safetensors")
_STYLES = {"faster": "green", "slower": "red", "same": "default", "unclear": "dim"}


@reports_errors
def benchmark(
    files: Annotated[
        list[str],
        Argument(
            metavar="FILE",
            help="Exported files: .onnx, .pt2 or .safetensors, or engines: .gossamer; the first is the reference. "
            "A MODEL (a torchvision name, package.module:function or a run) is timed in torch.",
        ),
    ],
    batch: Annotated[int | None, Option(help="Batch size, if the file leaves it open.")] = None,
    threads: Annotated[int, Option(help="Number of threads.")] = 1,
    rounds: Annotated[int | None, Option(help="Number of rounds; each file runs once per round.")] = None,
    seconds: Annotated[float | None, Option(help="Total time instead of rounds; 10 by default.")] = None,
    runtime: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="onnxruntime, openvino, gossamer, torch, or load (reading weights); repeatable; all by default.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        Option("--input", metavar="[NAME=]SHAPE", help="Sizes that a file leaves open, such as 1,3,224,224."),
    ] = None,
    trust: Annotated[bool, Option("--trust", help="Load .pt2 files, which can run code.")] = False,
    imports: Imports = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write the results as JSON, for gossamer report.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time exported files against each other, and report which differences are significant.

    Files run in a random order in each round. The table shows the median, the 5th and 95th percentile, and the speed
    relative to the first file with its 95 % interval. For files of weights, which contain no program, reading is timed.
    """
    from gossamer.benchmark import explain, labels, measure, name_of

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
        with writing(output) as part:
            part.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        show_json(results)
        return
    runtimes = {file: [one.runtime for one in timings if one.file == file] for file in map(name_of, candidates)}
    if len({tuple(group) for group in runtimes.values()}) > 1:
        for file, group in runtimes.items():
            say(f"{names[file]} runs in {' and '.join(group)}")
    groups = [list(group) for _, group in groupby(timings, key=lambda timing: timing.runtime)]
    tables = [_table(group, names) for group in groups]
    if any(out.measure(table, options=out.options.update(max_width=1000)).maximum > out.width for table in tables):
        numbers = {file: str(number) for number, file in enumerate(names, 1)}
        for file, number in numbers.items():
            say(f"{number}: {names[file]}")
        tables = [_table(group, numbers) for group in groups]
    for group, table in zip(groups, tables, strict=True):
        out.print(_heading(group, threads), highlight=False, markup=False)
        out.print(table)
    for conclusion in conclusions:
        out.print(f"• {conclusion}", highlight=False, markup=False)


def _candidate(name: str, shapes: Mapping[str, Sequence[int]], imports: Sequence[str]) -> Path | InMemory:
    """An exported file, or a model to time in torch."""
    path = Path(name)
    if path.suffix.lower() in _FILES:
        return path
    if path.is_file() and path.suffix.lower() not in (".yaml", ".yml", ".pt", ".pth"):
        raise GossamerError(f"{name}: expected a file of gossamer export or compile: {', '.join(_FILES)}")
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


def _unit(timings: Sequence[Timing]) -> tuple[str, float]:
    smallest = min(timing.low for timing in timings)
    return ("s", 1.0) if smallest >= 1 else ("ms", 1e3) if smallest >= 1e-3 else ("µs", 1e6)


def _table(timings: Sequence[Timing], names: Mapping[str, str]) -> Table:
    """The results of one runtime; file names are not broken."""
    from gossamer.benchmark import format_ratio

    one, (_, factor) = timings[0], _unit(timings)
    digits = 2 if min(timing.low for timing in timings) * factor < 10 else 1
    columns = "size", "zeros", "median", "5–95 %", *(["per s"] if one.batch else []), "speed"
    table = simple_table("file", *columns)
    table.columns[0].no_wrap = True
    for timing in timings:
        table.add_row(
            escape(names[timing.file]),
            format_size(timing.contents.bytes),
            f"{timing.contents.sparsity:.1%}",
            f"{timing.median * factor:.{digits}f}",
            f"{timing.low * factor:.{digits}f}–{timing.high * factor:.{digits}f}",
            *([] if timing.throughput is None else [f"{timing.throughput:,.1f}"]),
            "1" if timing.speed is None else format_ratio(timing.speed),
            style=_STYLES[timing.verdict or "same"],
        )
    return table


def _heading(timings: Sequence[Timing], threads: int) -> str:
    one = timings[0]
    what = "reading the file"
    if one.batch is not None:
        what = f"batch {one.batch}, {threads} thread{'s' * (threads > 1)}"
    version = "" if one.batch is None else f" {one.version}"
    return f"{one.runtime}{version}: {what}, {one.rounds} round{'s' * (one.rounds > 1)}, times in {_unit(timings)[0]}"


def _as_data(timing: Timing) -> dict[str, object]:
    data: dict[str, object] = {**asdict(timing), "throughput": timing.throughput, "sparsity": timing.contents.sparsity}
    for name, ratio in (("speed", timing.speed), ("itself", timing.itself)):
        if ratio is not None and not ratio.bounded:  # JSON has no infinity
            data[name] = {"value": ratio.value, "low": None, "high": None}
    return data
