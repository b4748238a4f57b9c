"""Layers that stay dense: the same ones in `layers`, in the analysis, in training and after export."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.msbench import BaseScheduler
from tests.loops import zeros
from tests.msbench.configs import admm, levels, prepared, probmask, str_config


class Stem(nn.Module):
    """Names in which one is part of another; a grouped and a depth-wise convolution among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.weighted = nn.Linear(8, 8)
        self.conv2_head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.block(self.norm(self.conv(x))))
        return self.conv2_head(self.weighted(x.mean((2, 3))))


ALL = {"conv", "block.0", "depthwise", "weighted", "conv2_head"}
IMAGES = (2, 4, 8, 8)


def expect(scheduler: BaseScheduler, model: nn.Module, pruned: set[str], inputs: Tensor) -> None:
    """Hold every view of the selection against what it should be; all layers start without zeros."""
    assert {name for name, reason in scheduler.layers.items() if reason is None} == pruned
    if hasattr(scheduler, "sparse_analysis"):
        rows = scheduler.sparse_analysis(model).layers
        assert {row.name for row in rows if row.excluded is None} == pruned
        assert {row.name for row in rows if any(row.zeros)} == pruned
        assert {row.name for row in rows} == set(scheduler.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for iteration in range(3):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    scheduler.export_sparse_model(model)
    found = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() > 1 and zeros(p)}
    assert {name.removeprefix("module.") for name in found} == pruned


@pytest.mark.parametrize(
    ("kwargs", "dense"),
    [
        ({"no_prune_keyword": "conv"}, {"conv", "conv2_head"}),
        ({"no_prune_keyword": "head, block"}, {"conv2_head", "block.0"}),
        ({"no_prune_keyword": "weight"}, {"weighted"}),
        ({"no_prune_keyword": "bl.ck"}, set()),
        ({"no_prune_keyword": "module.conv2,"}, {"conv2_head"}),
        ({"no_prune_layer": "conv, block.0"}, {"conv", "block.0"}),
        ({"no_prune_layer": "module.conv2_head"}, {"conv2_head"}),
        ({"no_prune_layer": "norm"}, set()),
        ({"no_prune_keyword": "head", "no_prune_layer": "conv"}, {"conv2_head", "conv"}),
        ({"dw_no_prune": True}, {"depthwise"}),
        ({"no_prune_keyword": " , ,", "no_prune_layer": ""}, set()),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_keywords_are_parts_of_layer_names_and_exact_names_are_whole_ones(kwargs: Any, dense: set[str]) -> None:
    torch.manual_seed(0)
    config = levels(sparsity_table=[50], default_input_shape=list(IMAGES), **kwargs)
    scheduler, model = prepared(config, Stem())
    expect(scheduler, model, ALL - dense, torch.randn(IMAGES))


@pytest.mark.parametrize("config", [str_config(-1.0), probmask(prune_rate=0.5, warmup_iteration_stamps=0), admm()])
def test_other_methods_leave_out_the_same_layers(config: dict[str, Any]) -> None:
    config["scheduler"]["kwargs"].update(no_prune_keyword="conv", no_prune_layer="block.0")
    scheduler, _ = prepared(config, Stem())
    assert {name for name, reason in scheduler.layers.items() if reason is None} == {"depthwise", "weighted"}
    assert all("exclude" in str(scheduler.layers[name]) for name in ("conv", "conv2_head", "block.0"))


def test_a_layer_that_is_really_called_module_is_found_by_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.module(x))

    for kwargs in ({"no_prune_layer": "module.1"}, {"no_prune_keyword": "module.1"}):
        scheduler, _ = prepared(levels(**kwargs), Holder())
        assert {name for name, reason in scheduler.layers.items() if reason is None} == {"module.0", "last"}


def test_a_typo_in_an_exact_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(GossamerError, match=r"no layer 'blok\.0'; nearest: 'block\.0'") as error:
        prepared(levels(no_prune_layer="conv, blok.0"), Stem())
    assert "no_prune_layer" in str(error.value), "the config's own word for it is what the user looks for"


def test_a_keyword_in_no_name_is_reported_and_prunes_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    scheduler, _ = prepared(levels(no_prune_keyword="hed"), Stem())
    assert "hed" in caplog.text
    assert {name for name, reason in scheduler.layers.items() if reason is None} == ALL


def test_excluding_everything_is_an_error() -> None:
    with pytest.raises(GossamerError, match="excludes all"):
        prepared(levels(no_prune_keyword="conv,block,depth,weighted"), Stem())


# Other kinds of layers


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


def encoder() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))


SEQUENCE = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
KINDS: dict[str, tuple[Any, Tensor, set[str]]] = {
    "attention": (Attention, SEQUENCE, {"attention", "attention.out_proj", "head"}),
    "a transformer's layer": (
        encoder,
        SEQUENCE,
        {"0.self_attn", "0.self_attn.out_proj", "0.linear1", "0.linear2"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["levels", "STR", "ProbMask"])
def test_layers_of_every_kind_are_pruned_and_evaluate_as_exported(kind: str, method: str) -> None:
    make, inputs, names = KINDS[kind]
    torch.manual_seed(0)
    original = make()
    config = {
        "levels": levels(sparsity_table=[50], default_input_custom=(inputs,)),
        "STR": str_config(-2.0),
        "ProbMask": probmask(prune_rate=0.5, warmup_iteration_stamps=0, finetune_iteration_stamps=0),
    }[method]
    keys = list(original.state_dict())
    scheduler, model = prepared(config, original)
    assert {name for name, reason in scheduler.layers.items() if reason is None} == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for iteration in range(3):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        before = model(inputs)
    call_after_backward = model(inputs).detach()
    rate = scheduler.compute_sparse_rate(model)
    scheduler.export_sparse_model(model)
    with torch.no_grad():
        after = model(inputs)
    assert torch.allclose(before, after, atol=1e-6)
    assert torch.allclose(before, call_after_backward, atol=1e-6)
    assert scheduler.compute_sparse_rate(model) == rate > 0.05
    assert list(model.state_dict()) == keys
    found = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() > 1 and zeros(p)}
    assert found == names


@pytest.mark.parametrize("method", ["levels", "STR", "ProbMask"])
def test_a_tied_weight_is_pruned_once_and_stays_tied(method: str) -> None:
    torch.manual_seed(0)
    config = {
        "levels": levels(sparsity_table=[50]),
        "STR": str_config(-1.0),
        "ProbMask": probmask(prune_rate=0.5, warmup_iteration_stamps=0, finetune_iteration_stamps=0),
    }[method]
    scheduler, model = prepared(config, Tied())
    assert len(scheduler.names) == 2
    rows = torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for iteration in range(3):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        before = model(rows)
        scheduler.export_sparse_model(model)
        assert torch.allclose(before, model(rows), atol=1e-6)
    assert model.head.weight is model.first.weight
    assert zeros(model.head.weight) > 20


def test_attention_is_left_out_by_its_layers_name() -> None:
    for kwargs in ({"no_prune_keyword": "attention"}, {"no_prune_layer": "attention, attention.out_proj"}):
        scheduler, _ = prepared(levels(**kwargs), Attention())
        assert {name for name, reason in scheduler.layers.items() if reason is None} == {"head"}


def test_all_projections_of_attention_are_set_by_the_layers_name() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.att = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return self.att(x, memory, memory)[0]

    scheduler, model = prepared(levels(), Attending())
    scheduler.update_sparsity_per_layer(model, {"att": 0.5})
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        weight = model.get_parameter(f"att.{name}")
        assert zeros(weight) == weight.numel() // 2
