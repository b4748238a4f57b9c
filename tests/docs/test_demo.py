"""The demonstration: it can be imported, and it reaches the accuracy and the sparsity that it promises."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import gossamer

EXAMPLES = Path(__file__).parents[2] / "examples"


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
    from gossamer.training import bindings

    recipe = gossamer.load(EXAMPLES / "digits.yaml")
    found = bindings(recipe, digits.SmallResNet())
    assert [binding.error for binding in found if binding.error] == []
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
