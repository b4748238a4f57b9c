"""What the page draws of learning rate and sparsity is what was set, however seldom the run logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.runner.records import LR_CHANGE, Records, ScheduleLog, read_records
from gossamer.runner.reporting import run_content
from gossamer.runner.sparsity import Sparsifier
from tests.runner.running_on_digits import LENGTH, config, interrupted, resumed, trained

STEPS = 6
"""Iterations of an epoch."""
SELDOM = "trainer.log_freq=100"


def as_set(folder: Path, key: str) -> dict[int, float]:
    """By iteration: the recorded value."""
    return {line["iteration"]: line[key] for line in read_records(folder) if line["kind"] == "set" and key in line}


def test_levels_and_the_restarts_of_the_learning_rate_are_recorded_in_their_iteration(tmp_path: Path) -> None:
    trained(config(tmp_path, "amba"), SELDOM, "trainer.lr_scheduler={type: CosineAnnealingLR}")
    levels = as_set(tmp_path / "run", "sparsity")
    assert list(levels) == [0, 6, 12]
    assert list(levels.values()) == pytest.approx([0.3, 0.6, 0.8], abs=0.005)
    rates = as_set(tmp_path / "run", "lr")
    assert rates[0] == rates[6] == rates[12] > 2 * rates[5]
    content = run_content(tmp_path / "run", "run")
    assert content.rate is not None
    assert content.sparsity is not None
    assert content.plan is not None
    assert content.rate.stepped
    assert content.rate.y[:-1] == tuple(rates.values())
    for drawn in (content.sparsity, content.plan):
        assert {round(x * STEPS) for x, y in zip(drawn.x, drawn.y, strict=True) if y != drawn.y[0]} == {6, 12, LENGTH}


def test_a_recipes_masks_are_counted_when_they_change_and_not_in_between(tmp_path: Path) -> None:
    trained(config(tmp_path, "gmp"), SELDOM)
    counted = as_set(tmp_path / "run", "sparsity")
    # From epoch 0.5 to 2.5, every half epoch; before that there are no masks.
    assert list(counted) == [0, 3, 6, 9, 12, 15]
    assert list(counted.values()) == sorted(counted.values())
    assert list(counted.values())[-1] == pytest.approx(0.8, abs=0.005)
    content = run_content(tmp_path / "run", "run")
    assert content.sparsity is not None
    assert content.sparsity.x[-1] == 3.0


def test_a_resumed_run_records_what_one_that_was_not_interrupted_does(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    trained(config(tmp_path / "whole", "amba"), SELDOM)
    folder = interrupted(config(tmp_path / "parts", "amba"), 7, SELDOM).folder
    resumed(folder)
    for key in ("lr", "sparsity"):
        whole, parts = as_set(tmp_path / "whole" / "run", key), as_set(folder, key)
        assert {at: parts[at] for at in whole} == whole


def test_a_run_that_recorded_nothing_is_drawn_from_its_samples(tmp_path: Path) -> None:
    trained(config(tmp_path, "amba"), "trainer.log_freq=5")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"kind": "set"' not in line]
    path.write_text("\n".join(lines) + "\n")
    content = run_content(tmp_path / "run", "run")
    assert content.rate is not None
    assert not content.rate.stepped
    assert [round(x * STEPS) for x in content.rate.x] == [5, 10, 15, 18]


def test_a_long_smooth_schedule_takes_some_hundred_lines_and_every_step_of_it(tmp_path: Path) -> None:
    length = 6_000
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length // 2)
    rates: list[float] = []
    with Records(tmp_path, tensorboard=False) as records:
        log = ScheduleLog(records, 100)
        for iteration in range(length):
            rate = optimizer.param_groups[0]["lr"] if iteration < length // 2 else 1e-5
            rates.append(rate)
            log.step(iteration, rate, Sparsifier(), nn.Linear(1, 1))
            if iteration < length // 2:
                optimizer.step()
                cosine.step()
    found = as_set(tmp_path, "lr")
    assert len(found) < 2_000
    held = 0.0
    for iteration, rate in enumerate(rates):
        held = found.get(iteration, held)
        assert held == pytest.approx(rate, rel=1.02 * LR_CHANGE)
