"""Calls in the wrong order or with wrong arguments are refused with the fix."""

from __future__ import annotations

import gc
import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from tests.loops import PRUNABLE, batch, loss_at, network, sgd, zeros
from tests.msbench.configs import TOTAL, admm, ampere, levels, loop, prepared, probmask, str_config, trained


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


@pytest.mark.parametrize("iteration", [-1, 1.0, True])
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


@LEARNED
def test_a_wrapper_around_a_model_that_gets_parameters_is_refused(config: dict[str, Any]) -> None:
    scheduler = build_sparse_scheduler(config)
    model = network()
    keys = list(model.state_dict())
    with pytest.raises(GossamerError, match="which DataParallel around the model would not train; prepare the model"):
        scheduler.prepare_sparse_model(DataParallel(model))
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("nonsense", [None, nn.Linear])
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


@pytest.mark.parametrize("nonsense", [None, 0.1])
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


@pytest.mark.parametrize("config", [str_config(), probmask(), admm(), ampere()], ids=kind)
def test_only_levels_can_be_analysed(config: dict[str, Any]) -> None:
    scheduler, model = prepared(config)
    with pytest.raises(GossamerError, match=f"sparse_analysis: {kind(config)} has no levels to analyse"):
        scheduler.sparse_analysis(model)


def test_two_schedulers_on_two_models_do_not_disturb_each_other() -> None:
    one, first = prepared(levels())
    other, second = prepared(levels(sparsity_table=[50]), network(seed=1))
    first_optimizer, second_optimizer = sgd(first), sgd(second)
    for iteration in range(6):
        loop(one, first, first_optimizer, range(iteration, iteration + 1))
        loop(other, second, second_optimizer, range(iteration, iteration + 1))
    assert zeros(first.get_parameter("3.weight")) == round(576 * 0.6)
    assert zeros(second.get_parameter("3.weight")) == 288


def test_prune_model_after_export_changes_nothing() -> None:
    scheduler, model = trained(levels(), iterations=6)
    scheduler.export_sparse_model(model)
    before = [zeros(model.get_parameter(name)) for name in PRUNABLE]
    scheduler.prune_model(model, 8)
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == before


def test_a_second_config_changes_only_what_it_names() -> None:
    scheduler = build_sparse_scheduler(levels(no_prune_layer="7"))
    other = {"scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": {"sparsity_table": [50]}}}
    scheduler.prepare_sparse_model(network(), other)
    assert (scheduler.total_iters, scheduler.table) == (TOTAL, [0.5])
    assert scheduler.layers == {"0": None, "3": None, "7": "excluded"}


@pytest.mark.parametrize("config", [levels(), admm()], ids=["levels", "ADMM"])
def test_an_average_can_be_exported_after_the_model(config: dict[str, Any]) -> None:
    scheduler, model = prepared(config)
    if "ADMM" in config["scheduler"]["type"]:
        scheduler.before_run(model, 2, TOTAL)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for iteration in range(TOTAL):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        optimizer.step()
        average.update_parameters(model)
    scheduler.export_sparse_model(model)
    scheduler.export_sparse_model(average)
    found = [zeros(average.module.get_parameter(name)) for name in PRUNABLE]
    assert found == [zeros(model.get_parameter(name)) for name in PRUNABLE]


def test_the_last_scheduler_to_prepare_a_model_decides_about_its_zeros() -> None:
    dense = network()
    weights = deepcopy(dense.state_dict())
    scheduler, model = prepared(levels(sparsity_table=[90]), dense)
    scheduler.prune_model(model, 0)
    scheduler.export_sparse_model(model)
    dense.load_state_dict(weights)
    other, again = prepared(levels(sparsity_table=[10]), dense)
    loop(other, again, sgd(again), range(2))
    assert other.compute_sparse_rate(again) == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("config", [str_config(), probmask()], ids=["STR", "ProbMask"])
def test_learned_parameters_in_no_optimizer_are_reported(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler, model = prepared(config, model)
    with caplog.at_level(logging.WARNING):
        loop(scheduler, model, optimizer, range(4))
    assert caplog.text.count("no optimizer trains the parameters") == 1


def test_exporting_what_was_never_pruned_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, model = prepared(levels())
    scheduler.export_sparse_model(model)
    assert "prune_model was never called" in caplog.text


@pytest.mark.parametrize(
    "config",
    [str_config(prune_rate=0.8, total_iterations=TOTAL), probmask(), levels(), admm()],
    ids=["STR", "ProbMask", "levels", "ADMM"],
)
@pytest.mark.parametrize("left_out", [0, TOTAL // 2])
def test_exporting_before_the_end_of_a_schedule_warns(
    config: dict[str, Any], left_out: int, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, model = prepared(config)
    optimizer = torch.optim.SGD(scheduler.param_groups(model), lr=0.01)
    done = TOTAL - left_out
    loop(scheduler, model, optimizer, range(done))
    scheduler.export_sparse_model(model)
    early = f"prune_model was called for {done} of {TOTAL} iterations, sparsity" in caplog.text
    assert early == (bool(left_out) and (done > 0 or scheduler.learns))
