"""A proposed allocation: its totals, what it leaves alone, what it keeps, and the recipe it writes."""

from __future__ import annotations

import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer import GossamerError, Manager, load
from gossamer.analysis.accuracy import Labelled, Score, classifier_score
from gossamer.analysis.proposal import Proposal, halves, known_allocations, propose
from gossamer.model import get_parameter, prunable
from gossamer.sparse.masks import smallest
from tests.analysis.labelled_digits import Batches, parts, trained

TRAINING, CALIBRATION, TEST = parts()


def sizes(model: nn.Module) -> dict[str, int]:
    return {name: get_parameter(model, name).numel() for name in prunable(model)}


@torch.no_grad()
def at_once(model: nn.Module, shares: dict[str, float], batches: Batches) -> Score:
    """A copy pruned by magnitude, batch norm's statistics taken anew on the training part."""
    pruned = deepcopy(model).train()
    for name, share in shares.items():
        weight = get_parameter(pruned, name)
        gone = smallest(weight.abs().reshape(-1), round(share * weight.numel())).reshape(weight.shape)
        weight.masked_fill_(gone, 0)
    for layer in pruned.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    for pixels, _ in TRAINING:
        pruned(pixels)
    return classifier_score(pruned, batches)


@pytest.mark.slow
def test_the_proposal_keeps_far_more_than_uniform_on_digits_it_has_not_seen() -> None:
    model = trained()
    proposal = propose(model, CALIBRATION, 0.95, evaluations=30)
    uniform = dict.fromkeys(proposal.sparsity, 0.95)
    ours, theirs = (at_once(model, shares, TEST).accuracy for shares in (proposal.sparsity, uniform))
    assert ours > theirs + 0.1
    assert proposal.calibration["proposed"].loss < proposal.calibration["uniform"].loss


@pytest.mark.parametrize("target", [0.0, 0.333, 0.97, 0.999])
def test_the_zeros_add_up_exactly(target: float) -> None:
    model = trained()
    proposal = propose(model, CALIBRATION[:1], target, evaluations=8)
    counts = {name: share * sizes(model)[name] for name, share in proposal.sparsity.items()}
    assert list(counts) == prunable(model)
    assert all(count == pytest.approx(round(count), abs=1e-6) for count in counts.values())
    assert round(sum(counts.values())) == round(sum(sizes(model).values()) * target)
    assert all(0 <= share <= 1 for share in proposal.sparsity.values())


def test_only_the_named_weights_share_the_zeros() -> None:
    model = trained()
    proposal = propose(model, CALIBRATION[:1], 0.8, names=["second.weight", "first.weight"], evaluations=8)
    assert list(proposal.sparsity) == ["second.weight", "first.weight"]
    assert round(4608 * sum(proposal.sparsity.values())) == round(9216 * 0.8)


def test_the_model_and_all_random_states_are_left_as_they_were() -> None:
    model = trained()
    model.head.weight.requires_grad_(False)
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    momenta = [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    propose(model, CALIBRATION[:1], 0.9, evaluations=6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)] == momenta
    assert all(layer.training for layer in model.modules())
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == ["head.weight"]
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == ["stem.weight"]
    assert torch.equal(model.stem.weight.grad, torch.ones_like(model.stem.weight))
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda counts: sum(counts) >= 4))
def test_no_sample_both_trains_and_judges_and_the_halves_are_equal(counts: list[int]) -> None:
    samples = torch.arange(sum(counts))
    scale = torch.tensor(2.0)  # no samples in it: handed on as it is
    batches = [Labelled((part.float(),), {"scale": scale}, part) for part in samples.split(counts)]
    first, second = halves(batches)
    trained_on, judged = (torch.cat([batch.labels for batch in half]) for half in (first, second))
    assert torch.equal(torch.cat([trained_on, judged]), samples)
    assert len(trained_on) - len(judged) == len(samples) % 2
    for batch in [*first, *second]:
        assert torch.equal(batch.args[0], batch.labels.float())
        assert batch.kwargs["scale"] is scale


def test_a_single_batch_is_judged_by_its_second_half() -> None:
    pixels, labels = CALIBRATION[0]
    one, two = [(pixels, labels)], list(zip(pixels.split(32), labels.split(32), strict=True))
    found = propose(trained(), one, 0.9, evaluations=5)
    assert found == propose(trained(), two, 0.9, evaluations=5)
    assert found.judged == 32


def test_samples_too_few_for_two_halves_are_refused() -> None:
    pixels, labels = CALIBRATION[0]
    with pytest.raises(GossamerError, match=r"tests on the other, at least 2 each; found 2 in 1 batch;"):
        propose(trained(), [(pixels[:2], labels[:2])], 0.9)


def test_a_last_batch_of_one_sample_does_no_harm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    pixels, labels = CALIBRATION[1]
    propose(model, [CALIBRATION[0], (pixels[:1], labels[:1])], 0.5, evaluations=4)


def test_evaluations_are_bounded_and_progress_is_reported() -> None:
    seen: list[tuple[str, float]] = []
    propose(trained(), CALIBRATION[:1], 0.9, evaluations=9, progress=lambda label, share: seen.append((label, share)))
    assert [label for label, _ in seen[:4]] == ["uniform", "erk", "global", "lamp"]
    assert (len(seen), seen[-1]) == (10, ("", 1.0))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.floats(0, 0.999),
    st.integers(0, 100),
)
@settings(max_examples=40)
def test_known_allocations_have_one_total_and_no_layer_loses_more_than_it_has(
    shapes: list[tuple[int, int]], target: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weights: dict[str, Tensor] = {str(index): torch.randn(shape) for index, shape in enumerate(shapes)}
    total = round(sum(weight.numel() for weight in weights.values()) * target)
    for counts in known_allocations(weights, target).values():
        assert sum(counts.values()) == total
        assert all(0 <= count <= weights[name].numel() for name, count in counts.items())


def test_lamp_spares_the_last_weight_of_every_layer() -> None:
    torch.manual_seed(0)
    weights = {"large": torch.randn(100, 10) * 100, "tiny": torch.randn(10, 10) / 100}
    found = known_allocations(weights, 0.99)
    assert found["global"]["tiny"] == 100
    assert found["lamp"]["tiny"] < 100


def test_the_recipe_trains_to_exactly_the_proposed_zeros() -> None:
    model = trained()
    proposal = propose(model, CALIBRATION[:1], 0.9, evaluations=8)
    text = proposal.to_recipe(2)
    assert load(text).max_epochs == 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = Manager(text)
    manager.modify(model, optimizer, len(TRAINING))
    for _ in range(2):
        for pixels, labels in TRAINING:
            optimizer.zero_grad()
            cross_entropy(model(pixels), labels).backward()
            optimizer.step()
    manager.finalize()
    for name, size in sizes(model).items():
        zeros = size - int(get_parameter(model, name).count_nonzero())
        assert zeros == round(proposal.sparsity[name] * size)


def test_layers_of_one_sparsity_stand_in_one_line_and_dense_ones_are_left_out() -> None:
    text = Proposal(0.5, {"a.weight": 0.5, "b.weight": 0.75, "c.weight": 0.5, "d.weight": 0.0}, {}).to_recipe(10)
    pruning = load(text).modifiers[1].model_dump()
    assert pruning["final_sparsity"] == {0.5: ["a.weight", "c.weight"], 0.75: ["b.weight"]}
    assert pruning["end_epoch"] == 5


@pytest.mark.parametrize(("epochs", "until"), [(0, None), (2, 3), (math.inf, None), (2, 0)])
def test_epochs_that_make_no_recipe_are_refused(epochs: float, until: float | None) -> None:
    with pytest.raises(GossamerError, match="to_recipe: expected 0 < prune_until <= epochs"):
        Proposal(0.5, {"a.weight": 0.5}, {}).to_recipe(epochs, prune_until=until)
    with pytest.raises(GossamerError, match="prunes no weight"):
        Proposal(0.0, {"a.weight": 0.0}, {}).to_recipe(2)


def test_bad_questions_are_refused() -> None:
    with pytest.raises(GossamerError, match="target must be at least 0 and below 1, found 1"):
        propose(trained(), CALIBRATION, 1.0)
    with pytest.raises(GossamerError, match="evaluations must be at least 1, found 0"):
        propose(trained(), CALIBRATION, 0.9, evaluations=0)
    with pytest.raises(GossamerError, match="without such labels, use sensitivity"):
        propose(trained(), [pixels for pixels, _ in CALIBRATION], 0.9)
    with pytest.raises(GossamerError, match=r"no weight 'frist.weight'; nearest: 'first.weight'"):
        propose(trained(), CALIBRATION, 0.9, names=["frist.weight"])
