"""What a run starts from and goes on with: which file counts, and what is said of one that does not fit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner.checkpoint import CheckpointError, Checkpoints
from gossamer.runner.config import read_config
from gossamer.runner.records import read_records
from tests.runner.nets import small
from tests.runner.running_on_digits import (
    LENGTH,
    config,
    copied_run,
    evaluated,
    final_state,
    interrupted,
    resumed,
    same,
    trained,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that others start from, which nobody changes: `dense`, all of it, and `stopped` at 8."""
    folder = tmp_path_factory.mktemp("runs")
    trained(config(folder), f"saver.save_dir={folder / 'dense'}")
    interrupted(config(folder), 8, f"saver.save_dir={folder / 'stopped'}")
    return folder


def file_of(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / f"iter_{iteration:08d}.safetensors"


def names(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "checkpoints", 3).all()]


def starts_at(path: Path, *sets: str) -> int:
    """The iteration that a run goes on from, as its log has it."""
    trained(path, *sets)
    reported = re.findall(r"resuming from iteration (\d+) of", (path.parent / "run" / "log.txt").read_text())
    return int(reported[-1]) if reported else 0


# Which file counts


def test_what_is_on_the_command_line_counts_more_than_auto_resume(tmp_path: Path) -> None:
    path = config(tmp_path, saver={"save_dir": str(tmp_path / "run"), "auto_resume": True})
    interrupted(path, 14)
    assert starts_at(path, f"saver.resume_model={file_of(tmp_path / 'run', 12)}") == 12


def test_auto_resume_counts_more_than_resume_model_and_that_more_than_pretrain_model(
    tmp_path: Path, runs: Path
) -> None:
    saver: dict[str, Any] = {
        "save_dir": str(tmp_path / "run"),
        "pretrain_model": str(runs / "dense"),
        "resume_model": str(file_of(runs / "dense", 12)),
    }
    path = config(tmp_path, saver=saver)
    assert starts_at(path) == 12
    shutil.rmtree(tmp_path / "run")
    path = config(tmp_path, saver={**saver, "auto_resume": True, "resume_model": None})
    interrupted(path, 4)
    path = config(tmp_path, saver={**saver, "auto_resume": True})
    assert starts_at(path) == 4


def test_an_evaluation_takes_what_is_named_else_the_best_else_the_latest(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "dense", tmp_path / "run")
    path = config(tmp_path)
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    best.unlink()
    assert evaluated(path).iteration == LENGTH
    shutil.copy(file_of(tmp_path / "run", 6), best)
    assert evaluated(path).iteration == 6
    assert evaluated(tmp_path / "run").iteration == 6
    assert evaluated(path, weights=file_of(tmp_path / "run", 12)).iteration == 12
    assert evaluated(path, f"saver.resume_model={file_of(tmp_path / 'run', 12)}").iteration == 12
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"best\.safetensors: .*damaged.*remove it to use the last"):
        evaluated(path)


def test_a_run_that_has_not_saved_yet_is_not_resumed_but_begun_again(tmp_path: Path) -> None:
    path = config(tmp_path)
    interrupted(path, 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(GossamerError, match="has no checkpoint to resume from; start the run again with"):
        resumed(tmp_path / "run")
    assert trained(path).complete
    assert [line["iteration"] for line in read_records(tmp_path / "run") if line["kind"] == "test"] == [6, 12, 18]


def test_a_complete_run_stays_as_it_is_and_gives_its_model_again(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "dense", tmp_path / "run")
    before = final_state(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    result = resumed(tmp_path / "run")
    assert result.complete
    assert result.files == [tmp_path / "run" / "model.safetensors"]
    assert set(result.metrics) == {"top1", "top5"}
    same(final_state(tmp_path / "run"), before)


def test_a_moved_run_continues_where_it_is_now(tmp_path: Path, runs: Path) -> None:
    interrupted(config(tmp_path, "gmp"), 8)
    (tmp_path / "gmp.yaml").unlink()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    result = resumed(tmp_path / "elsewhere")
    assert result.complete
    assert result.sparsity == pytest.approx(0.8, abs=2e-3)
    assert not (tmp_path / "run").exists()


def test_metrics_stand_once_after_several_resumes(tmp_path: Path) -> None:
    interrupted(config(tmp_path), 3)
    for stop in (6, 7, 13):
        hook = f"hooks=[{{type: 'tests.runner.nets:Interrupt', kwargs: {{at: {stop}}}}}]"
        assert trained(tmp_path / "config.yaml", "saver.auto_resume=true", hook).iteration == stop
    resumed(tmp_path / "run")
    lines = read_records(tmp_path / "run")
    assert [line["iteration"] for line in lines if line["kind"] == "train"] == list(range(2, 19, 2))
    assert [line["iteration"] for line in lines if line["kind"] == "test"] == [6, 12, 18]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


# Damage


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_the_checkpoint_before_a_damaged_one_is_used_and_told(keep: float, tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "stopped", tmp_path / "run")
    latest = file_of(tmp_path / "run", 8)
    latest.write_bytes(latest.read_bytes()[: int(keep * latest.stat().st_size)])
    assert resumed(tmp_path / "run").complete
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "iter_00000008.safetensors: the checkpoint is damaged" in log
    assert "iter_00000006.safetensors: used instead, from iteration 6" in log
    same(final_state(tmp_path / "run"), final_state(runs / "dense"))


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "stopped", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(GossamerError, match="none of 3 checkpoints can be read; remove them to start again"):
        resumed(tmp_path / "run")


# Other settings than before


def test_a_run_that_is_made_longer_does_not_raise_its_learning_rate_again(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "dense", tmp_path / "run")
    assert resumed(tmp_path / "run", "trainer.max_epoch=6").iteration == 2 * LENGTH
    rates = [line["lr"] for line in read_records(tmp_path / "run") if line["kind"] == "train"]
    assert rates[-1] < 0.01, "the cosine of three epochs goes up behind them"


def test_a_learning_rate_that_a_resumed_run_does_not_take_is_reported(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "stopped", tmp_path / "run")
    resumed(tmp_path / "run", "trainer.optimizer.kwargs.lr=0.001", "trainer.max_epoch=2", "trainer.log_freq=1")
    rate = next(line["lr"] for line in read_records(tmp_path / "run") if line["iteration"] == 9)
    assert rate <= 0.001 or "trainer.optimizer.kwargs is" in (tmp_path / "run" / "log.txt").read_text()


def test_another_batch_size_is_reported_for_the_data_come_in_another_order(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "stopped", tmp_path / "run")
    assert "WARNING" not in (tmp_path / "run" / "log.txt").read_text()
    resumed(tmp_path / "run", "dataset.train.batch_size=64")
    assert "WARNING" in (tmp_path / "run" / "log.txt").read_text()


def test_extra_state_of_a_module_holds_values_of_numpy_and_python(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    for name in ("whole", "parts"):
        folder = tmp_path / name
        folder.mkdir()
        path = config(folder, net={"type": "tests.runner.nets:counting"})
        if name == "parts":
            interrupted(path, 8, "saver.export=[]")
            resumed(folder / "run")
        else:
            trained(path, "saver.export=[]")
        states.append(final_state(folder / "run")["model"]["0._extra_state"])
    whole, parts = states
    assert whole["counts"].sum() > 0
    assert whole["counts"].tolist() == parts["counts"].tolist()
    assert {**whole, "counts": None} == {**parts, "counts": None}


# What does not fit


def test_a_scheduler_or_an_average_that_comes_or_goes_is_reported(tmp_path: Path, runs: Path) -> None:
    copied_run(runs / "stopped", tmp_path / "run")
    resumed(tmp_path / "run", "trainer.lr_scheduler=null", "ema.enable=true")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the config has no lr_scheduler, and the saved run had one" in log
    assert "the config has ema, and the saved run had none" in log


@pytest.mark.parametrize("way", ["resume_model", "pretrain_model"])
def test_another_number_of_classes_is_reported_with_its_remedy(way: str, tmp_path: Path, runs: Path) -> None:
    given = f"saver.{way}={runs / 'stopped'}"
    with pytest.raises(GossamerError, match=r"'9.weight' has the shape \(10, 128\).*number of classes.*num_classes"):
        trained(config(tmp_path), "num_classes=12", given)
    with pytest.raises(GossamerError, match=r"10 outputs against 12.*number of classes; .*num_classes"):
        evaluated(config(tmp_path), "num_classes=12", given)


@pytest.mark.parametrize("way", ["resume_model", "pretrain_model"])
def test_a_first_layer_of_another_width_is_not_put_down_to_classes(way: str, tmp_path: Path, runs: Path) -> None:
    with pytest.raises(GossamerError, match=r"'0\.weight' has the shape") as caught:
        trained(config(tmp_path), "net.kwargs={width: 8}", f"saver.{way}={runs / 'stopped'}")
    assert "classes" not in str(caught.value)


def test_layers_that_are_named_are_not_taken_from_the_weights(tmp_path: Path, runs: Path) -> None:
    given = f"saver.pretrain_model={runs / 'dense'}"
    sets = (given, "num_classes=12", "trainer.max_iter=1", "saver.pretrain_except=['9.']")
    assert trained(config(tmp_path), *sets).complete
    with pytest.raises(GossamerError, match=r"saver.pretrain_except: no name in the model starts with '8.'"):
        trained(config(tmp_path), given, "saver.pretrain_except=['8.']", f"saver.save_dir={tmp_path / 'other'}")


def test_weights_of_another_model_are_reported(tmp_path: Path) -> None:
    torch.save({f"body.{name}": tensor for name, tensor in small().state_dict().items()}, tmp_path / "weights.pt")
    with pytest.raises(
        GossamerError, match=r"weights of another model: it has no '0.weight'; nearest: 'body.0.weight'"
    ):
        trained(config(tmp_path), f"saver.pretrain_model={tmp_path / 'weights.pt'}")


@pytest.mark.parametrize("way", ["resume_model", "pretrain_model"])
@pytest.mark.parametrize("kind", ["missing", "no weights", "empty folder"])
def test_a_file_that_is_not_what_it_should_be_is_reported(way: str, kind: str, tmp_path: Path) -> None:
    named = tmp_path / "weights.pt"
    if kind == "no weights":
        named.write_text("none")
    elif kind == "empty folder":
        named.mkdir()
    with pytest.raises(GossamerError, match=r"weights.pt"):
        trained(config(tmp_path), f"saver.{way}={named}")
    with pytest.raises(GossamerError, match=r"weights.pt"):
        evaluated(config(tmp_path), f"saver.{way}={named}")


@pytest.mark.parametrize("sparsity", ["amba", "gmp"])
def test_a_dense_run_is_not_gone_on_with_as_if_it_had_been_sparse(sparsity: str, tmp_path: Path, runs: Path) -> None:
    with pytest.raises(GossamerError, match="pretrain_model"):
        trained(config(tmp_path, sparsity), f"saver.resume_model={runs / 'dense'}")


def test_going_on_with_another_run_does_not_remove_the_checkpoints_of_the_one_that_is_there(
    tmp_path: Path, runs: Path
) -> None:
    copied_run(runs / "dense", tmp_path / "run")
    before = names(tmp_path / "run")
    with pytest.raises(GossamerError, match="already has a run"):
        trained(config(tmp_path), f"saver.resume_model={runs / 'stopped'}", "trainer.max_epoch=2")
    assert names(tmp_path / "run") == before


def test_what_is_left_out_of_a_pretrained_model_is_there_when_a_model_is_tested(tmp_path: Path, runs: Path) -> None:
    path = config(tmp_path, saver={"save_dir": str(tmp_path / "run"), "pretrain_except": ["9."]})
    weights = runs / "dense" / "model.safetensors"
    assert evaluated(path, weights=weights).metrics == evaluated(runs / "dense", weights=weights).metrics


def test_a_resumed_run_still_says_what_it_began_with(tmp_path: Path, runs: Path) -> None:
    path = config(tmp_path, saver={"save_dir": str(tmp_path / "run"), "pretrain_model": str(runs / "dense")})
    interrupted(path, 2)
    resumed(tmp_path / "run")
    assert read_config(tmp_path / "run" / "config.yaml").config.saver.pretrain_model == runs / "dense"
