"""The command: choose benchmarks, run them, show the table. See `--help`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.allocation import allocation
from benchmarks.allocation_accuracy import allocation_accuracy
from benchmarks.create_accuracy import create_accuracy
from benchmarks.detection_accuracy import detection_accuracy
from benchmarks.file_size import file_size
from benchmarks.import_time import import_time
from benchmarks.mask_size import mask_size
from benchmarks.mask_update import mask_update, mask_update_of_patterns
from benchmarks.measuring import Benchmark, Row, Watch
from benchmarks.methods_accuracy import methods_accuracy, methods_accuracy_on_digits
from benchmarks.nm_masks import nm_masks
from benchmarks.obs_accuracy import obs_accuracy, obs_accuracy_on_cifar, obs_accuracy_on_digits
from benchmarks.permutation_search import permutation_search, permutation_search_large
from benchmarks.quantized_speed import quantized_speed
from benchmarks.runner_speed import runner_speed
from benchmarks.thinning import thinning
from benchmarks.thinning_peer import thinning_peer
from benchmarks.training_step import training_step
from benchmarks.two_of_four_accuracy import two_of_four_accuracy

SHORT: dict[str, Benchmark] = {
    "training-step": training_step,
    "mask-update": mask_update,
    "mask-size": mask_size,
    "file-size": file_size,
    "nm-masks": nm_masks,
    "permutation": permutation_search,
    "import": import_time,
    "quantized-speed": quantized_speed,
    "runner-speed": runner_speed,
    "thinning": thinning,
}
LONG: dict[str, Benchmark] = {
    "mask-update-patterns": mask_update_of_patterns,
    "permutation-large": permutation_search_large,
    "methods-accuracy-digits": methods_accuracy_on_digits,
    "obs-accuracy-digits": obs_accuracy_on_digits,
}
ON_DATA: dict[str, Callable[[Watch, Path | None], Iterable[Row]]] = {
    "2of4-accuracy": two_of_four_accuracy,
    "allocation-accuracy": allocation_accuracy,
    "allocation": allocation,
    "methods-accuracy": methods_accuracy,
    "create-accuracy": create_accuracy,
    "thinning-peer": thinning_peer,
    "obs-accuracy": obs_accuracy,
}
"""Long ones that need Fashion-MNIST, or take it where it is given."""
ON_PHOTOGRAPHS = {"detection-accuracy": detection_accuracy}
"""A long one that also takes photographs with boxes."""
ON_CIFAR = {"obs-accuracy-cifar": obs_accuracy_on_cifar}
"""A long one that needs CIFAR-10."""
COLOURS = {"met": "green", "accepted": "yellow", "missed": "red"}

console = Console(highlight=False)


def main() -> None:
    known = [*SHORT, *LONG, *ON_DATA, *ON_CIFAR, *ON_PHOTOGRAPHS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what Gossamer costs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(known)}")
    parser.add_argument("--all", action="store_true", help="the long ones too")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with Fashion-MNIST's IDX files")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="the folder with CIFAR-10's binary files")
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="a folder with train.json, val.json, images/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    for name in options.names:
        if name not in known:
            parser.error(f"no benchmark is called '{name}'; there are {', '.join(known)}")
    chosen = options.names or list(known if options.all else SHORT)

    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    benchmarks = SHORT | LONG | {name: partial(_on_data, on_data, options.data) for name, on_data in ON_DATA.items()}
    benchmarks |= {name: partial(_on_data, on_cifar, options.cifar) for name, on_cifar in ON_CIFAR.items()}
    for name, benchmark in ON_PHOTOGRAPHS.items():
        if name in chosen and options.photographs is None:
            console.print(f"{name}: without photographs; --photographs DIR names them", style="yellow")
        benchmarks[name] = partial(_on_data, benchmark, options.photographs)
    rows = [row for name in chosen for row in run(name, benchmarks[name])]
    console.print(table(rows))
    if options.json:
        found = [{**asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows]
        options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=2) + "\n")


def _on_data(benchmark: Callable[[Watch, Path | None], Iterable[Row]], folder: Path | None, watch: Watch) -> list[Row]:
    """The rows, or none and a sentence when the data, or the tool to compare with, is not there."""
    try:
        return list(benchmark(watch, folder))
    except (FileNotFoundError, ModuleNotFoundError) as error:
        console.print(str(error), style="yellow")
        return []


def run(name: str, benchmark: Benchmark) -> list[Row]:
    """The rows of one benchmark; a bar shows how far it is, or plain lines where there is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def watch(what: str, rounds: int) -> Iterator[int]:
            if not console.is_terminal:
                console.print(f"{name}: {rounds} rounds of {what}")
            yield from progress.track(range(rounds), description=f"{name}: {what}")

        return list(benchmark(watch))


def table(rows: Sequence[Row]) -> Table:
    result = Table(box=box.SIMPLE_HEAD)
    for column in ("measured", "ours", "peer", "ratio", "aim", ""):
        result.add_column(
            column, justify="left" if column in ("measured", "") else "right", no_wrap=column != "measured"
        )
    for row in rows:
        colour = COLOURS.get(row.verdict, "default")
        aim = "" if row.aim is None else f"≤ {row.aim:g}"
        name = f"{row.name}\n[dim]{row.note}[/]" if row.note else row.name
        ratio, verdict = (f"[{colour}]{text}[/]" for text in (f"{row.ratio:.3f}", row.verdict))
        result.add_row(name, amount(row.ours, row.unit), amount(row.peer, row.unit), ratio, aim, verdict)
    return result


def amount(value: float, unit: str) -> str:
    return f"{value / 1e6:.2f} M" if unit == "bytes" else f"{value:,.4g} {unit}"


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count() or 0,
        "architecture": platform.machine(),
    }


if __name__ == "__main__":
    main()
