"""Every combination of the options either trains with a working result or names the conflict.

Combinations are generated. All of them are made into recipes; those that give
one are trained for a few steps, a share of them here and the rest among the
slow tests.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gossamer as sparsify
from gossamer import GossamerError, Manager
from gossamer.create import generator
from gossamer.create.choices import LEARNING_RATES, NAMES, method_of
from gossamer.model.tracing.flow import Ends
from gossamer.modifiers import QuantizationModifier
from gossamer.sparse import NM, parse_pattern

STEPS_PER_EPOCH, EPOCHS = 4, 2
PRUNING = (True, False, None, *NAMES)
TARGETS = (None, "vnni", "tensorrt")
MASK_TYPES: tuple[Any, ...] = (None, "unstructured", "block4", "2:4", "filter", [1, 4])
RATES = (*LEARNING_RATES, False)
EVERY = 13
"""`make test` trains one in this number of combinations."""


@dataclass(frozen=True)
class Options:
    pruning: Any
    quantization: bool
    distillation: bool
    target: str | None
    mask_type: Any
    lr: Any

    @property
    def variables(self) -> dict[str, Any]:
        given = {"target": self.target, "mask_type": self.mask_type}
        return {"num_epochs": EPOCHS, **{name: value for name, value in given.items() if value is not None}}

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "pruning": self.pruning,
            "quantization": self.quantization,
            "lr": self.lr,
            "distillation": self.distillation,
            "recipe_variables": self.variables,
        }

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


def all_options(first_rate: int = 0) -> Iterator[Options]:
    """Everything but the learning rate against everything; the learning rates take turns, beginning with this one."""
    rates = itertools.cycle((*RATES[first_rate:], *RATES[:first_rate]))
    both = (True, False)
    for pruning, quantization, distillation, target, mask_type in itertools.product(
        PRUNING, both, both, TARGETS, MASK_TYPES
    ):
        yield Options(pruning, quantization, distillation, target, mask_type, next(rates))


def conflict(options: Options) -> tuple[str, str] | None:
    """The two options that contradict each other according to the documentation."""
    method = method_of(options.pruning)
    patterns = {"vnni": "block4", "tensorrt": "2:4", None: "unstructured"}
    asked, default = options.mask_type, patterns[options.target]
    if method is None:
        return None
    if method.name == "constant":
        return None if asked is None else ("constant", "mask_type")
    if asked is not None and options.target is not None and parse_pattern(asked) != parse_pattern(default):
        return "target", "mask_type"
    found = asked if asked is not None else default
    if method.single_weights and found != "unstructured":
        return method.name, "mask_type"
    if method.name == "structured" and found != "filter" and (asked is not None or options.target is not None):
        return "structured", "mask_type"
    return None


def network() -> nn.Sequential:
    """Two layers that every pattern fits and hardware can run in 2:4, between a first convolution and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )


MIDDLE = ("3.weight", "8.weight")


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def losses(model: nn.Module) -> Iterator[Tensor]:
    for step in range(4):
        pixels, labels = batch(100 + step)
        yield cross_entropy(model(pixels), labels)


@pytest.mark.parametrize("first_rate", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(RATES)))])
def test_every_combination_loads_or_names_the_conflict(first_rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the network begins and ends is found once: it is the same each time."""
    model = network()
    known = Ends(frozenset({"0.weight"}), frozenset({"10.weight"}))
    assert generator.ends(model) == known
    monkeypatch.setattr(generator, "ends", lambda *_: known)
    loaded = 0
    for options in all_options(first_rate):
        arguments = conflict(options)
        if arguments is not None:
            with pytest.raises(GossamerError) as error:
                sparsify.create.recipe_for(model, **options.arguments)
            assert all(word in str(error.value) for word in arguments), f"{options}: {error.value}"
            assert "drop" in str(error.value)
            continue
        recipe = sparsify.create.recipe_for(model, **options.arguments, steps_per_epoch=STEPS_PER_EPOCH)
        assert recipe.max_epochs == EPOCHS, options
        assert bool([m for m in recipe.modifiers if m.family == "quantization"]) == options.quantization
        assert bool([m for m in recipe.modifiers if m.family == "distillation"]) == options.distillation
        assert bool([m for m in recipe.modifiers if m.family == "learning_rate"]) == (options.lr is not False)
        assert bool([m for m in recipe.modifiers if m.family == "pruning"]) == (options.pruning not in (False, None))
        loaded += 1
    assert loaded > 500


WORKING = [options for options in all_options() if conflict(options) is None]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=str(options), marks=() if number % EVERY == 0 else pytest.mark.slow)
        for number, options in enumerate(WORKING)
    ],
)
def test_a_combination_without_a_conflict_trains(options: Options) -> None:
    model = network()
    if options.pruning in ("constant", "transfer", "sparse-transfer", False):
        with torch.no_grad():
            model[3].weight[:, ::2] = 0
    given = {} if options.pruning not in ("obs", "mfac") else {"grad_sampler": losses}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    manager, used = sparsify.create.initialize(model, optimizer, STEPS_PER_EPOCH, **options.arguments, **given)
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        pixels, labels = batch(step)
        used.zero_grad()
        loss = cross_entropy(model(pixels), labels)
        loss.backward()
        used.step()
        assert bool(loss.isfinite())
    assert has_the_zeros(model, options)
    if options.quantization:
        assert is_rounded(model)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values() if value.is_floating_point())
    manager.finalize()
    assert has_the_zeros(model, options)


def has_the_zeros(model: nn.Sequential, options: Options) -> bool:
    method = method_of(options.pruning)
    weights = [model.get_parameter(name).detach() for name in MIDDLE]
    count = sum(int((weight == 0).sum()) for weight in weights)
    total = sum(weight.numel() for weight in weights)
    held = bool((model[3].weight[:, ::2] == 0).all())
    if method is None:
        return held if options.pruning is False and options.quantization else count < total / 2
    if method.name == "constant":
        return held and count == 16 * 8 * 9
    pattern = parse_pattern(
        options.mask_type or {"vnni": "block4", "tensorrt": "2:4", None: "unstructured"}[options.target]
    )
    if method.name == "structured":
        pattern = parse_pattern("filter")
    assert all(pattern.violations(weight) == 0 for weight in weights)
    if isinstance(pattern, NM):
        return count == total / 2
    if pattern == parse_pattern("filter"):
        dead = [int((weight.flatten(1) == 0).all(dim=1).sum()) for weight in weights]
        return sum(dead) == 16 and max(dead) < 16
    unit = 1 if pattern == parse_pattern("unstructured") else 4
    exact = round(total / unit * 0.8) * unit
    return count == exact if method.name != "levels" else abs(count - exact) <= unit * len(weights)


def is_rounded(model: nn.Sequential) -> bool:
    """Whether the model computes otherwise than its weights do in floating point, though nearly the same."""
    plain = network()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        pixels = batch(50)[0]
        found, whole = model.eval()(pixels), plain.eval()(pixels)
    model.train()
    return not torch.equal(found, whole) and bool((found - whole).norm() < 0.2 * whole.norm() + 0.1)


def optional(values: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


@settings(max_examples=60)
@given(
    st.sampled_from([name for name in NAMES if name != "obs"]),
    st.fixed_dictionaries(
        {},
        optional={
            "target": st.sampled_from(["vnni", "tensorrt"]),
            "mask_type": st.sampled_from(
                ["unstructured", "block4", "1:4", "m4n2_2d_greedy", "filter", "channel", [2, 2]]
            ),
            "global_sparsity": st.booleans(),
            "sparsity": st.floats(0.01, 0.99),
            "num_epochs": st.floats(0.1, 40),
        },
    ),
    optional(st.floats(0.3, 50)),
    st.booleans(),
)
def test_whatever_is_chosen_prunes_without_emptying_a_layer_or_is_refused(
    pruning: str, variables: dict[str, Any], steps_per_epoch: float | None, measured: bool
) -> None:
    model = network()
    data = [batch(0)] if measured else None
    arguments: dict[str, Any] = {"quantization": False, "recipe_variables": variables}
    try:
        recipe = sparsify.create.recipe_for(model, pruning, **arguments, steps_per_epoch=steps_per_epoch, data=data)
    except GossamerError as error:
        assert re.search("; drop |lower the (sparsity|target)$|; raise one of the two$", str(error)), error  # noqa: PT017
        return
    assert sparsify.load(recipe.text) == recipe
    Manager(recipe).apply(model)
    shares = [float((layer.weight == 0).double().mean()) for layer in model if hasattr(layer, "weight")]
    assert max(shares) < 1


def test_the_scheme_of_quantization_follows_the_target() -> None:
    for target, scheme in (("vnni", "vnni"), ("tensorrt", "tensorrt"), (None, "default")):
        recipe = sparsify.create.recipe_for(network(), recipe_variables={"target": target})
        (found,) = [m for m in recipe.modifiers if isinstance(m, QuantizationModifier)]
        assert found.scheme == scheme
