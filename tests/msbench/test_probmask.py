"""ProbMask: probabilities within a budget, one mask without chance for evaluation, the user's randomness untouched."""

from __future__ import annotations

import pickle
import random
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import gossamer
from gossamer.errors import SparsityError
from gossamer.msbench import BaseScheduler
from gossamer.msbench.sparsers import ProbMaskFakeSparse, nodes
from tests.loops import PRUNABLE, batch, loss_at, network, sgd, through_disk, zeros
from tests.msbench.configs import (
    POSITIONS,
    TOTAL,
    Position,
    accuracy,
    digit_loss,
    loop,
    prepared,
    probmask,
    trained_digit_net,
)

WEIGHTS = 288 + 576 + 320
START, END = 2, 8


def probabilities(model: nn.Module) -> Tensor:
    scores = [node.scores.detach().flatten() for node in nodes(model).values() if isinstance(node, ProbMaskFakeSparse)]
    return torch.cat(scores)


def rate_at(iteration: int) -> float:
    """0 before the warm-up is over, then the cubic ramp to 0.8."""
    if iteration < START:
        return 0.0
    share = min((iteration - START) / (END - START), 1.0)
    return 0.8 * (1 - (1 - share) ** 3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("make", [sgd, adam])
def test_the_sum_of_probabilities_is_within_the_budget_after_every_step(position: Position, make: Any) -> None:
    scheduler, model = prepared(probmask())

    def look(iteration: int) -> None:
        p = probabilities(model)
        assert float(p.min()) >= 0
        assert float(p.max()) <= 1
        budget = (1 - rate_at(iteration)) * WEIGHTS
        assert float(p.double().sum()) <= budget
        if budget < 0.4 * WEIGHTS:  # less than what the probabilities sum up to at first
            assert float(p.double().sum()) >= 0.9 * budget

    loop(scheduler, model, make(model), range(TOTAL), position=position, after=look)


def test_the_budget_falls_by_a_cubic_ramp_between_warm_up_and_fine_tuning() -> None:
    scheduler, model = prepared(probmask())
    optimizer = adam(model)
    for iteration in range(TOTAL):
        loop(scheduler, model, optimizer, range(iteration, iteration + 1))
        assert scheduler.compute_sparse_rate(model) == pytest.approx(round(rate_at(iteration) * WEIGHTS) / WEIGHTS)


def test_during_warm_up_the_model_is_the_dense_one() -> None:
    dense = network()
    _, model = prepared(probmask(), deepcopy(dense))
    inputs = batch(0)[0]
    for mode in (True, False):
        assert torch.equal(model.train(mode)(inputs), dense.train(mode)(inputs))


def run(**kwargs: Any) -> tuple[BaseScheduler, nn.Module]:
    scheduler, model = prepared(probmask(**kwargs))
    loop(scheduler, model, adam(model), range(TOTAL))
    return scheduler, model


def test_training_is_by_chance_and_evaluation_is_not() -> None:
    scheduler, model = run()
    inputs = batch(50)[0]
    model.eval()
    assert torch.equal(model(inputs), model(inputs))
    model.train()
    frozen = deepcopy(model)
    first = frozen(inputs)
    scheduler.prune_model(model, TOTAL)
    assert not torch.allclose(model(inputs), first)


def test_a_state_dict_loads_into_a_model_prepared_afresh_and_evaluates_the_same() -> None:
    _, model = run()
    saved = through_disk(model.state_dict())
    inputs = batch(50)[0]
    expected = model.eval()(inputs)
    _, other = prepared(probmask(), network(seed=1))
    other.eval()(inputs)
    other.load_state_dict(saved)
    assert torch.equal(other(inputs), expected)
    assert torch.equal(other(inputs), expected)


def test_the_exported_mask_is_binary_exactly_at_the_budget_and_keeps_the_weights_themselves() -> None:
    scheduler, model = run()
    inputs = batch(50)[0]
    model.eval()
    raw = {name: model.get_parameter(name).detach().clone() for name in PRUNABLE}
    p = probabilities(model)
    expected = model(inputs)
    scheduler.export_sparse_model(model)
    assert torch.equal(model(inputs), expected)
    exported = {name: model.get_parameter(name).detach() for name in PRUNABLE}
    assert sum(zeros(weight) for weight in exported.values()) == round(0.8 * WEIGHTS)
    for name, weight in exported.items():
        assert torch.equal(weight[weight != 0], raw[name][weight != 0])
    kept = torch.cat([(weight != 0).flatten() for weight in exported.values()])
    assert p[kept].min() >= p[~kept].max()
    assert list(model.state_dict()) == list(network().state_dict())
    assert scheduler.compute_sparse_rate(model) == pytest.approx(round(0.8 * WEIGHTS) / WEIGHTS, abs=1e-12)


def test_the_global_random_states_are_untouched() -> None:
    model = network()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    states = (torch.get_rng_state(), random.getstate(), str(np.random.get_state()))
    scheduler, model = prepared(probmask(), model)
    loop(scheduler, model, adam(model), range(TOTAL))
    scheduler.export_sparse_model(model.eval())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]


def test_the_seed_is_the_configs_and_not_the_processes() -> None:
    found = []
    for seed, process in ((0, 1), (0, 2), (1, 1)):
        scheduler, model = prepared(probmask(seed=seed))
        torch.manual_seed(process)
        loop(scheduler, model, adam(model), range(TOTAL))
        found.append(model.get_parameter("3.weight").detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_probabilities_learn_in_both_directions_from_the_border() -> None:
    scheduler, model = prepared(probmask(start_prune_rate=0.5, warmup_iteration_stamps=0))
    scheduler.prune_model(model, 0)
    loss_at(model, 0).backward()
    for node in nodes(model).values():
        assert bool(node.scores.grad.isfinite().all())
        assert bool((node.scores.grad > 0).any())
        assert bool((node.scores.grad < 0).any())


def test_before_anything_is_learned_no_layer_is_wiped_out_in_evaluation() -> None:
    scheduler, model = prepared(probmask(start_prune_rate=0.5, warmup_iteration_stamps=0))
    scheduler.prune_model(model, 0)
    scheduler.export_sparse_model(model)
    for name in PRUNABLE:
        weight = model.get_parameter(name)
        assert 0.2 < zeros(weight) / weight.numel() < 0.8, f"{name}: equal probabilities are no reason to go by index"


def test_an_average_with_its_buffers_evaluates_and_exports_at_the_live_rate() -> None:
    scheduler, model = prepared(probmask())
    average = AveragedModel(model, use_buffers=True)
    loop(scheduler, model, adam(model), range(TOTAL), after=lambda _: average.update_parameters(model))
    inputs = batch(50)[0]
    expected = average.eval()(inputs)
    scheduler.export_sparse_model(average.module)
    assert torch.equal(average(inputs), expected)
    assert sum(zeros(average.module.get_parameter(name)) for name in PRUNABLE) == round(0.8 * WEIGHTS)


def test_a_copy_that_trains_draws_as_the_model_does() -> None:
    scheduler, model = prepared(probmask())
    scheduler.prune_model(model, 4)
    copy = deepcopy(model)
    scheduler.prune_model(model, 5)
    with torch.no_grad():
        for mine, live in zip(copy.parameters(), model.parameters(), strict=True):
            mine.copy_(live)
    inputs = batch(50)[0]
    assert torch.equal(copy(inputs), model(inputs))


def test_a_pickled_model_stands_where_it_was_pickled() -> None:
    scheduler, model = prepared(probmask())
    scheduler.prune_model(model, 5)
    inputs = batch(50)[0]
    expected = model(inputs), model.eval()(inputs)
    stored = pickle.dumps(model.train())
    scheduler.prune_model(model, 9)
    other = pickle.loads(stored)
    for mode, output in zip((False, True), reversed(expected), strict=True):
        assert torch.allclose(other.train(mode)(inputs), output, atol=1e-6)


def test_what_is_saved_of_the_clock_is_exact_and_a_tensor() -> None:
    scheduler, model = prepared(probmask())
    scheduler.prune_model(model, 5)
    saved = through_disk(model.to(torch.bfloat16).state_dict())
    assert all(isinstance(value, Tensor) for value in saved.values())
    tau = 1 - 0.97 * 0.3
    assert saved["3.weight_fake_sparse._extra_state"].tolist() == pytest.approx([rate_at(5), tau, 5], rel=1e-14)
    assert not [name for name, _ in model.named_buffers() if "fake_sparse" in name]


def test_layers_of_one_shape_have_each_their_noise_and_the_same_in_another_process() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        scheduler, model = prepared(probmask(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        scheduler.prune_model(model, 5)
        with torch.no_grad():
            for node in nodes(model).values():
                node.scores.fill_(0.5)
            found.append([node(torch.ones(8, 8)) for node in nodes(model).values()])
    assert not torch.allclose(found[0][0], found[0][1], atol=0.1)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_probabilities_that_diverged_are_refused() -> None:
    scheduler, model = prepared(probmask())
    with torch.no_grad():
        nodes(model)["3.weight"].scores[0, 0] = float("nan")
    with pytest.raises(SparsityError, match="training diverged"):
        scheduler.prune_model(model, 5)


# torch looks at the substitute's .grad while it compiles, and hides the warning of that where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_trains_the_same_in_two_graphs_without_breaks() -> None:
    found = []
    for compiled in (False, True):
        scheduler, model = prepared(probmask())
        # A function around the model, for torch.compile compiles the hooks of a model itself one by one.
        call = torch.compile(lambda x, model=model: model(x), backend="eager", fullgraph=True) if compiled else model
        torch._dynamo.utils.counters.clear()
        loop(scheduler, model, adam(model), range(TOTAL), loss=lambda _, step, call=call: loss_at(call, step))
        found.append(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # before pruning begins, and from then on
    plain, model = (one.state_dict() for one in found)
    assert all(torch.allclose(value, plain[name], rtol=1e-3, atol=1e-5) for name, value in model.items())
    inputs = batch(50)[0]
    evaluate = torch.compile(found[1].eval(), backend="eager")
    assert torch.equal(evaluate(inputs), found[1](inputs))


def test_a_model_cast_after_it_was_prepared_still_ends_exactly_at_the_budget() -> None:
    scheduler, model = prepared(probmask(prune_rate=0.9))
    model = model.to(torch.bfloat16)
    for iteration in range(TOTAL):
        scheduler.prune_model(model, iteration)
    scheduler.export_sparse_model(model)
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(0.9 * WEIGHTS)


@pytest.mark.slow
def test_digits_are_read_at_eighty_percent() -> None:
    stamps = {"total_iterations": 200, "warmup_iteration_stamps": 10, "finetune_iteration_stamps": 120}
    scheduler, model = prepared(probmask(**stamps), trained_digit_net())
    own, learned = scheduler.param_groups(model)
    optimizer = torch.optim.Adam([{**own, "lr": 2e-3}, {**learned, "lr": 1e-2}])
    loop(scheduler, model, optimizer, range(200), loss=digit_loss)
    scheduler.export_sparse_model(model)
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.8, abs=1e-4)
    assert accuracy(model) >= 0.85


def test_an_export_with_the_statistics_of_random_masks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for recalibrated in (False, True):
        caplog.clear()
        scheduler, model = prepared(probmask())
        loop(scheduler, model, sgd(model), range(TOTAL))
        if recalibrated:
            gossamer.recalibrate(model, [batch(0)])
        scheduler.export_sparse_model(model)
        assert ("call gossamer.recalibrate(model, batches)" in caplog.text) is not recalibrated
