"""How layers share a level: `prun_algo`, tolerances and caps, rounding and ties, and whole filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.sparse import NM, energy, erdos_renyi
from tests.loops import PRUNABLE, network, sgd, zeros
from tests.msbench.configs import TOTAL, levels, loop, prepared, weights

TOTAL_WEIGHTS = 288 + 576 + 320


def counts(config: dict[str, Any], model: nn.Module | None = None) -> list[int]:
    """The zeros of each pruned layer at the first level."""
    scheduler, made = prepared(config, model)
    scheduler.prune_model(made, 0)
    return [zeros(weight) for weight in weights(scheduler, made).values()]


@pytest.mark.parametrize("algorithm", [0, "uniform"])
def test_uniform_takes_the_same_share_of_each_layer(algorithm: Any) -> None:
    assert counts(levels(sparsity_table=[35], prun_algo=algorithm)) == [round(n * 0.35) for n in (288, 576, 320)]


@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("algorithm", [1, "energy"])
def test_energy_is_the_threshold_of_its_formula(algorithm: Any, slope: float) -> None:
    model = network()
    scores = {name: model.get_parameter(name).detach().abs() for name in PRUNABLE}
    expected = [round(scores[n].numel() * share) for n, share in energy(scores, 0.7, slope).items()]
    assert counts(levels(sparsity_table=[70], prun_algo=algorithm, prun_algo_tuning=slope), model) == expected
    assert sum(expected) == round(TOTAL_WEIGHTS * 0.7)


def test_erk_and_global_come_to_the_exact_total() -> None:
    shapes = {name: network().get_parameter(name).shape for name in PRUNABLE}
    erk = [round(shapes[name].numel() * share) for name, share in erdos_renyi(shapes, 0.7).items()]
    assert counts(levels(sparsity_table=[70], prun_algo="erk")) == erk
    assert sum(counts(levels(sparsity_table=[70], prun_algo="global"))) == round(TOTAL_WEIGHTS * 0.7)


def test_global_is_one_threshold_on_magnitudes() -> None:
    scheduler, model = prepared(levels(sparsity_table=[70], prun_algo="global"))
    before = torch.cat([weight.abs().flatten() for weight in weights(scheduler, model).values()])
    scheduler.prune_model(model, 0)
    after = torch.cat([weight.flatten() for weight in weights(scheduler, model).values()])
    assert before[after != 0].min() >= before[after == 0].max()


@pytest.mark.parametrize("algorithm", [0, 1, "erk", "global"])
def test_rounding_ninety_percent_of_ten_weights_keeps_one(algorithm: Any) -> None:
    torch.manual_seed(0)
    assert counts(levels(sparsity_table=[90], prun_algo=algorithm), nn.Sequential(nn.Linear(10, 1))) == [9]


@pytest.mark.parametrize("algorithm", [0, 1, "erk", "global"])
def test_half_of_eight_equal_weights_keeps_four(algorithm: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    nn.init.ones_(model[0].weight)
    assert counts(levels(sparsity_table=[50], prun_algo=algorithm), model) == [4]


@pytest.mark.parametrize("table", [[99], [99.9]])
def test_no_layer_passes_ninety_nine_percent_under_energy(table: list[float]) -> None:
    found = counts(levels(sparsity_table=table, prun_algo=1))
    assert found == [int(n * 0.99) for n in (288, 576, 320)]


def test_a_target_beyond_the_caps_is_an_error_that_names_the_level() -> None:
    scheduler, model = prepared(levels(sparsity_table=[50, 99.9], prun_algo=1, sparse_rate_tolerance=0))
    with pytest.raises(GossamerError, match=r"level 2 of 2: .*0\.999 is out of reach: with at most 0\.99 in each"):
        loop(scheduler, model, sgd(model), range(TOTAL))


def test_a_target_beyond_the_caps_leaves_the_model_and_the_clock_as_they_were() -> None:
    scheduler, model = prepared(levels(sparsity_table=[99.9], prun_algo=1, sparse_rate_tolerance=0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(GossamerError, match="out of reach"):
            scheduler.prune_model(model, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert scheduler.iteration is None


@pytest.mark.parametrize(
    ("tolerances", "cap"),
    [
        ({"prune_tolerance_max": 1.05}, 0.84),
        ({"prune_tolerance_min": 0.9}, 0.82),
        ({"prune_tolerance_max": 1.05, "prune_tolerance_min": 0.9}, 0.82),
        ({"prune_tolerance_max": 2.0}, 0.99),
        ({}, 0.99),
    ],
)
def test_tolerances_bound_the_sparsity_of_each_layer(tolerances: dict[str, float], cap: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 10), nn.Linear(10, 100))
    with torch.no_grad():
        model[0].weight.pow_(9)  # a few of its weights hold all of its energy: unbounded, it would lose nearly all
    found = counts(levels(sparsity_table=[80], prun_algo=1, prun_algo_tuning=0.0, **tolerances), model)
    assert max(found) <= 1000 * cap
    assert max(found) == pytest.approx(1000 * min(cap, 0.9), abs=60)
    assert sum(found) == 1600


@pytest.mark.parametrize(
    ("generator", "kwargs"),
    [
        ("NormalMaskGenerator", {"structured": True}),
        ("NormalMaskGenerator", {"structured": True, "func": "p1"}),
        ("NormalMaskGenerator", {"structured": True, "func": "p2"}),
        ("FPGMMaskGenerator", {}),
        ("FPGMMaskGenerator", {"func": "l1"}),
        ("FPGMMaskGenerator", {"func": "cos"}),
        ("NuclearMaskGenerator", {}),
    ],
)
@pytest.mark.parametrize("algorithm", [0, 1, "erk", "global"])
def test_whole_filters_go_except_those_of_the_last_layer(generator: str, kwargs: Any, algorithm: Any) -> None:
    config = levels(sparsity_table=[25, 50], prun_algo=algorithm)
    config["mask_generator"] = {"type": generator, "kwargs": kwargs}
    scheduler, model = prepared(config)
    assert "the last layer" in str(scheduler.layers["7"])
    loop(scheduler, model, sgd(model), range(TOTAL))
    removed = 0
    for name in PRUNABLE[:2]:
        filters = (model.get_parameter(name).detach() != 0).flatten(1)
        assert bool((filters.any(1) == filters.all(1)).all())
        removed += int((~filters.any(1)).sum())
        if algorithm == 0:
            assert int((~filters.any(1)).sum()) == 4
    assert removed == 8
    assert zeros(model.get_parameter("7.weight")) == 0
    assert scheduler.compute_sparse_rate(model) == pytest.approx(0.5, abs=0.17)


def test_p1_and_p2_rank_filters_by_their_norms() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0.1, 0.1, 0.1]]))
    for func, gone in (("p1", 1), ("p2", 0)):
        config = levels(sparsity_table=[50])
        config["mask_generator"]["kwargs"] = {"structured": True, "func": func}
        scheduler, prepared_model = prepared(config, nn.Sequential(*model).requires_grad_(True))
        dense = model[0].weight.detach().clone()
        scheduler.prune_model(prepared_model, 0)
        assert not bool(prepared_model.get_parameter("0.weight")[gone].any())
        with torch.no_grad():
            model[0].weight.copy_(dense)


def test_two_of_four_as_a_level() -> None:
    scheduler, model = prepared(levels("NMMaskGenerator", sparsity_table=[50]))
    loop(scheduler, model, sgd(model), range(TOTAL))
    assert [NM(2, 4).violations(model.get_parameter(name).detach()) for name in scheduler.names] == [0, 0, 0]
    assert scheduler.compute_sparse_rate(model) == 0.5


def test_a_constant_sparsity_needs_the_base_scheduler_only() -> None:
    config = {
        "mask_generator": {"type": "NormalMaskGenerator", "kwargs": {"sparsity": 0.4}},
        "scheduler": {"type": "BaseScheduler"},
    }
    scheduler, model = prepared(config)
    loop(scheduler, model, sgd(model), range(3))
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [round(n * 0.4) for n in (288, 576, 320)]


def test_a_weight_that_is_not_finite_is_an_error_with_its_name() -> None:
    scheduler, model = prepared(levels())
    scheduler.prune_model(model, 0)
    with torch.no_grad():
        model.get_parameter("3.weight")[0, 0, 0, 0] = float("nan")
    with pytest.raises(GossamerError, match=r"3\.weight"):
        scheduler.prune_model(model, 4)
