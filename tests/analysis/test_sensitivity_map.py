"""Which layers matter: by labels and by outputs, on networks of which the answer is known."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gossamer.analysis.sensitivity import LEVELS, UNCOUPLED, SensitivityMap, first_samples, has_labels, sensitivity_map


def network() -> nn.Sequential:
    """Tells which of four numbers is largest; its first layer has ten times the rows that it needs."""
    wide = nn.Linear(4, 40, bias=False)
    narrow = nn.Linear(40, 4, bias=False)
    with torch.no_grad():
        wide.weight.copy_(torch.eye(4).repeat(10, 1) + 0.001)
        narrow.weight.copy_(torch.eye(4).repeat(1, 10) + 0.001)
        narrow.weight[3] *= 30  # one class hangs on large weights: the others go first
    return nn.Sequential(wide, narrow)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
    return [(part, network()(part).argmax(dim=1)) for part in inputs.split(16)]


def measured() -> SensitivityMap:
    return sensitivity_map(network(), batches(), [0.5, 0.9])


def test_labels_give_the_accuracy_that_each_layer_leaves() -> None:
    found = measured()
    assert (found.by, found.samples, found.dense is not None and found.dense.accuracy) == ("labels", 64, 1.0)
    assert [layer.name for layer in found.layers] == ["0.weight", "1.weight"]
    for layer in found.layers:
        assert layer.accuracy is not None
        assert layer.accuracy[0] >= layer.accuracy[1]


def test_the_layer_whose_pruning_costs_most_comes_first() -> None:
    found = measured()
    means = [sum(layer.harm) / 2 for layer in found.ranked()]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[1]


def test_without_labels_the_outputs_are_compared() -> None:
    found = sensitivity_map(network(), [inputs for inputs, _ in batches()], [0.5, 0.9])
    assert (found.by, found.dense, found.layers[0].accuracy) == ("outputs", None, None)
    assert all(0 <= layer.harm[0] <= layer.harm[1] for layer in found.layers)


def test_a_pattern_that_groups_layers_says_without_labels_that_it_did_not() -> None:
    inputs = [inputs for inputs, _ in batches()]
    assert sensitivity_map(network(), inputs, [0.5], pattern="filter").notes == (UNCOUPLED,)
    assert sensitivity_map(network(), inputs, [0.5]).notes == ()


def test_layers_that_the_pattern_does_not_fit_are_reported_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    found = sensitivity_map(model, batches(), pattern="2:4")
    assert [layer.name for layer in found.layers] == ["0.weight"]
    assert found.skipped == {"1.weight": "6 input channels do not divide by 4"}
    assert found.to_json()["skipped"] == found.skipped


@pytest.mark.parametrize(("pattern", "levels"), [("2:4", (0.25, 0.5)), ("1:4", (0.375, 0.75)), ("channel", LEVELS)])
def test_an_n_of_m_pattern_is_measured_up_to_its_own_sparsity(pattern: str, levels: tuple[float, ...]) -> None:
    assert sensitivity_map(network(), batches(), pattern=pattern).sparsities == levels


def test_only_as_many_batches_are_read_as_hold_the_samples() -> None:
    assert len(first_samples(batches(), 17)) == 2
    assert len(first_samples(batches(), 1000)) == 4


def test_labels_are_whole_numbers_beside_the_inputs() -> None:
    inputs, labels = batches()[0]
    assert has_labels([(inputs, labels)])
    assert not has_labels([inputs])
    assert not has_labels([(inputs, labels.float())])
    assert not has_labels([(inputs, inputs, labels)])
    assert not has_labels([])


def test_json_has_no_number_that_json_lacks() -> None:
    model = network()
    model[1].weight.data *= 1e38
    found = sensitivity_map(model, batches(), [0.5])
    json.dumps(found.to_json(), allow_nan=False)
