"""`report.html` of run folders: made at the end of a run, and from its files whenever it is asked for.

A run never ends because of its report: what goes wrong there is a warning, and only an interrupt goes through. What
the page holds is read by `reporting_content.py`, and how it looks is decided in `gossamer.report`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, open_regular
from gossamer.runner.records import read_records
from gossamer.runner.reporting.content import run_content
from gossamer.runner.reporting.notes import note_plan, note_weights, origin_of, weights_of
from gossamer.runner.reporting.sensitivity import measure
from gossamer.runner.reporting.speed import read_speed
from gossamer.runner.trust import check_links

if TYPE_CHECKING:
    from gossamer.runner.trainer import Runner

__all__ = ["PAGE", "measure", "note_begin", "report", "report_of"]

logger = logging.getLogger("gossamer")
PAGE = "report.html"


def report(
    folders: Sequence[str | Path], output: str | Path | None = None, benchmark: str | Path | None = None
) -> Path:
    """Write one page for a run, by default into its folder, or for several side by side, by default here.

    `benchmark` is a file of results that `gossamer benchmark --output` wrote.
    """
    from gossamer.report import render

    if not folders:
        raise GossamerError("report: expected a run folder, found none; name one, as runs/res18")
    paths = [Path(folder) for folder in folders]
    path = Path(output) if output is not None else (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    _check_place(path)
    for folder in paths if output is None else ():
        check_links(folder)
    names = _names(paths)
    speed = None if benchmark is None else read_speed(Path(benchmark), paths)
    text = render([run_content(folder, name) for folder, name in zip(paths, names, strict=True)], speed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{path}: cannot be written: {error.strerror or error}; name another by -o") from None
    return path


def note_begin(runner: Runner) -> None:
    """Note what a report needs from before the training; the first process does."""
    if not runner.place.first or not runner.config.runtime.report.enable or runner.iteration >= runner.length:
        return

    def note() -> None:
        if runner.start_weights is not None:
            note_weights(runner.folder, "start", runner.start_weights, origin=origin_of(runner))
        note_plan(runner)

    _guarded(runner, note)


def report_of(runner: Runner, *, complete: bool) -> None:
    """The report of a run that ends now, complete or not; the first process writes it."""
    if not runner.place.first or not runner.config.runtime.report.enable:
        return
    if complete:
        _guarded(runner, lambda: _note_end(runner))
    _guarded(runner, lambda: _page(runner))


def _page(runner: Runner) -> None:
    """The page; a run that failed before its first record has nothing to show, and told its own error."""
    if read_records(runner.folder) or runner.checkpoints.latest() is not None:
        report([runner.folder])


def _note_end(runner: Runner) -> None:
    note_weights(runner.folder, "end", weights_of(runner.outcome), iteration=runner.iteration)
    wanted = runner.config.runtime.report.sensitivity
    if wanted is not False:
        with runner.display.testing(100) as advance:
            done = 0

            def progress(label: str, share: float) -> None:
                nonlocal done
                for _ in range(done, int(100 * share)):
                    advance()
                done = max(done, int(100 * share))

            measure(runner, progress, bounded=wanted == "auto")


def _guarded(runner: Runner, act: Callable[[], object]) -> None:
    """Whatever goes wrong is told, and the run goes on; an interrupt ends it, and leaves each file old or new."""
    remedy = f"make it again by gossamer report {shlex.quote(str(runner.folder))}"
    try:
        act()
    except KeyboardInterrupt:
        logger.warning("the report is not complete: it was interrupted; %s", remedy)
        raise
    except Exception as error:  # noqa: BLE001 - a page is worth no run
        words = " ".join(f"{error}".split()) or type(error).__name__
        logger.warning("the report is not complete: %s; %s", words, remedy)


def _check_place(path: Path) -> None:
    """Raise rather than write over a file that is no report."""
    from gossamer.report import GENERATOR

    try:
        head = _start(path) if path.is_file() else GENERATOR
    except OSError as error:
        raise GossamerError(f"{path}: cannot be read: {error.strerror or error}; name another by -o") from None
    if path.is_dir():
        raise GossamerError(f"{path}: is a folder; name a file by -o, as {path / PAGE}")
    if head and GENERATOR not in head:
        raise GossamerError(f"{path}: is no report, and would be written over; name another file by -o")


def _start(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(4000).decode(errors="replace")


def _names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders; longer ones, or numbers, where two are the same."""
    short = [folder.resolve().name for folder in folders]
    longer = [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in folders]
    names = [name if short.count(name) == 1 else longer[index] for index, name in enumerate(short)]
    return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names, 1)]
