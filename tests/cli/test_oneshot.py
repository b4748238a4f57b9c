"""`gossamer oneshot` on folders and models, and `gossamer eval --perplexity`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.export.weights import load_into, read_state
from tests.calibration.models import images, network, recipe
from tests.calibration.test_streaming import loaded, saved, write_tokenizer


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout if result.exit_code == 0 else result.stderr


def small() -> nn.Module:
    return network()


def batches() -> list[Tensor]:
    return images()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = saved(tmp_path / "model")
    write_tokenizer(source)
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and the dog sat too " * 40)
    (tmp_path / "recipe.yaml").write_text(recipe("SparseGPTModifier: {sparsity: 0.5, ignore: ['re:.*embed']}"))
    return source


def test_a_folder_is_pruned_with_a_text_and_measured_on_another(folder: Path, tmp_path: Path) -> None:
    command = ["oneshot", folder, "-r", tmp_path / "recipe.yaml", "--data", tmp_path / "corpus.txt", "--length", 16]
    code, output = run(*command, "-o", tmp_path / "out", "--format", "bitmask")
    assert (code, output) == (0, f"{tmp_path / 'out'}: 50.0 % of 23.0 k weights are zero\n")
    small_file = read_state(tmp_path / "out" / "model-bitmask.safetensors")
    assert torch.equal(small_file["model.norm.weight"], loaded(tmp_path / "out").model.norm.weight)
    code, output = run("eval", tmp_path / "out", "--perplexity", tmp_path / "corpus.txt", "--length", 16, "--json")
    found = json.loads(output)
    assert code == 0
    assert found["zeros"] / found["weights"] == 0.5
    ids = torch.tensor([0, 1, 2, 3, 0, 4, 5, 0, 6, 2, 7] * 40)[: 440 // 16 * 16].view(-1, 16)
    with torch.no_grad():
        loss = loaded(tmp_path / "out")(input_ids=ids, labels=ids).loss
    assert found["value"] == pytest.approx(math.exp(float(loss)), rel=1e-4)
    code, output = run("eval", tmp_path / "out", "--perplexity", tmp_path / "corpus.txt")
    assert output.startswith("perplexity ")
    assert run(*command, "-o", tmp_path / "out")[0] == 1


def test_a_model_of_a_function_is_pruned_with_batches_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe("WandaPruningModifier: {sparsity: 0.5}"))
    out = tmp_path / "small.safetensors"
    here = "tests.cli.test_oneshot"
    arguments = ["oneshot", f"{here}:small", "-r", tmp_path / "recipe.yaml", "--data", f"{here}:batches", "-o", out]
    code, output = run(*arguments, "--json")
    assert code == 0
    assert json.loads(output)["zeros"] / json.loads(output)["weights"] == pytest.approx(0.5, abs=1e-3)
    model = small()
    load_into(model, out)
    assert float((model[0].weight == 0).double().mean()) == 0.5


def test_errors_are_one_line_and_name_options(folder: Path, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "out"]
    assert "holds no config.json" in run("oneshot", tmp_path, "-r", tmp_path / "recipe.yaml", *out)[1]
    code, output = run("oneshot", folder, "-r", tmp_path / "recipe.yaml", *out)
    assert code == 1
    assert output == "error: data: a text file or batches of token ids are needed to calibrate\n"
    code, output = run("eval", folder, "--perplexity", tmp_path / "none.txt")
    assert code == 1
    assert output.count("\n") == 1
    code, output = run("eval", folder, "--length", 5)
    assert output == "error: --length: used with --perplexity only\n"
