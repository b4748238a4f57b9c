"""`gossamer report`: an HTML page about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, progress, reports_errors, say, show_json
from gossamer.cli.models import Imports
from gossamer.runner.formatting import format_size


@reports_errors
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; several are compared.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write; by default report.html in the run folder."
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="First measure the sensitivity of layers, which takes longer."),
    ] = False,
    benchmark: Annotated[
        Path | None,
        typer.Option("--benchmark", metavar="FILE", help="Include the results of gossamer benchmark --output."),
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML page about a run, or ./report.html that compares several."""
    from gossamer.runner.reporting import report as write

    if sensitivity:
        from gossamer.runner.runs import measure_sensitivity

        for folder in folders:
            with progress(f"sensitivity of {folder.name}:", as_json) as show:
                measure_sensitivity(folder, show, imports=imports or ())
    path = write(folders, output, benchmark)
    if as_json:
        show_json({"file": str(path), "bytes": path.stat().st_size, "runs": [str(folder) for folder in folders]})
        return
    say(f"{path}: {format_size(path.stat().st_size)}")
