"""Levels: where each starts, what is fixed within one, and what each leaves on disk."""

from __future__ import annotations

import csv
import json
import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from gossamer.sparse import NM
from tests.loops import PRUNABLE, has_minus_zero, loss_at, network, sgd, zeros
from tests.msbench.configs import POSITIONS, TOTAL, Position, levels, loop, pattern, prepared, same, trained, weights


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 10**7))
def test_level_n_starts_at_n_times_the_total_over_the_number_of_levels(count: int, extra: int) -> None:
    table = [10 + 5 * n for n in range(count)]
    total = count + extra
    scheduler = build_sparse_scheduler(levels(total_iters=total, sparsity_table=table))
    starts = scheduler.level_starts
    assert starts == [n * total // count for n in range(count)]
    assert starts == sorted(set(starts))


@pytest.mark.parametrize("position", POSITIONS)
def test_within_a_level_the_mask_is_fixed_and_the_zeros_are_real(position: Position) -> None:
    scheduler, model = prepared(levels())
    seen: dict[int, list[dict[str, Tensor]]] = {}

    def look(iteration: int) -> None:
        assert not any(has_minus_zero(weight) for weight in weights(scheduler, model).values())
        seen.setdefault(iteration // 4, []).append(pattern(scheduler, model))

    loop(scheduler, model, sgd(model), range(TOTAL), position=position, after=look)
    for level, sparsity in enumerate((0.3, 0.6, 0.9)):
        first = seen[level][0]
        assert all(same(first, later) for later in seen[level])
        assert [int((~first[name]).sum()) for name in PRUNABLE] == [
            round(first[name].numel() * sparsity) for name in PRUNABLE
        ]


@pytest.mark.parametrize("algorithm", [0, 1])
def test_a_new_level_is_computed_from_what_survives(algorithm: Any) -> None:
    scheduler, model = prepared(levels(prun_algo=algorithm))
    optimizer = sgd(model)
    for start in (0, 4, 8):
        before = deepcopy(weights(scheduler, model))
        scheduler.prune_model(model, start)
        after = weights(scheduler, model)
        for name, weight in before.items():
            kept = after[name] != 0
            assert torch.equal(after[name][kept], weight[kept])
            assert not bool((kept & (weight == 0)).any()), "what was pruned came back"
            if not bool(kept.all()):
                assert weight[kept].abs().min() >= weight[~kept].abs().max()
        loop(scheduler, model, optimizer, range(start, start + 4))


def test_each_level_leaves_a_checkpoint_of_its_end() -> None:
    scheduler, model = prepared(levels(save_dir="a/b"))
    states: dict[int, dict[str, Tensor]] = {}
    loop(
        scheduler,
        model,
        sgd(model),
        range(TOTAL),
        position="before forward",
        after=lambda iteration: states.update({iteration: deepcopy(dict(model.state_dict()))}),
    )
    folder = Path("a/b")
    assert sorted(file.name for file in folder.iterdir()) == [
        f"global_sparse_rate_{rate}.pth.tar" for rate in (0.3, 0.6, 0.9)
    ]
    for level, rate in enumerate((0.3, 0.6, 0.9)):
        saved = torch.load(folder / f"global_sparse_rate_{rate}.pth.tar", weights_only=True)
        assert same(saved["model"], states[4 * level + 3])
        assert (saved["prune_step"], saved["sparse_rate"]) == (level, rate)
        assert set(saved["sparsities"]) == {"0", "3", "7"}
        assert saved["sparsities"]["3"] == round(576 * rate) / 576
        other = network(seed=1)
        other.load_state_dict(saved["model"])
        assert zeros(other[3].weight) == round(576 * rate)


def test_a_folder_that_cannot_be_written_to_is_an_error_with_its_name() -> None:
    Path("checkpoints").write_text("a file")
    with pytest.raises(GossamerError, match=r"checkpoints/global_sparse_rate_0\.3.*: cannot be written.*save_dir"):
        trained(levels())


def test_the_table_may_begin_with_nothing_and_name_fractions_of_percents() -> None:
    scheduler, model = prepared(levels(sparsity_table=[0, 12.5, 99.5]))
    found = []
    for iteration in range(TOTAL):
        scheduler.prune_model(model, iteration)
        found.append(zeros(model.get_parameter("3.weight")))
    assert [found[0], found[4], found[8]] == [0, 72, 573]
    assert sorted(file.name for file in Path("checkpoints").iterdir()) == [
        f"global_sparse_rate_{rate}.pth.tar" for rate in ("0.0", "0.125", "0.995")
    ]


def test_a_copy_can_be_exported_while_training_goes_on() -> None:
    scheduler, model = trained(levels(), iterations=6)
    average = deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(1.0)
    scheduler.export_sparse_model(average)
    assert same(pattern(scheduler, average), pattern(scheduler, model))
    loop(scheduler, model, sgd(model), range(6, TOTAL))
    assert zeros(model.get_parameter("3.weight")) == round(576 * 0.9)
    assert zeros(average.get_parameter("3.weight")) == round(576 * 0.6)


def test_the_analysis_is_written_first_and_says_what_training_then_does() -> None:
    config = levels(do_sparse_analysis=True, prun_algo=1, default_input_shape=[1, 4, 8, 8], output_dir="analysis")
    scheduler, model = prepared(config)
    dense = network()
    assert not Path("analysis").exists()
    scheduler.prune_model(model, 0)
    report = json.loads(Path("analysis/pruner_report.json").read_text())
    with Path("analysis/pruner_report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert report["levels"] == [0.3, 0.6, 0.9]
    assert [layer["name"] for layer in report["layers"]] == ["0", "3", "7"]
    assert [layer["macs"] for layer in report["layers"]] == [288 * 36, 576 * 16, 320]
    assert [row["layer"] for row in rows] == ["0", "3", "7", "total"]
    assert [layer["zeros"][0] for layer in report["layers"]] == [zeros(model.get_parameter(n)) for n in PRUNABLE]
    kept = weights(scheduler, model)["3.weight"].square().sum() / dense[3].weight.detach().square().sum()
    assert report["layers"][1]["energy_kept"][0] == pytest.approx(float(kept), abs=1e-6)


def test_verbose_logs_the_zeros_of_each_layer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gossamer.msbench")
    scheduler, model = prepared(levels(verbose=True))
    scheduler.prune_model(model, 0)
    assert "iteration 0: '3.weight' has 173 zeros" in caplog.text


def test_one_sparsity_or_one_for_each_layer_can_be_set_by_hand() -> None:
    scheduler, model = prepared(levels())
    scheduler.prune_model(model, 0)
    scheduler.update_sparsity_per_layer(model, {"0": 0.5, "3.weight": 0.75})
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [144, 432, 96]
    scheduler.update_sparsity_per_layer(model, dict.fromkeys(("0", "3", "module.7"), 0.75))
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [216, 432, 240]
    scheduler.update_sparsity_per_layer(model, 0.8)
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [230, 461, 256]
    with pytest.raises(GossamerError, match="no layer '33' is pruned; nearest: '3'"):
        scheduler.update_sparsity_per_layer(model, {"33": 0.5})


def test_set_by_hand_before_the_first_iteration_it_is_that_sparsity_and_not_the_first_levels() -> None:
    scheduler, model = prepared(levels())
    scheduler.update_sparsity_per_layer(model, {"3": 0.25})
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [0, 144, 0]


def steps(scheduler: Any, model: nn.Module, iterations: range, first: bool) -> list[Tensor]:
    """A weight just before `prune_model` leaves a level, and after the last step."""
    optimizer, left = sgd(model), []
    for iteration in iterations:
        leaving = iteration in scheduler.level_starts[1:]
        if first:
            left += [model.get_parameter("3.weight").detach().clone()] if leaving else []
            scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        loss_at(model, iteration).backward()
        optimizer.step()
        if not first:
            left += [model.get_parameter("3.weight").detach().clone()] if leaving else []
            scheduler.prune_model(model, iteration)
    return [*left, model.get_parameter("3.weight").detach().clone()]


def saved(sparsity: float) -> Tensor:
    return torch.load(f"checkpoints/global_sparse_rate_{sparsity}.pth.tar", weights_only=True)["model"]["3.weight"]


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_has_every_step_of_its_level_wherever_prune_model_stands(first: bool) -> None:
    scheduler, model = prepared(levels())
    for sparsity, weight in zip(scheduler.table, steps(scheduler, model, range(TOTAL), first), strict=True):
        assert torch.equal(saved(sparsity), weight)


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_leaves_the_checkpoints_that_are_still_due(first: bool) -> None:
    scheduler, model = prepared(levels())
    steps(scheduler, model, range(6), first)
    state, weights_ = scheduler.state_dict(), deepcopy(model.state_dict())
    for file in Path("checkpoints").iterdir():
        file.unlink()
    other, again = prepared(levels())
    again.load_state_dict(weights_)
    assert other.load_state_dict(state) == []
    found = steps(other, again, range(6, TOTAL), first)
    assert sorted(file.name for file in Path("checkpoints").iterdir()) == [
        f"global_sparse_rate_{rate}.pth.tar" for rate in (0.6, 0.9)
    ]
    assert torch.equal(saved(0.6), found[0])
    assert torch.equal(saved(0.9), found[1])


def test_calls_in_every_second_iteration_leave_checkpoints_too() -> None:
    scheduler, model = prepared(levels())
    for iteration in range(0, TOTAL + 1, 2):
        scheduler.prune_model(model, iteration)
    assert len(list(Path("checkpoints").iterdir())) == 3


def test_no_folder_means_no_checkpoints() -> None:
    scheduler, model = prepared(levels(save_dir=None))
    steps(scheduler, model, range(TOTAL), True)
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize("prunes", [True, False])
def test_training_on_after_the_last_level_writes_nothing_more(prunes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, model = prepared(levels())
    loop(scheduler, model, optimizer := sgd(model), range(TOTAL))
    written: list[Any] = []
    monkeypatch.setattr(torch, "save", lambda *_: written.append(_))
    for iteration in range(TOTAL, TOTAL + 5):
        if prunes:
            scheduler.prune_model(model, iteration)
        loss_at(model, iteration).backward()
        optimizer.step()
    assert written == []


def test_the_last_checkpoint_has_the_last_step_of_every_optimizer() -> None:
    scheduler, model = prepared(levels())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in map(model.get_submodule, ("3", "0"))]
    for iteration in range(TOTAL):
        scheduler.prune_model(model, iteration)
        loss_at(model, iteration).backward()
        for optimizer in optimizers:
            optimizer.step()
    state = torch.load("checkpoints/global_sparse_rate_0.9.pth.tar", weights_only=True)["model"]
    assert all(torch.equal(state[name], value) for name, value in model.named_parameters())


# How layers share a level


def counts(config: dict[str, Any], model: nn.Module | None = None) -> list[int]:
    """The zeros of each pruned layer at the first level."""
    scheduler, made = prepared(config, model)
    scheduler.prune_model(made, 0)
    return [zeros(weight) for weight in weights(scheduler, made).values()]


@pytest.mark.parametrize("algorithm", [0, 1])
def test_rounding_ninety_percent_of_ten_weights_keeps_one(algorithm: Any) -> None:
    torch.manual_seed(0)
    assert counts(levels(sparsity_table=[90], prun_algo=algorithm), nn.Sequential(nn.Linear(10, 1))) == [9]


@pytest.mark.parametrize("algorithm", [0, 1])
def test_half_of_eight_equal_weights_keeps_four(algorithm: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    nn.init.ones_(model[0].weight)
    assert counts(levels(sparsity_table=[50], prun_algo=algorithm), model) == [4]


def test_a_target_beyond_the_caps_is_an_error_that_names_the_level() -> None:
    scheduler, model = prepared(levels(sparsity_table=[50, 99.9], prun_algo=1, sparse_rate_tolerance=0))
    with pytest.raises(GossamerError, match=r"level 2 of 2: .*0\.999 is out of reach: with at most 0\.99 in each"):
        loop(scheduler, model, sgd(model), range(TOTAL))


@pytest.mark.parametrize(
    ("tolerances", "cap"),
    [
        ({"prune_tolerance_max": 1.05}, 0.84),
        ({"prune_tolerance_min": 0.9}, 0.82),
        ({"prune_tolerance_max": 1.05, "prune_tolerance_min": 0.9}, 0.82),
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
        ("FPGMMaskGenerator", {}),
        ("NuclearMaskGenerator", {}),
    ],
)
@pytest.mark.parametrize("algorithm", [0, "global"])
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


def test_a_constant_sparsity_needs_the_base_scheduler_only() -> None:
    config = {
        "mask_generator": {"type": "NormalMaskGenerator", "kwargs": {"sparsity": 0.4}},
        "scheduler": {"type": "BaseScheduler"},
    }
    scheduler, model = prepared(config)
    loop(scheduler, model, sgd(model), range(3))
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [round(n * 0.4) for n in (288, 576, 320)]


def test_two_of_four_in_levels_is_two_of_four_whatever_the_allocation() -> None:
    config = {**levels(sparsity_table=[20, 50], prun_algo=1), "mask_generator": {"type": "NMMaskGenerator"}}
    scheduler, model = prepared(config)
    loop(scheduler, model, sgd(model), range(TOTAL))
    assert all(NM(2, 4).violations(model.get_parameter(name).detach()) == 0 for name in PRUNABLE)
    assert scheduler.compute_sparse_rate(model) == 0.5
