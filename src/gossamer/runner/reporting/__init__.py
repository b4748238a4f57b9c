"""`report.html` of run folders, written at the end of a run and by `gossamer report`.

`notes.py` records what other files of a run do not contain, `content.py` reads a run folder, and `gossamer.report`
renders the page. A failed report never ends a run: it is a warning, and only an interrupt is raised.
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
from gossamer.runner.reporting.content import read_speed, run_content
from gossamer.runner.reporting.notes import note_plan, note_sensitivity, note_weights, origin_of, weights_of
from gossamer.runner.trust import check_links

if TYPE_CHECKING:
    from gossamer.runner.trainer import Runner

__all__ = ["PAGE", "note_sensitivity", "note_start", "report", "report_end"]

logger = logging.getLogger("gossamer")
PAGE = "report.html"


def report(
    folders: Sequence[str | Path], output: str | Path | None = None, benchmark: str | Path | None = None
) -> Path:
    """Write the page of one run, by default into its folder, or of several, by default into the working folder.

    `benchmark` is a file that `gossamer benchmark --output` wrote. Raises `GossamerError` if a folder holds no
    run, or if `output` exists and is not a report.
    """
    from gossamer.report import render

    if not folders:
        raise GossamerError("report: no run folder given; give one, such as runs/res18")
    paths = [Path(folder) for folder in folders]
    path = Path(output) if output is not None else (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    _check_output(path)
    for folder in paths if output is None else ():
        check_links(folder)
    names = _labels(paths)
    speed = None if benchmark is None else read_speed(Path(benchmark), paths)
    text = render([run_content(folder, name) for folder, name in zip(paths, names, strict=True)], speed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GossamerError(
            f"{path}: cannot be written: {error.strerror or error}; choose another file with -o"
        ) from None
    return path


def note_start(runner: Runner) -> None:
    """Record what the report needs from before the training, on rank 0."""
    if not runner.distributed.first or not runner.config.runtime.report.enable or runner.iteration >= runner.length:
        return

    def note() -> None:
        if runner.start_weights is not None:
            note_weights(runner.folder, "start", runner.start_weights, origin=origin_of(runner))
        note_plan(runner)

    _guarded(runner, note)


def report_end(runner: Runner, *, complete: bool) -> None:
    """Write the report of a run that ends, complete or not, on rank 0."""
    if not runner.distributed.first or not runner.config.runtime.report.enable:
        return
    if complete:
        _guarded(runner, lambda: _note_end(runner))
    _guarded(runner, lambda: _page(runner))


def _page(runner: Runner) -> None:
    """Write the page, unless the run failed before its first record."""
    if read_records(runner.folder) or runner.checkpoints.latest() is not None:
        report([runner.folder])


def _note_end(runner: Runner) -> None:
    note_weights(runner.folder, "end", weights_of(runner.outcome), iteration=runner.iteration)
    setting = runner.config.runtime.report.sensitivity
    if setting is not False:
        with runner.display.testing(100) as advance:
            done = 0

            def progress(label: str, share: float) -> None:
                nonlocal done
                for _ in range(done, int(100 * share)):
                    advance()
                done = max(done, int(100 * share))

            note_sensitivity(runner, progress, bounded=setting == "auto")


def _guarded(runner: Runner, act: Callable[[], object]) -> None:
    """Log a warning if `act` fails; an interrupt is raised again."""
    remedy = f"write it again with gossamer report {shlex.quote(str(runner.folder))}"
    try:
        act()
    except KeyboardInterrupt:
        logger.warning("The report is incomplete: it was interrupted; %s", remedy)
        raise
    except Exception as error:  # noqa: BLE001 - a report must not end a run
        reason = " ".join(f"{error}".split()) or type(error).__name__
        logger.warning("The report is incomplete: %s; %s", reason, remedy)


def _check_output(path: Path) -> None:
    """Refuse to overwrite a file that is not a report."""
    from gossamer.report import GENERATOR

    try:
        head = _start(path) if path.is_file() else GENERATOR
    except OSError as error:
        raise GossamerError(f"{path}: cannot be read: {error.strerror or error}; choose another file with -o") from None
    if path.is_dir():
        raise GossamerError(f"{path}: is a folder; give a file with -o, such as {path / PAGE}")
    if head and GENERATOR not in head:
        raise GossamerError(f"{path}: is not a report and is not overwritten; choose another file with -o")


def _start(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(4000).decode(errors="replace")


def _labels(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with parent folders or numbers if two are equal."""
    short = [folder.resolve().name for folder in folders]
    longer = [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in folders]
    names = [name if short.count(name) == 1 else longer[index] for index, name in enumerate(short)]
    return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names, 1)]
