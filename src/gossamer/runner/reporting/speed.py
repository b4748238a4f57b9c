"""The results that `gossamer benchmark --output` wrote, as a report shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError
from gossamer.io import read_regular
from gossamer.report.content import Speed, SpeedTable, TimedFile
from gossamer.runner.reporting.notes import LONGEST


def read_speed(path: Path, folders: Sequence[Path]) -> Speed:
    """The tables and sentences of a benchmark; files in one of the run folders have the colour of that run."""
    try:
        content: Any = json.loads(read_regular(path, LONGEST))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not JSON"
        raise GossamerError(f"{path}: {reason}; gossamer benchmark --output writes such a file") from None
    runs = {folder.resolve(): index for index, folder in enumerate(folders)}
    try:
        if not content["timings"]:
            raise GossamerError(f"{path}: holds no timings; gossamer benchmark --output writes them")
        threads = int(content["threads"])
        groups = groupby(cast(list[Any], content["timings"]), key=lambda timing: str(timing["runtime"]))
        tables = tuple(_table(list(timings), threads, runs) for _, timings in groups)
        return Speed(tables, tuple(str(sentence) for sentence in content["sentences"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise GossamerError(f"{path}: is not a result of a benchmark; gossamer benchmark --output writes one") from None


def _table(timings: Sequence[Mapping[str, Any]], threads: int, runs: Mapping[Path, int]) -> SpeedTable:
    first = timings[0]
    rounds = f"{int(first['rounds'])} rounds"
    if first["batch"] is None:
        title = f"{first['runtime']}: reading the file, {rounds}"
    else:
        counted = "1 thread" if threads == 1 else f"{threads} threads"
        title = f"{first['runtime']} {first['version']}: batch {int(first['batch'])}, {counted}, {rounds}"
    return SpeedTable(title, tuple(_file(timing, runs) for timing in timings))


def _file(timing: Mapping[str, Any], runs: Mapping[Path, int]) -> TimedFile:
    speed = timing["speed"]
    low, high = (None, None) if speed is None else (speed["low"], speed["high"])
    return TimedFile(
        name=str(timing["name"]),
        bytes=int(timing["contents"]["bytes"]),
        sparsity=float(timing["sparsity"]),
        median=float(timing["median"]),
        low=float(timing["low"]),
        high=float(timing["high"]),
        speed=None
        if speed is None
        else (float(speed["value"]), None if low is None else float(low), None if high is None else float(high)),
        run=runs.get(Path(timing["file"]).resolve().parent),
    )
