"""`gossamer compare`: runs side by side in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.console import AsJson, out, reports_errors, show_json


@reports_errors
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; the first is the reference.")],
    as_json: AsJson = False,
) -> None:
    """Compare accuracy, sparsity and non-zero weights of runs."""
    from gossamer.runner.summary import comparison, comparison_table

    if as_json:
        show_json(comparison(folders))
        return
    out.print(comparison_table(folders))
