"""Engines share no memory with the model or with their callers, and keep little from call to call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import runtime
from gossamer.runtime import program
from tests.runtime.models import pruned


class Positions(nn.Module):
    """Adds positions, which depend on the number of tokens only, and returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.layer = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(ids.shape[1])
        x = self.embedding(ids) + positions.unsqueeze(1) / 10
        return self.layer(self.norm(x)), positions.unsqueeze(0)


def test_callers_may_change_outputs() -> None:
    model, ids = pruned(Positions()), torch.randint(20, (2, 7))
    engine = runtime.compile(model, ids, threads=1, tuned=False)
    expected = [value.clone() for value in engine(ids)]
    for _ in range(3):
        found = engine(ids)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
            one.numpy()[:] = 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_to_the_model_do_not_change_the_engine(dtype: torch.dtype) -> None:
    model, ids = pruned(Positions()), torch.randint(20, (2, 7))
    engine = runtime.compile(model, ids, threads=1, tuned=False, weight_dtype=dtype)
    expected = engine(ids)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert torch.equal(engine(ids)[0], expected)
    assert torch.equal(engine(ids[:, :5])[0], expected[:, :5])


def test_parameters_with_strides_are_read_as_they_are() -> None:
    model = pruned(nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64)))
    norm: Any = model[1]
    norm.weight, norm.bias = nn.Parameter(torch.randn(64, 2)[:, 0]), nn.Parameter(torch.ones(1).expand(64))
    x = torch.randn(3, 20, 8)
    engine = runtime.compile(model, x, threads=1, tuned=False)
    with torch.inference_mode():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


def test_sizes_that_depend_on_values_are_computed_in_every_call() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() / x[x.sum(1) > 0].shape[0]

    x = torch.ones(4, 3)
    engine = runtime.compile(Chosen().eval(), x, threads=1, tuned=False)
    assert float(engine(x)) == 3
    x[0] = -1
    assert float(engine(x)) == 2


def test_a_tied_embedding_is_read_as_a_tensor_beside_weights_in_bfloat16() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids).relu())

    model, ids = Tied().eval(), torch.randint(40, (2, 7))
    engine = runtime.compile(model, ids, threads=1, tuned=False, weight_dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(engine(ids), model(ids), rtol=2e-2, atol=2e-2)


def test_views_with_the_negative_bit_are_inputs() -> None:
    model = pruned(nn.Linear(8, 5))
    x = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    with torch.inference_mode():
        engine = runtime.compile(model, torch.randn(2, 8), threads=1, tuned=False)
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_is_kept_for_each_size_is_small() -> None:
    class Computed(nn.Module):
        """Its weight depends on constants only, and is as large."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(600, 600))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.softmax(1)

    model = Computed().eval()
    engine = runtime.compile(model, torch.randn(2, 600), threads=1, tuned=False)
    for batch in (1, 2, 3):
        x = torch.randn(batch, 600)
        with torch.inference_mode():
            torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(binding.known is None for binding in engine._bindings.values())


def test_a_thread_that_cannot_be_started_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = pruned(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())), torch.randn(2, 3, 9, 9)
    engine = runtime.compile(model, x, threads=1, tuned=False)
    expected = engine(x)

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(program, "_Helper", fail)
    monkeypatch.setattr(program, "_pools", {})
    engine.threads = 3
    assert torch.equal(engine(x), expected)
