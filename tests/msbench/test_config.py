"""Mistakes in a config: all of them are raised together, each with its key and the nearest name."""

from __future__ import annotations

from copy import deepcopy
from types import MappingProxyType
from typing import Any

import pytest
from torch import nn

from gossamer.errors import GossamerError
from gossamer.msbench import PRESETS, build_sparse_scheduler
from tests.loops import network
from tests.msbench.configs import admm, ampere, levels, probmask, str_config

STAMPS = {"total_iterations": 10, "warmup_iteration_stamps": 2, "finetune_iteration_stamps": 8}
PROBMASK = {"mask_generator": {"type": "ProbMaskGenerator"}, "fake_sparse": {"type": "ProbMaskFakeSparse"}}


def scheduler(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "kwargs": kwargs}}


WRONG: list[tuple[Any, str]] = [
    # Not a config
    (None, "expected a dict with the key 'scheduler', found NoneType"),
    ({}, "scheduler: missing key"),
    # Unknown keys, at each level
    ({**levels(), "mask_generater": {}}, "mask_generater: unknown key; nearest: 'mask_generator'"),
    ({"scheduler": {"typ": "BaseScheduler"}}, "scheduler.typ: unknown key; nearest: 'type'"),
    (
        {"scheduler": {"type": "BaseScheduler", "total_iters": 4}},
        "scheduler.total_iters: unknown key; put arguments into 'kwargs'",
    ),
    (levels(sparsity_tabel=[30]), "scheduler.kwargs.sparsity_tabel: unknown key; nearest: 'sparsity_table'"),
    (
        {**levels(), "fake_sparse": {"type": "FakeSparse", "kwargs": {"sInit_value": -5}}},
        "fake_sparse.kwargs.sInit_value: unknown key; FakeSparse takes no arguments",
    ),
    (
        {**admm(), "sparsity": {"target_sparsity": 0.5, "unifrom": True}},
        "sparsity_config: sparsity.unifrom: unknown key; nearest: 'uniform'",
    ),
    # Unknown types
    (scheduler("AmbaLevelScheduler"), "scheduler.type: unknown type 'AmbaLevelScheduler'; nearest: 'AmbaLevelPruneSch"),
    ({"scheduler": {"type": nn.Linear}}, "scheduler.type: unknown type <class"),
    # Wrong types
    ({"scheduler": "BaseScheduler"}, r"scheduler: expected \{'type': …, 'kwargs': \{…\}\}, found str"),
    ({"scheduler": {"type": "BaseScheduler", "kwargs": [1]}}, "scheduler.kwargs: expected a dict, found list"),
    (levels(total_iters=10.5), "scheduler.kwargs.total_iters: expected a whole number, found 10.5"),
    (levels(sparsity_table=[30, "much"]), "scheduler.kwargs.sparsity_table.*: expected a number, found .*'much'"),
    (levels(prun_algo=2), "scheduler.kwargs.prun_algo.*0, 1.*found 2"),
    (ampere(whitelist=["Liner"]), "whitelist: expected types of layers, or names from Linear"),
    (ampere(mask_calculator="m4n2_3d"), "mask_calculator"),
    ({**levels(), "sparsity": 0.9}, "sparsity: expected {'target_sparsity': …"),
    ({**levels(), "leaf_module": "Block"}, "leaf_module: expected a list of classes or dotted names, found 'Block'"),
    # What is missing
    ({**PROBMASK, **scheduler("ProbMaskPruneScheduler", **STAMPS)}, "scheduler.kwargs.prune_rate: missing key"),
    (scheduler("ADMMScheduler"), "sparsity: ADMMScheduler needs"),
    # Values that make no sense
    (levels(sparsity_table=[]), "sparsity_table: expected sparsities in percent, as in .*found none"),
    (levels(sparsity_table=[30, 100]), r"sparsity_table\[1\]: expected a number < 100"),
    (
        levels(sparsity_table=[50, 30]),
        r"expected percents that rise, as in \[30, 50, 70\], found \[50.0, 30.0\]",
    ),
    (levels(total_iters=2), "total_iters: 2 iterations are too few for 3 levels"),
    (levels("NMMaskGenerator"), "2:4 means 0.5, found 0.9"),
    ({**levels(), "fuse_bn": True}, "fuse_bn: not supported; fuse with torch.nn.utils.fusion before"),
    (probmask(prune_rate=1.5), "prune_rate: expected a number < 1, found 1.5"),
    (probmask(warmup_iteration_stamps=9), "expected warmup_iteration_stamps ≤ finetune_iteration_stamps ≤ total"),
    ({**probmask(), "fake_sparse": {"type": "FakeSparse"}}, "fake_sparse: ProbMaskGenerator needs ProbMaskFakeSparse"),
    ({**levels(), "mask_generator": {"type": "FPGMMaskGenerator", "kwargs": {"structured": False}}}, "must be True"),
    ({**levels(), "mask_generator": {"type": "FPGMMaskGenerator", "kwargs": {"func": "p1"}}}, "'l1', 'l2' or 'cos'"),
    ({**levels(), "fake_sparse": {"type": "STRFakeSparse"}}, "AmbaLevelPruneScheduler needs FakeSparse, found STR"),
    (scheduler("STRScheduler"), "STRScheduler needs STRFakeSparse"),
    ({**str_config(), "fake_sparse": {"type": "FakeSparse"}}, "STRMaskGenerator needs STRFakeSparse"),
    (
        {"fake_sparse": {"type": "ProbMaskFakeSparse"}, **scheduler("BaseScheduler")},
        "ProbMaskFakeSparse needs ProbMaskPruneScheduler",
    ),
    ({**admm(), "mask_generator": {"type": "FPGMMaskGenerator"}}, "does not support FPGMMaskGenerator"),
    (levels(sparsity_table=[0.3, 0.6]), "expected percents, as in 30 for a share of 0.3"),
    (levels(prun_hw_aware="cv22"), "prun_hw_aware: not supported"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[f"{n}: {text[:40]}" for n, (_, text) in enumerate(WRONG)])
def test_a_mistake_is_raised_when_the_scheduler_is_built(config: Any, message: str) -> None:
    given = deepcopy(config)
    with pytest.raises(GossamerError, match=message) as error:
        build_sparse_scheduler(config)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("sparsity_config: ")
    assert len(text) < 600
    assert str(config) == str(given)


def test_all_mistakes_are_raised_together() -> None:
    config = {
        "mask_generater": {},
        "mask_generator": {"type": "NormalMask"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit": -5}},
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {"total_iter": 10, "verbose": "loud", "total_iters": "many"},
        },
        "fuse_bn": True,
        "leaf_module": 3,
    }
    with pytest.raises(GossamerError) as error:
        build_sparse_scheduler(config)
    lines = str(error.value).splitlines()
    for word in (
        "mask_generater:",
        "'NormalMask'",
        "sInit:",
        "total_iter:",
        "'loud'",
        "many",
        "fuse_bn: ",
        "leaf_module: ",
    ):
        assert sum(word in line for line in lines) == 1, word
    assert len(lines) == 8
    assert all(line.startswith("sparsity_config: ") for line in lines)


def test_values_that_contradict_each_other_are_raised_together() -> None:
    with pytest.raises(GossamerError) as error:
        build_sparse_scheduler(levels(sparsity_table=[0.3, 0.5], total_iters=1))
    assert "total_iters" in str(error.value)
    assert "expected percents" in str(error.value)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (["Blok"], "leaf_module: the model has no module or class 'Blok'"),
        (["Conv2D"], "leaf_module: the model has no module or class 'Conv2D'; nearest: 'Conv2d'"),
        ([3], "leaf_module: expected classes of modules or dotted names, found 3"),
        ([nn.Linear, None], "leaf_module: expected classes of modules or dotted names, found None"),
    ],
)
def test_leaves_that_the_model_does_not_have_are_refused_when_it_is_prepared(leaves: Any, message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        build_sparse_scheduler({**levels(), "leaf_module": leaves}).prepare_sparse_model(network())


@pytest.mark.parametrize(
    "config",
    [
        {"sparsity": levels()},
        {"model": {"type": "resnet18"}, "sparsity": levels()},
        MappingProxyType(levels()),
        {**levels(), "fuse_bn": False},
        {**levels(), "leaf_module": None},
        {**levels(), "fake_sparse": {"type": "DefaultFakeSparse"}},
        {"scheduler": levels()["scheduler"]},
        {**levels(), "mask_generator": {}},
        {**levels(), "mask_generator": {"type": "NormalMaskGenerator", "kwargs": None}},
        levels(sparsity_table=(30, 60)),
        levels(sparsity_table=None),
        levels(total_iters=12.0),
        scheduler("AmbaLevelPruneScheduler"),
    ],
    ids=lambda config: str(config)[:60],
)
def test_other_ways_to_write_a_config_are_accepted(config: Any) -> None:
    given = deepcopy(dict(config))
    build_sparse_scheduler(config).prepare_sparse_model(network())
    assert dict(config) == given


def test_presets_give_copies_to_change_at_will() -> None:
    assert list(PRESETS) == ["Ampere", "Ambarella", "unstructured"]
    assert len(PRESETS) == 3
    for name in PRESETS:
        changed = PRESETS[name]
        changed["scheduler"]["kwargs"]["total_iters"] = 7
        changed.clear()
        assert "scheduler" in PRESETS[name]
        assert PRESETS[name]["scheduler"]["kwargs"].get("total_iters") != 7
        assert PRESETS[name] == PRESETS[name]
        assert PRESETS[name] is not PRESETS[name]
        build_sparse_scheduler(PRESETS[name])
    with pytest.raises(KeyError):
        PRESETS["Amper"]
