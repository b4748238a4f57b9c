"""The command: choose benchmarks, run them, print each result as it is ready. See `--help`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.allocation import allocation
from benchmarks.allocation_accuracy import allocation_accuracy
from benchmarks.compiling import compiling
from benchmarks.create_accuracy import create_accuracy
from benchmarks.decoding import decoding_speed
from benchmarks.detection_accuracy import detection_accuracy
from benchmarks.distributed import distributed_update
from benchmarks.file_size import file_size
from benchmarks.import_time import import_time
from benchmarks.integers import integer_speed
from benchmarks.mask_size import mask_size
from benchmarks.mask_update import mask_update, mask_update_of_patterns
from benchmarks.measuring import Benchmark, Row, Watch
from benchmarks.methods_accuracy import methods_accuracy, methods_accuracy_on_digits
from benchmarks.nm_masks import nm_masks
from benchmarks.obs_accuracy import obs_accuracy, obs_accuracy_on_cifar, obs_accuracy_on_digits
from benchmarks.oneshot_accuracy import oneshot_accuracy_on_cifar, oneshot_accuracy_on_digits
from benchmarks.oneshot_language import oneshot_language
from benchmarks.oneshot_memory import oneshot_memory
from benchmarks.permutation_search import permutation_of_resnet50, permutation_search, permutation_search_large
from benchmarks.quantized_speed import quantized_speed
from benchmarks.runner_speed import runner_speed
from benchmarks.runtime import runtime_speed, runtime_speed_of_all
from benchmarks.thinning import thinning
from benchmarks.thinning_peer import thinning_peer
from benchmarks.trained_masks import trained_masks
from benchmarks.training_step import small_training_step, training_step
from benchmarks.two_of_four_accuracy import two_of_four_accuracy

SHORT: dict[str, Benchmark] = {
    "training-step": training_step,
    "small-step": small_training_step,
    "mask-update": mask_update,
    "mask-size": mask_size,
    "file-size": file_size,
    "nm-masks": nm_masks,
    "permutation": permutation_search,
    "permutation-resnet50": permutation_of_resnet50,
    "import": import_time,
    "quantized-speed": quantized_speed,
    "runner-speed": runner_speed,
    "thinning": thinning,
    "runtime": runtime_speed,
    "runtime-int8": integer_speed,
    "runtime-compile": compiling,
    "runtime-decoding": decoding_speed,
}
LONG: dict[str, Benchmark] = {
    "mask-update-patterns": mask_update_of_patterns,
    "distributed-update": distributed_update,
    "permutation-large": permutation_search_large,
    "runtime-all": runtime_speed_of_all,
    "methods-accuracy-digits": methods_accuracy_on_digits,
    "obs-accuracy-digits": obs_accuracy_on_digits,
    "oneshot-memory": oneshot_memory,
    "oneshot-accuracy-digits": oneshot_accuracy_on_digits,
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
ON_CIFAR = {"obs-accuracy-cifar": obs_accuracy_on_cifar, "oneshot-accuracy-cifar": oneshot_accuracy_on_cifar}
"""Long ones that need CIFAR-10."""
ON_LANGUAGE = {"oneshot-language": oneshot_language}
"""A long one that needs the folder of a language model with two texts."""
ON_WEIGHTS = {"runtime-trained": trained_masks}
"""A long one that needs weights of trained networks."""
COLOURS = {"met": "green", "accepted": "yellow", "missed": "red"}

console = Console(highlight=False)


def main() -> None:
    known = [*SHORT, *LONG, *ON_DATA, *ON_CIFAR, *ON_PHOTOGRAPHS, *ON_WEIGHTS, *ON_LANGUAGE]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what Gossamer costs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(known)}")
    parser.add_argument("--all", action="store_true", help="the long ones too")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with Fashion-MNIST's IDX files")
    parser.add_argument("--cifar", type=Path, metavar="DIR", help="the folder with CIFAR-10's binary files")
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="a folder with train.json, val.json, images/")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a folder with model.json or model.safetensors")
    parser.add_argument("--language", type=Path, metavar="DIR", help="a folder with model/, calibration.txt, test.txt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    for name in options.names:
        if name not in known:
            parser.error(f"no benchmark is called '{name}'; there are {', '.join(known)}")
    chosen = options.names or list(known if options.all else SHORT)

    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
    benchmarks = SHORT | LONG | {name: partial(_on_data, on_data, options.data) for name, on_data in ON_DATA.items()}
    benchmarks |= {name: partial(_on_data, on_cifar, options.cifar) for name, on_cifar in ON_CIFAR.items()}
    benchmarks |= {name: partial(_on_data, trained, options.weights) for name, trained in ON_WEIGHTS.items()}
    benchmarks |= {name: partial(_on_data, language, options.language) for name, language in ON_LANGUAGE.items()}
    for name, benchmark in ON_PHOTOGRAPHS.items():
        if name in chosen and options.photographs is None:
            console.print(f"{name}: without photographs; --photographs DIR names them", style="yellow")
        benchmarks[name] = partial(_on_data, benchmark, options.photographs)
    rows: list[Row] = []
    for name in chosen:
        rows += run(name, benchmarks[name])
    if options.json:
        found = [{**asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows]
        options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=2) + "\n")


def _on_data(
    benchmark: Callable[[Watch, Path | None], Iterable[Row]], folder: Path | None, watch: Watch
) -> Iterator[Row]:
    """The rows, or none and a message when the data, or the tool to compare with, is not there."""
    try:
        yield from benchmark(watch, folder)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        console.print(str(error), style="yellow")


def run(name: str, benchmark: Benchmark) -> list[Row]:
    """Run one benchmark and print each row as it is ready; a bar shows the progress on a terminal."""
    console.print(f"\n[bold]{name}[/]")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    rows: list[Row] = []
    began = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def watch(what: str, rounds: int) -> Iterator[int]:
            task = progress.add_task(f"{name}: {what}", total=rounds)
            for number in range(rounds):
                yield number
                progress.advance(task)
            progress.remove_task(task)

        for row in benchmark(watch):
            if not rows:
                console.print(line("measured", "ours", "peer", "ratio", "aim", "", style="dim"))
            rows.append(row)
            console.print(shown(row))
    console.print(f"{time.perf_counter() - began:.0f} s", style="dim")
    return rows


def shown(row: Row) -> Table:
    colour = COLOURS.get(row.verdict, "default")
    spread = "" if row.spread is None else f"\n{row.spread[0]:.3f}–{row.spread[1]:.3f}"
    name = f"{row.name}\n[dim]{row.note}[/]" if row.note else row.name
    ratio, verdict = f"[{colour}]{row.ratio:.3f}[/][dim]{spread}[/]", f"[{colour}]{row.verdict}[/]"
    aim = "" if row.aim is None else f"≤ {row.aim:.4g}"
    return line(name, amount(row.ours, row.unit), amount(row.peer, row.unit), ratio, aim, verdict)


WIDTHS = {"ours": 10, "peer": 10, "ratio": 11, "aim": 7, "verdict": 8}


def line(*cells: str, style: str = "") -> Table:
    """One line of the table; fixed widths, because lines are printed one by one."""
    result = Table.grid(padding=(0, 1))
    result.add_column(width=max(24, min(console.width, 120) - sum(WIDTHS.values()) - len(WIDTHS) - 1))
    for name, width in WIDTHS.items():
        result.add_column(justify="left" if name == "verdict" else "right", width=width, no_wrap=True)
    result.add_row(*cells, style=style)
    return result


def amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e6:.2f} M"
    scales = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    if unit in dict(scales) and value > 0:  # seconds in the largest unit that leaves a digit before the point
        seconds = value / dict(scales)[unit]
        unit, value = next(((name, seconds * per) for name, per in scales if seconds * per >= 1), ("µs", seconds * 1e6))
    return f"{value:,.4g} {unit}"


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
