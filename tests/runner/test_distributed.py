"""Several processes: the same masks everywhere, the accuracy of one, and clear words when the start is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file

from gossamer.errors import GossamerError
from gossamer.runner import trainer
from gossamer.runner.checkpoint import read_checkpoint
from gossamer.runner.distributed import init_distributed, launch
from gossamer.runner.records import read_records
from tests.runner.running_on_digits import config, final_state, same, trained

ROOT = Path(__file__).parents[2]
WORKER = """
import os, signal, sys, torch
from gossamer.model import unwrap
from gossamer.runner import Hook
from gossamer.runner.display import Display
from gossamer.runner.runs import run

class Ending(Hook):
    def iteration_done(self, runner):
        if runner.iteration == int(os.environ["STOP"]) and runner.distributed.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    def train_ends(self, runner):
        model = unwrap(runner.model)
        zeros = {name: parameter.detach() == 0 for name, parameter in model.named_parameters()}
        torch.save({"zeros": zeros, "model": model.state_dict()}, f"{sys.argv[2]}/rank{runner.distributed.rank}.pt")

rank = int(os.environ["RANK"])
sys.modules["worker"] = sys.modules["__main__"]
sets = [word.replace("RANK", str(rank)) for word in sys.argv[3:]]
result = run(sys.argv[1], [f"runtime.seed={7 + 100 * rank}", *sets, "hooks=[{type: 'worker:Ending'}]"],
             display=Display(shown=False))
assert result.first == (rank == 0)
"""


def in_two_processes(
    path: Path, folder: Path, *sets: str, stop: str | None = None
) -> list[dict[str, dict[str, torch.Tensor]]]:
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, folder / "worker.py", path, folder, *sets],
        cwd=ROOT,
        env={
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            "GOSSAMER_STATE_DIR": os.environ["GOSSAMER_STATE_DIR"],
            "STOP": stop or "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("sparsity", ["amba", "ampere", "gmp"])
def test_two_processes_with_different_seeds_end_with_the_same_masks(sparsity: str, tmp_path: Path) -> None:
    one, two = in_two_processes(config(tmp_path, sparsity), tmp_path, "dataset.train.batch_size=16")
    for name, zeros in one["zeros"].items():
        assert torch.equal(zeros, two["zeros"][name]), name
    pruned = [one["zeros"][name] for name in ("3.weight", "9.weight")]
    assert sum(int(zeros.sum()) for zeros in pruned) / sum(zeros.numel() for zeros in pruned) > 0.35
    for name in one["zeros"]:
        assert torch.equal(one["model"][name], two["model"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["amba", "ampere"])
def test_two_processes_reach_the_accuracy_of_one(sparsity: str, tmp_path: Path) -> None:
    sets = ("trainer.max_epoch=9", "dataset.train.limit=null", "dataset.test.limit=null", "trainer.test_freq=100")
    found: dict[int, list[float]] = {1: [], 2: []}
    for seed in (7, 8, 9):
        for count in (1, 2):
            folder = tmp_path / f"{count}-{seed}"
            folder.mkdir()
            own = (f"dataset.train.batch_size={32 // count}", f"runtime.seed={seed}", *sets)
            if count == 2:
                in_two_processes(config(folder, sparsity), folder, *own)
            else:
                trained(config(folder, sparsity), *own)
            found[count].append(read_records(folder / "run")[-1]["top1"])
    assert min(found[1]) > 88
    assert mean(found[2]) == pytest.approx(mean(found[1]), abs=2)


def test_a_run_of_two_processes_continues_to_the_bit(tmp_path: Path) -> None:
    sets = ("dataset.train.batch_size=16",)
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, stops in (("whole", [None]), ("parts", ["8", None])):
        (tmp_path / name).mkdir()
        path = config(tmp_path / name, "amba", saver={"save_dir": str(tmp_path / name / "run"), "auto_resume": True})
        for stop in stops:
            in_two_processes(path, tmp_path / name, *sets, stop=stop)
        states[name] = final_state(tmp_path / name / "run")
    same(states["parts"], states["whole"])


@pytest.mark.slow
def test_the_best_checkpoint_is_written_where_only_the_first_process_sees_its_folder(tmp_path: Path) -> None:
    sets = ("dataset.train.batch_size=16", f"saver.save_dir={tmp_path}/runRANK")
    in_two_processes(config(tmp_path), tmp_path, *sets, "runtime.runner.type=tests.runner.nets:Scripted")
    best = read_checkpoint(tmp_path / "run0" / "checkpoints" / "best.safetensors")
    assert best.iteration == 12
    found = load_file(tmp_path / "run0" / "model.safetensors")
    assert all(torch.equal(tensor, best.weights[name]) for name, tensor in found.items())


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("RANK", "-1")])
def test_a_wrong_environment_is_reported(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(GossamerError, match=f"{name} is '{value}'.*--nproc"), init_distributed("cpu"):
        pass


@pytest.mark.parametrize("device", ["cuda", "cpuu"])
def test_a_device_that_is_not_there_is_reported(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(GossamerError, match=r"runtime\.device: .*'" + device), init_distributed(device):
        pass


def test_no_processes_are_refused() -> None:
    with pytest.raises(GossamerError, match="--nproc: expected a number of processes from 1 on, found 0"):
        launch(0, [])


def test_the_command_starts_several_processes(tmp_path: Path) -> None:
    path = config(tmp_path, "amba")
    done = subprocess.run(
        [sys.executable, "-m", "gossamer", "train", path, "--nproc", "2", "--json", "--set", "trainer.max_epoch=1"],
        cwd=ROOT,
        env={
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            "GOSSAMER_STATE_DIR": os.environ["GOSSAMER_STATE_DIR"],
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["complete"]
    assert result["sparsity"] == pytest.approx(0.8, abs=2e-3)
    assert result["iteration"] == 200 // (32 * 2)


def test_processes_that_are_there_already_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GossamerError, match="--nproc: torchrun has already started several processes; remove --nproc"):
        launch(2, [])


def test_processes_that_see_different_folders_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trainer, "all_gather", lambda own: [own, (12, False)])
    with pytest.raises(GossamerError, match=r"start from different checkpoints \(nothing, iteration 12\)"):
        trained(config(tmp_path))
