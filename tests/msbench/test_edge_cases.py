"""Invalid combinations of parts, averaged models, edited configs and several optimizers."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from gossamer.sparse import NM
from tests.loops import PRUNABLE, loss_at, network, sgd, zeros
from tests.msbench.configs import TOTAL, admm, levels, loop, prepared, probmask, str_config


def learned() -> dict[str, Any]:
    return {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse"},
        "scheduler": {"type": "BaseScheduler"},
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**levels(), "fake_sparse": {"type": "STRFakeSparse"}}, "AmbaLevelPruneScheduler needs FakeSparse, found STR"),
        ({**admm(), "fake_sparse": {"type": "STRFakeSparse"}}, "ADMMScheduler needs FakeSparse"),
        ({"scheduler": {"type": "STRScheduler"}}, "STRScheduler needs STRFakeSparse"),
        ({**learned(), "fake_sparse": {"type": "FakeSparse"}}, "STRMaskGenerator needs STRFakeSparse"),
        (
            {"fake_sparse": {"type": "ProbMaskFakeSparse"}, "scheduler": {"type": "BaseScheduler"}},
            "ProbMaskFakeSparse needs ProbMaskPruneScheduler",
        ),
        ({**admm(), "mask_generator": {"type": "FPGMMaskGenerator"}}, "does not support FPGMMaskGenerator"),
        (levels(sparsity_table=[0.3, 0.6]), "expected percents, as in 30 for a share of 0.3"),
        (levels(prun_hw_aware="cv22"), "prun_hw_aware: not supported"),
        ({**admm(), "sparsity": {"target_sparsity": 1.5}}, "target_sparsity: expected a number <= 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parts_and_values_that_would_do_nothing_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        build_sparse_scheduler(config)


def test_two_of_four_in_levels_is_two_of_four_whatever_the_allocation() -> None:
    config = {**levels(sparsity_table=[20, 50], prun_algo=1), "mask_generator": {"type": "NMMaskGenerator"}}
    scheduler, model = prepared(config)
    loop(scheduler, model, sgd(model), range(TOTAL))
    assert all(NM(2, 4).violations(model.get_parameter(name).detach()) == 0 for name in PRUNABLE)
    assert scheduler.compute_sparse_rate(model) == 0.5


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


def test_a_changed_config_is_reported_and_its_levels_are_used() -> None:
    scheduler, model = prepared(levels())
    loop(scheduler, model, sgd(model), range(6))
    other, again = prepared(levels(sparsity_table=[50, 95], total_iters=8))
    again.load_state_dict(model.state_dict())
    assert any("config" in problem for problem in other.load_state_dict(scheduler.state_dict()))
    other.prune_model(again, 7)
    assert other.compute_sparse_rate(again) == pytest.approx(0.95, abs=1e-3)
    elsewhere, again = prepared(levels(save_dir="elsewhere", verbose=True))
    assert elsewhere.load_state_dict(scheduler.state_dict()) == [], "the modifiers are the same"


def test_a_state_from_before_the_first_iteration_takes_everything_back() -> None:
    scheduler, model = prepared(levels())
    state, weights = scheduler.state_dict(), deepcopy(model.state_dict())
    loop(scheduler, model, sgd(model), range(TOTAL))
    model.load_state_dict(weights)
    scheduler.load_state_dict(state)
    scheduler.prune_model(model, 0)
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.3, abs=1e-3)


def test_a_sparsity_set_by_hand_survives_saving_and_holds_in_training() -> None:
    scheduler, model = prepared(levels())
    scheduler.update_sparsity_per_layer(model, 0.5)
    other, again = prepared(levels())
    again.load_state_dict(model.state_dict())
    other.load_state_dict(scheduler.state_dict())
    optimizer = sgd(again)
    loss_at(again, 0).backward()
    optimizer.step()
    assert other.compute_sparse_rate(again) == 0.5


def test_each_optimizer_pulls_its_own_weights_in_every_step() -> None:
    """As where two networks are trained in turn, each with a backward pass of its own."""
    scheduler, model = prepared({**admm(), "sparsity": {"target_sparsity": 0.9, "uniform": True}})
    scheduler.before_run(model, 30, 90)
    first = torch.optim.SGD([model.get_parameter("0.weight")], lr=0.1)
    second = torch.optim.SGD([model.get_parameter("3.weight")], lr=0.1)
    scheduler.prune_model(model, 0)
    for optimizer, name in ((first, "0.weight"), (second, "3.weight")) * 2:
        before = model.get_parameter(name).detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert not torch.equal(model.get_parameter(name), before), f"{name} was not drawn"


def test_whoever_prepares_a_model_again_decides_about_its_zeros() -> None:
    dense = network()
    weights = deepcopy(dense.state_dict())
    scheduler, model = prepared(levels(sparsity_table=[90]), dense)
    scheduler.prune_model(model, 0)
    scheduler.export_sparse_model(model)
    dense.load_state_dict(weights)
    other, again = prepared(levels(sparsity_table=[10]), dense)
    loop(other, again, sgd(again), range(2))
    assert other.compute_sparse_rate(again) == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("config", [learned(), probmask()], ids=["STR", "ProbMask"])
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


STR = str_config(prune_rate=0.8, total_iterations=TOTAL)


@pytest.mark.parametrize("config", [STR, probmask(), levels(), admm()], ids=["STR", "ProbMask", "levels", "ADMM"])
@pytest.mark.parametrize("left_out", [0, TOTAL // 2, TOTAL])
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


def test_the_analysis_of_filters_is_what_training_does() -> None:
    kwargs = {"structured": True, "func": "l2"}
    config = {**levels(prun_algo="global"), "mask_generator": {"type": "FPGMMaskGenerator", "kwargs": kwargs}}
    scheduler, model = prepared(config)
    planned = {row.weight: row.zeros[0] for row in scheduler.sparse_analysis(model).layers}
    scheduler.prune_model(model, 0)
    assert planned == {name: zeros(model.get_parameter(name)) for name in PRUNABLE}


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
