"""The text of a recipe: for people, with reasons, and to be changed later."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import gossamer as sparsify
from gossamer import GossamerError, Manager
from gossamer.create.text import name_patterns
from gossamer.model import match
from tests.create.digits import MIDDLE, batches, network, trained, zeros


class Blocks(nn.Module):
    """Names as residual networks have them: norms between convolutions, and one layer that differs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(12)]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean(dim=(2, 3)))


def test_many_names_become_one_pattern() -> None:
    recipe = sparsify.create.recipe_for(Blocks(), quantization=False)
    (pruning,) = [modifier for modifier in recipe.modifiers if modifier.family == "pruning"]
    assert pruning.params == [r"re:layers\.\d+\.0\.weight$"]


@pytest.mark.parametrize("left_out", [(), (3,), tuple(range(2, 12))])
def test_tidy_names_say_exactly_the_same(left_out: tuple[int, ...]) -> None:
    model = Blocks()
    names = [f"layers.{n}.0.weight" for n in range(12) if n not in left_out]
    found = name_patterns(names, model)
    assert match(model, found) == names
    assert len(found) == (len(names) if left_out else 1)


def test_every_layer_has_its_reason_in_a_comment() -> None:
    for arguments in (
        {},
        {"recipe_variables": {"global_sparsity": False}},
        {"recipe_variables": {"target": "tensorrt"}},
    ):
        text = sparsify.create.recipe_for(network(), **arguments).text
        comments = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
        rows = re.findall(r"^ +[\d.]+: \[(.*)\]", text, re.MULTILINE)
        params = re.findall(r"^ +params: \[(.*)\]", text, re.MULTILINE)
        for name in ("0.weight", *MIDDLE, "11.weight"):
            assert name in comments or any(name in line for line in (*rows, *params)), name
        assert "0.weight: left dense (" in comments
        assert "11.weight: left dense (the head" in comments


def test_the_sparsity_can_be_changed_later() -> None:
    recipe = sparsify.create.recipe_for(network(), quantization=False)
    for sparsity in (0.5, 0.95):
        model = network()
        Manager(recipe.with_variables(sparsity=sparsity)).apply(model)
        assert zeros(model)[0] == round(zeros(model)[1] * sparsity)


def test_a_sparsity_beyond_the_measured_bounds_is_refused_with_the_numbers() -> None:
    model = trained()
    recipe = sparsify.create.recipe_for(model, quantization=False, data=batches(0))
    with pytest.raises(GossamerError, match=r"max_layer_sparsity: sparsity 0\.99 is out of reach"):
        Manager(recipe.with_variables(sparsity=0.99)).apply(model)


@pytest.mark.parametrize("pruning", ["acdc", "rigl", "probmask", "levels"])
def test_every_method_ends_at_the_sparsity_asked_for(pruning: str) -> None:
    model = network()
    recipe = sparsify.create.recipe_for(model, pruning, False, recipe_variables={"sparsity": 0.65})
    Manager(recipe).apply(model)
    assert zeros(model)[0] == round(zeros(model)[1] * 0.65)


def test_what_adapted_stands_in_the_head() -> None:
    text = sparsify.create.recipe_for(network(), recipe_variables={"target": "tensorrt"}).text
    assert "# Adapted: mask_type is 2:4, for target tensorrt." in text
    assert "# Adapted: sparsity is 0.5, the pattern's own." in text
    assert "Adapted" not in sparsify.create.recipe_for(network()).text


@pytest.mark.parametrize("units", ["filter", "channel"])
def test_where_whole_units_go_the_sparsity_is_reported_as_their_share(units: str) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    text = sparsify.create.recipe_for(model, quantization=False, recipe_variables={"mask_type": units}).text
    assert f"prune 50 % of {units}s (magnitude, {units})" in text
    assert f"# the share of {units}s removed from the pruned layers" in text
