"""`scheduler.recipe()`: a manager that runs it ends with the weights that the scheduler ends with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import Manager, load
from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from tests.loops import PRUNABLE, loss_at, network, sgd, zeros
from tests.msbench.configs import TOTAL, admm, ampere, levels, loop, prepared, probmask, same, str_config
from tests.msbench.lr_schedulers import RATES, step_rate
from tests.msbench.test_resume import wide_network

STEPS = 4


def with_generator(config: dict[str, Any], kind: str, **kwargs: Any) -> dict[str, Any]:
    return {**config, "mask_generator": {"type": kind, "kwargs": kwargs}}


LEVELS: dict[str, dict[str, Any]] = {
    "uniform": levels(),
    "energy": levels(prun_algo=1),
    "energy, tuned": levels(prun_algo=1, prun_algo_tuning=0.0, prune_tolerance_max=1.05, sparse_rate_tolerance=0.2),
    "one threshold": levels(prun_algo="global"),
    "ERK": levels(prun_algo="erk"),
    "with exclusions": levels(no_prune_keyword="0", no_prune_layer="7", dw_no_prune=True),
    "filters": levels("FPGMMaskGenerator", sparsity_table=[25, 50]),
    "filters by p2": with_generator(levels(sparsity_table=[25, 50]), "NormalMaskGenerator", structured=True, func="p2"),
    "nuclear": levels("NuclearMaskGenerator", sparsity_table=[25, 50]),
    "2:4": levels("NMMaskGenerator", sparsity_table=[50]),
    "levels of unequal length": levels(sparsity_table=[20, 40, 60, 80, 90]),
    "a constant sparsity": with_generator(
        {"scheduler": {"type": "BaseScheduler"}}, "NormalMaskGenerator", sparsity=0.4
    ),
}


def by_scheduler(config: dict[str, Any], rate: str | None = None, make: Any = network) -> dict[str, Tensor]:
    scheduler, model = prepared(config, make())
    optimizer = sgd(model)
    lr_scheduler = RATES[rate](optimizer) if rate else None
    if lr_scheduler is not None:
        scheduler.set_lr_scheduler(lr_scheduler)
    elif "Ampere" in config["scheduler"]["type"]:
        scheduler.init_optimizer(optimizer)
    for iteration in range(TOTAL):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        optimizer.step()
        if lr_scheduler is not None:
            step_rate(lr_scheduler, iteration)
    scheduler.export_sparse_model(model)
    return dict(model.state_dict())


def by_manager(recipe: Any, steps: float, rate: str | None = None, make: Any = network) -> dict[str, Tensor]:
    model = make()
    optimizer = sgd(model)
    lr_scheduler = RATES[rate](optimizer) if rate else None
    manager = Manager(recipe)
    manager.modify(model, optimizer, steps, lr_scheduler=lr_scheduler)
    for iteration in range(TOTAL):
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        optimizer.step()
        if lr_scheduler is not None:
            step_rate(lr_scheduler, iteration)
    manager.finalize()
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", LEVELS)
def test_levels_end_in_the_same_bits(kind: str) -> None:
    recipe = build_sparse_scheduler(LEVELS[kind]).recipe(STEPS)
    expected = by_scheduler(LEVELS[kind], "cosine")
    assert same(by_manager(recipe, STEPS, "cosine"), expected)
    assert any(zeros(expected[name]) for name in PRUNABLE)


@pytest.mark.parametrize("rate", ["plateau", None])
def test_levels_end_in_the_same_bits_under_every_rate(rate: str | None) -> None:
    recipe = build_sparse_scheduler(levels()).recipe(STEPS)
    assert same(by_manager(recipe, STEPS, rate), by_scheduler(levels(), rate))


@pytest.mark.parametrize("steps", [1.0, 7.0])
def test_epochs_may_have_any_length(steps: float) -> None:
    recipe = build_sparse_scheduler(levels(prun_algo=1)).recipe(steps)
    assert same(by_manager(recipe, steps, "cosine"), by_scheduler(levels(prun_algo=1), "cosine"))


@pytest.mark.parametrize("permute", [True, False])
def test_ampere_ends_in_the_same_bits(permute: bool) -> None:
    config = ampere(allow_permutation=permute)
    scheduler, _model = prepared(config, wide_network())
    expected = by_scheduler(config, make=wide_network)
    assert same(by_manager(scheduler.recipe(), STEPS, make=wide_network), expected)
    assert zeros(expected["2.weight"]) == 16 * 16 * 9 // 2


@pytest.mark.parametrize("uniform", [True, False])
def test_admm_ends_in_the_same_bits(uniform: bool) -> None:
    config = admm(uniform=uniform, rho=0.1)
    recipe = build_sparse_scheduler(config).recipe(STEPS)
    assert same(by_manager(recipe, STEPS), by_scheduler(config))


@pytest.mark.parametrize("start", [-3.0])
def test_thresholds_learn_the_same_with_the_decay_of_the_recipe(start: float) -> None:
    config = str_config(start, "BaseScheduler")
    recipe = build_sparse_scheduler(config).recipe(STEPS)
    decay = recipe.modifiers[0].st_decay
    scheduler, model = prepared(config)
    groups = scheduler.param_groups(model, weight_decay=1e-4, st_decay=decay)
    loop(scheduler, model, torch.optim.SGD(groups, lr=0.05, momentum=0.9), range(TOTAL))
    scheduler.export_sparse_model(model)
    found = by_manager(recipe, STEPS)
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-5), name
    assert [zeros(found[n]) for n in PRUNABLE] == [zeros(model.get_parameter(n)) for n in PRUNABLE]


def test_the_recipe_of_probabilities_ends_exactly_at_the_same_budget() -> None:
    config = probmask(no_prune_layer="7")
    recipe = build_sparse_scheduler(config).recipe(STEPS)
    found = by_manager(recipe, STEPS)
    assert sum(zeros(found[name]) for name in PRUNABLE[:2]) == round(0.8 * 864)
    assert zeros(found["7.weight"]) == 0
    assert sum(zeros(by_scheduler(config)[name]) for name in PRUNABLE[:2]) == round(0.8 * 864)


@pytest.mark.parametrize("config", [levels(), str_config(), probmask(), admm()], ids=lambda c: c["scheduler"]["type"])
def test_its_text_says_where_it_comes_from_and_loads_again(config: dict[str, Any]) -> None:
    recipe = build_sparse_scheduler(config).recipe(STEPS)
    assert f"MSBench {config['scheduler']['type']}" in recipe.text
    again = load(recipe.text)
    assert [modifier.model_dump() for modifier in again.modifiers] == [
        modifier.model_dump() for modifier in recipe.modifiers
    ]


def test_only_ampere_needs_the_model() -> None:
    with pytest.raises(GossamerError, match=r"recipe: call prepare_sparse_model\(model\) first"):
        build_sparse_scheduler(ampere()).recipe()
