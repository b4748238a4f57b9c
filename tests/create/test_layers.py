"""Which layers are pruned and how sparse each becomes: by position, shape, size and measurement."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer as sparsify
from gossamer import GossamerError, Manager
from gossamer.create.choices import choose
from gossamer.create.generator import design
from gossamer.create.layers import LayerPlan, plan_layers
from gossamer.model.tracing.flow import ends
from gossamer.sparse import parse_pattern
from tests.create.digits import FIRST, HEAD, MIDDLE, batches, trained


class Mobile(nn.Module):
    """A head that is defined first, a depth-wise convolution, a tiny layer and two that can be pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.stem = nn.Conv2d(3, 32, 3)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.pointwise = nn.Conv2d(32, 64, 1)
        self.wide = nn.Conv2d(64, 64, 3)
        self.tiny = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.pointwise(self.depthwise(self.stem(x).relu()).relu()).relu()).relu()
        return self.head(x.mean(dim=(2, 3)) + self.tiny(x.new_ones(1, 2)).sum())


def planned(model: nn.Module, data: Any = None, example: Any = None, **arguments: Any) -> dict[str, LayerPlan]:
    return {layer.name: layer for layer in plan_layers(model, choose(**arguments), ends(model, example), data)}


def test_the_ends_of_the_network_depth_wise_and_tiny_layers_stay_dense() -> None:
    found = planned(Mobile())
    assert {name for name, layer in found.items() if layer.takes_part} == {"pointwise.weight", "wide.weight"}
    assert found["stem.weight"].why.startswith("the first convolution")
    assert found["head.weight"].why.startswith("the head")
    assert found["depthwise.weight"].why.startswith("depthwise")
    assert found["tiny.weight"].why == "tiny: 4 weights"


def test_the_order_is_that_of_the_forward_pass_and_without_one_that_of_definition() -> None:
    found = ends(Mobile())
    assert (found.first, found.last) == ({"stem.weight"}, {"head.weight"})

    class TwoInputs(Mobile):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    assert ends(TwoInputs()).last == {"tiny.weight"}
    images = torch.zeros(1, 3, 16, 16)
    assert ends(TwoInputs(), (images, images)).last == {"head.weight"}


def test_every_head_and_every_first_convolution_counts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, padding=1)
            self.body = nn.Conv2d(8, 8, 1)
            self.boxes, self.classes = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> dict[str, Any]:
            x = self.body(self.left(x) + self.right(x))
            return {"boxes": self.boxes(x), "rest": (self.classes(x),)}

    found = ends(Two())
    assert found.first == {"left.weight", "right.weight"}
    assert found.last == {"boxes.weight", "classes.weight"}


def test_a_detector_whose_path_depends_on_values_shows_its_heads_before_that() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.boxes = nn.Conv2d(16, 4, 1)
            self.body, self.classes = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 2, 1)
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            boxes, scores = self.boxes(x), self.classes(x).softmax(dim=1)
            found = boxes.permute(0, 2, 3, 1)[scores[:, 0] > 0.5]
            return self.last(found)

    found = ends(Detector())
    assert found.first == {"body.weight"}
    assert found.last == {"boxes.weight", "classes.weight", "last.weight"}


def test_what_follows_a_choice_by_values_is_found_on_real_ones() -> None:
    class TwoStages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.proposals = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 1, 1)
            self.classes, self.fine = nn.Linear(64, 40), nn.Linear(64, 64)
            self.rare, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.body(x)
            order = self.proposals(x).flatten(1).max(dim=1).values
            x = x.mean(dim=(2, 3))
            if float(order.sum()) > 1e9:
                return self.rare(x), self.last(x)
            x = self.fine(x)
            return self.classes(x), self.last(x)

    arguments: dict[str, Any] = {"pruning": "structured", "quantization": False}
    found = ends(TwoStages())
    assert found.last == {"proposals.weight", "classes.weight", "last.weight"}
    assert (found.unreached, found.followed) == ({"rare.weight"}, "by values")
    made = design(TwoStages(), choose(**arguments))
    assert [layer.name for layer in made.layers if layer.takes_part] == ["fine.weight"]
    assert "Note: the model has data-dependent control flow" in made.recipe.text
    assert "layers that were not reached (1) are left dense" in made.warnings[0].message


def test_a_model_that_cannot_be_traced_is_reported_with_the_fix() -> None:
    class TwoInputs(Mobile):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    made = design(TwoInputs(), choose(quantization=False))
    assert "could not be traced" in made.warnings[0].message
    assert made.warnings[0].key == ("example_inputs",)
    images = torch.zeros(1, 3, 16, 16)
    assert design(TwoInputs(), choose(quantization=False), example_inputs=(images, images)).warnings == ()


def test_a_head_for_training_alone_is_left_dense_and_not_counted() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.more = nn.Linear(32, 64), nn.Linear(64, 64)
            self.aux, self.head = nn.Linear(64, 4000), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.body(x)
            y = self.head(self.more(x))
            return (y, self.aux(x)) if self.training else y

    for arguments in ({}, {"pruning": "structured"}):
        made = design(Auxiliary(), choose(quantization=False, **arguments))
        (aux,) = [layer for layer in made.layers if layer.name == "aux.weight"]
        assert not aux.takes_part
        assert "it does not run in evaluation mode" in aux.why
        assert "Prunes 2 of 3 layers, with 6,144 weights (96 % of all)" in made.recipe.text
        assert made.warnings == ()


def test_a_head_that_shares_its_weight_with_an_embedding_stays_dense() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.words(x)).relu())

    found = planned(Words())
    assert [name for name, layer in found.items() if layer.takes_part] == ["body.weight"]
    assert found["words.weight"].why.startswith("shared with an embedding")


def test_looking_leaves_no_trace() -> None:
    @functools.cache
    def positions(count: int) -> Tensor:
        return torch.arange(count).float()

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(self.layer(x)) + positions(4)

    model = Caches()
    model.layer.requires_grad_(False)
    assert "stores tensors outside the model" in (ends(model).reason or "")
    positions.cache_clear()
    positions(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    ends(model)
    assert (model.calls, model.training) == (0, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert type(model(torch.ones(2, 4)).detach()) is Tensor


def test_a_layer_that_the_pattern_does_not_fit_stays_dense_with_the_reason() -> None:
    model = nn.Sequential()
    model.add_module("even", nn.Linear(32, 30))
    model.add_module("odd", nn.Linear(30, 32))
    model.add_module("head", nn.Linear(32, 32))
    found = planned(model, recipe_variables={"mask_type": "block4"})
    assert found["odd.weight"].why == "mask_type block4 does not fit: 30 input channels do not divide by 4"
    assert [layer.takes_part for layer in found.values()] == [True, False, False]


def test_for_tensorrt_layers_that_hardware_cannot_run_stay_dense() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 20), nn.Linear(20, 64), nn.Linear(64, 10))
    found = planned(model, recipe_variables={"target": "tensorrt"})
    assert [name for name, layer in found.items() if layer.takes_part] == ["0.weight"]
    assert "sparse tensor cores cannot run it: 20 output channels" in found["1.weight"].why


def test_a_single_layer_takes_part_though_it_is_the_head() -> None:
    found = planned(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert found["1.weight"].takes_part


def test_a_head_with_most_of_the_weights_takes_part() -> None:
    found = planned(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1000)))
    assert [layer.takes_part for layer in found.values()] == [True, True]


@pytest.mark.parametrize("measured", [True, False])
def test_where_whole_filters_go_the_head_keeps_all_of_them(measured: bool) -> None:
    model = trained()
    data = batches(0) if measured else None
    found = planned(model, data, recipe_variables={"mask_type": "filter"})
    assert found[HEAD].why == "the head: each of its filters is an output"
    assert not found[HEAD].takes_part
    with pytest.raises(
        GossamerError, match="no layer of the model can be pruned: 'weight': the head: each of its filters"
    ):
        planned(nn.Linear(64, 10), recipe_variables={"mask_type": "filter"})


def test_frozen_layers_are_left_out_where_gradients_rank() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    model[1].requires_grad_(False)
    assert planned(model)["1.weight"].takes_part
    assert planned(model, pruning="movement")["1.weight"].why == "frozen, and movement ranks by gradients"


def test_no_layer_that_fits_is_an_error_that_says_what_to_drop() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with pytest.raises(GossamerError, match=r"mask_type 2:4 does not fit: 5 input channels.*drop target or mask_type"):
        planned(model, recipe_variables={"target": "tensorrt"})


@pytest.mark.parametrize("pruning", [True, "constant", None])
def test_a_model_without_layers_is_refused(pruning: Any) -> None:
    with pytest.raises(GossamerError, match="the model has no convolution or linear layer to prune or quantize"):
        sparsify.create.recipe_for(nn.Sequential(nn.ReLU()), pruning)


# Shares


widths = st.lists(st.integers(1, 12).map(lambda n: 4 * n), min_size=3, max_size=6)


@settings(max_examples=40)
@given(widths, st.floats(0.2, 0.9), st.sampled_from(["unstructured", "block4"]))
def test_shares_by_size_add_up_exactly_in_the_recipe_as_it_is_written(
    channels: list[int], sparsity: float, mask_type: str
) -> None:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(channels)]
    model = nn.Sequential(nn.Linear(4, channels[0]), *layers, nn.Linear(channels[-1], 2))
    variables = {"sparsity": sparsity, "mask_type": mask_type, "global_sparsity": False}
    made = design(model, choose(quantization=False, recipe_variables=variables))
    taking = [layer for layer in made.layers if layer.takes_part]
    units = 1 if mask_type == "unstructured" else 4
    expected = round(sum(layer.weights // units for layer in taking) * sparsity) * units
    manager = Manager(made.recipe)
    manager.apply(model)
    zeros = sum(int((model.get_parameter(layer.name) == 0).sum()) for layer in taking)
    assert zeros == expected
    assert all(int((model.get_parameter(layer.name) != 0).sum()) > 0 for layer in taking)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("pruning", ["magnitude", "acdc", "rigl"])
def test_with_data_the_layers_that_move_the_outputs_more_give_less_and_the_total_is_exact(
    pruning: str, wide: bool
) -> None:
    model = trained()
    variables = {} if pruning == "rigl" else {"global_sparsity": wide}
    arguments = {"pruning": pruning, "quantization": False, "recipe_variables": variables}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = design(model, choose(**arguments), batches(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    found = {layer.name: layer for layer in made.layers}
    moved = {name: layer.moved for name, layer in found.items()}
    assert all(value is not None and value > 0 for value in moved.values())
    gives = {name: layer.bound if layer.sparsity is None else layer.sparsity for name, layer in found.items()}
    fragile, robust = sorted(MIDDLE, key=lambda name: -moved[name])
    assert gives[fragile] < gives[robust]
    assert max(gives[FIRST], gives[HEAD]) <= 0.4, "the ends give at most half of what is asked for"
    assert "the first convolution, less sparse" in made.recipe.text
    Manager(made.recipe).apply(model)
    weights = [model.get_parameter(layer.name) for layer in made.layers if layer.takes_part]
    assert sum(int((w == 0).sum()) for w in weights) == round(sum(w.numel() for w in weights) * 0.8)


def test_one_threshold_takes_exactly_the_total_and_spares_every_layer_a_rest() -> None:
    model = Mobile()
    with torch.no_grad():
        model.pointwise.weight.mul_(1e-4)  # by magnitude alone, this layer would lose everything
    Manager(sparsify.create.recipe_for(model, quantization=False, recipe_variables={"sparsity": 0.9})).apply(model)
    pointwise, wide = model.pointwise.weight, model.wide.weight
    total = pointwise.numel() + wide.numel()
    assert int((pointwise == 0).sum()) + int((wide == 0).sum()) == round(total * 0.9)
    assert int((pointwise == 0).sum()) == math.floor(pointwise.numel() * 0.975)
    assert parse_pattern("unstructured").violations(wide) == 0
