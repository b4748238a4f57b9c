"""Several processes: the same masks everywhere, the accuracy of one, and clear words when the start is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner.processes import joined, launch
from tests.runner.running_on_digits import config, final_state, trained

ROOT = Path(__file__).parents[2]
WORKER = """
import os, sys, torch
from gossamer.graph import unwrap
from gossamer.runner import Hook
from gossamer.runner.display import Display
from gossamer.runner.running import run

class Ending(Hook):
    def train_ends(self, runner):
        model = unwrap(runner.model)
        zeros = {name: parameter.detach() == 0 for name, parameter in model.named_parameters()}
        torch.save({"zeros": zeros, "model": model.state_dict()}, f"{sys.argv[2]}/rank{runner.place.rank}.pt")

rank = int(os.environ["RANK"])
sys.modules["worker"] = sys.modules["__main__"]
result = run(sys.argv[1], [f"runtime.seed={7 + 100 * rank}", "hooks=[{type: 'worker:Ending'}]", *sys.argv[3:]],
             display=Display(shown=False))
assert result.first == (rank == 0)
"""


def in_two_processes(path: Path, folder: Path, *sets: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, folder / "worker.py", path, folder, *sets],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("sparsity", ["amba", "ampere", "gmp"])
def test_two_processes_with_different_seeds_end_with_the_same_masks(sparsity: str, tmp_path: Path) -> None:
    """And their accuracy is that of one process with the same images in each step."""
    (tmp_path / "one").mkdir()
    epochs = () if sparsity == "gmp" else ("trainer.max_epoch=8",)
    length = ("dataset.train.limit=null", "dataset.test.limit=null", "trainer.test_freq=100")
    path = config(tmp_path, sparsity)
    one, two = in_two_processes(path, tmp_path, "dataset.train.batch_size=16", *epochs, *length)
    for name in one["zeros"]:
        assert torch.equal(one["zeros"][name], two["zeros"][name])
    zeros = [zero for name, zero in one["zeros"].items() if name in ("3.weight", "9.weight")]
    share = sum(int(zero.sum()) for zero in zeros) / sum(zero.numel() for zero in zeros)
    assert share > 0.45
    alone = trained(config(tmp_path / "one", sparsity), "dataset.train.batch_size=32", *epochs, *length)
    together = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert together["kind"] == "test"
    assert alone.metrics["top1"] > 85
    assert together["top1"] == pytest.approx(alone.metrics["top1"], abs=4)


def test_a_run_of_two_processes_goes_on_to_the_bit(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    sets = ("dataset.train.batch_size=16",)
    in_two_processes(config(tmp_path / "whole", "amba"), tmp_path / "whole", *sets)
    parts = config(tmp_path / "parts", "amba")
    in_two_processes(parts, tmp_path / "parts", *sets, "hooks=[{type: 'tests.runner.nets:Interrupt', kwargs: {at: 8}}]")
    in_two_processes(parts, tmp_path / "parts", *sets, "saver.auto_resume=true")
    whole, again = final_state(tmp_path / "whole" / "run"), final_state(tmp_path / "parts" / "run")
    for name, weight in whole["model"].items():
        assert torch.equal(weight, again["model"][name]), name


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("RANK", "-1")])
def test_a_wrong_environment_is_told(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(GossamerError, match=f"{name} is '{value}'.*--nproc"), joined("cpu"):
        pass


@pytest.mark.parametrize("device", ["cuda", "cpuu"])
def test_a_device_that_is_not_there_is_told(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(GossamerError, match=r"runtime\.device: .*'" + device), joined(device):
        pass


def test_no_processes_are_refused() -> None:
    with pytest.raises(GossamerError, match="--nproc: expected a number of processes from 1 on, found 0"):
        launch(0, [])
