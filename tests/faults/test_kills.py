"""A run that is killed, wherever it is, and started again ends with the bits of one that was not."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.runner.checkpoint import describe
from tests.faults.harness import (
    KILLED,
    METHODS,
    Reference,
    Server,
    assert_same_run,
    finish,
    random_fault,
    started,
    write_config,
)

KILLS = 50

logger = logging.getLogger(__name__)
WHERE = {
    "gmp": {"event": "os.link iter_00000018.safetensors"},  # the best checkpoint
    "2:4 with permutation": {"event": "open +iter_00000012.safetensors", "bytes": 40_000},
    "levels": {"steps": 7, "microseconds": 3000},
    "probmask": {"event": "os.rename +iter_00000006.safetensors"},
    "qat with distillation": {"steps": 17},
}


@pytest.mark.parametrize("method", WHERE)
def test_a_killed_run_ends_with_the_same_bits(
    method: str, server: Server, uninterrupted: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = uninterrupted(METHODS[method])
    assert len(finish([server], tmp_path, METHODS[method], [WHERE[method]], random.Random(method))) == 1
    assert_same_run(tmp_path / "run", expected.folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_fifty_kills_change_no_bit(
    method: str, server: Server, uninterrupted: Callable[[str], Reference], tmp_path: Path
) -> None:
    expected = uninterrupted(METHODS[method])
    draw, signals, runs = random.Random(method), Counter(), 0
    with started(seed=1) as another:  # which orders sets otherwise
        while signals.total() < KILLS:
            faults = (random_fault(draw, len(expected.events)) for _ in range(KILLS - signals.total()))
            folder = tmp_path / str(runs)
            signals.update(finish([server, another], folder, METHODS[method], faults, draw))
            assert_same_run(folder / "run", expected.folder)
            runs += 1
    assert len(signals) == 3, "before file operations, in writes and in the computation"
    logger.info("%s: %s in %d runs", method, dict(signals), runs)


def test_the_best_checkpoint_is_made_by_the_next_start(server: Server, tmp_path: Path) -> None:
    """A test below the best follows, so that the run itself would not make it again."""
    path = write_config(tmp_path, "dense")
    scripted = ["--set", "runtime.runner.type=tests.runner.nets:Scripted"]  # 30, 90 and 50 percent
    assert server.run(tmp_path, "train", path, *scripted, event="os.link iter_00000012.safetensors").code in KILLED
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    assert describe(best).iteration == 6
    assert server.run(tmp_path, "resume", tmp_path / "run").code == 0
    assert describe(best).iteration == 12
    checkpoints = sorted(path.name for path in best.parent.iterdir())
    assert checkpoints == ["best.safetensors", *(f"iter_000000{number}.safetensors" for number in (12, 15, 18))]
