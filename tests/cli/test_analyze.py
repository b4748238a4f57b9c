"""`gossamer analyze`: what it says of real networks, with and without data and recipes, and how it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.torch import save_file

import gossamer

NETWORK = """
import torch
from torch import nn

print("whatever the user's code prints")

def small(num_classes=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))

def half():
    model = small()
    model[2].weight.data[::2] = 0
    return model

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.inner, self.end = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((x + self.end(self.inner(x).relu())).mean((2, 3)))

class Deciding(nn.Sequential):
    def __init__(self):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 8), nn.Linear(8, 10))

    def forward(self, x):
        return super().forward(x if float(x.sum()) > 0 else -x)

def labelled():
    torch.manual_seed(1)
    return [(torch.randn(8, 3, 8, 8), torch.arange(8))]

def unlabelled():
    torch.manual_seed(1)
    return [torch.randn(8, 3, 8, 8)]
"""
MODEL = "nets_for_analyze:small"


@pytest.fixture
def analyze(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "nets_for_analyze.py").write_text(NETWORK)
    monkeypatch.delitem(sys.modules, "nets_for_analyze", raising=False)
    monkeypatch.setattr("gossamer.cli.analyze.MAX_RANKED", 2)
    return lambda *words, model=MODEL: run("analyze", model, *words)


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_answer_is_in_sentences_and_the_lines_fit_a_terminal(analyze: Any) -> None:
    done = analyze("--recipe", "builtin:nm-2of4", model="squeezenet1_1")
    assert done.exit_code == 0, done.output
    told = words(done.stdout)
    assert "squeezenet1_1: 26 layers with 1.23 M weights, 349 M MACs for an input of 1×3×224×224" in told
    assert "Of 26 layers 25 can be 2:4" in told
    assert "builtin:nm-2of4 makes it 49.9 % sparse" in told
    assert "features.0 stays dense: mask_type 2:4 does not fit: 3 input channels do not divide by 4" in told
    assert "sensitivity: no data" in told
    assert "squeezenet1_1 has its initial weights" in words(done.stderr)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "…" not in done.stdout, "a cell was cut"


def test_zeros_that_are_there_now_are_told_with_their_pattern(analyze: Any) -> None:
    told = words(analyze(model="nets_for_analyze:half").stdout)
    assert "Now it is 43.0 % sparse: 3.06 k weights" in told
    assert "50.0 % filter" in told


def test_json_has_all_that_is_known_of_each_layer(analyze: Any) -> None:
    done = analyze("--json", "--recipe", "builtin:gmp-90", "--data", "nets_for_analyze:labelled")
    found = json.loads(done.stdout)
    assert [layer["weight"] for layer in found["layers"]] == ["0.weight", "2.weight", "6.weight"]
    assert found["layers"][1]["zeros_then"] == round(0.9 * 4608)
    assert found["input"] == [[1, 3, 224, 224]]
    assert {support["key"] for support in found["hardware"]} >= {"thin", "tensorrt", "torch", "deepsparse"}
    assert found["sensitivity"]["by"] == "labels"
    assert len(found["sensitivity"]["layers"]) == 3
    assert (found["recipe"]["name"], found["proposal"], found["files"]) == ("builtin:gmp-90", None, [])


def test_labels_give_accuracy_and_only_the_layers_that_matter_most_are_shown(analyze: Any) -> None:
    done = analyze("--data", "nets_for_analyze:labelled")
    assert "mean little before it is trained" in words(done.stderr)
    told = words(done.stdout)
    assert "Accuracy when one layer alone is pruned" in told
    assert "and 1 less sensitive layers" in told
    assert "--target 0.9 proposes how layers share" in told


def test_layers_that_lose_the_same_filters_are_one_row_with_its_members(analyze: Any) -> None:
    given = ("--data", "nets_for_analyze:labelled", "--pattern", "filter")
    told = words(analyze(*given, model="nets_for_analyze:Residual").stdout)
    assert "stem +1" in told
    assert "Not head: it is the last layer" in told
    found = json.loads(analyze(*given, "--json", model="nets_for_analyze:Residual").stdout)["sensitivity"]
    assert [layer["members"] for layer in found["layers"]] == [["stem.weight", "end.weight"], ["inner.weight"]]
    assert (found["pattern"], found["notes"]) == ("filter", [])


def test_a_model_that_cannot_be_followed_is_told_beside_its_curves(analyze: Any, tmp_path: Path) -> None:
    given = ("--data", "nets_for_analyze:labelled", "--pattern", "filter", "-o", "found")
    shown = words(analyze(*given, model="nets_for_analyze:Deciding").stdout)
    assert "could not be traced are pruned one by one" in shown
    found = json.loads((tmp_path / "found" / "analysis.json").read_text("utf-8"))["sensitivity"]
    assert "could not be traced are pruned one by one" in found["notes"][0]


def test_a_test_part_alone_is_named_and_no_proposal_is_made_on_it(analyze: Any, tmp_path: Path) -> None:
    lines = "{type: digits, split: test, batch_size: 16, limit: 32, transforms: [{Resize: {size: [8, 8]}}]}"
    (tmp_path / "only.yaml").write_text(f"net: {{type: '{MODEL}'}}\nnum_classes: 10\ndataset:\n  test: {lines}\n")
    analyze("--quick")  # imports the module
    save_file(sys.modules["nets_for_analyze"].small().state_dict(), tmp_path / "small.safetensors")
    given = ("--samples", "32", "--weights", "small.safetensors")
    done = analyze(*given, model="only.yaml")
    assert "On 32 samples of the test set" in words(done.stdout)
    assert "measured on the test set" in words(done.stderr)
    refused = analyze(*given, "--target", "0.9", model="only.yaml")
    assert refused.exit_code == 1
    assert "--target: there is only a test set" in words(refused.stderr)


def test_without_labels_layers_are_compared_by_the_outputs(analyze: Any) -> None:
    told = words(analyze("--data", "nets_for_analyze:unlabelled").stdout)
    assert "Relative output change when one layer alone is pruned" in told
    assert "accuracy: the data has no labels" in told


def test_quick_leaves_out_what_takes_long_and_says_so(analyze: Any) -> None:
    told = words(analyze("--data", "nets_for_analyze:labelled", "--quick").stdout)
    assert "Accuracy when" not in told
    assert "skipped because of --quick" in told


def test_a_folder_gets_data_pictures_and_a_recipe_that_runs_on_the_model(analyze: Any, tmp_path: Path) -> None:
    done = analyze("--data", "nets_for_analyze:labelled", "--target", "0.8", "-o", "found/here")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "found" / "here"
    assert {path.name for path in folder.iterdir()} == {
        "analysis.json",
        "layers.csv",
        "recipe.yaml",
        "sensitivity.png",
        "sensitivity.svg",
    }
    found = json.loads((folder / "analysis.json").read_text("utf-8"))
    sizes = {layer["weight"]: layer["parameters"] for layer in found["layers"]}
    zeros = sum(round(sizes[name] * share) for name, share in found["proposal"]["sparsity"].items())
    assert zeros == round(0.8 * sum(sizes.values()))
    assert {"proposed", "uniform", "erk"} <= set(found["proposal"]["calibration"])
    assert (folder / "layers.csv").read_text("utf-8").count("\n") == 4
    assert (folder / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(folder / "sensitivity.svg").getroot().tag.endswith("svg")
    then = json.loads(analyze("--recipe", folder / "recipe.yaml", "--json", "--quick").stdout)
    assert then["total"]["then"]["zeros"] == zeros


def test_data_by_name_give_the_model_its_classes_and_its_input(analyze: Any) -> None:
    found = json.loads(analyze("--data", "tiny", "--samples", "32", "--json").stdout)
    assert (found["data"], found["sensitivity"]["samples"]) == ({"part": "train", "samples": 64}, 64)
    assert found["layers"][-1]["shape"] == [10, 32]
    assert found["input"] != [[1, 3, 224, 224]]


def test_weights_from_a_file_are_what_is_analysed(analyze: Any, tmp_path: Path) -> None:
    analyze("--quick")  # imports the module
    save_file(sys.modules["nets_for_analyze"].half().state_dict(), tmp_path / "half.safetensors")
    found = json.loads(analyze("--weights", "half.safetensors", "--json").stdout)
    assert found["layers"][1]["patterns"][0] == "filter"
    assert found["weights"] == "half.safetensors"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--target", "90"], "--target: expected a share between 0 and 1, such as 0.9, found 90"),
        (["--target", "0.9"], "--target: a proposal needs labelled data; give --data, or a run, which has its own"),
        (["--target", "0.9", "--quick"], "--quick skips the measurement that --target needs; drop one of the two"),
        (
            ["--target", "0.9", "--data", "nets_for_analyze:unlabelled"],
            "--target: a proposal needs labels, and the batches of --data have none",
        ),
        (["--pattern", "filtr"], "--pattern: unknown pattern 'filtr'; nearest: 'filter'"),
        (["--target", "0.9", "--pattern", "2:4"], "--target: a proposal is for unstructured zeros, not 2:4"),
        (
            ["--pattern", "1:64", "--data", "nets_for_analyze:labelled"],
            "--pattern: the model has no layer that fits NM(n=1, m=64)",
        ),
        (["--input", "1,5,8,8"], "--input: cannot count MACs: the model fails on an input of shape [1, 5, 8, 8]"),
        (["--input", "big"], "--input: expected a shape such as 1,3,224,224, found 'big'"),
        (["--recipe", "builtin:gmp-99"], "builtin:gmp-99"),
        (["-o", "nets_for_analyze.py"], "--output: cannot create the folder nets_for_analyze.py"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_one(analyze: Any, given: list[str], told: str) -> None:
    done = analyze(*given)
    assert done.exit_code == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].removeprefix("error: ").startswith(told)


def test_a_recipe_that_does_not_fit_is_told_with_its_line(analyze: Any, tmp_path: Path) -> None:
    text = gossamer.load("builtin:gmp-90").text.replace("__ALL_PRUNABLE__", "['7.weight']")
    (tmp_path / "mine.yaml").write_text(text)
    done = analyze("--recipe", "mine.yaml")
    assert done.exit_code == 1
    assert "error: mine.yaml:" in done.stderr
    assert "nearest: '" in done.stderr


def test_the_runtime_shows_the_kernel_and_the_time_of_each_layer(analyze: Any) -> None:
    done = analyze("--quick", "--runtime", "--input", "1,3,32,32", model="nets_for_analyze:half")
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    told = words(done.stdout)
    assert "layer computed by time share in torch ratio" in told
    assert "whole network" in told
    assert "One call with 1×3×32×32 on " in told
    assert done.stderr.count("nothing is gained") == 0  # said once, on stdout
    found = json.loads(analyze("--quick", "--runtime", "--input", "1,3,32,32", "--json").stdout)
    layers = {layer["weight"]: layer for layer in found["runtime"]["layers"]}
    assert {"0.weight", "2.weight", "6.weight"} <= set(layers)
    assert layers["2.weight"]["kernel"].startswith("dense")
    assert all(layer["seconds"] > 0 and layer["dense_seconds"] > 0 for layer in layers.values() if layer["weight"])
    assert sum(layer["share"] for layer in found["runtime"]["layers"]) == pytest.approx(1)
    assert found["runtime"]["gain"] == pytest.approx(found["runtime"]["dense_seconds"] / found["runtime"]["seconds"])


def test_a_model_that_cannot_be_traced_is_one_line_with_the_reason(analyze: Any) -> None:
    shape = "--input", "1,3,8,8"
    done = analyze("--quick", "--runtime", *shape, model="nets_for_analyze:Deciding")
    assert done.exit_code == 0, done.output
    assert "runtime: torch.export cannot trace the model with these example inputs" in words(done.stdout)
    assert "Traceback" not in done.output
    found = json.loads(analyze("--quick", "--runtime", "--json", *shape, model="nets_for_analyze:Deciding").stdout)
    assert found["runtime"] is None
