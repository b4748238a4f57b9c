"""`gossamer permute` and `gossamer check`: what they print, write, and how they exit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossamer.sparse import NM
from tests.cli.conftest import Run

MODELS = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 16),
    )

class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return self.b(self.a(x) if x.sum() > 0 else -self.a(x))

def undecided():
    return Undecided()

def narrow():
    return nn.Linear(3, 5)
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "networks.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    import sys

    monkeypatch.delitem(sys.modules, "networks", raising=False)


def model() -> nn.Sequential:
    return importlib.import_module("networks").small()


def words(text: str) -> str:
    return " ".join(text.split())


def test_permute_writes_weights_that_compute_the_same_and_keep_more(run: Run, tmp_path: Path) -> None:
    done = run("permute", "networks:small", "-o", "permuted.safetensors")
    assert done.exit_code == 0, done.output
    assert "2 of 2 layers could be permuted, 100% of the weights that can be 2:4" in words(done.output)
    assert "not permuted, because 3 input channels do not divide by 16: 0.weight" in words(done.output)
    before, after = model().eval(), model().eval()
    after.load_state_dict(load_file(tmp_path / "permuted.safetensors"))
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(before(x), after(x), atol=1e-5)
    kept = [
        float((m[3].weight.detach().abs() * NM(2, 4).keep_largest(m[3].weight.detach())).sum()) for m in (before, after)
    ]
    assert kept[1] > kept[0]


def test_permute_tells_machines_what_each_layer_keeps(run: Run) -> None:
    told: dict[str, Any] = json.loads(run("permute", "networks:small", "--json", "--effort", "0.1").output)
    layer = told["layers"][0]
    assert layer["name"] == "3.weight"
    assert 0 < layer["kept_before"] < layer["kept"] < layer["bound"] < 1
    assert 0 < layer["efficacy"] < 1
    assert told["skipped"] == {"0.weight": "3 input channels do not divide by 16"}


def test_permute_reads_trained_weights_and_draws_what_it_gained(run: Run, tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "trained.pt")
    done = run("permute", "networks:small", "--weights", "trained.pt", "--plot", "gains.png", "-o", "out.pt")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "gains.png").read_bytes()[:4] == b"\x89PNG"
    assert set(torch.load(tmp_path / "out.pt", weights_only=True)) == set(model().state_dict())


def test_permute_says_why_nothing_could_move(run: Run, tmp_path: Path) -> None:
    done = run("permute", "networks:undecided", "-o", "same.pt")
    assert done.exit_code == 1
    assert "the model could not be traced: its control flow depends on values" in words(done.output)
    assert "--parts traces what it can" in words(done.output)
    assert not (tmp_path / "same.pt").exists()


def test_what_the_users_code_prints_stays_out_of_the_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "networks.py").write_text(MODELS.replace("def small():", "def small():\n    print('hello')"))
    told = run("check", "networks:small", "--json")
    assert json.loads(told.stdout)["able"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["networks:small", "-o", "weights.onnx"],
            "weights.onnx: unknown format '.onnx'; use .safetensors, .pt, .pth",
        ),
        (["networks:small", "--pattern", "5:4"], "--pattern: 5:4 is not a pattern"),
        (
            ["networks:small", "--pattern", "m4n2_2d_best"],
            "--pattern: expected a pattern along one dimension",
        ),
        (["networks:small", "--weights", "none.pt"], "none.pt: no such file of weights"),
        (["networks.py:small"], "networks.py:small: expected a module, not a file: write networks:small"),
        (["networks:narrow"], "networks:narrow: no layer can be 2:4: 5 output channels do not divide by 8"),
        (["networks:small", "--plot", "gains.xyz"], "gains.xyz: unknown format '.xyz'; use .png, .svg, .pdf"),
        (["networks:small", "--effort", "0.01", "-o", "/proc/none/a.pt"], "/proc/none/a.pt: cannot be written"),
        (["networks:small", "--input", "2,33"], "nothing is permuted: the model could not be traced"),
    ],
)
def test_permute_explains_what_is_wrong_in_one_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    done = run("permute", *arguments)
    assert done.exit_code == 1
    assert sentence in words(done.output)
    assert "Traceback" not in done.output


def test_check_says_which_layers_hold_and_where_the_first_violation_lies(run: Run, tmp_path: Path) -> None:
    network = model()
    with torch.no_grad():
        for layer in (network[3], network[7]):
            layer.weight.mul_(NM(2, 4).keep_largest(layer.weight))
        network[3].weight[5, 8:12, 1, 2] = 1.0
    torch.save({"model_state_dict": network.state_dict()}, tmp_path / "pruned.pth")
    done = run("check", "networks:small", "--weights", "pruned.pth", "--json")
    layers = {layer["name"]: layer for layer in json.loads(done.output)["layers"]}
    assert layers["7.weight"]["holds"] is True
    assert layers["3.weight"]["violations"] == 1
    assert layers["3.weight"]["first"] == [5, 8, 1, 2]
    assert layers["0.weight"]["reason"] == "3 input channels do not divide by 16"
    shown = run("check", "networks:small", "--weights", "pruned.pth")
    assert "1 of 4,608 groups violate it, first [5, 8:12, 1, 2]" in words(shown.output)
    assert "1 of 2 eligible layers are 2:4; 1 cannot be" in words(shown.output)
    assert run("check", "networks:small", "--weights", "pruned.pth", "--require").exit_code == 1
    assert shown.exit_code == 0


def test_check_holds_two_dimensional_patterns_against_rows_and_columns(run: Run) -> None:
    told = json.loads(run("check", "networks:small", "--pattern", "m4n2_2d_best", "--json").output)
    assert told["holds"] == 0
    assert told["layers"][1]["groups"] == 64 * 32 * 9 // 4 * 2
