"""What a run leaves behind: checkpoints, the best of them, the model in files, a log that says how it ended."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gossamer.errors import GossamerError
from gossamer.runner.checkpoint import Checkpoints, read_checkpoint
from gossamer.runner.display import Display
from gossamer.runner.records import read_records
from gossamer.runner.runs import Result, export
from tests.runner.running_on_digits import config, evaluated, interrupted, resumed, trained


@contextmanager
def room_for(count: int) -> Generator[None]:
    """No file can become longer than `count` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "checkpoints", 3).all()]


def exported(folder: Path, *formats: str, **more: Path | str) -> Result:
    return export(folder, formats=formats, display=Display(shown=False), **more)  # pyright: ignore[reportArgumentType]


# Checkpoints


def test_a_full_disk_leaves_earlier_checkpoints_and_the_run_continues_later(tmp_path: Path) -> None:
    interrupted(config(tmp_path), 6)
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    with (
        room_for(30_000),
        pytest.raises(GossamerError, match=r"iter_00000012.*cannot be written.*earlier.*intact; free some space"),
    ):
        resumed(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()} == before
    assert resumed(tmp_path / "run").complete


def test_the_best_is_kept_though_only_every_third_epoch_is_saved(tmp_path: Path) -> None:
    path = config(tmp_path, trainer={"save_freq": 3})
    trained(path, "runtime.runner.type=tests.runner.nets:Scripted")  # which is best at iteration 12
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert best.iteration == 12
    assert best.metrics == {"top1": 90.0}


def test_the_best_stays_the_best_over_a_resume(tmp_path: Path) -> None:
    path = config(tmp_path, saver={"save_dir": str(tmp_path / "run"), "keep": 1})
    interrupted(path, 13, "runtime.runner.type=tests.runner.nets:Scripted")
    resumed(tmp_path / "run")
    assert names(tmp_path / "run") == ["iter_00000018.safetensors"]
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "best.safetensors").iteration == 12


def test_weights_that_are_no_numbers_do_not_push_out_good_checkpoints(tmp_path: Path) -> None:
    path = config(tmp_path, net={"type": "tests.runner.nets:Unlucky"}, saver={"save_dir": str(tmp_path / "run")})
    with pytest.raises(GossamerError, match=r"is (nan|not finite) at iteration"):
        trained(path, "trainer.max_iter=18", "trainer.save_freq=1", "trainer.test_freq=18", "trainer.log_freq=10")
    latest = Checkpoints(tmp_path / "run" / "checkpoints", 3).latest()
    assert latest is not None
    broken = [name for name, weight in read_checkpoint(latest).weights.items() if not weight.isfinite().all()]
    assert not broken, f"{latest.name} holds no numbers in {broken[0]}"


def test_frequencies_count_iterations_under_max_iter(tmp_path: Path) -> None:
    trained(config(tmp_path), "trainer.max_iter=8", "trainer.test_freq=3", "trainer.save_freq=5")
    assert {"iter_00000005.safetensors", "iter_00000008.safetensors"} <= set(names(tmp_path / "run"))
    assert not {"iter_00000002.safetensors", "iter_00000004.safetensors"} & set(names(tmp_path / "run"))
    assert [line["iteration"] for line in read_records(tmp_path / "run") if line["kind"] == "test"] == [3, 6, 8]


def test_a_warm_up_in_epochs_is_one_under_max_iter_too(tmp_path: Path) -> None:
    rates = {"type": "ExponentialLR", "kwargs": {"gamma": 1.0}, "warmup_epochs": 1, "warmup_type": "constant"}
    trained(config(tmp_path, trainer={"lr_scheduler": rates, "log_freq": 1}), "trainer.max_iter=8")
    rates = [line["lr"] for line in read_records(tmp_path / "run") if line["kind"] == "train"]
    assert rates == pytest.approx([0.01] * 5 + [0.1] * 3)


@pytest.mark.parametrize(("sets", "count"), [("trainer.only_save_latest=true", 1), ("saver.keep=2", 2)])
def test_as_many_checkpoints_stay_as_the_config_says_and_the_model_is_written(
    sets: str, count: int, tmp_path: Path
) -> None:
    result = trained(config(tmp_path), sets)
    assert names(tmp_path / "run") == ["iter_00000012.safetensors", "iter_00000018.safetensors"][-count:]
    assert result.files == [tmp_path / "run" / "model.safetensors"]


# The model


def test_a_full_disk_at_the_end_is_one_sentence(tmp_path: Path) -> None:
    trained(config(tmp_path), "trainer.max_iter=1", "saver.export=[]")
    with room_for(15_000), pytest.raises(GossamerError, match=r"model\.safetensors: cannot be written"):
        exported(tmp_path / "run", "safetensors")
    assert not [path for path in (tmp_path / "run").iterdir() if "model" in path.name]


def test_a_run_without_test_data_trains_and_exports(tmp_path: Path) -> None:
    result = trained(config(tmp_path), "dataset.test=null", "trainer.max_iter=2")
    assert result.complete
    assert result.metrics == {}
    with pytest.raises(GossamerError, match=r"dataset\.test: missing"):
        evaluated(tmp_path / "run")
    assert exported(tmp_path / "run", "safetensors", output=tmp_path / "out").files


@pytest.mark.parametrize("sparsity", ["str", "probmask", "ampere"])
def test_what_is_exported_in_the_middle_has_the_zeros_of_that_moment(sparsity: str, tmp_path: Path) -> None:
    path = config(tmp_path, sparsity)
    trained(path)
    middle = tmp_path / "run" / "checkpoints" / "iter_00000012.safetensors"
    result = exported(tmp_path / "run", "safetensors", weights=middle, output=tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    pruned = [tensor for tensor in weights.values() if (tensor == 0).float().mean() > 0.05]
    zeros = sum(int((tensor == 0).sum()) for tensor in pruned)
    assert result.sparsity is not None
    if sparsity == "ampere":
        assert zeros / sum(tensor.numel() for tensor in pruned) == result.sparsity_of_pruned_layers == 0.5
    assert zeros > 0
    reported = {line["iteration"]: line["top1"] for line in read_records(tmp_path / "run") if line["kind"] == "test"}
    assert evaluated(path, weights=tmp_path / "out" / "model.safetensors").metrics["top1"] == reported[12]


def test_an_average_is_what_is_tested_and_exported(tmp_path: Path) -> None:
    path = config(tmp_path)
    result = trained(path, "ema.enable=true", "ema.decay=0.8", "trainer.max_epoch=2")
    for named in ("model.safetensors", "checkpoints/iter_00000012.safetensors"):
        assert evaluated(path, weights=tmp_path / "run" / named).metrics == result.metrics
    exported(tmp_path / "run", "safetensors", output=tmp_path / "out")
    one, other = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    assert all((one[name] == other[name]).all() for name in other)


# The folder


def test_a_config_that_stands_in_the_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    path = config(tmp_path, saver={"save_dir": str(tmp_path)})
    before = path.read_text()
    try:
        trained(path, "trainer.max_iter=1")
    except GossamerError as error:
        assert "save_dir" in str(error)  # noqa: PT017
    assert path.read_text() == before


def test_the_log_says_why_a_run_ended(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="is nan"):
        trained(config(tmp_path, net={"type": "tests.runner.nets:Unlucky"}))
    assert "is nan at iteration 4" in (tmp_path / "run" / "log.txt").read_text()


def test_an_evaluation_and_an_export_make_no_run_folder(tmp_path: Path) -> None:
    trained(config(tmp_path, "amba"), "trainer.max_epoch=1")
    other = f"saver.save_dir={tmp_path / 'none'}"
    weights = tmp_path / "run" / "checkpoints" / "iter_00000006.safetensors"
    evaluated(tmp_path / "config.yaml", other, weights=weights)
    export(
        tmp_path / "config.yaml",
        [other],
        weights=weights,
        formats=["safetensors"],
        output=tmp_path / "out",
        display=Display(shown=False),
    )
    assert not (tmp_path / "none").exists()
