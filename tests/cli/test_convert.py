"""`gossamer convert`: configs of MSBench and arguments of ASP become recipes that `recipe check` accepts."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gossamer import load
from tests.cli.conftest import Run
from tests.msbench.configs import admm, ampere, levels, probmask, str_config

MODELS = """
from torch import nn

def tiny():
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16))
"""

PYTHON = """
import torch
from somewhere import a_thing_that_is_not_installed

max_iter = 1200
sparsity_config = {
    'mask_generator': {'type': 'NormalMaskGenerator'},
    'fake_sparse': {'type': 'FakeSparse'},
    'scheduler': {
        'type': 'AmbaLevelPruneScheduler',
        'kwargs': {
            'total_iters': max_iter,
            'sparsity_table': [30, 60, 90],
            'no_prune_layer': 'fc',
            'save_dir': 'ckpts',
        }
    }
}
raise SystemExit('scripts are not executed')
"""


@pytest.fixture(autouse=True)
def _models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("models_of_convert.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models_of_convert", raising=False)


def write(name: str, config: Any) -> str:
    path = Path(name)
    with path.open("w") as file:
        json.dump(config, file) if path.suffix == ".json" else YAML(typ="safe", pure=True).dump(config, file)
    return name


def checked(run: Run, text: str) -> Any:
    """The modifiers of a recipe that `recipe check` has accepted."""
    Path("checked.yaml").write_text(text)
    result = run("recipe", "check", "checked.yaml")
    assert result.exit_code == 0, result.output
    return load("checked.yaml").modifiers


@pytest.mark.parametrize(
    ("suffix", "config", "name"),
    [
        (".yaml", levels(), "LevelPruningModifier"),
        (".yml", str_config(), "STRPruningModifier"),
        (".json", probmask(), "ProbMaskPruningModifier"),
        (".yaml", admm(), "ADMMPruningModifier"),
    ],
)
def test_each_kind_of_config_becomes_a_recipe_on_stdout(run: Run, suffix: str, config: Any, name: str) -> None:
    result = run("convert", write(f"config{suffix}", config), "--steps-per-epoch", "4")
    assert result.exit_code == 0, result.output
    length = ["EpochRangeModifier"] if name.startswith("ADMM") else []
    assert [modifier.name for modifier in checked(run, result.stdout)] == [name, *length]


def test_iterations_become_epochs(run: Run) -> None:
    config = write("config.yaml", levels(total_iters=1200))
    modifier = checked(run, run("convert", config, "--steps-per-epoch", "400").stdout)[0]
    assert (modifier.start_epoch, modifier.end_epoch, modifier.levels) == (0, 3, [0.3, 0.6, 0.9])
    assert checked(run, run("convert", config).stdout)[0].end_epoch == 1200


def test_what_a_recipe_does_not_carry_is_told_on_stderr(run: Run) -> None:
    result = run("convert", write("config.yaml", levels(do_sparse_analysis=True, init_lr=0.1)))
    told = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    for word in ("save_dir", "do_sparse_analysis", "init_lr", "lr_scheduler="):
        assert any(word in line for line in told), word
    assert "warning" not in result.stdout


def test_a_config_may_be_one_part_of_a_training_config(run: Run) -> None:
    whole = {"model": {"type": "resnet50"}, "sparsity": levels()}
    result = run("convert", write("train.yaml", whole))
    assert result.exit_code == 0, result.output
    assert checked(run, result.stdout)[0].levels == [0.3, 0.6, 0.9]


def test_a_script_is_read_and_not_executed(run: Run) -> None:
    Path("train.py").write_text(PYTHON)
    result = run("convert", "train.py", "--steps-per-epoch", "100")
    assert result.exit_code == 0, result.output
    modifier = checked(run, result.stdout)[0]
    assert (modifier.end_epoch, modifier.exclude) == (12, ["fc"])


def test_constants_of_a_script_may_use_other_constants_and_be_merged(run: Run) -> None:
    script = """
        iterations = 1200
        base = {'total_iters': iterations, 'no_prune_layer': 'conv1'}
        scheduler = {'type': 'AmbaLevelPruneScheduler', 'kwargs': {**base, 'no_prune_layer': 'fc'}}
        sparsity_config = {'scheduler': scheduler}
    """
    Path("train.py").write_text(textwrap.dedent(script))
    result = run("convert", "train.py", "--steps-per-epoch", "100")
    assert result.exit_code == 0, result.output
    modifier = checked(run, result.stdout)[0]
    assert (modifier.end_epoch, modifier.exclude) == (12, ["fc"])


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("len(loader) * 90", "len(loader) * 90"),
        ("f'{3}'", "f'{3}'"),
        ("args.skip", "args.skip"),
        ("torch.load('x').iters", "torch.load('x').iters"),
    ],
)
def test_code_in_a_script_is_an_error_with_its_line(run: Run, code: str, shown: str) -> None:
    Path("train.py").write_text(PYTHON.replace("'total_iters': max_iter", f"'total_iters': {code}"))
    result = run("convert", "train.py")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: train.py:12: ")
    assert f"'{shown}' is code, and scripts are not executed; write the value there" in result.stderr


def test_a_constant_that_is_code_is_an_error_at_its_own_line(run: Run) -> None:
    Path("train.py").write_text(PYTHON.replace("max_iter = 1200", "max_iter = len(loader)"))
    assert run("convert", "train.py").stderr.startswith("error: train.py:5: 'len(loader)' is code")


def test_a_constant_that_changes_is_not_guessed(run: Run) -> None:
    Path("train.py").write_text(PYTHON.replace("max_iter = 1200", "max_iter = 1200\nmax_iter = 2400"))
    result = run("convert", "train.py")
    if result.exit_code == 0:
        assert checked(run, result.stdout)[0].end_epoch == 2400, "what holds is what was assigned last"
    else:
        assert "max_iter" in result.stderr


def test_a_dict_that_takes_another_in_is_not_read_in_part(run: Run) -> None:
    script = PYTHON.replace("max_iter = 1200", "max_iter = 1200\ncommon = {'prun_algo': 0, 'no_prune_keyword': 'bn'}")
    Path("train.py").write_text(script.replace("'total_iters': max_iter", "**common, 'total_iters': max_iter"))
    result = run("convert", "train.py")
    if result.exit_code == 0:
        modifier = checked(run, result.stdout)[0]
        assert modifier.allocation == "uniform"
        assert any("bn" in pattern for pattern in modifier.exclude)
    else:
        assert "common" in result.stderr


@pytest.mark.parametrize("name", ["torch.nn.Linear", "nn.Linear"])
def test_classes_in_a_script_are_known_by_their_names(run: Run, name: str) -> None:
    Path("train.py").write_text(f"options = {{'asp': {{'whitelist': [{name}], 'verbosity': 0}}}}")
    result = run("convert", "train.py", "--model", "models_of_convert:tiny")
    assert checked(run, result.stdout)[0].params == ["3.weight"]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"mask_calculator": "m4n2_1d", "allow_permutation": False, "verbosity": 0}, 2),
        ({"asp": {"whitelist": ["Linear"], "verbosity": 0}}, 1),
        ({"asp": {"disallowed_layer_names": ["0"], "verbosity": 0}}, 1),
        ({"asp": {}}, 2),
        (ampere(), 2),
    ],
    ids=str,
)
def test_two_of_four_needs_the_model(run: Run, arguments: dict[str, Any], count: int) -> None:
    config = write("config.yaml", arguments)
    result = run("convert", config)
    assert result.exit_code == 1
    assert "2:4 depends on the shapes of the layers; pass the model (--model)" in result.stderr
    result = run("convert", config, "--model", "models_of_convert:tiny")
    assert result.exit_code == 0, result.output
    modifier = checked(run, result.stdout)[0]
    assert (modifier.mask_type, len(modifier.params)) == ("m4n2_1d", count)


def test_the_recipe_is_written_to_a_file(run: Run) -> None:
    name = "recipe.md"
    result = run("convert", write("config.yaml", levels()), "-o", name)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{name}: LevelPruningModifier, 12 epochs\n"
    assert run("recipe", "check", name).exit_code == 0
    assert load(name).modifiers[0].levels == [0.3, 0.6, 0.9]


def test_json_is_the_only_output(run: Run) -> None:
    result = run("convert", write("config.yaml", levels()), "-o", "recipe.yaml", "--json")
    found = json.loads(result.stdout)
    assert result.stderr == ""
    assert found["output"] == "recipe.yaml"
    assert found["recipe"] == Path("recipe.yaml").read_text()
    assert any("save_dir" in sentence for sentence in found["left_out"])
    assert json.loads(run("convert", "config.yaml", "--json").stdout)["output"] is None


WITHOUT_LENGTHS = {"sparsity": {"target_sparsity": 0.5}, "scheduler": {"type": "ADMMScheduler"}}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("missing.yaml", None, "missing.yaml: no such file"),
        ("config.toml", "a = 1", "expected a file that ends in .yaml, .yml, .json, .py"),
        ("config.yaml", "scheduler: [", "config.yaml:1:13: not valid YAML: "),
        ("config.yaml", "- 1\n- 2", "expected a mapping with the key 'scheduler', found list"),
        ("config.yaml", "", "expected a mapping, found nothing"),
        ("config.json", "3", "expected a mapping, found a single value"),
        ("config.py", "a = [", "config.py:1: not valid Python: "),
        ("config.py", "a = {'b': 1}", "no dict with the key 'scheduler'"),
        ("config.yaml", "fuse_bn: false", "scheduler: missing key"),
        ("config.yaml", "scheduler: {type: AmbaLevelScheduler}", "nearest: 'AmbaLevelPruneScheduler'"),
        ("config.yaml", "asp: [1]", "asp: expected the arguments of init_model_for_pruning, found [1]"),
        ("config.yaml", "asp: {mask_calculater: m4n2_1d}", "nearest: 'mask_calculator'"),
        (
            "config.json",
            json.dumps(WITHOUT_LENGTHS),
            "scheduler.kwargs: the length of the training is not set; set total_iters and iters_per_epoch",
        ),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_one(run: Run, file: str, content: str | None, said: str) -> None:
    if content is not None:
        Path(file).write_text(content)
    result = run("convert", file, "--model", "models_of_convert:tiny")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


@pytest.mark.parametrize("steps", ["0", "nan"])
def test_an_epoch_has_some_steps(run: Run, steps: str) -> None:
    result = run("convert", write("config.yaml", levels()), "--steps-per-epoch", steps)
    assert result.exit_code == 1
    assert "steps_per_epoch: expected a number above 0" in result.stderr


def test_a_file_that_cannot_be_written_is_told(run: Run) -> None:
    result = run("convert", write("config.yaml", levels()), "-o", "no/folder/recipe.yaml")
    assert result.exit_code == 1
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_a_script_that_is_no_text_is_told(run: Run) -> None:
    Path("config.py").write_bytes(b"\xff\xfe\x00\x81")
    assert "config.py: expected UTF-8 text" in run("convert", "config.py").stderr
