"""Single rows: the matrix × vector kernels, what they hold in memory, and their choices in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import runtime
from gossamer.runtime.operators import SparseLayer
from gossamer.runtime.vectors import FORMS
from tests.runtime.models import pruned


def layers(engine: runtime.Engine) -> list[SparseLayer]:
    return [op for op in engine._plan.operators if isinstance(op, SparseLayer)]


def compiled(model: nn.Module, columns: int, form: str, threads: int = 1) -> runtime.Engine:
    engine = runtime.compile(model, torch.randn(2, columns), threads=threads, tuned=False)
    for layer in layers(engine):
        layer.form = form
    return engine


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 90),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    form=st.sampled_from(FORMS),
    activation=st.sampled_from([nn.Identity(), nn.ReLU(), nn.GELU()]),
)
def test_any_single_row_equals_torch(rows: int, columns: int, share: float, form: str, activation: nn.Module) -> None:
    model = pruned(nn.Sequential(nn.Linear(columns, rows), activation), share)
    engine, x = compiled(model, columns, form), torch.randn(1, columns)
    with torch.inference_mode():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 200), nn.Linear(200, 96)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.first(x).relu())).relu()


@pytest.mark.parametrize("form", FORMS)
def test_single_rows_have_the_same_bits_for_any_number_of_threads_and_after_loading(form: str, tmp_path: Path) -> None:
    model, x = pruned(Skip(), 0.8), torch.randn(1, 96)
    engine = compiled(model, 96, form)
    expected = engine(x)
    with torch.inference_mode():
        torch.testing.assert_close(expected, model(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(compiled(model, 96, form, threads=3)(x), expected)
    engine.save(tmp_path / "engine")
    loaded = runtime.load(tmp_path / "engine")
    assert [layer.form for layer in layers(loaded)] == [form, form]
    assert torch.equal(loaded(x), expected)
    several = torch.cat([x, x])
    torch.testing.assert_close(engine(several), expected.expand(2, -1), rtol=1e-4, atol=1e-5)


def test_tokens_of_width_one_are_single_rows() -> None:
    model = pruned(nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.LayerNorm(70), nn.Linear(70, 8)), 0.7)
    engine = runtime.compile(model, torch.randn(2, 5, 40), threads=1, tuned=False)
    for shape in ((1, 1, 40), (3, 1, 40), (2, 4, 40)):
        x = torch.randn(shape)
        with torch.inference_mode():
            torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(layer._vectors for layer in layers(engine))


@pytest.mark.parametrize("form", ["slices", "bits"])
def test_weights_with_90_percent_zeros_take_at_most_30_percent_of_dense(form: str) -> None:
    model, x = pruned(nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 512))), torch.randn(1, 512)
    engine = compiled(model, 512, form)
    engine(x)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    held = 0
    for layer in layers(engine):
        arrays = [array for found in (*layer._vectors.values(), *layer._weights.values()) for array in found.values()]
        held += layer.weight.nbytes + sum(array.nbytes for array in arrays)
    assert engine.weight_bytes == held <= 0.3 * dense


def test_tuning_chooses_a_form_and_multiplies_by_zeros_only_if_they_are_few() -> None:
    for share, forms in ((0.0, FORMS), (0.9, ("slices", "bits"))):
        model = pruned(nn.Sequential(nn.Linear(64, 64)), share)
        assert layers(runtime.compile(model, torch.randn(1, 64), threads=1))[0].form in forms


def test_single_rows_on_a_cpu_without_avx512_equal_those_with_it() -> None:
    program = """
import json, sys, torch
from torch import nn
from gossamer import runtime
from gossamer.runtime.operators import SparseLayer
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(50, 70)).eval()
model[0].weight.data[torch.rand(70, 50) < 0.6] = 0
x, found = torch.randn(1, 50), []
for form in ("slices", "bits", "dense"):
    engine = runtime.compile(model, torch.randn(2, 50), threads=1, tuned=False)
    for op in engine._plan.operators:
        op.form = form
    found.append(engine(x).tolist())
print(json.dumps(found))
"""
    found = []
    for cpu in ("", "haswell"):
        environment = {**os.environ, "GOSSAMER_CPU": cpu}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
