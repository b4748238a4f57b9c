"""Malformed recipes: refused with a `GossamerError` and without a trace in the model, or they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gossamer import Manager
from gossamer.errors import GossamerError
from gossamer.modifiers.base import registered
from tests.fuzz.documents import block_text, mangled, tweaked, yaml_text
from tests.fuzz.harness import attempt, fingerprint, fuzz
from tests.fuzz.values import hostile, mutated

FILES = sorted(
    path
    for path in (Path(__file__).parent.parent / "data" / "recipes").rglob("*")
    if path.suffix in (".yaml", ".md") and path.stat().st_size < 20_000
)
TIMED: dict[str, Any] = {"start_epoch": 0.0, "end_epoch": 2.0, "update_frequency": 0.5}
GRADUAL: dict[str, Any] = {
    "params": ["0.weight", "re:[24].weight"],
    "init_sparsity": 0.05,
    "final_sparsity": 0.5,
    **TIMED,
}
FIELDS: dict[str, dict[str, Any]] = {
    "ACDCPruningModifier": {"params": "__ALL_PRUNABLE__", "compression_sparsity": 0.5, **TIMED},
    "ADMMPruningModifier": {"params": ["0.weight"], "final_sparsity": 0.5, "rho": 0.01, **TIMED},
    "ConstantPruningModifier": {"params": "__ALL_PRUNABLE__", "start_epoch": 0.0, "end_epoch": 1.0, "exclude": ["2"]},
    "DistillationModifier": {"start_epoch": 0.0, "end_epoch": 1.0, "hardness": 0.5, "temperature": 2.0},
    "EpochRangeModifier": {"start_epoch": 0.0, "end_epoch": 2.0},
    "GMPruningModifier": {**GRADUAL, "mask_type": "unstructured", "global_sparsity": True, "inter_func": "cubic"},
    "GlobalMagnitudePruningModifier": {**GRADUAL, "max_layer_sparsity": 0.9},
    "LayerPruningModifier": {"layers": ["2"], "start_epoch": 0.5, "end_epoch": 1.0},
    "LayerThinningModifier": {"params": ["re:.*weight"], "start_epoch": 0.25, "update_epochs": [0.5, 1.0]},
    "LearningRateFunctionModifier": {
        "lr_func": "cyclic_linear", "init_lr": 0.1, "final_lr": 0.01, "cycle_epochs": 0.5, "start_epoch": 0,
        "end_epoch": 2,
    },
    "LearningRateModifier": {
        "lr_class": "MultiStepLR", "lr_kwargs": {"gamma": 0.1, "milestones": [0.25, 1]}, "init_lr": 0.1,
        "start_epoch": 0,
    },
    "LevelPruningModifier": {"levels": [0.3, 0.6], "end_epoch": 1.0, "allocation": "energy", "energy_slope": 0.5,
    "tolerance": 0.015},
    "MFACPruningModifier": {**GRADUAL, "num_grads": {0.0: 2, 0.5: 4}, "fisher_block_size": 8, "damp": 1e-5},
    "MagnitudePruningModifier": {**GRADUAL, "mask_type": [1, 4]},
    "MovementPruningModifier": {**GRADUAL, "leave_enabled": False},
    "OBSPruningModifier": {**GRADUAL, "num_grads": 2, "fisher_block_size": 4, "num_recomputations": 2},
    "PerLayerDistillationModifier": {"start_epoch": 0.0, "end_epoch": 1.0, "gain": 1.5, "epsilon": 1e-6},
    "ProbMaskPruningModifier": {
        "params": "__ALL_PRUNABLE__", "final_sparsity": 0.5, "start_epoch": 0.0, "end_epoch": 1.0,
        "finetune_epoch": 0.5,
        "score_lr": 0.1, "tau_end": 0.03, "seed": 1,
    },
    "QuantizationModifier": {
        "start_epoch": 0.0, "scheme": {"input_activations": {"num_bits": 8, "symmetric": False}, "weights": None},
        "scheme_overrides": {"Linear": {"weights": {"num_bits": 4}}, "re:0": None}, "ignore": ["ReLU", "re:9.*"],
        "disable_quantization_observer_epoch": 1.0, "freeze_bn_stats_epoch": 0.5, "num_calibration_steps": 2,
    },
    "RigLPruningModifier": {
        "params": ["__ALL_PRUNABLE__"], "final_sparsity": 0.5, "init_update_fraction": 0.3, "num_grads": 1, **TIMED,
    },
    "STRPruningModifier": {
        "params": "__ALL_PRUNABLE__", "final_sparsity": 0.5, "s_init": -5.0, "st_decay": 0.001, "st_lr": 0.1,
        "end_epoch": 1.0,
    },
    "SetLearningRateModifier": {"learning_rate": 0.1, "param_groups": [0], "start_epoch": 0.0},
    "SetParamModifier": {"params": ["4.bias"], "val": [0.1] * 16},
    "GradualParamModifier": {"params": ["re:.*bias"], "init_val": 0.0, "final_val": 1.0, "inter_func": "linear",
    **TIMED},
    "SetWeightDecayModifier": {"weight_decay": 0.01, "start_epoch": 0.0},
    "SparsificationLoggingModifier": {"update_frequency": 0.5},
    "StructuredPruningModifier": {**GRADUAL, "mask_type": "filter", "param_groups": [["0.weight"]]},
    "TopKASTPruningModifier": {
        "params": "__ALL_PRUNABLE__", "forward_sparsity": 0.5, "backward_sparsity": 0.3, "active_weight_decay": 1e-4,
        **TIMED,
    },
    "TrainableParamsModifier": {"params": ["0.weight"], "trainable": False, "start_epoch": 0.0, "end_epoch": 1.0},
}  # fmt: skip
"""A sound example of every modifier on the network below."""


def network() -> nn.Sequential:
    """Every layer gives what it takes, so that any of them can be removed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Softsign(), nn.Linear(16, 16))


def loss_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 16, 2, 16, generator=generator).requires_grad_()  # a recipe may freeze every layer
    outputs = model(inputs)
    return functional.cross_entropy(outputs.mean((2, 3)), torch.arange(4))


def sampler(model: nn.Module) -> Any:
    for _ in range(8):
        yield loss_of(model)


def run(text: str) -> None:
    """Read a recipe, attach it to a small model, train two steps; a refusal leaves the model as it was."""
    manager = Manager(text)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = fingerprint(model)
    try:
        optimizer = manager.modify(
            model,
            optimizer,
            2,
            grad_sampler=sampler,
            calibration_data=[torch.zeros(2, 16, 2, 16)],
            example_inputs=torch.zeros(1, 16, 2, 16),
        )
    except GossamerError:
        assert fingerprint(model) == before
        raise
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    manager.finalize()


def one(name: str, **fields: Any) -> str:
    return block_text({"modifiers": [{f"!{name}": {**FIELDS[name], **fields}}]})


plausible = st.sampled_from(
    [
        0, 1, 2, 3, 64, -1, 10**9, 0.0, 0.1, 0.25, 0.999, 1.0, 1.5, 1e-12, 1e-9, 1e-6, 1e3, 1e4, 1e5, 1e6, 1e9, True,
        False, None,
        "filter", "channel", "2:4", "1:2", "1:9999", "block4", "m4n2_2d_best", "m8n4_2d_greedy", "cosine", "linear",
        "ExponentialLR", "StepLR", "CosineAnnealingWarmRestarts", "erk", "global", "uniform", "movement", "OBS", "MFAC",
        "0.weight", "2", "4.bias", "__ALL__", "__ALL_PRUNABLE__", "re:.*", "re:(.*)*$", "__FROM_PARAM__", "tensorrt",
        "eval(epochs)",
        [0.1, 0.2], [1, 2], [8, 1], ["0.weight", "4.weight"], {0.5: ["0.weight"], 0.9: ["2.weight"]}, {"gamma": 1000.0},
    ]
)  # fmt: skip


def documents() -> st.SearchStrategy[str]:
    """Mutated recipes: of one or two modifiers, with variables, in stages, or as Markdown."""

    @st.composite
    def build(draw: st.DrawFn) -> str:
        names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2))
        values = st.one_of(plausible, plausible, hostile)
        whole = draw(st.integers(0, 4)) == 0
        kinds = [draw(st.one_of(tweaked(FIELDS[name]), mutated(FIELDS[name], values, 2))) for name in names]
        modifiers = [{f"!{name}": FIELDS[name] if whole else kind} for name, kind in zip(names, kinds, strict=True)]
        variables = {"epochs": 2.0, "sparsity": 0.5, "half": "eval(epochs / 2)", "version": "1.0.0"}
        form = draw(st.sampled_from(["plain", "plain", "variables", "stages", "list"]))
        document: Any = {"modifiers": modifiers}
        if form == "variables":
            first = FIELDS[names[0]]
            ends = {"end_epoch": "eval(epochs)"} if "end_epoch" in first else {}
            document = {**variables, "pruning_modifiers": [{f"!{names[0]}": {**first, **ends}}, *modifiers[1:]]}
        elif form == "stages":
            document = {
                "first_stage": {"x": 1, "a_modifiers": modifiers[:1]},
                "second_stage": {"b_modifiers": modifiers[1:]},
            }
        elif form == "list":
            document = modifiers
        document = draw(mutated(document, values)) if whole else document
        text = draw(st.sampled_from([block_text, yaml_text]))(document)
        return f"---\n{text}\n---\n\n# Text\n" if draw(st.integers(0, 9)) == 0 else text

    return build()


def texts() -> st.SearchStrategy[str]:
    """Mutated text of real recipes, and of sound ones for the network."""
    sound = [one(name) for name in sorted(FIELDS)]
    real = [path.read_text(encoding="utf-8") for path in FILES]
    return st.one_of(st.sampled_from(sound).flatmap(mangled), st.sampled_from(real).flatmap(mangled))


@pytest.fixture(autouse=True, scope="module")
def warmed_up() -> None:
    """torch imports parts of itself, and writes a file, when the first optimizer steps."""
    run(one("EpochRangeModifier"))


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_modifier_has_a_sound_example_to_mutate(name: str) -> None:
    module = registered()[name].__module__
    if module.startswith("gossamer.") and not module.startswith("gossamer.modifiers.oneshot."):
        run(one(name))


@pytest.mark.parametrize("examples", [80, pytest.param(8_000, marks=pytest.mark.slow)])
def test_mutated_recipes_are_refused_or_train(examples: int) -> None:
    outcome = fuzz(documents(), examples, run)
    assert outcome.accepted > examples / 20
    assert outcome.refused > examples / 20


@pytest.mark.parametrize("examples", [60, pytest.param(4_000, marks=pytest.mark.slow)])
def test_mutated_texts_are_refused_or_train(examples: int) -> None:
    outcome = fuzz(texts(), examples, run)
    assert outcome.refused > examples / 20


REFUSED: list[tuple[str, str]] = [
    (one("EpochRangeModifier", end_epoch=1e308), "end_epoch: expected a number <= 1e+09, found 1e+308"),
    (one("GMPruningModifier", update_frequency=1e-320), "expected at least 1e-09 epochs, or -1 for every step"),
    (one("SetLearningRateModifier", learning_rate=1e308), "learning_rate: expected a number <= 10000"),
    (one("SetWeightDecayModifier", weight_decay=1e308), "weight_decay: expected a number <= 10000"),
    (one("ADMMPruningModifier", rho=1e308), "rho: expected a number <= 1e+06"),
    (one("ADMMPruningModifier", rho=1e-320), "rho: expected a number >= 1e-12"),
    (one("STRPruningModifier", s_init=1e308), "s_init: expected a number <= 100000"),
    (one("STRPruningModifier", st_lr=1e308), "st_lr: expected a number <= 10000"),
    (one("DistillationModifier", temperature=1e308), "temperature: expected a number <= 1e+06"),
    (one("DistillationModifier", temperature=1e-320), "temperature: expected a number >= 0.001"),
    (one("LayerThinningModifier", update_epochs=[1e308]), "update_epochs[0]: expected a number <= 1e+09"),
    (one("LearningRateModifier", lr_kwargs={"gamma": 1e308, "milestones": [1]}), "gamma: expected a number from 0"),
    (one("LearningRateModifier", lr_kwargs={"gamma": 0.1, "milestones": [1e308]}), "milestones: expected a number"),
    (one("SetParamModifier", val=1e308), "expected numbers between -1e+30 and 1e+30"),
    (one("SetParamModifier", val=[10**400]), "expected numbers between -1e+30 and 1e+30, found a larger one"),
    (one("SetParamModifier", val=[[float("nan")]]), "expected numbers between -1e+30 and 1e+30"),
    (one("QuantizationModifier", scheme_overrides={"Linear": {1: None}}), "scheme_overrides: unknown key '1'"),
    (one("QuantizationModifier", scheme={"weights": {1: 2}}), "unknown key '1'"),
    (one("MFACPruningModifier", num_grads={}), "dictionary should have at least 1 item"),
    (one("OBSPruningModifier", num_grads=10**9), "num_grads: expected a number <= 65536"),
    (one("MagnitudePruningModifier", mask_type="9" * 5000 + ":4"), "unknown pattern"),
    (one("MagnitudePruningModifier", mask_type="\ud83d"), "expected text, found half of a character"),
    (one("GMPruningModifier", params=["re:(.*)*x"]), "matches none of 6 parameters"),
    (one("GMPruningModifier", params=["re:" + "(" * 500 + ")" * 500]), "more than 50 levels deep"),
    ("x: eval(" + "-" * 990 + "1)\nmodifiers: [!DistillationModifier ]", "nested too deeply"),
    ("x: &a [*a]\nmodifiers: []", "refers to a value that contains it"),
    ("modifiers: [" + "!EpochRangeModifier {start_epoch: 0, end_epoch: 1}, " * 1001 + "]", "at most 1,000 modifiers"),
    ("x: " + "a" * 2**20, "at most 1 MB"),
    ("x: &a [" + "1, " * 500 + "]\ny: [" + "*a, " * 100 + "]\nmodifiers: []", "more than 50,000 values"),
]  # fmt: skip
ACCEPTED: list[str] = [
    one("GMPruningModifier", params=["re:((?!9).)*weight$"]),
    one("LearningRateModifier", lr_class="ExponentialLR", lr_kwargs={"gamma": 1000.0}, init_lr=1e4),
    *(
        block_text({"modifiers": [{f"!{name}": FIELDS[name]}, {"!LayerPruningModifier": {"layers": ["2"]}}]})
        for name in ("GMPruningModifier", "TopKASTPruningModifier", "GradualParamModifier")
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_recipe_that_once_failed_is_refused_with_its_reason(text: str, message: str) -> None:
    messages: list[str] = []

    def read() -> None:
        try:
            run(text)
        except GossamerError as error:
            messages.append(str(error))
            raise

    assert not attempt(read)
    assert message in messages[0]


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_recipe_that_once_failed_trains(text: str) -> None:
    assert attempt(lambda: run(text))


@pytest.mark.parametrize(
    "steps_per_epoch", [0, -1, 1e-320, 1e308, float("inf"), float("nan"), 2**2000, True, "2", None]
)
def test_a_number_of_steps_that_makes_no_sense_is_refused(steps_per_epoch: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GossamerError, match="steps_per_epoch: expected the number of optimizer steps"):
        Manager(one("GMPruningModifier")).modify(model, optimizer, steps_per_epoch)
