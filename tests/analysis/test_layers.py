"""The report of layers: its numbers and its files."""

from __future__ import annotations

import csv
import io
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossamer.analysis.layers import LayerReport, layer_report
from gossamer.errors import GossamerError
from gossamer.sparse import Unstructured

LEVELS = [0.3, 0.5, 0.9]
INPUTS = [2, 4, 6, 6]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict(
        stem=nn.Conv2d(4, 8, 3),
        depth=nn.Conv2d(8, 8, 3, groups=8),
        flat=nn.Flatten(),
        head=nn.Linear(32, 10),
    )
    return nn.Sequential(layers)


def report(inputs: Any = INPUTS) -> LayerReport:
    sparsities = {"stem.weight": [0.1, 0.4, 0.8], "head.weight": [0.4, 0.6, 0.95]}
    return layer_report(model(), sparsities, LEVELS, inputs, {"depth.weight": "depth-wise"})


# Numbers


def test_rows_hold_what_each_layer_has_and_keeps() -> None:
    stem, depth, head = report().layers
    assert [row.name for row in (stem, depth, head)] == ["stem", "depth", "head"]
    assert (stem.weight, stem.shape, stem.parameters) == ("stem.weight", (8, 4, 3, 3), 288)
    assert (stem.macs, depth.macs, head.macs) == (288 * 2 * 16, 72 * 2 * 4, 320 * 2)
    assert stem.sparsity == (0.1, 0.4, 0.8)
    assert stem.zeros == (29, 115, 230)
    assert stem.macs_left == (259 * 32, 173 * 32, 58 * 32)
    assert depth.excluded == "depth-wise"
    assert depth.sparsity == (0.0, 0.0, 0.0)
    assert depth.energy_kept == (1.0, 1.0, 1.0)
    assert head.zeros == (128, 192, 304)


def test_totals_are_over_all_layers_and_over_those_that_take_part() -> None:
    found = report()
    assert found.total.parameters == 288 + 72 + 320
    assert found.total.zeros == (157, 307, 534)
    assert found.total.sparsity[2] == 534 / 680
    assert found.total.macs == 288 * 32 + 72 * 8 + 320 * 2
    assert found.total.macs_left is not None
    assert found.total.macs_left[2] == 58 * 32 + 72 * 8 + 16 * 2
    assert found.taking_part.layers == 2
    assert found.taking_part.parameters == 608
    assert found.taking_part.zeros == found.total.zeros
    assert found.taking_part.macs_left is not None
    assert found.taking_part.macs_left[2] == 58 * 32 + 16 * 2


@given(
    st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=40), st.lists(st.floats(0, 1), max_size=4, unique=True)
)
def test_energy_is_that_of_the_weights_which_a_mask_of_the_same_sparsity_keeps(
    numbers: list[float], levels: list[float]
) -> None:
    layer = nn.Linear(len(numbers), 1, bias=False)
    layer.weight.data = torch.tensor([numbers])
    [row] = layer_report(layer, {"weight": levels}, [index / 10 for index in range(len(levels))]).layers
    weight = layer.weight.detach().double()
    for sparsity, zeros, energy in zip(levels, row.zeros, row.energy_kept, strict=True):
        kept = Unstructured().mask(weight.abs(), sparsity)
        assert zeros == int((~kept).sum())
        whole = float(weight.square().sum())
        assert energy == pytest.approx(float((weight * kept).square().sum()) / whole if whole else 1.0, abs=1e-9)


def test_zeros_of_now_are_counted_apart_from_those_of_the_levels() -> None:
    network = model()
    network.head.weight.data[:5] = 0
    found = layer_report(network, {"head.weight": [0.25]}, [0.25])
    assert [row.current_sparsity for row in found.layers] == [0, 0, 0.5]
    assert found.layers[2].energy_kept == (1.0,)
    assert found.total.current_zeros == 160
    assert found.total.zeros == (80,)


def test_without_inputs_there_are_no_macs() -> None:
    found = report(inputs=None)
    assert found.layers[0].macs is None
    assert found.layers[0].macs_left is None
    assert found.total.macs is found.total.macs_left is None
    assert layer_report(model(), {}, [0.5]).taking_part.macs is None


def test_a_weight_that_nobody_names_takes_no_part_and_says_so() -> None:
    found = layer_report(model(), {"head.weight": [0.5]}, [0.5])
    assert [row.excluded for row in found.layers] == ["no sparsity given"] * 2 + [None]


def test_models_without_layers_or_with_broken_weights_are_refused() -> None:
    with pytest.raises(GossamerError, match="no convolution or linear layer to report on"):
        layer_report(nn.ReLU(), {}, [0.5])
    network = model()
    network.head.weight.data[0, 0] = torch.nan
    with pytest.raises(GossamerError, match=r"'head\.weight' contains values that are not finite"):
        layer_report(network, {"head.weight": [0.5]}, [0.5])
    with pytest.raises(GossamerError, match=r"the model fails on an input of shape \[2, 5\]"):
        layer_report(model(), {}, [0.5], [2, 5])


# Files


def test_the_json_is_plain_and_adds_up() -> None:
    data = json.loads(json.dumps(report().to_json(), allow_nan=False))
    assert data["format"] == 1
    assert data["levels"] == LEVELS
    assert data["layers"][1]["excluded"] == "depth-wise"
    assert sum(layer["macs"] for layer in data["layers"]) == data["total"]["macs"]
    for level in range(3):
        assert sum(layer["zeros"][level] for layer in data["layers"]) == data["total"]["zeros"][level]
        assert sum(layer["macs_left"][level] for layer in data["layers"]) == data["total"]["macs_left"][level]
    assert data["taking_part"]["layers"] == 2


def test_the_csv_has_a_line_for_each_layer_and_a_total() -> None:
    lines = list(csv.DictReader(io.StringIO(report().to_csv())))
    assert [line["layer"] for line in lines] == ["stem", "depth", "head", "total"]
    assert lines[0]["shape"] == "8x4x3x3"
    assert lines[0]["sparsity_0.3"] == "0.1"
    assert float(lines[0]["energy_kept_0.9"]) == pytest.approx(report().layers[0].energy_kept[2], rel=1e-5)
    assert lines[1]["excluded"] == "depth-wise"
    assert lines[3]["parameters"] == "680"
    assert lines[3]["macs_left_0.9"] == str(58 * 32 + 72 * 8 + 16 * 2)
    assert lines[3]["energy_kept_0.9"] == ""
    unknown = next(csv.DictReader(io.StringIO(report(inputs=None).to_csv())))
    assert (unknown["macs"], unknown["macs_left_0.3"]) == ("", "")


def test_saving_makes_the_folder_and_leaves_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    paths = report().save(str(folder))
    assert paths == (folder / "pruner_report.csv", folder / "pruner_report.json")
    report().save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["pruner_report.csv", "pruner_report.json"]
    assert paths[0].read_text(encoding="utf-8") == report().to_csv()
    assert json.loads(paths[1].read_text(encoding="utf-8"))["levels"] == LEVELS


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GossamerError, match="file: the report cannot be written: File exists; choose a writable"):
        report().save(tmp_path / "file")
