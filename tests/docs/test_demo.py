"""The demonstrations: the commands of `make demo` are valid and fair, and the example reaches what it promises."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.core import TyperGroup

import gossamer
from gossamer.cli import app
from gossamer.runner.config import read_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """What `make demo` runs of ours: the words behind `gossamer`."""
    make = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "demo"]
    text = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    return [words[1:] for words in lines if words and words[0].endswith("/gossamer")]


def test_the_commands_of_the_demo_are_ours_with_options_that_they_take(commands: list[list[str]]) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, *words in commands:
        group.commands[name].make_context(name, words)


def test_the_runs_of_the_demo_start_alike_and_train_for_as_long(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    Path("runs/demo/start").mkdir(parents=True)
    loaded = [
        read_config(words[words.index("tiny") + 1], [words[i + 1] for i, w in enumerate(words) if w == "--set"], "tiny")
        for words in commands
        if words[0] == "train"
    ]
    start, dense, *others = [one.config for one in loaded]
    assert [warning for one in loaded for warning in one.warnings] == []
    assert start.saver.pretrain_model is None
    assert len(others) == 4
    assert {run.saver.pretrain_model for run in (dense, *others)} == {start.saver.save_dir}
    assert {run.trainer.max_epoch for run in (dense, *others)} == {dense.trainer.max_epoch}
    assert (dense.net, dense.sparsity) == (start.net, None)


def test_the_demo_times_a_thinned_and_an_integer_file_and_shows_the_result(commands: list[list[str]]) -> None:
    timed, large = [words for words in commands if words[0] == "benchmark"]
    (page,) = [words for words in commands if words[0] == "report"]
    assert timed[1] == "runs/demo/dense/model.onnx"
    assert {"runs/demo/filters/model-thin.onnx", "runs/demo/int8/model.onnx"} <= set(timed)
    shown = [word for option, word in pairwise(page) if option == "--benchmark"]
    assert shown == [words[words.index("--output") + 1] for words in (timed, large)]
    assert all({"onnxruntime", "gossamer"} <= set(words) and "levels" in words[2] for words in (timed, large))
    assert [words[1] for words in commands if words[0] == "compile"] == ["runs/demo/levels"] * 2


@pytest.fixture
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLES / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


def test_the_recipe_of_the_demo_fits_its_model(digits: ModuleType) -> None:
    from gossamer.engine import check_bindings

    recipe = gossamer.load(EXAMPLES / "digits.yaml")
    found = check_bindings(recipe, digits.SmallResNet())
    assert [binding.problems for binding in found if binding.problems] == []
    assert recipe.variables["final_sparsity"] == 0.9


def test_the_batches_of_the_demo_are_whole_and_moved_by_at_most_a_pixel(digits: ModuleType) -> None:
    torch.manual_seed(0)
    data = digits.Digits.load()
    batches = data.batches()
    assert len(batches) == data.steps_per_epoch
    assert {tuple(images.shape) for images, _ in batches} == {(digits.BATCH, 1, 8, 8)}
    assert all(float(images.amax()) <= 1 for images, _ in batches)


@pytest.mark.slow
def test_the_demo_ends_sparse_and_accurate(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True, timeout=600)
    model = load_file(tmp_path / "sparse.safetensors")
    weights = [value for value in model.values() if value.dim() > 1]
    total = sum(weight.numel() for weight in weights)
    assert sum(int((weight == 0).sum()) for weight in weights) == round(0.9 * total)
    row = next(line for line in done.stdout.splitlines() if line.startswith("│ sparse"))
    assert float(row.split("│")[2].strip().removesuffix("%")) >= 97
    assert (tmp_path / "schedule.png").stat().st_size > 10_000
