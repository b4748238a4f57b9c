"""Transformers' `Conv1D`, a linear layer whose weight is `(in, out)`, and heads that share an embedding's weight."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gossamer.analysis.hardware import layers_of
from gossamer.asp import ASP
from gossamer.export import save
from gossamer.export.load import load
from gossamer.model import prunable
from gossamer.model.counting import macs
from gossamer.sparse import NM
from tests.odd_models.architectures import built
from tests.odd_models.front_ends import optimizer_of, step

TOKENS = {"input_ids": torch.arange(16).reshape(2, 8)}


class Conv1D(nn.Module):
    """As in GPT-2's code, which many projects carry a copy of."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_gpt2_is_made_2_4_along_the_inputs_of_every_conv1d(tmp_path: Path) -> None:
    model, _ = built("gpt2")
    table = model.transformer.wte.weight.detach().clone()
    optimizer = optimizer_of(model)
    ASP.prune_trained_model(model, optimizer, example_inputs=TOKENS, effort=0.1)
    for _ in range(3):
        step(model, optimizer, TOKENS)
    layers = ASP.layers(model)
    pruned = [name for name, reason in layers.items() if reason is None]
    assert pruned == [
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    for name in pruned:
        weight = model.get_parameter(name)
        assert NM(2, 4).violations(weight.T) == 0
        assert int((weight == 0).sum()) * 2 == weight.numel()
    assert layers["transformer.wte.weight"] == (
        "shared with an embedding, of which each row is a token; name its layer in allowed_layer_names to prune it"
    )
    assert torch.count_nonzero(model.lm_head.weight) == table.numel()
    written = save(model, tmp_path / "model.safetensors", "sparse24")
    assert written.zeros == sum(model.get_parameter(name).numel() for name in pruned) // 2
    other, _ = built("gpt2")
    load(tmp_path / "model.safetensors", other)
    assert torch.equal(other.eval()(**TOKENS).logits, model.eval()(**TOKENS).logits)
    assert other.lm_head.weight is other.transformer.wte.weight
    ASP.forget(model)


def test_a_tied_head_is_pruned_when_its_layer_is_named() -> None:
    model, _ = built("tied_embedding")
    ASP.init_model_for_pruning(model, verbosity=0, allowed_layer_names=["out"], allow_permutation=False)
    ASP.compute_sparse_masks(model)
    assert NM(2, 4).violations(model.out.weight.detach()) == 0
    assert model.out.weight is model.words.weight
    ASP.forget(model)


def test_conv1d_has_its_outputs_first_in_analysis() -> None:
    model = nn.Sequential(Conv1D(64, 32), nn.GELU(), Conv1D(16, 64))
    assert prunable(model) == ["0.weight", "2.weight"]
    assert [(layer.kind, layer.shape) for layer in layers_of(model, torch.randn(2, 32))] == [
        ("linear", (64, 32)),
        ("linear", (16, 64)),
    ]
    assert macs(model, torch.randn(2, 32)) == {"0.weight": 2 * 64 * 32, "2.weight": 2 * 16 * 64}


def test_a_class_that_only_has_the_name_of_conv1d_is_no_linear_layer() -> None:
    other = type("Conv1D", (nn.Conv1d,), {})(4, 8, 3)
    assert prunable(nn.Sequential(other)) == ["0.weight"]
    strange = type("Conv1D", (nn.Module,), {})()
    strange.weight = nn.Parameter(torch.randn(4))
    assert prunable(nn.Sequential(strange)) == []
