"""A model as a table: counts of real networks, bytes against bytes that are packed here, patterns by property."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossamer.analysis.layers import kind_of
from gossamer.analysis.model_table import (
    PATTERNS,
    bitmask_bytes,
    model_table,
    patterns_of,
    sparse24_bytes,
)
from gossamer.analysis.projection import project
from gossamer.engine import Manager
from gossamer.errors import GossamerError
from gossamer.export import save
from gossamer.recipe import load
from gossamer.sparse import NM, magnitude

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(SIZES, st.sampled_from(sorted(PATTERNS)), st.integers(0, 99))
def test_a_pruned_weight_holds_to_the_pattern_it_was_pruned_in(
    size: tuple[int, int, int], name: str, seed: int
) -> None:
    out, groups, kernel = size
    weight = torch.rand(4 * out, 4 * groups, kernel, generator=torch.Generator().manual_seed(seed)) + 0.1
    keep = PATTERNS[name].mask(magnitude(weight), 0.5)
    assert name in patterns_of(weight * keep)


@given(SIZES, st.integers(0, 99))
def test_one_zero_in_a_dense_weight_is_unstructured(size: tuple[int, int, int], seed: int) -> None:
    weight = torch.ones(4 * size[0], 8 * size[1], size[2])
    weight.view(-1)[seed % weight.numel()] = 0
    assert patterns_of(weight) == ("unstructured",)


@given(st.integers(1, 500), st.floats(0, 1), st.sampled_from([np.float16, np.float32]))
def test_a_bitmask_takes_the_bytes_that_packing_takes(count: int, share: float, dtype: type) -> None:
    weight = np.ones(count, dtype)
    weight[: round(count * share)] = 0
    packed = np.packbits(weight != 0).nbytes + weight[weight != 0].nbytes
    zeros = count - np.count_nonzero(weight)
    assert bitmask_bytes(count, zeros, weight.itemsize) == min(packed, weight.nbytes)


def test_two_of_four_takes_half_the_values_and_two_bits_for_each() -> None:
    assert sparse24_bytes(1024, 2) == 512 * 2 + 512 * 2 // 8
    assert sparse24_bytes(1024, 2) / (1024 * 2) == 0.5625


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "format"), [("builtin:gmp-90", "bitmask"), ("builtin:nm-2of4", "sparse24")])
def test_what_a_file_is_said_to_take_is_what_the_export_writes(recipe: str, format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1().eval()
    table = model_table(model, None, project(load(recipe), model))
    Manager(load(recipe)).apply(model)
    written = save(model, tmp_path / "model.safetensors", format, example_inputs=torch.zeros(1, 3, 64, 64))
    assert table.then is not None
    assert written.dense_bytes == table.then.sizes.dense
    assert written.bytes == pytest.approx(getattr(table.then.sizes, format), rel=0.01)  # names take the rest


def test_resnet18_has_the_weights_and_macs_that_it_is_known_for() -> None:
    model = torchvision.models.resnet18()
    table = model_table(model, [1, 3, 224, 224])
    assert table.parameters + table.other_parameters == 11_689_512  # as torchvision says
    assert table.macs == pytest.approx(1.814e9, rel=1e-3)
    state = model.state_dict().values()
    assert table.now.sizes.dense == sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert [table.rows[place].kind for place in (0, 1, 7, 20)] == ["conv 7×7", "conv 3×3", "conv 1×1", "linear"]


def test_kinds_tell_depthwise_grouped_transposed_and_attention() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 4, 2), nn.Conv1d(4, 4, 5)
    )
    kinds = [kind_of(model, f"{place}.weight") for place in range(4)]
    assert kinds == ["depthwise 3×3", "conv in 2 groups, 3×3", "transposed conv 2×2", "conv 5"]
    assert kind_of(nn.MultiheadAttention(8, 2), "in_proj_weight") == "attention"


def test_a_sparse_model_is_reported_with_its_patterns_and_what_is_left() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight *= NM(2, 4).keep_largest(model[0].weight)
        model[2].weight[1] = 0
    table = model_table(model, [1, 16])
    assert [row.patterns[0] for row in table.rows] == ["2:4", "filter"]
    assert (table.now.zeros, table.now.macs) == (64 + 8, 64 + 24)
    assert table.now.sizes.sparse24 == 4 * (8 + 4 + 32) + sparse24_bytes(128, 4)


def test_the_end_of_a_recipe_has_its_own_zeros_macs_and_bytes() -> None:
    model = torchvision.models.squeezenet1_1()
    table = model_table(model, [1, 3, 224, 224], project(load("builtin:gmp-90"), model))
    assert table.then is not None
    assert table.then.zeros is not None
    assert table.then.macs is not None
    assert table.macs is not None
    assert table.then.zeros / table.parameters == pytest.approx(0.9, abs=1e-4)
    assert table.then.macs / table.macs == pytest.approx(0.1, abs=1e-3)
    rest = table.now.sizes.dense - 4 * table.parameters
    expected = rest + sum(-(-row.parameters // 8) + 4 * (row.parameters - (row.zeros_then or 0)) for row in table.rows)
    assert table.then.sizes.bitmask == expected


def test_zeros_that_are_held_keep_their_pattern_and_their_file() -> None:
    model = nn.Linear(16, 8, bias=False)
    with torch.no_grad():
        model.weight *= NM(2, 4).keep_largest(model.weight)
    table = model_table(model, [1, 16], project(load("builtin:sparse-transfer"), model))
    assert table.then is not None
    assert table.rows[0].outlook is not None
    assert (table.rows[0].outlook.pattern, table.then.zeros) == ("2:4", 64)
    assert table.then.sizes == table.now.sizes


def test_what_a_method_learns_has_no_macs_but_the_bytes_of_its_target() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    text = "modifiers: [!ProbMaskPruningModifier {params: __ALL__, start_epoch: 0, end_epoch: 2, final_sparsity: 0.75}]"
    then = model_table(model, [1, 16], project(load(text), model)).then
    assert then is not None
    assert (then.zeros, then.macs) == (120, None)
    assert then.sizes.bitmask == 16 + 4 + 4 * 40


def test_json_and_csv_hold_every_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    table = model_table(model, [1, 16], project(load("builtin:nm-2of4"), model))
    data = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert [layer["zeros_then"] for layer in data["layers"]] == [64, 16]
    assert data["total"]["then"]["sparsity"] == 0.5
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [(row["weight"], row["shape"], row["sparsity_then"]) for row in rows] == [
        ("0.weight", "8x16", "0.5"),
        ("1.weight", "4x8", "0.5"),
    ]


def test_a_model_without_layers_and_one_that_does_not_run_are_refused() -> None:
    with pytest.raises(GossamerError, match="no convolution or linear layer"):
        model_table(nn.ReLU())
    with pytest.raises(GossamerError, match="fails on an input of shape"):
        model_table(nn.Linear(4, 4), [1, 5])


def test_a_model_without_numbers_is_reported_so() -> None:
    with pytest.raises(GossamerError, match="meta device"):
        model_table(nn.Linear(8, 4, device="meta"), torch.zeros(1, 8, device="meta"))
