"""Malformed MSBench configs: refused with a `GossamerError` and without a trace in the model, or they train."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.msbench import PRESETS, build_sparse_scheduler
from gossamer.msbench.config_file import read_config
from tests.fuzz.documents import block_text, mangled, tweaked
from tests.fuzz.harness import attempt, fingerprint, fuzz
from tests.fuzz.values import hostile, mutated


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(64, 8))


def loss_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return functional.cross_entropy(model(torch.randn(4, 16, 2, 2, generator=generator)), torch.arange(4))


def levels(**kwargs: Any) -> dict[str, Any]:
    return {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {
            "type": "AmbaLevelPruneScheduler",
            "kwargs": {"total_iters": 4, "sparsity_table": [30, 60], "save_dir": None, **kwargs},
        },
    }


CONFIGS: list[dict[str, Any]] = [
    levels(),
    levels(prun_algo="erk", no_prune_keyword="2", dw_no_prune=True),
    levels(prun_algo=1, prun_algo_tuning=0.5, sparse_rate_tolerance=0.015, prune_tolerance_max=1.1, init_lr=0.1),
    {**levels(prun_algo=0, verbose=True), "mask_generator": {"type": "FPGMMaskGenerator", "kwargs": {"func": "l2"}}},
    {**levels(prun_algo=0), "mask_generator": {"type": "NuclearMaskGenerator"}, "leaf_module": ["Conv2d"]},
    {**levels(sparsity_table=[25, 50]), "mask_generator": {"type": "NMMaskGenerator"}},
    {
        "mask_generator": {"type": "NormalMaskGenerator", "kwargs": {"structured": True, "func": "p2",
        "sparsity": 0.5}},
        "scheduler": {"type": "BaseScheduler", "kwargs": {"no_prune_layer": "0"}},
    },
    {"sparsity": {"target_sparsity": 0.5, "uniform": False}, "scheduler": {"type": "BaseScheduler"}},
    {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -5.0}},
        "scheduler": {"type": "STRScheduler", "kwargs": {"prune_rate": 0.5, "total_iterations": 4}},
    },
    {
        "mask_generator": {"type": "ProbMaskGenerator", "kwargs": {"tau": 1.0}},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {
            "type": "ProbMaskPruneScheduler",
            "kwargs": {
                "prune_rate": 0.5, "total_iterations": 4, "warmup_iteration_stamps": 0, "finetune_iteration_stamps": 2,
                "start_prune_rate": 0.0, "seed": 1,
            },
        },
    },
    {
        "sparsity": {"target_sparsity": 0.5, "uniform": True},
        "scheduler": {"type": "ADMMScheduler", "kwargs": {"total_iters": 4, "iters_per_epoch": 2, "rho": 0.01}},
    },
    {"scheduler": {"type": "AmpereScheduler", "kwargs": {"mask_calculator": "m4n2_1d", "whitelist": ["Linear"],
    "verbosity": 0}}},
    *(PRESETS[name] for name in PRESETS),
]  # fmt: skip

plausible = st.sampled_from(
    [
        0, 1, 2, 4, -1, 10**9, 0.0, 0.1, 0.5, 0.999, 1.0, 1.5, 30, 99.9, 100, 1e-12, 1e4, 1e5, 1e6, True, False, None,
        "erk", "global",
        "energy", "0", "2", "module.0", "p1", "p2", "cos", "Linear", "m4n2_2d_best", "m8n4_1d", "2:4", "FakeSparse",
        "STRFakeSparse",
        "STRScheduler", "BaseScheduler", "AmpereScheduler", "NMMaskGenerator", "NormalMaskGenerator", [30, 60, 90],
        [0.5], ["Conv2d"], {},
    ]
)  # fmt: skip
values = st.one_of(
    plausible,
    plausible,
    hostile,
    st.sampled_from([nn.Linear, nn.ReLU(), len, b"x", 1j]),
)


@st.composite
def inside(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """A config in which the arguments of its parts are mutated, and nothing around them."""
    parts = [part for part in config if part == "sparsity" or (part != "leaf_module" and config[part].get("kwargs"))]
    part = draw(st.sampled_from(parts))
    if part == "sparsity":
        return {**config, part: draw(mutated(config[part], values, 2))}
    return {**config, part: {**config[part], "kwargs": draw(mutated(config[part]["kwargs"], values, 2))}}


configs = st.sampled_from(CONFIGS).flatmap(
    lambda config: st.one_of(inside(config), tweaked(config), mutated(config, values, 2))
)


def run(config: Any) -> None:
    """Build a scheduler, prepare a small model, train one step; a refusal leaves the model as it was."""
    scheduler = build_sparse_scheduler(config)
    if getattr(scheduler, "save_dir", None) is not None:
        scheduler.save_dir = None  # pyright: ignore[reportAttributeAccessIssue]  # writing there is what the user asked for
    if getattr(scheduler, "analyse", False):
        scheduler.writes_analysis = False  # pyright: ignore[reportAttributeAccessIssue]  # the same
    model = network()
    before = fingerprint(model)
    try:
        prepared = scheduler.prepare_sparse_model(model, example_inputs=torch.zeros(1, 16, 2, 2))
    except GossamerError:
        assert fingerprint(model) == before
        raise
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    scheduler.init_optimizer(optimizer)
    scheduler.prune_model(prepared, 0)
    loss_of(prepared).backward()
    optimizer.step()
    scheduler.export_sparse_model(prepared)


@pytest.fixture(autouse=True, scope="module")
def warmed_up() -> None:
    """torch imports parts of itself, and writes a file, when the first optimizer steps."""
    for config in CONFIGS:
        run(config)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_configs_that_are_mutated_are_sound(config: dict[str, Any]) -> None:
    run(config)


@pytest.mark.parametrize("examples", [80, pytest.param(8_000, marks=pytest.mark.slow)])
def test_mutated_configs_are_refused_or_train(examples: int) -> None:
    outcome = fuzz(configs, examples, run)
    assert outcome.accepted > examples / 20
    assert outcome.refused > examples / 20


def texts() -> st.SearchStrategy[tuple[str, str]]:
    """Names and contents of files: YAML, JSON and Python."""
    as_yaml = (
        st.sampled_from(CONFIGS).flatmap(lambda config: mangled(block_text(config))).map(lambda text: ("a.yaml", text))
    )
    as_json = st.sampled_from(CONFIGS).flatmap(lambda config: mangled(json.dumps(config, indent=1)))
    script = "import torch\nlength = 100\nsparsity_config = {}\n"
    as_python = st.sampled_from(CONFIGS).flatmap(lambda config: mangled(script.format(repr(config))))
    return st.one_of(as_yaml, as_json.map(lambda text: ("a.json", text)), as_python.map(lambda text: ("a.py", text)))


@pytest.mark.parametrize("examples", [60, pytest.param(3_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_build(examples: int, tmp_path: Path) -> None:
    def read(file: tuple[str, str]) -> None:
        path = tmp_path / file[0]
        path.write_text(file[1], encoding="utf-8", errors="replace")
        build_sparse_scheduler(read_config(path))

    outcome = fuzz(texts(), examples, read, tmp_path)
    assert outcome.refused > examples / 20


REFUSED: list[tuple[Any, str]] = [
    ({"scheduler": None}, "scheduler: missing key"),
    (levels(total_iters=10**400), "total_iters: expected a number <= 1e+09"),
    (levels(init_lr=1e308), "init_lr: expected a number <= 10000"),
    ({"scheduler": {"type": "BaseScheduler", "kwargs": torch.ones(2)}}, "kwargs: expected a dict, found Tensor"),
    ({"scheduler": {}, "fuse_bn": torch.ones(2)}, "fuse_bn: not supported"),
    (levels(no_prune_keyword="a" * 10_000), "has 10,012 characters"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_a_config_that_once_failed_is_refused_with_its_reason(config: Any, message: str) -> None:
    with pytest.raises(GossamerError, match=re.escape(message)):
        run(config)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "scheduler: &a [*a]", "refers to a value that contains it"),
        ("a.yaml", "scheduler: !Unknown 1", "unknown tag"),
        ("a.yaml", "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
         "more than 50,000 values when its aliases are expanded"),
        ("a.py", "x = {'scheduler': " + "-" * 100_000 + "1}", "nested too deeply"),
        ("a.py", "x = {'scheduler': {[1]: 2}}", "a.py:1: expected a name as key"),
    ],
)  # fmt: skip
def test_a_file_that_once_failed_is_refused_with_its_reason(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(GossamerError, match=re.escape(message)):
        read_config(tmp_path / name)


def chain(last: str, link: str, length: int) -> str:
    """Names that stand for one another, and a config with the last of them."""
    names = [f"a0 = {last}", *(f"a{i} = {link.format(f'a{i - 1}')}" for i in range(1, length))]
    return "\n".join([*names, f"c = {{'scheduler': a{length - 1}}}"])


SCRIPTS: dict[str, tuple[str, str]] = {
    "doubled names": (chain("['x']", "[{0}, {0}]", 30), "the config has more than 50,000 values when its names"),
    "doubled sets": (
        f"s = {set(range(1000))}\nc = {{'scheduler': [{'s, ' * 1000}]}}",
        "a.py:1: the config has more than 50,000 values",
    ),
    "a chain of names": (chain("1", "{0}", 2000), "the config is nested more than 100 levels deep"),
    "a name of itself": ("a = [a]\nc = {'scheduler': a}", "a.py:1: 'a' is code"),
    "many attributes": ("c = {'scheduler': x" + ".y" * 500 + "}", "a.py:1: 'x.y.y"),
    "a large sum": ("c = {'scheduler': 1" + "+x" * 500 + "}", "a.py:1: '1+x+x"),
    "a large number": (
        "c = {'scheduler': 0x" + "f" * 6000 + "}",
        "expected a number, found one of 24,000 bits",
    ),
    "a list in a set": ("c = {'scheduler': {[1]}}", "a.py:1: expected a name, found '[1]'"),
    "an operator": ("c = {'scheduler': {'a': not 1}}", "a.py:1: 'not 1' is code"),
    "a list merged into a dict": ("c = {'scheduler': {**[1]}}", "a.py:1: expected a dict after '**', found '[1]'"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_once_failed_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    text, message = SCRIPTS[name]
    (tmp_path / "a.py").write_text(text)

    def read() -> None:
        with pytest.raises(GossamerError, match=re.escape(message)):
            read_config(tmp_path / "a.py")

    assert attempt(read, tmp_path)
