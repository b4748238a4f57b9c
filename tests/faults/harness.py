"""Runs `gossamer` in processes that are killed, stopped or refused by the disk, and compares what they leave."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gossamer.runner.checkpoint import Checkpoints, read_checkpoint
from gossamer.runner.lock import LOCK
from gossamer.runner.records import LR_CHANGE, SPARSITY_CHANGE, read_records
from tests.runner.running_on_digits import LENGTH, config, same

ROOT = Path(__file__).parents[2]
KILLED = {-signal.SIGKILL, -signal.SIGPROF, -signal.SIGXFSZ}
METHODS = {
    "gmp": "gmp",
    "2:4 with permutation": "ampere",
    "levels": "amba",
    "str": "str",
    "probmask": "probmask",
    "qat with distillation": "qat",
}
SAVED = 3
"""Iterations between two checkpoints."""


@dataclass
class Ended:
    """What became of a process: its exit code, negative for a signal, and what it printed."""

    code: int
    output: str


class Server:
    """Starts `gossamer` in forks of a process that has imported everything. `seed` is that of Python's hashes."""

    def __init__(self, seed: int = 0) -> None:
        environment = {
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PYTHONHASHSEED": str(seed),
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "GOSSAMER_STATE_DIR": os.environ["GOSSAMER_STATE_DIR"],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, folder: Path, *arguments: str | Path, environment: dict[str, str] | None = None, **fault: Any
    ) -> int:
        """Start a command; `fault` is as `server.install` takes it, and counts file operations in `folder`/run."""
        request = {
            "do": "start",
            "arguments": [str(word) for word in arguments],
            "environment": environment or {},
            "folder": str(folder / "run"),
            "fault": fault,
        }
        return self._ask(request)["pid"]

    def wait(self, pid: int) -> Ended:
        answer = self._ask({"do": "wait", "pid": pid})
        return Ended(answer["exit"], answer["output"])

    def wait_until_stopped(self, pid: int) -> None:
        answer = self._ask({"do": "wait", "pid": pid})
        assert answer == {"stopped": signal.SIGSTOP}, answer

    def run(self, folder: Path, *arguments: str | Path, **fault: Any) -> Ended:
        return self.wait(self.start(folder, *arguments, **fault))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server ended"
        return json.loads(line)


@contextmanager
def started(seed: int = 0) -> Generator[Server]:
    server = Server(seed)
    try:
        yield server
    finally:
        server.close()


def write_config(folder: Path, sparsity: str, **changed: Any) -> Path:
    """A run of 18 iterations that goes on where it is, and saves often."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = {"max_iter": LENGTH, "max_epoch": None, "test_freq": 6, "save_freq": SAVED, "log_freq": SAVED}
    saver = {"save_dir": str(folder / "run"), "auto_resume": True}
    report = {"enable": True, "sensitivity": False}
    runtime = {
        "runner": {"type": "base" if sparsity == "dense" else "sparse"},
        "tensorboard": False,
        "report": report,
    }
    path = config(folder, sparsity, trainer=trainer, saver=saver, runtime=runtime, **changed)
    content = json.loads(path.read_text())
    content["trainer"] = {key: value for key, value in content["trainer"].items() if value is not None}
    path.write_text(json.dumps(content))
    return path


@dataclass
class Reference:
    """A run that nothing interrupted."""

    folder: Path
    events: list[str]
    """Its file operations, in order."""


def reference(server: Server, folder: Path, sparsity: str) -> Reference:
    """Train without a fault."""
    path = write_config(folder, sparsity)
    ended = server.run(folder, "train", path, count=str(folder / "count.json"))
    assert ended.code == 0, ended.output
    return Reference(folder / "run", json.loads((folder / "count.json").read_text()))


def random_fault(draw: random.Random, events: int) -> dict[str, Any]:
    """Somewhere in the computation, before a file operation, or in the middle of a write."""
    kind = draw.choice(["steps", "event", "bytes"])
    if kind == "steps":
        return {"steps": draw.randrange(LENGTH), "microseconds": draw.randrange(20_000)}
    fault = {"event": draw.randint(1, events)}
    return fault if kind == "event" else {**fault, "bytes": int(2 ** draw.uniform(0, 17))}


def finish(
    servers: Sequence[Server], folder: Path, sparsity: str, faults: Iterable[dict[str, Any]], draw: random.Random
) -> list[int]:
    """Start a run until it ends, each time with the next fault; the signals that killed it."""
    path = write_config(folder, sparsity)
    rest, signals = iter(faults), []
    while True:
        fault = next(rest, {})
        begun = Checkpoints(folder / "run" / "checkpoints", keep=1).latest() is not None
        words = ["resume", folder / "run"] if begun and draw.random() < 0.5 else ["train", path]
        ended = draw.choice(servers).run(folder, *words, **fault)
        if ended.code == 0:
            return signals
        assert ended.code in KILLED, (fault, ended.output)
        signals.append(-ended.code)


def assert_same_run(folder: Path, other: Path) -> None:
    """Assert that two run folders hold the same run, to the bit: checkpoints, model and metrics; and nothing besides.

    Changes of learning rate and sparsity are recorded from a threshold on, which a resumed run starts again.
    """
    assert leftovers(folder) == []
    assert not (folder / LOCK).exists()
    assert files(folder, "checkpoints") == files(other, "checkpoints")
    for name in files(folder, "checkpoints"):
        one, two = (read_checkpoint(each / "checkpoints" / name) for each in (folder, other))
        assert (one.iteration, one.epoch, one.metrics) == (two.iteration, two.epoch, two.metrics)
        same(*({key: value for key, value in each.state.items() if key != "config"} for each in (one, two)))
    same(load_file(folder / "model.safetensors"), load_file(other / "model.safetensors"))
    assert files(folder, "levels") == files(other, "levels")
    for name in files(folder, "levels"):
        same(*(torch.load(each / "levels" / name) for each in (folder, other)))
    assert (folder / "report.html").exists()
    assert files(folder, "analysis") == files(other, "analysis")
    for kind in ("train", "test"):
        assert measured(folder, kind) == measured(other, kind)
    for name, tolerance in (("lr", LR_CHANGE), ("sparsity", SPARSITY_CHANGE)):
        for at, (value, expected) in enumerate(zip(course(folder, name), course(other, name), strict=True)):
            assert value == expected or abs(value - expected) <= 2 * tolerance * max(value, expected), (name, at)


def files(folder: Path, part: str) -> list[str]:
    """The names of the files in a part of a run folder; hidden ones are looked for by `leftovers`."""
    return sorted(path.name for path in (folder / part).glob("[!.]*"))


def measured(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Records of one kind, without times."""
    times = ("seconds", "images_per_s")
    return [
        {name: value for name, value in record.items() if name not in times}
        for record in read_records(folder)
        if record["kind"] == kind
    ]


def course(folder: Path, name: str) -> list[float]:
    """A value that was set, for each iteration; changes below a threshold are not recorded."""
    values: list[float] = []
    records = {record["iteration"]: record for record in read_records(folder) if record["kind"] == "set"}
    for iteration in range(LENGTH):
        last = values[-1] if values else 0.0
        values.append(records.get(iteration, {}).get(name, last))
    return values


def leftovers(folder: Path) -> list[str]:
    """Temporary files that a killed process left."""
    return [path.name for path in folder.rglob(".*") if re.match(r"\.[0-9a-f]{32}\.", path.name)]
