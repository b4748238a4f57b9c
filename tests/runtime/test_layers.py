"""What an engine reports of its layers: kernels, zeros and times by the model's own names, and why torch computes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer import runtime
from gossamer.runtime import LayerReport, layers
from tests.runtime.models import Residual, pruned

X = torch.randn(2, 3, 32, 32)


def by_name(engine: runtime.Engine) -> dict[str, LayerReport]:
    return {layer.name: layer for layer in engine.layers()}


def test_every_layer_has_the_models_name_its_zeros_and_its_kernel() -> None:
    model = pruned(Residual())
    found = by_name(runtime.compile(model, X, threads=1, tuned=False))
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            layer = found[name]
            assert layer.weight == f"{name}.weight"
            assert layer.shape == tuple(module.weight.shape)
            assert layer.zeros == pytest.approx(float((module.weight == 0).double().mean()))
            assert layer.native[-1] == "SparseLayer"
            assert layer.seconds is layer.dense_seconds is None
    assert found["left"].native == ("SplitPhases", "SparseLayer")  # the phases of the input are part of the layer
    assert found["stem"].kernel == "sparse"


def test_a_saved_engine_keeps_the_names_of_layers(tmp_path: Path) -> None:
    engine = runtime.compile(pruned(Residual()), X, threads=1)
    engine.save(tmp_path / "model.gossamer")
    loaded = runtime.load(tmp_path / "model.gossamer", threads=1)
    for one, other in zip(loaded.layers(), engine.layers(), strict=True):
        assert (one.name, one.weight, one.shape, one.native) == (other.name, other.weight, other.shape, other.native)
    assert loaded.times is None
    assert "Nothing was measured" in loaded.summary()


def test_times_of_operators_add_up_to_those_of_the_whole_network() -> None:
    engine = runtime.compile(pruned(Residual()), X, threads=1, tuned=False)
    times = engine.measure(X)
    found = engine.layers()
    assert times is engine.times
    assert all(layer.seconds is not None and layer.seconds > 0 for layer in found)
    assert sum(layer.dense_seconds or 0.0 for layer in found) == pytest.approx(sum(times.dense.values()))
    assert 0.2 < sum(layer.seconds or 0.0 for layer in found) / times.total < 5
    assert 0.2 < sum(times.dense.values()) / times.dense_total <= 1.5


def test_measuring_neither_changes_results_nor_torchs_threads() -> None:
    engine = runtime.compile(pruned(Residual()), X, threads=1, tuned=False)
    before, expected = torch.get_num_threads(), engine(X)
    runtime.Engine(engine._plan, threads=2).measure(X)
    assert torch.get_num_threads() == before
    assert torch.equal(engine(X), expected)


class Unusual(nn.Module):
    """Layers that have no kernel, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Conv2d(3, 4, 3, stride=(1, 2))
        self.line = nn.Conv1d(4, 4, 3)
        self.wide = nn.Linear(13, 5).double()
        self.dense = nn.Linear(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(self.uneven(x).mean(2))
        return self.wide(self.dense(x).double())


def test_layers_that_torch_computes_have_the_reason() -> None:
    found = by_name(runtime.compile(Unusual(), X, threads=1, tuned=False))
    assert {name: found[name].reason for name in ("uneven", "line", "wide", "dense")} == {
        "uneven": "strides 1 and 2 differ",
        "line": "no kernel for conv1d",
        "wide": "float64 is not supported by kernels",
        "dense": "few zeros to skip",
    }
    assert [found[name].kernel for name in ("uneven", "line", "wide")] == ["torch"] * 3
    assert found["dense"].kernel.startswith("dense")


def test_a_single_row_is_matrix_times_vector() -> None:
    model = pruned(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)))
    engine = runtime.compile(model, torch.randn(1, 64), threads=1)
    assert [layer.kernel for layer in engine.layers()] == ["matrix × vector"] * 2
    engine.measure(torch.randn(20, 64))
    assert all(layer.kernel.startswith("sparse") for layer in engine.layers())


def test_the_summary_is_an_aligned_table_with_a_total_and_a_verdict() -> None:
    engine = runtime.compile(pruned(Residual()), X, threads=1)
    summary = engine.summary()
    heading, rule, *lines = summary.splitlines()
    for word in ("layer", "zeros", "computed by", "dense torch, ms", "ratio"):
        assert word in heading
    assert set(rule) == {"─", " "}
    end = heading.index("dense torch, ms") + len("dense torch, ms")
    rows = lines[: lines.index("")]
    assert all(row[end - 1] in "0123456789─ " for row in rows)
    assert any(row.startswith("whole network") for row in rows)
    assert "One call with 2×3×32×32 on 1 thread takes " in summary
    for layer in engine.layers():
        assert layer.weight is None or layer.name in summary


@pytest.mark.parametrize(
    ("dense", "words"), [(2.0, "2.00 times as fast"), (1.01, "nothing is gained"), (0.5, "takes 2.00 times as long")]
)
def test_the_verdict_compares_whole_calls(dense: float, words: str) -> None:
    assert words in layers.Times(1, [(1, 8)], {}, [], {}, 1.0, dense).verdict()


def test_compile_says_when_nothing_is_gained(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, measured = pruned(Residual()), runtime.Engine._measure
    for factor, count in ((0.5, 1), (100.0, 0)):

        def measure(engine: runtime.Engine, leaves: object, _: float, factor: float = factor) -> layers.Times:
            times = measured(engine, leaves)  # pyright: ignore[reportArgumentType]
            return layers.Times(1, [], {}, times.steps, times.dense, times.total, factor * times.total)

        monkeypatch.setattr(runtime.Engine, "_measure", measure)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gossamer"):
            runtime.compile(model, X, threads=1)
        assert sum("nothing is gained" in record.getMessage() for record in caplog.records) == count


def test_progress_names_the_layers_and_ends_at_1() -> None:
    seen: list[tuple[str, float]] = []
    runtime.compile(pruned(Residual()), X, threads=1, progress=lambda label, share: seen.append((label, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert seen[0] == ("tracing the model", 0.0)
    assert shares[-1] == 1.0
    assert sum("measuring" in label for label, _ in seen) == 5
