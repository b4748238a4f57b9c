"""`gossamer create`: the recipe alone on stdout, reasons within it, one sentence for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gossamer

NETWORK = """
import torch
from torch import nn

print("whatever the user's code prints")

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

def sparse():
    model = small()
    model[2].weight.data[:, ::2] = 0
    return model

def batches():
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 8, 8), torch.zeros(4))]

def fails():
    raise ValueError("no data here")
"""


@pytest.fixture
def create(run: Any, tmp_path: Path) -> Any:
    (tmp_path / "nets_for_create.py").write_text(NETWORK)
    return lambda *words, model="nets_for_create:small": run("create", model, *words)


def test_only_the_recipe_is_on_stdout(create: Any) -> None:
    result = create("--sparsity", "0.9")
    assert result.exit_code == 0
    recipe = gossamer.load(result.stdout)
    assert recipe.variables["sparsity"] == 0.9
    assert [modifier.name for modifier in recipe.modifiers] == [
        "EpochRangeModifier",
        "LearningRateFunctionModifier",
        "GMPruningModifier",
        "QuantizationModifier",
    ]
    assert "0.weight: left dense (the first convolution" in result.stdout


def test_every_option_reaches_the_recipe(create: Any) -> None:
    words = "--pruning acdc --no-quantization --lr cosine --distillation --epochs 7 --mask-type 1,4 --layer-wise"
    words += " --init-lr 0.5 --final-lr 0.1 --sparsity 0.7 --hardness 0.7 --temperature 3"
    result = create(*words.split())
    assert result.exit_code == 0, result.output
    recipe = gossamer.load(result.stdout)
    epochs, rate, pruning, distillation = recipe.modifiers
    assert (epochs.end_epoch, rate.lr_func, rate.init_lr, rate.final_lr) == (7, "cosine", 0.5, 0.1)
    assert (pruning.name, pruning.mask_type, pruning.global_sparsity) == ("ACDCPruningModifier", [1, 4], False)
    assert pruning.compression_sparsity == pytest.approx(0.7, abs=1e-3)
    assert (distillation.hardness, distillation.temperature) == (0.7, 3)


def test_a_target_sets_pattern_and_scheme(create: Any) -> None:
    recipe = gossamer.load(create("--target", "tensorrt").stdout)
    pruning, quantization = recipe.modifiers[-2:]
    assert (pruning.mask_type, pruning.final_sparsity, quantization.scheme) == ("2:4", 0.5, "tensorrt")


@pytest.mark.parametrize(("word", "held"), [("none", False), ("off", True)])
def test_off_holds_the_zeros_of_a_sparse_model_and_none_does_not(create: Any, word: str, held: bool) -> None:
    result = create("--pruning", word, model="nets_for_create:sparse")
    assert result.exit_code == 0, result.output
    names = [modifier.name for modifier in gossamer.load(result.stdout).modifiers]
    assert ("ConstantPruningModifier" in names) == held


def test_data_without_effect_is_a_warning(create: Any) -> None:
    result = create("--pruning", "constant", "--data", "nets_for_create:batches")
    assert "warning: --data: no effect" in result.stderr


def test_pruning_and_rate_can_be_left_out(create: Any) -> None:
    recipe = gossamer.load(create("--pruning", "none", "--lr", "false").stdout)
    assert [modifier.name for modifier in recipe.modifiers] == ["EpochRangeModifier", "QuantizationModifier"]


def test_with_data_the_reasons_are_measured(create: Any) -> None:
    result = create("--data", "nets_for_create:batches")
    assert result.exit_code == 0, result.output
    assert "it changes the outputs by" in gossamer.load(result.stdout).text


def test_a_file_is_written_and_told(create: Any, tmp_path: Path) -> None:
    result = create("-o", "recipe.yaml")
    assert result.stdout.startswith("recipe.yaml: EpochRangeModifier")
    assert gossamer.load(tmp_path / "recipe.yaml").max_epochs == 20


def test_json_has_every_layer_with_its_reason(create: Any) -> None:
    found = json.loads(create("--json", "--layer-wise").stdout)
    assert [layer["name"] for layer in found["layers"]] == ["0.weight", "2.weight", "6.weight"]
    assert [layer["takes_part"] for layer in found["layers"]] == [False, True, False]
    assert found["layers"][1] == {
        "name": "2.weight",
        "shape": [32, 16, 3, 3],
        "weights": 4608,
        "takes_part": True,
        "sparsity": pytest.approx(0.8, abs=1e-3),
        "max_sparsity": None,
        "why": "by size (ERK)",
    }
    assert gossamer.load(found["recipe"]).max_epochs == found["epochs"] == 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sparsity", "1"], "error: --sparsity: expected a number < 1, found 1.0"),
        (["--epochs", "0"], "error: --epochs: expected a number > 0, found 0.0"),
        (
            ["--target", "tensorrt", "--sparsity", "0.9"],
            "error: --sparsity: 0.9 contradicts target tensorrt, which means 0.5; drop sparsity or target",
        ),
        (["--lr", "none", "--init-lr", "0.1"], "error: --init-lr: the recipe does not set the learning rate"),
        (["--sparsity", "0.9999", "--mask-type", "filter"], "error: --sparsity: sparsity 0.9999 is out of reach"),
        (["--mask-type", "blok4"], "error: --mask-type: unknown pattern 'blok4'; nearest: 'block4'"),
        (["--mask-type", "5:9"], "error: no layer of the model can be pruned: '0.weight': mask_type 5:9 does not fit"),
        (["--data", "nets_for_create"], "error: --data: expected package.module:function"),
        (["--data", "nets_for_create:batch"], "error: --data: 'nets_for_create' has no 'batch'; nearest: 'batches'"),
        (["--data", "nets_for_create:fails"], "error: --data: nets_for_create:fails: calling it failed: ValueError"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_one(create: Any, words: list[str], told: str) -> None:
    result = create(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].startswith(told)


def test_what_has_no_effect_is_a_warning_beside_the_recipe(create: Any) -> None:
    result = create("--pruning", "none", "--sparsity", "0.9")
    assert result.exit_code == 0
    assert "warning: --sparsity: no effect: nothing is pruned" in result.stderr
    assert gossamer.load(result.stdout).max_epochs == 20
