"""Malformed states of managers: refused with model, optimizer and run untouched, or accepted and trained on.

One row for each family of modifiers that keeps a state. A state of a real run is mutated; what is accepted goes on
for two steps and to `finalize`, and must not fail there.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gossamer import GossamerError, Manager
from gossamer.msbench import build_sparse_scheduler
from tests.fuzz.harness import attempt, fingerprint, fuzz
from tests.fuzz.values import hostile, mutated

STEPS_PER_EPOCH = 4
SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, update_frequency: 0.25"
GRADUAL = SPAN + ", init_sparsity: 0.1, final_sparsity: 0.8"


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


@cache
def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def losses(model: nn.Module) -> Iterator[Tensor]:
    for step in range(4):
        inputs, labels = batch(step)
        yield functional.cross_entropy(model(inputs), labels)


@dataclass
class Run:
    """A small model in training; `load` is what is tested."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    load: Callable[[Any], Any]
    save: Callable[[], Any]
    before: Callable[[int], None]
    finish: Callable[[], None]
    scheduler: Any = None
    steps: int = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.before(self.steps)
            inputs, labels = batch(self.steps % 8)
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1

    def digest(self) -> str:
        """Everything that a refused state may not change."""
        held = [self.save(), self.optimizer.state_dict(), len(self.optimizer._optimizer_step_post_hooks)]
        return fingerprint(self.model) + hashlib.sha256(repr(_plain(held)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in value.items()]
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Recipe:
    """A recipe; `loads_first` gives the state to the manager before `modify`."""

    modifiers: str
    options: Callable[[], dict[str, Any]] = field(default=dict)
    rates: Callable[[torch.optim.Optimizer], Any] | None = None
    saved_at: tuple[int, ...] = (3, 7)

    def begin(self, state: Any = None) -> Run:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        manager = _manager(self.modifiers)
        scheduler = None if self.rates is None else self.rates(optimizer)
        options = self.options() | ({} if scheduler is None else {"lr_scheduler": scheduler})
        run = Run(
            model,
            optimizer,
            manager.load_state_dict,
            manager.state_dict,
            lambda _: None,
            lambda: manager.finalize(warn=False),
            scheduler,
        )
        if state is not None:
            untouched = fingerprint(model)
            try:
                manager.load_state_dict(state)
                manager.apply_structure(model, 0.0)
            except GossamerError:
                assert fingerprint(model) == untouched
                raise
            untouched = fingerprint(model)
            try:
                manager.modify(model, optimizer, STEPS_PER_EPOCH, **options)
            except GossamerError:
                assert fingerprint(model) == untouched
                assert not optimizer._optimizer_step_post_hooks
                raise
        else:
            manager.modify(model, optimizer, STEPS_PER_EPOCH, **options)
        return run


def _manager(modifiers: str) -> Manager:
    manager = Manager(_recipe(modifiers))
    manager.report_when_dropped = False
    return manager


@cache
def _recipe(modifiers: str) -> Any:
    return Manager(
        "modifiers:\n" + "".join(f"  - !{line.strip()}\n" for line in modifiers.strip().splitlines())
    ).recipe_object


@dataclass(frozen=True)
class Config:
    """A config of MSBench, whose schedulers have states of their own."""

    scheduler: dict[str, Any]
    sparser: str = "FakeSparse"
    generator: str = "NormalMaskGenerator"
    more: dict[str, Any] = field(default_factory=dict)
    saved_at: tuple[int, ...] = (3, 7)

    def begin(self, state: Any = None) -> Run:
        model = network()
        held = build_sparse_scheduler(
            {
                "scheduler": self.scheduler,
                "mask_generator": {"type": self.generator},
                "fake_sparse": {"type": self.sparser},
                **self.more,
            }
        )
        model = held.prepare_sparse_model(model)
        optimizer = torch.optim.SGD(held.param_groups(model), lr=0.05, momentum=0.9)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        held.set_lr_scheduler(rates)
        run = Run(
            model,
            optimizer,
            held.load_state_dict,
            held.state_dict,
            lambda step: _prune(held, model, step),
            lambda: held.export_sparse_model(model),
            rates,
        )
        if state is not None:
            untouched = run.digest()
            try:
                held.load_state_dict(state)
            except GossamerError:
                assert run.digest() == untouched
                raise
        return run


def _prune(scheduler: Any, model: nn.Module, step: int) -> None:
    scheduler.prune_model(model, max(step, scheduler.iteration or 0))


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def steps(optimizer: torch.optim.Optimizer) -> Any:
    rates = torch.optim.lr_scheduler
    first, second = rates.StepLR(optimizer, 3), rates.MultiStepLR(optimizer, [2, 5])
    return rates.SequentialLR(optimizer, [first, second], [4])


LEVELS = "LevelPruningModifier {levels: [0.3, 0.6, 0.8], end_epoch: 3}"
FAMILIES: dict[str, Recipe | Config] = {
    "gradual": Recipe(
        f"GMPruningModifier {{{GRADUAL}}}\nConstantPruningModifier {{params: ['3.weight'], start_epoch: 3}}"
    ),
    "global": Recipe(f"GlobalMagnitudePruningModifier {{{GRADUAL}}}"),
    "movement": Recipe(f"MovementPruningModifier {{{GRADUAL}}}"),
    "mfac": Recipe(f"MFACPruningModifier {{{GRADUAL}, num_grads: 3, fisher_block_size: 8}}"),
    "obs": Recipe(
        f"OBSPruningModifier {{{GRADUAL}, num_grads: 2, fisher_block_size: 4}}", lambda: {"grad_sampler": losses}
    ),
    "filters": Recipe(f"StructuredPruningModifier {{{GRADUAL}}}"),
    "acdc": Recipe(f"ACDCPruningModifier {{{SPAN}, compression_sparsity: 0.8}}"),
    "rigl": Recipe(f"RigLPruningModifier {{{SPAN}, final_sparsity: 0.8}}"),
    "topkast": Recipe(f"TopKASTPruningModifier {{{SPAN}, forward_sparsity: 0.8, backward_sparsity: 0.5}}"),
    "admm": Recipe(f"ADMMPruningModifier {{{SPAN}, final_sparsity: 0.8}}"),
    "str": Recipe("STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3}"),
    "str to a target": Recipe(
        "STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, final_sparsity: 0.8}"
    ),
    "probmask": Recipe(
        "ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, final_sparsity: 0.8}"
    ),
    "levels": Recipe(LEVELS, rates=cosine),
    "levels by steps": Recipe(LEVELS, rates=steps),
    "quantization": Recipe(f"QuantizationModifier {{start_epoch: 0.5}}\nGMPruningModifier {{{GRADUAL}}}"),
    "distillation": Recipe(f"DistillationModifier {{hardness: 0.5}}\nGMPruningModifier {{{GRADUAL}}}"),
    "features": Recipe(
        "PerLayerDistillationModifier {student_layer_names: ['0', '3'], teacher_layer_names: ['0', '3']}",
        lambda: {"distillation_teacher": network(6)},
    ),
    "layers": Recipe(
        f"LayerPruningModifier {{layers: ['3'], start_epoch: 0.5, end_epoch: 2}}\nGMPruningModifier {{{GRADUAL}}}"
    ),
    "trainable": Recipe(
        "TrainableParamsModifier {params: ['3.bias'], trainable: false, start_epoch: 0.5, end_epoch: 2}\n"
        f"GMPruningModifier {{{GRADUAL}}}"
    ),
    "thinning": Recipe(
        "StructuredPruningModifier {params: ['0.weight', '3.weight'], start_epoch: 0, end_epoch: 1, "
        "update_frequency: 0.25, init_sparsity: 0.5, final_sparsity: 0.5}\nLayerThinningModifier {start_epoch: 1.25}"
    ),
    "rates": Recipe(
        "LearningRateFunctionModifier "
        "{start_epoch: 0, end_epoch: 1, lr_func: linear, init_lr: 0.01, final_lr: 0.1}\n"
        "LearningRateModifier {start_epoch: 1, lr_class: ExponentialLR, lr_kwargs: {gamma: 0.5}}\n"
        f"SetWeightDecayModifier {{start_epoch: 1, weight_decay: 0.0}}\nGMPruningModifier {{{GRADUAL}}}"
    ),
    "msbench levels": Config(
        {"type": "AmbaLevelPruneScheduler", "kwargs": {"total_iters": 12, "sparsity_table": [30, 60], "save_dir": None}}
    ),
    "msbench probmask": Config(
        {
            "type": "ProbMaskPruneScheduler",
            "kwargs": {
                "prune_rate": 0.8,
                "total_iterations": 12,
                "warmup_iteration_stamps": 0,
                "finetune_iteration_stamps": 8,
            },
        },
        "ProbMaskFakeSparse",
        "ProbMaskGenerator",
    ),
    "msbench admm": Config(
        {"type": "ADMMScheduler", "kwargs": {"total_iters": 12, "iters_per_epoch": 2}},
        more={"sparsity": {"target_sparsity": 0.8, "uniform": True}},
    ),
}


@cache
def saved(name: str) -> list[Any]:
    """States of a real run of a family."""
    run, found = FAMILIES[name].begin(), list[Any]()
    for step in range(max(FAMILIES[name].saved_at)):
        run.train(1)
        if step + 1 in FAMILIES[name].saved_at:
            found.append(copy.deepcopy(run.save()))
    return found


# Mutations of tensors, which `mutated` replaces as wholes


def _poked(value: float) -> Callable[[Tensor], Tensor]:
    def poke(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        if changed.numel():
            changed.view(-1)[0] = value if changed.is_floating_point() else 1
        return changed

    return poke


CHANGES: list[Callable[[Tensor], Any]] = [
    *(_poked(value) for value in (float("nan"), float("inf"), -1.0, 0.0, 1.0, 1e9, -1e9, 1e20, 3e38)),
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.bool,
    Tensor.int,
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.to_sparse() if tensor.dim() else tensor,
    lambda tensor: tensor.float().requires_grad_(),
    lambda tensor: tensor.reshape(-1),
    lambda tensor: tensor.unsqueeze(0),
    lambda tensor: tensor[:1] if tensor.dim() else tensor,
    lambda tensor: tensor.new_zeros(()),
    lambda tensor: tensor.new_zeros((1,)).expand(2**40),
    lambda tensor: tensor.new_zeros(()).expand(tensor.shape),
    lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    lambda tensor: tensor.flip(0) if tensor.dim() else tensor,
    lambda tensor: nn.Parameter(tensor.float()),
    lambda tensor: tensor.tolist(),
]
TENSORS: list[Any] = [
    torch.zeros(()),
    torch.zeros(2),
    torch.zeros(8, 8),
    torch.zeros(0),
    torch.full((8, 8), float("nan")),
    torch.zeros(8, 8, dtype=torch.complex64),
    torch.zeros(8, 8, dtype=torch.uint8),
    torch.zeros(8, 8, device="meta"),
    torch.zeros(1).expand(2**40),
    torch.zeros(1, dtype=torch.uint8).expand(2**29),
    torch.eye(8).to_sparse(),
    {"__bits__": {"bits": torch.zeros(8, dtype=torch.uint8), "shape": [8, 8]}},
    {"__bits__": {"bits": torch.zeros(1, dtype=torch.uint8), "shape": [2**32]}},
    {"__bits__": {"bits": torch.zeros(1, dtype=torch.uint8).expand(2**29), "shape": [2**32]}},
    {"__bits__": None},
    "active",
    "pending",
    "ended",
]
values = st.one_of(hostile, st.sampled_from(TENSORS), st.integers(0, 20))


@st.composite
def states(draw: st.DrawFn) -> tuple[str, Any, bool]:
    """A family, a mutated state of it, and whether it is loaded before `modify`."""
    name = draw(st.sampled_from(list(FAMILIES)))
    base = draw(st.sampled_from(saved(name)))
    if draw(st.booleans()):
        state = draw(mutated(base, values))
    else:
        state = copy.deepcopy(base)
        places = list(_tensors(state))
        numbers = (
            st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=2, unique=True) if places else st.just([])
        )
        for number in draw(numbers):
            holder, key = places[number]
            holder[key] = draw(st.sampled_from(CHANGES))(holder[key])
    return name, state, draw(st.integers(0, 3)) == 0


def _tensors(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs):
        if isinstance(item, Tensor):
            yield value, key
        yield from _tensors(item)


_runs: dict[str, tuple[Run, str]] = {}
"""By family: a run that refused every state so far, and what it is like."""


def load(value: tuple[str, Any, bool]) -> None:
    name, state, first = value
    if first:
        run = FAMILIES[name].begin(state)
    else:
        if name not in _runs:
            run = FAMILIES[name].begin()
            run.train(2)
            _runs[name] = run, run.digest()
        run, untouched = _runs[name]
        try:
            run.load(state)
        except GossamerError:
            assert run.digest() == untouched, f"a refused state changed the run: {name}"
            raise
        del _runs[name]
    try:
        run.train(2)
        run.finish()
    except GossamerError as error:
        raise AssertionError(f"{name}: an accepted state failed later: {error}") from error


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Nobody reads what thousands of runs log."""
    logger = logging.getLogger("gossamer")
    logger.disabled = True
    yield
    logger.disabled = False
    _runs.clear()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_that_is_not_malformed_is_accepted(name: str) -> None:
    for state in saved(name):
        for first in (False, True):
            assert attempt(lambda: load((name, state, first))), (name, first)  # noqa: B023


def change(*path: Any, to: Any) -> Callable[[Any], None]:
    """Set what is at the end of a path; `to` may be a function of what is there."""

    def changed(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to(state[path[-1]]) if callable(to) else to

    return changed


def drop(*path: Any) -> Callable[[Any], None]:
    def changed(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return changed


def _forget(state: Any, name: str) -> None:
    """Let a state say that one tensor was not cut with the others."""
    for part in state["modifiers"]["LayerThinningModifier.0"]["state"]["cuts"][0].values():
        del part[name]


def of(name: str, *path: Any) -> tuple[Any, ...]:
    return ("modifiers", f"{name}PruningModifier.0", *path)


HUGE = {"__bits__": {"bits": torch.zeros(1, dtype=torch.uint8), "shape": [2**32]}}
WEIGHT = "3.weight"
REFUSED: list[tuple[str, Callable[[Any], None], str]] = [
    ("gradual", change("modifiers", to=None), "state.modifiers: expected a mapping, found None"),
    ("gradual", change("step", to="x"), "state.step: expected a whole number from 0"),
    ("gradual", change("step", to=-5), "found -5"),
    ("gradual", change("step", to=True), "found True"),
    ("gradual", change("step", to=2**60), "state.step: expected a whole number"),
    ("gradual", change("step", to=float("nan")), "found nan"),
    ("gradual", change("steps_per_epoch", to=0), "state.steps_per_epoch: expected a number from"),
    ("gradual", change("steps_per_epoch", to=1e-320), "state.steps_per_epoch: expected a number from"),
    ("gradual", change("format", to=2), "the state has format 2"),
    ("gradual", lambda state: state.update(extra=1), "unknown key 'extra'"),
    ("gradual", drop(*of("GM", "status")), "'status' is missing"),
    ("gradual", change(*of("GM", "status"), to="started"), "expected 'pending' or 'active' or 'ended'"),
    ("gradual", change(*of("GM", "status"), to="pending"), "has not started, and holds masks"),
    ("gradual", change(*of("GM", "targets"), to=[1]), "expected text, found 1"),
    ("gradual", change(*of("GM", "masks", WEIGHT), to=HUGE), "the bits do not fit shape (4294967296,)"),
    ("gradual", change(*of("GM", "masks", WEIGHT, "__bits__", "shape"), to=[8, 7]), "the bits do not fit shape (8, 7)"),
    ("gradual", change(*of("GM", "state", "sparsity", WEIGHT), to=1.5), "expected a number from 0 to 1, found 1.5"),
    ("gradual", lambda state: state["modifiers"]["ConstantPruningModifier.0"].update(status="active", state={"x": 1}),
     "unknown key 'x'"),
    ("rates", change("groups", 0, "lr", to=float("inf")), "state.groups[0].lr: expected a number from 0"),
    ("rates", change("modifiers", "LearningRateModifier.0", "state", "initial", to=["x"]), "found 'x'"),
    ("movement", change(*of("Movement", "state", "movement", WEIGHT), to=_poked(float("nan"))), "found NaN"),
    ("mfac", change(*of("MFAC", "state", "gradients", WEIGHT), to=[torch.zeros(64, device="meta")]), "a dense tensor"),
    ("mfac", change(*of("MFAC", "state", "gradients", WEIGHT), to=[torch.zeros(1).expand(64)]), "an expanded one"),
    ("probmask", drop(*of("ProbMask", "state", "second")), "'second' is missing"),
    ("probmask", drop(*of("ProbMask", "state", "steps", WEIGHT)), "only one of 'probabilities' and 'steps' has"),
    ("probmask", change(*of("ProbMask", "state", "probabilities", WEIGHT), to=_poked(2.0)), "numbers from 0 to 1"),
    ("str", change(*of("STR", "state", "thresholds", WEIGHT), to=torch.tensor(1j)), "expected floating-point numbers"),
    ("str", drop(*of("STR", "state", "momenta")), "'momenta' is missing"),
    ("admm", drop(*of("ADMM", "state", "kept", WEIGHT)), "only one of 'sums' and 'kept' has '3.weight'"),
    ("topkast", drop(*of("TopKAST", "state", "aside", WEIGHT)), "'3.weight' is missing, but 'backward' has it"),
    ("acdc", change(*of("ACDC", "state", "sparse"), to=1), "expected true or false, found 1"),
    ("levels", change(*of("Level", "state", "target"), to=None), "expected a number from 0 to 1, found None"),
    ("levels", change("restart", "scheduler", "last_epoch", to="x"), "state.restart.scheduler.last_epoch"),
    ("quantization", change("modifiers", "QuantizationModifier.0", "state", "ranges", "0.input", to=torch.zeros(3)),
     "expected shape (2,), found (3,)"),
    ("distillation", change("teacher", "1.running_var", to=_poked(-1.0)), "numbers from 0 to 1e+09"),
    ("features", lambda state: state["modifiers"]["PerLayerDistillationModifier.0"]["state"]["momenta"].update(
        {"3 → 3": torch.zeros(1, 1)}), "is not like its projection"),
    ("layers", change(*of("Layer", "state", "layers", "3", "bias"), to=torch.full((8,), float("nan"))), "found NaN"),
    ("trainable", change("modifiers", "TrainableParamsModifier.0", "state", "before", "3.bias", to="yes"), "'yes'"),
    ("thinning", change("modifiers", "LayerThinningModifier.0", "state", "cuts", 0, "kept", "0.weight", "0",
     to=torch.tensor([3, 1])), "expected ascending positions below 8"),
    ("thinning", drop("modifiers", "LayerThinningModifier.0", "state", "cuts", 0, "kept", "0.bias"), "name different"),
    ("thinning", lambda state: _forget(state, "3.bias"), "'3.bias' was not thinned as the layers around it"),
    ("msbench levels", change("iteration", to=-1), "expected a whole number from 0"),
    ("msbench levels", change("run", "step", to="x"), "state.step"),
    ("msbench probmask", change("statistics", "statistics", to=torch.zeros(2, 2)), "expected one dimension"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "message"), REFUSED)
@pytest.mark.parametrize("first", [False, True])
def test_a_malformed_state_is_refused(name: str, changed: Callable[[Any], None], message: str, first: bool) -> None:
    state = copy.deepcopy(saved(name)[-1 if name not in ("layers", "trainable") else 0])
    changed(state)
    found: list[str] = []

    def loaded() -> None:
        try:
            load((name, state, first))
        except GossamerError as error:
            found.append(str(error))
            raise

    assert not attempt(loaded)
    assert message in found[0]


@pytest.mark.parametrize("examples", [80, pytest.param(25_000, marks=pytest.mark.slow)])
def test_malformed_states_are_refused_untouched_or_trained_on(examples: int) -> None:
    for name in FAMILIES:
        saved(name)
    outcome = fuzz(states(), examples, load)
    assert outcome.accepted > examples // 20
    assert outcome.refused > examples // 4
