"""`gossamer recipe check`, `show` and `list`: what they print and how they exit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import gossamer

BUILT_IN = sorted(file.stem for file in (Path(gossamer.__file__).parent / "recipes").glob("*.yaml"))

GOOD = """
num_epochs: 4
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: eval(num_epochs)}
  - !GMPruningModifier
    params: ['re:.*conv1.weight']
    init_sparsity: 0.05
    final_sparsity: 0.8
    start_epoch: 1
    end_epoch: 3
    update_frequency: 0.5
"""

WRONG = """
modifiers:
  - !GMPruningModifer {a: 1}
  - !EpochRangeModifier {start_epoch: soon}
"""

MODELS = """
from torch import nn

def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))

def needs_width(width):
    return nn.Linear(width, width)

def number():
    return 3

VALUE = 3
"""


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_a_good_recipe_is_summed_up_and_exits_with_zero(run):
    result = run("recipe", "check", write("good.yaml", GOOD))
    assert result.exit_code == 0
    words = result.stdout.split()
    assert "good.yaml is valid: epochs 0 to 4" in " ".join(words)
    assert "GMPruningModifier" in words
    assert words[words.index("num_epochs") + 1] == "4"


def test_every_problem_stands_on_its_own_line(run):
    result = run("recipe", "check", write("wrong.yaml", WRONG))
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: wrong.yaml:") for line in lines)
    assert "'GMPruningModifier'" in lines[0]


def test_problems_as_json_are_the_only_output(run):
    result = run("recipe", "check", write("wrong.yaml", WRONG), "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], len(found["errors"])) == (1, False, 3)
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "missing.yaml"], "missing.yaml: no such file"),
        (["check", "zoo:resnet50"], "SparseZoo is closed"),
        (["show", "builtin:gmp-9"], "nearest: 'gmp-90'"),
        (["show", "builtin:gmp-90", "--set", "nm_epochs=3"], "nearest: 'num_epochs'"),
        (["show", "builtin:gmp-90", "--set", "num_epochs"], "expected 'name=value'"),
        (["check", "builtin:gmp-90", "--import", "no_such_module"], "cannot import 'no_such_module'"),
        (["check", "builtin:gmp-90", "--model", "resnet81"], "no such torchvision model; nearest"),
        (["check", "builtin:gmp-90", "--model", "models_here:"], "expected package.module:function"),
        (["check", "builtin:gmp-90", "--model", "models_here:tini"], "has no 'tini'; nearest: 'tiny'"),
        (["check", "builtin:gmp-90", "--model", "models_here:VALUE"], "expected a function"),
        (["check", "builtin:gmp-90", "--model", "models_here:number"], "expected a torch.nn.Module, found int"),
        (["check", "builtin:gmp-90", "--model", "models_here:needs_width"], "needs_width() failed: TypeError"),
        (["check", "builtin:gmp-90", "--model", "broken_here:f"], "cannot import 'broken_here': ZeroDivisionError"),
        (["plot", "builtin:gmp-90", "-o", "schedule.gif"], "unknown format '.gif'; use .png, .svg, .html"),
        (["plot", "builtin:gmp-90", "-o", "no/folder/schedule.png"], "cannot be written"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_one(run, words, said, monkeypatch):
    write("models_here.py", MODELS)
    write("broken_here.py", "1 / 0")
    monkeypatch.delitem(sys.modules, "models_here", raising=False)
    result = run("recipe", *words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


def test_something_unexpected_keeps_its_traceback(run, monkeypatch):
    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gossamer.cli.recipe._show", breaks)
    result = run("recipe", "check", "builtin:gmp-90")
    assert isinstance(result.exception, ZeroDivisionError)


def test_parameters_are_matched_against_a_torchvision_model(run):
    result = run("recipe", "check", write("good.yaml", GOOD), "--model", "resnet18", "--json")
    found = json.loads(result.stdout)
    targets = next(b["targets"] for b in found["bindings"] if b["modifier"] == "GMPruningModifier")
    assert found["ok"]
    assert targets == ["conv1.weight", *(f"layer{i}.{j}.conv1.weight" for i in range(1, 5) for j in range(2))]


def test_a_parameter_that_the_model_lacks_is_an_error_with_file_and_line(run):
    recipe = write("good.yaml", GOOD.replace("['re:.*conv1.weight']", "[fc9.weight]"))
    result = run("recipe", "check", recipe, "--model", "resnet18")
    assert result.exit_code == 1
    assert "error: good.yaml:6: " in result.stderr
    assert "'fc.weight'" in result.stderr


def test_all_modifiers_are_matched_even_when_the_first_does_not_fit(run):
    parts = GOOD.replace("['re:.*conv1.weight']", "[fc9.weight]")
    second = parts.partition("  - !GMPruningModifier")[2].replace("fc9", "fc8")
    result = run("recipe", "check", write("two.yaml", f"{parts}  - !GMPruningModifier{second}"), "--model", "resnet18")
    assert ["fc9" in result.stderr, "fc8" in result.stderr] == [True, True]
    assert len(result.stderr.splitlines()) == 2


def test_what_is_skipped_is_shown_with_its_reason(run, monkeypatch):
    write("models_too.py", MODELS)
    monkeypatch.delitem(sys.modules, "models_too", raising=False)
    result = run("recipe", "check", "builtin:nm-2of4", "--model", "models_too:tiny")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert "acts on 1: 3.weight" in words
    assert "3 input channels do not divide by 4): 0.weight" in words


def test_a_modifier_of_ones_own_is_known_after_its_import(run):
    write(
        "own_modifiers.py",
        "import gossamer\n\n@gossamer.register\nclass Shrug(gossamer.Modifier):\n    effort: float = 0.0\n",
    )
    recipe = write("own.yaml", "modifiers:\n  - !Shrug {effort: 0.5}\n")
    assert run("recipe", "check", recipe).exit_code == 1
    found = json.loads(run("recipe", "check", recipe, "--import", "own_modifiers", "--json").stdout)
    assert found["modifiers"][0]["fields"] == {"effort": 0.5}


def test_show_fills_in_the_variables(run):
    result = run("recipe", "show", "builtin:gmp-90", "--set", "num_epochs=10", "--set", "final_sparsity=0.8", "--json")
    found = json.loads(result.stdout)
    pruning = found["modifiers"][-1]
    assert (pruning["start_epoch"], pruning["end_epoch"]) == (1.0, 6.0)
    assert pruning["fields"]["final_sparsity"] == 0.8
    assert found["epochs"] == {"min": 0, "max": 10}


def test_show_prints_a_table_of_modifiers(run):
    assert "GMPruningModifier" in run("recipe", "show", write("good.yaml", GOOD)).stdout


def test_list_shows_every_recipe_with_its_description(run):
    found = json.loads(run("recipe", "list", "--json").stdout)
    assert [entry["name"] for entry in found] == BUILT_IN
    assert all(len(entry["description"]) > 20 for entry in found)
    assert all(f"builtin:{name}" in run("recipe", "list").stdout for name in BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_recipe_fits_resnet18(run, name):
    result = run("recipe", "check", f"builtin:{name}", "--model", "resnet18", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["errors"], found["warnings"]) == (0, [], [])
    if name == "int8":  # acts on modules, not on weights
        assert found["epochs"] == {"min": 0, "max": 10}
        return
    assert max(len(binding["targets"]) for binding in found["bindings"]) >= 20
    assert found["epochs"] == {"min": 0, "max": 30}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_recipe_scales_with_its_number_of_epochs(run, name):
    found = json.loads(run("recipe", "show", f"builtin:{name}", "--set", "num_epochs=7", "--json").stdout)
    assert found["epochs"]["max"] == 7


def test_a_classifier_keeps_its_outputs_under_filter_pruning(run):
    found = json.loads(run("recipe", "check", "builtin:filters-50", "--model", "resnet18", "--json").stdout)
    assert all("fc.weight" not in binding["targets"] for binding in found["bindings"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("re:.*conv1.weight", "re:layer(1.*", "6:14: GMPruningModifier.params[0]: 're:layer(1.*' is not a regular"),
        (
            "['re:.*conv1.weight']",
            "__ALL_PRUNEABLE__",
            "6:5: GMPruningModifier.params: unknown keyword '__ALL_PRUNEABLE__'; nearest: '__ALL_PRUNABLE__'",
        ),
        (
            "['re:.*conv1.weight']",
            "\n    - fc\n    - __EVERY__",
            "8:7: GMPruningModifier.params[1]: unknown keyword '__EVERY__'; nearest: '__ALL__'",
        ),
        ("0.8", "{0.8: ['re:(']}", "8:28: GMPruningModifier.final_sparsity.0.8[0]: 're:(' is not a regular expression"),
        (
            "0.8",
            "0.8\n    exclude: [__DEPTWISE__]",
            "9:15: GMPruningModifier.exclude[0]: unknown keyword '__DEPTWISE__'; nearest: '__DEPTHWISE__'",
        ),
    ],
)
def test_names_that_fit_no_model_are_errors_without_a_model(run, old, new, message):
    result = run("recipe", "check", write("names.yaml", GOOD.replace(old, new)))
    assert result.exit_code == 1
    assert f"names.yaml:{message}" in result.stdout + result.stderr
