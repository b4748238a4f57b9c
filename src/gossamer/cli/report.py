"""`gossamer report`: one page of what came out of runs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, err, out, reports_errors, show_json


@reports_errors
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; several are set side by side.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write; by default report.html in the run folder."
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="Measure the layers' sensitivity first: builds the model, takes longer."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """One page about runs, in one file: curves, layers, weights, masks. Several runs are compared, in ./report.html."""
    from gossamer.runner.reporting import report as write

    if sensitivity:
        from gossamer.runner.running import measure_sensitivity

        for folder in folders:
            with _progress(folder, as_json) as progress:
                measure_sensitivity(folder, progress)
    path = write(folders, output)
    if as_json:
        show_json({"file": str(path), "bytes": path.stat().st_size, "runs": [str(folder) for folder in folders]})
        return
    out.print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", highlight=False, soft_wrap=True)


@contextmanager
def _progress(folder: Path, quiet: bool) -> Generator[Callable[[str, float], None]]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("sensitivity"), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=err, transient=True, disable=quiet) as shown:
        task = shown.add_task(folder.name, total=1.0)
        yield lambda label, share: shown.update(task, completed=share, description=label)
