"""After 20,000 steps a step takes the time of the first ones, and nothing has grown that a longer run would feel."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from gossamer import Manager
from tests.faults.meter import Meter, Metered
from tests.loops import loss_at, network, sgd
from tests.runner.running_on_digits import config, trained

STEPS = 20_000
STEPS_PER_EPOCH = 100
MOST_BYTES = 8_000_000
"""Growth of memory over three quarters of the steps; 1 kB a step would be 15 MB."""
RECIPE = f"""
modifiers:
  - !GMPruningModifier {{params: __ALL_PRUNABLE__, init_sparsity: 0.05, final_sparsity: 0.9, start_epoch: 0,
                        end_epoch: {STEPS // STEPS_PER_EPOCH}, update_frequency: 1}}
  - !DistillationModifier {{start_epoch: 0, end_epoch: {STEPS // STEPS_PER_EPOCH}, hardness: 0.5, temperature: 2.0}}
  - !QuantizationModifier {{start_epoch: 0}}
"""
logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory and open files are read from /proc"),
]


def check_flat(meter: Meter) -> None:
    logger.info(
        "%d steps, %.2f ms each; slowdown %.3f; memory %+.2f MB, objects %+d, tensors %+d, open files %+d",
        meter.steps,
        1000 * sum(meter.seconds) / (100 * len(meter.seconds)),
        meter.slowdown(),
        meter.growth(meter.bytes) / 1e6,
        meter.growth(meter.objects),
        meter.growth(meter.tensors),
        meter.growth(meter.files),
    )
    assert meter.steps == STEPS
    assert meter.slowdown() < 1.5
    assert meter.growth(meter.bytes) < MOST_BYTES
    assert meter.growth(meter.tensors) <= 2
    assert meter.growth(meter.objects) < 1000
    assert meter.growth(meter.files) == 0


def test_a_loop_with_a_recipe_stays_as_it_is() -> None:
    model = network()
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), steps_per_epoch=STEPS_PER_EPOCH)
    meter = Meter()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_at(model, step % STEPS_PER_EPOCH).backward()
        optimizer.step()
        if step % 1000 == 999:
            manager.state_dict()
        meter.step()
    assert all(value == pytest.approx(0.9, abs=2e-3) for value in manager.sparsity().values())
    manager.finalize()
    check_flat(meter)


def test_a_run_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("gossamer"), "propagate", False)  # pytest would keep every message
    path = config(
        tmp_path,
        "qat",
        net={"type": "tests.runner.nets:plain"},
        trainer={"max_iter": STEPS, "max_epoch": None, "test_freq": 1000, "save_freq": 500, "log_freq": 10},
        hooks=[{"type": "tests.faults.meter:Metered"}],
    )
    (tmp_path / "qat.yaml").write_text(RECIPE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = trained(path, f"dataset.train.limit={8 * STEPS_PER_EPOCH}", "dataset.train.batch_size=8")
    finally:
        torch.set_num_threads(threads)
    assert result.complete
    check_flat(Metered.last)
    sizes = {name: (tmp_path / "run" / name).stat().st_size for name in ("log.txt", "metrics.jsonl", "report.html")}
    logger.info("%s", sizes)
    assert sizes["log.txt"] < 400_000
    assert sizes["metrics.jsonl"] < 800_000
    assert sizes["report.html"] < 1_000_000
