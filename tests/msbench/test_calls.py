"""Calls in the wrong order or with wrong arguments are refused with the fix."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from tests.loops import PRUNABLE, batch, network, sgd, train, zeros
from tests.msbench.configs import admm, ampere, levels, loop, prepared, probmask, str_config, trained


def kind(config: dict[str, Any]) -> str:
    return config["scheduler"]["type"]


LEARNED = pytest.mark.parametrize("config", [str_config(), probmask()], ids=kind)


@pytest.mark.parametrize("config", [levels(), str_config(), probmask(), admm(), ampere()], ids=kind)
def test_calls_before_prepare_are_refused(config: dict[str, Any]) -> None:
    scheduler = build_sparse_scheduler(config)
    model = network()
    calls = [
        lambda: scheduler.prune_model(model, 0),
        lambda: scheduler.export_sparse_model(model),
        lambda: scheduler.export_sparse_onnx(model, batch(0)[0], "model"),
        lambda: scheduler.compute_sparse_rate(model),
        lambda: scheduler.layers,
    ]
    for call in calls:
        with pytest.raises(GossamerError, match=r": call prepare_sparse_model\(model\) first"):
            call()


@pytest.mark.parametrize("config", [levels(), str_config(), probmask(), admm()], ids=kind)
def test_another_model_is_refused(config: dict[str, Any]) -> None:
    scheduler, model = prepared(config)
    for other in (network(), deepcopy(model)):
        with pytest.raises(GossamerError, match="this is not the model that prepare_sparse_model returned; pass that"):
            scheduler.prune_model(other, 0)


def test_the_model_that_was_given_is_not_the_one_that_was_returned() -> None:
    given = network()
    scheduler, model = prepared(levels(), given)
    assert model is not given
    with pytest.raises(GossamerError, match="pass that one"):
        scheduler.prune_model(given, 0)


@pytest.mark.parametrize("iteration", [-1, 1.0, "3", None, True, torch.tensor(2)])
def test_an_iteration_is_a_whole_number_from_0_on(iteration: Any) -> None:
    scheduler, model = prepared(levels())
    with pytest.raises(GossamerError, match="iteration: expected a whole number from 0 on, found"):
        scheduler.prune_model(model, iteration)


def test_time_does_not_go_backwards_but_may_stand_still() -> None:
    scheduler, model = prepared(levels())
    scheduler.prune_model(model, 5)
    scheduler.prune_model(model, 5)
    with pytest.raises(GossamerError, match=r"iteration 4 is before 5.*load_state_dict to resume"):
        scheduler.prune_model(model, 4)


@LEARNED
def test_a_model_that_learns_its_sparsity_is_prepared_once(config: dict[str, Any]) -> None:
    scheduler, model = prepared(config)
    for again in (scheduler, build_sparse_scheduler(str_config())):
        with pytest.raises(GossamerError, match="the model is already prepared; call export_sparse_model first"):
            again.prepare_sparse_model(model)


def test_preparing_again_for_masks_starts_over() -> None:
    scheduler, model = prepared(levels())
    scheduler.prune_model(model, 8)
    again = scheduler.prepare_sparse_model(model)
    scheduler.prune_model(again, 0)
    assert zeros(again.get_parameter("3.weight")) >= 173


@LEARNED
def test_a_wrapper_around_a_model_that_gets_parameters_is_refused(config: dict[str, Any]) -> None:
    scheduler = build_sparse_scheduler(config)
    model = network()
    keys = list(model.state_dict())
    with pytest.raises(GossamerError, match="which DataParallel around the model would not train; prepare the model"):
        scheduler.prepare_sparse_model(DataParallel(model))
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("nonsense", [None, network, {"model": 1}, nn.Linear])
def test_only_a_module_can_be_prepared(nonsense: Any) -> None:
    with pytest.raises(GossamerError, match=r"prepare_sparse_model: expected a torch\.nn\.Module, found"):
        build_sparse_scheduler(levels()).prepare_sparse_model(nonsense)


def test_a_model_without_layers_to_prune_is_refused() -> None:
    with pytest.raises(GossamerError, match="no convolution or linear layer to prune"):
        build_sparse_scheduler(levels()).prepare_sparse_model(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)))


def test_a_config_of_another_scheduler_cannot_override() -> None:
    scheduler = build_sparse_scheduler(levels())
    with pytest.raises(GossamerError, match="the config names ADMMScheduler, and this is AmbaLevelPruneScheduler"):
        scheduler.prepare_sparse_model(network(), admm())
    with pytest.raises(GossamerError, match="expected a dict with the key 'scheduler', found list"):
        scheduler.prepare_sparse_model(network(), [1])  # type: ignore[arg-type]
    assert scheduler.level_starts == [0, 4, 8]


@pytest.mark.parametrize("config", [levels(), str_config(-3.0), probmask(), admm()], ids=kind)
def test_exporting_twice_is_exporting_once(config: dict[str, Any]) -> None:
    scheduler, model = trained(config)
    scheduler.export_sparse_model(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rate = scheduler.compute_sparse_rate(model)
    scheduler.export_sparse_model(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert scheduler.compute_sparse_rate(model) == rate > 0


def test_another_model_cannot_be_exported() -> None:
    scheduler, _ = trained(levels())
    with pytest.raises(GossamerError, match=r"not a copy of the prepared model: it has no parameter '7\.weight'"):
        scheduler.export_sparse_model(network()[:5])


@pytest.mark.parametrize("nonsense", [None, 0.1, "SGD", nn.Linear(2, 2)])
def test_only_an_optimizer_is_named_as_one(nonsense: Any) -> None:
    for config in (levels(), ampere()):
        scheduler, _ = prepared(config, nn.Sequential(nn.Linear(16, 16)))
        with pytest.raises(GossamerError, match=r"init_optimizer: expected a torch\.optim\.Optimizer, found"):
            scheduler.init_optimizer(nonsense)


def test_ampere_needs_its_optimizer_before_it_prunes() -> None:
    scheduler, model = prepared(ampere(), nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(GossamerError, match=r"prune_model: call init_optimizer\(optimizer\) first"):
        scheduler.prune_model(model, 0)


def test_a_model_that_no_longer_exists_is_reported() -> None:
    scheduler, model = prepared(str_config())
    del model
    gc.collect()
    with pytest.raises(GossamerError, match="keep the model that it returns"):
        scheduler.prune_model(network(), 0)


@pytest.mark.parametrize("config", [str_config(), probmask(), admm()], ids=kind)
def test_the_sparsity_of_methods_that_decide_it_themselves_cannot_be_set(config: dict[str, Any]) -> None:
    scheduler, model = prepared(config)
    with pytest.raises(GossamerError, match="decides the sparsity itself"):
        scheduler.update_sparsity_per_layer(model, 0.5)


def test_two_schedulers_on_two_models_do_not_disturb_each_other() -> None:
    one, first = prepared(levels())
    other, second = prepared(levels(sparsity_table=[50]), network(seed=1))
    first_optimizer, second_optimizer = sgd(first), sgd(second)
    for iteration in range(6):
        loop(one, first, first_optimizer, range(iteration, iteration + 1))
        loop(other, second, second_optimizer, range(iteration, iteration + 1))
    assert zeros(first.get_parameter("3.weight")) == round(576 * 0.6)
    assert zeros(second.get_parameter("3.weight")) == 288


def test_a_loop_that_never_calls_prune_model_trains_the_dense_model() -> None:
    _, model = prepared(levels())
    train(model, sgd(model), range(3))
    dense = network()
    train(dense, sgd(dense), range(3))
    assert all(torch.equal(value, dense.state_dict()[name]) for name, value in model.state_dict().items())


def test_prune_model_after_export_changes_nothing() -> None:
    scheduler, model = trained(levels(), iterations=6)
    scheduler.export_sparse_model(model)
    before = [zeros(model.get_parameter(name)) for name in PRUNABLE]
    scheduler.prune_model(model, 8)
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == before
