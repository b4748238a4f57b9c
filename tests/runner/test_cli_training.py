"""`gossamer train`, `resume`, `eval`, `export`, `compare` as a user calls them: exit codes, sentences, JSON, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from gossamer.cli import app
from tests.runner.running_on_digits import LENGTH, config

Run = Callable[..., Any]
RESULT = {"folder", "complete", "iteration", "metrics", "sparsity", "files"}
STOP = "hooks=[{type: 'tests.runner.nets:Interrupt', kwargs: {at: 3}}]"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *words: runner.invoke(app, [str(word) for word in words])


def read_json(result: Any) -> Any:
    """What a command printed, which is JSON and nothing else."""
    assert result.stderr == ""
    return json.loads(result.stdout)


def refused(result: Any, *words: str) -> None:
    """Ends with exit code 1 and one sentence, and no traceback."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("setting", "reported"),
    [
        ("trainer.max_epohc=1", "nearest: 'max_epoch'"),
        ("trainer.optimizer.type=SDG", "nearest: 'SGD'"),
        ("trainer.lr_scheduler.type=CosineLR", "nearest: 'CosineAnnealingLR'"),
        ("net.type=tests.runner.nets:smal", "nearest: 'small'"),
        ("saver.pretrain_model=nope.pt", "saver.pretrain_model: file not found: nope.pt"),
        ("saver.resume_model=nope.pt", "saver.resume_model: file not found: nope.pt"),
        ("num_classes=5", "num_classes"),
        ("trainer.max_epoch=null", "give max_epoch or max_iter"),
        ("trainer.accumulate=99", "trainer.accumulate"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_leaves_nothing(
    run: Run, tmp_path: Path, setting: str, reported: str
) -> None:
    path = config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused(run("train", path, "--set", setting), reported)
    left = [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*") if found not in before]
    assert left in ([], ["run", "run/log.txt"]), "a log may be there by then, and nothing else"


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("train", "nope.yaml"), "nope.yaml"),
        (("train", "config.yaml", "--nproc", "0"), "--nproc"),
        (("resume", "nope"), "nope: no such run folder"),
        (("eval", "config.yaml"), "has no checkpoint to evaluate"),
        (("export", "config.yaml"), "has no checkpoint to evaluate"),
        (("compare", "nope"), "nope: no such folder"),
    ],
)
def test_what_is_not_there_is_one_sentence(run: Run, tmp_path: Path, words: tuple[str, ...], reported: str) -> None:
    config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused(run(*words), reported)
    assert sorted(tmp_path.rglob("*")) == before


def test_each_command_speaks_json(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path, "ampere")
    stopped = run("train", path, "--json", "--set", STOP)
    assert stopped.exit_code == 130
    found = read_json(stopped)
    assert set(found) >= RESULT
    assert not found["complete"]
    assert found["iteration"] == 3
    ended = read_json(run("resume", "run", "--json", "--set", "hooks=[]"))
    assert ended["complete"]
    assert ended["iteration"] == LENGTH
    assert ended["sparsity_of_pruned_layers"] == 0.5
    assert ended["sparsity"] == pytest.approx(0.5 * 4608 / 6320)  # the first and the last layer stay dense
    assert ended["files"] == ["run/model.safetensors"]
    tested = read_json(run("eval", "run", "--json", "--weights", "run/checkpoints/iter_00000018.safetensors"))
    assert tested["metrics"] == ended["metrics"]
    again = run("train", path, "-e", "--json", "--set", "saver.resume_model=run/checkpoints/iter_00000018.safetensors")
    assert read_json(again)["metrics"] == ended["metrics"]
    written = read_json(run("export", "run", "--json", "--format", "safetensors", "-o", "out"))
    assert [file["path"] for file in written["files"]] == ["out/model.safetensors"]
    compared = read_json(run("compare", "run", "--json"))
    assert compared[0]["iterations"] == LENGTH


def test_without_a_terminal_a_run_prints_a_line_an_epoch_and_a_table(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path, "gmp")
    stopped = run("train", path, "--set", STOP)
    assert stopped.exit_code == 130
    assert (
        stopped.stdout == "Stopped at iteration 3 and saved. Continue with:\n  gossamer resume " + f"{tmp_path}/run\n"
    )
    ended = run("resume", "run", "--set", "hooks=[]")
    assert ended.exit_code == 0
    assert "\x1b" not in ended.stdout
    lines = [line for line in ended.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.split()[:4] for line in lines] == [["epoch", f"{n}/3", "iteration", f"{6 * n}/18"] for n in (1, 2, 3)]
    assert "80.0 %" in lines[-1]
    assert ended.stdout.count("test at iteration") == 3
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"resuming from iteration 3 of {tmp_path}/run" in log or "resuming from iteration 3 of run/" in log


def test_the_way_to_go_on_can_be_typed_though_the_folder_has_blanks(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path)
    stopped = run("train", path, "--set", STOP, "--set", "saver.save_dir=a run")
    command = stopped.stdout.splitlines()[-1].strip()
    assert command in ("gossamer resume 'a run'", 'gossamer resume "a run"')


def test_a_run_that_is_there_is_not_begun_again(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path)
    assert run("train", path, "--set", "trainer.max_iter=1", "--json").exit_code == 0
    refused(run("train", path), "already has a run", "gossamer resume")


# Images that cannot be read


def image_folder(folder: Path, *damaged: int) -> dict[str, Any]:
    """Two classes of six images each, and what a config says of them."""
    for index in range(12):
        path = folder / "images" / "ab"[index % 2] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((8, 8, 3), 20 * index, dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        if index in damaged:
            path.write_bytes(path.read_bytes()[:40])
    return {"type": "image_folder", "path": str(folder / "images")}


def photo_config(folder: Path, *damaged: int, batch_size: int = 4) -> Path:
    source = {**image_folder(folder, *damaged), "batch_size": batch_size}
    net = {"type": "tests.runner.nets:plain"}
    return config(folder, num_classes=2, dataset={"train": source, "test": source}, net=net)


def test_an_image_that_cannot_be_read_is_left_out_and_counted(run: Run, tmp_path: Path) -> None:
    result = run("train", photo_config(tmp_path, 4, 7), "--set", "trainer.max_epoch=1")
    assert result.exit_code == 0
    reported = [line for line in result.stdout.splitlines() if "skipped" in line]
    assert [line.split(": ")[1] for line in reported] == ["dataset.train", "dataset.test"]
    assert "images that are skipped: 2, such as" in reported[0]


def test_images_left_out_are_reported_though_the_epoch_is_not_over(run: Run, tmp_path: Path) -> None:
    path = photo_config(tmp_path, *range(6), batch_size=6)
    result = run("train", path, "--set", "trainer.max_iter=1", "--set", "dataset.test=null")
    assert result.exit_code == 0
    assert "skipped" in result.stdout


@pytest.mark.parametrize(("damaged", "sets"), [(4, ()), (11, ("dataset.test.batch_size=11",))])
def test_a_batch_without_readable_images_does_not_end_a_run(
    run: Run, tmp_path: Path, damaged: int, sets: tuple[str, ...]
) -> None:
    words = [word for each in ("trainer.max_epoch=1", *sets) for word in ("--set", each)]
    result = run("train", photo_config(tmp_path, damaged, batch_size=1), *words)
    assert result.exit_code == 0, result.stderr
    assert "skipped" in result.stdout


def test_a_damaged_image_ends_a_run_that_refuses_them(run: Run, tmp_path: Path) -> None:
    path = photo_config(tmp_path, 4)
    refused(run("train", path, "--set", "dataset.train.on_error=refuse"), "04.png", "on_error: skip")
