"""Sparsers, or fake-sparse modules: modules that replace a weight while its layer computes.

A sparser is a small module beside the weight, `weight_fake_sparse`, so that the user's optimizer trains its parameters
and they are saved with the model. The weight keeps its name. A plain `FakeSparse` needs no such module: the zeros of
its masks are in the weights. Models are pickled with these classes, so their names stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import first_names, get_module, get_parameter, named_modules
from gossamer.model.additions import SPARSER, Substitution, remove_substitutions
from gossamer.msbench.generators import MaskGenerator, ProbMaskGenerator
from gossamer.quantities import Logit
from gossamer.sparse.reparameterization import (
    hard_masks,
    initial_probabilities,
    logistic_noise,
    project,
    relaxed_mask,
    soft_threshold,
)


class FakeSparse(nn.Module):
    """The weight itself. A custom sparser overrides `forward`."""

    def __init__(self, weight: Tensor, generator: MaskGenerator) -> None:
        super().__init__()

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the layer computes with; it must not be random in evaluation mode."""
        return weight


class STRFakeSparse(FakeSparse):
    """sign(W)·ReLU(|W| − σ(s)) with one learned s (Kusupati et al. 2020); a lower `sInit_value` starts denser."""

    def __init__(self, weight: Tensor, generator: MaskGenerator, *, sInit_value: Logit = -5.0) -> None:  # noqa: N803
        super().__init__(weight, generator)
        self.s = nn.Parameter(torch.tensor(float(sInit_value), dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return soft_threshold(weight, self.s)


class Clock:
    """The state of ProbMask at one iteration: prune rate, temperature, and the noise of that iteration.

    All members of a pool share one, and so do copies of the model, so that an average evaluates at the current rate. A
    pickled model has its own, without the noise, which is a function of seed and iteration.
    """

    def __init__(self, rate: float = 0.0, tau: float = 1.0, step: int = 0) -> None:
        # torch.compile cannot trace random numbers or the ranking of all weights in a layer's graph. These are not
        # decorated methods of Pool, because torch.compiler.disable imports torch._dynamo, which is slow.
        self.draw = cast(Callable[[Pool], list[Tensor]], torch.compiler.disable(Pool.draw))
        self.hard_mask = cast(Callable[[Pool, int], Tensor], torch.compiler.disable(Pool.hard_mask))
        self.set(rate, tau, step)

    def set(self, rate: float, tau: float, step: int) -> None:
        self.rate, self.tau, self.step = rate, tau, step
        # Read by a forward pass in training: torch.compile would specialise on a plain number and recompile.
        self.dense = rate == 0
        self.temperature = torch.tensor(tau, dtype=torch.float32, device="cpu")
        self.noise: list[Tensor] = []

    def __deepcopy__(self, memo: object) -> Clock:
        return self

    def __reduce__(self) -> tuple[type[Clock], tuple[float, float, int]]:
        return Clock, (self.rate, self.tau, self.step)


@dataclass
class Pool:
    """The state that the probabilities of all layers share: one budget, one temperature, one clock."""

    members: list[ProbMaskFakeSparse] = field(default_factory=list["ProbMaskFakeSparse"])
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    _key: tuple[object, ...] = ()
    _masks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def probabilities(self) -> dict[str, Tensor]:
        return {str(index): member.scores.detach() for index, member in enumerate(self.members)}

    def set(self, rate: float, tau: float, step: int) -> None:
        self.clock.set(rate, tau, step)
        if not self.clock.dense:
            self.draw()

    def draw(self) -> list[Tensor]:
        """The noise of this iteration for each member."""
        self.clock.noise = [
            logistic_noise(member.scores.shape, self.seed, self.clock.step, index, member.scores.device)
            for index, member in enumerate(self.members)
        ]
        return self.clock.noise

    @torch.no_grad()
    def begin(self, weights: Sequence[Tensor]) -> None:
        """Probabilities by the weights' magnitudes, relative to the largest of each layer."""
        first = initial_probabilities({str(index): weight for index, weight in enumerate(weights)})
        for index, member in enumerate(self.members):
            member.scores.copy_(first[str(index)])

    @torch.no_grad()
    def project(self) -> None:
        """Reduce Σp to the budget."""
        probabilities = self.probabilities()
        total = sum(p.numel() for p in probabilities.values())
        project(probabilities, (1.0 - self.clock.rate) * total)

    def hard_mask(self, index: int) -> Tensor:
        """The mask of one member: the largest probabilities of all layers, exactly as many as the budget allows."""
        # Moving or casting a model does not change the identity and version of its parameters.
        scores = [member.scores for member in self.members]
        key = (self.clock.rate, *((id(p), p._version, p.device, p.dtype) for p in scores))  # pyright: ignore[reportPrivateUsage]
        if key != self._key:
            self._masks, self._key = hard_masks(self.probabilities(), self.clock.rate), key
        return self._masks[str(index)]


class ProbMaskFakeSparse(FakeSparse):
    """W·m with m near 0 or 1 by a learned probability of each weight (Zhou et al. 2021)."""

    def __init__(self, weight: Tensor, generator: MaskGenerator, pool: Pool | None = None) -> None:
        super().__init__(weight, generator)
        self.pool = pool if pool is not None else Pool()
        self.pool.members.append(self)
        self.index = len(self.pool.members) - 1
        self.scores = nn.Parameter(torch.ones_like(weight.detach(), dtype=torch.float32))
        self.pool.clock.set(0.0, generator.tau if isinstance(generator, ProbMaskGenerator) else 1.0, 0)

    def get_extra_state(self) -> Tensor:
        """The clock, so that a loaded model evaluates like the saved one; casting the model does not change it."""
        clock = self.pool.clock
        return torch.tensor([clock.rate, clock.tau, clock.step], dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        if not isinstance(state, Tensor) or state.dtype != torch.float64 or state.shape != (3,):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError("the extra state of a ProbMaskFakeSparse must be three numbers; load another state")
        rate, tau, step = (float(number) for number in state)
        if not (0 <= rate <= 1 and 0 < tau < math.inf and 0 <= step < 2**53):
            raise GossamerError("the extra state of a ProbMaskFakeSparse is not a rate, a temperature and a step")
        self.pool.clock.set(rate, tau, int(step))

    def forward(self, weight: Tensor) -> Tensor:
        clock = self.pool.clock
        if not self.training:
            return torch.where(clock.hard_mask(self.pool, self.index).to(weight.device), weight, 0.0)
        if clock.dense:
            # All weights are kept. The probabilities get a gradient anyway, because DDP waits for every one.
            return weight + 0.0 * self.scores.to(weight.dtype)
        noise = (clock.noise or clock.draw(self.pool))[self.index].to(weight.device)
        return weight * relaxed_mask(self.scores, noise, clock.temperature).to(weight.dtype)


# Sparsers in a model


def attach(model: nn.Module, name: str, sparser: FakeSparse) -> Substitution:
    """Add a sparser beside a weight, in each layer that has it, and make these layers use it."""
    for owner, leaf in _owners(model, name):
        owner.add_module(leaf + SPARSER, sparser)
    sparser.train(get_module(model, name.rpartition(".")[0]).training)
    return Substitution(model, name, Through(name.rpartition(".")[2]))


class Through:
    """The substitution that applies the sparser of a layer to its weight.

    Looks the sparser up in the layer, so that a copy of the model uses its own.
    """

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf

    def __call__(self, owner: nn.Module, weight: Tensor) -> Tensor:
        return getattr(owner, self.leaf + SPARSER)(weight)


def effective_weight(model: nn.Module, name: str) -> Tensor:
    """The weight as the model evaluates with it."""
    weight, sparser = get_parameter(model, name).detach(), _fake_sparse_of(model, name)
    if sparser is None:
        return weight
    training = sparser.training
    try:
        with torch.no_grad():
            return sparser.eval()(weight)
    finally:
        sparser.train(training)


@torch.no_grad()
def fold_into_weights(model: nn.Module, names: list[str]) -> None:
    """Write the effective weights into the weights, and remove the sparsers."""
    values = {name: effective_weight(model, name) for name in names if _fake_sparse_of(model, name) is not None}
    remove_substitutions(model)
    for name, value in values.items():
        weight = get_parameter(model, name)
        weight.copy_(torch.where(value == 0, 0.0, value))
        for owner, leaf in _owners(model, name):
            owner._modules.pop(leaf + SPARSER, None)  # pyright: ignore[reportPrivateUsage]


def fake_sparse_modules(model: nn.Module) -> dict[str, FakeSparse]:
    """The sparsers of a model by the name of their weight."""
    return {path.removesuffix(SPARSER): child for path, child in named_modules(model) if isinstance(child, FakeSparse)}


def _fake_sparse_of(model: nn.Module, name: str) -> FakeSparse | None:
    path, _, leaf = name.rpartition(".")
    sparser = getattr(get_module(model, path), leaf + SPARSER, None)
    return sparser if isinstance(sparser, FakeSparse) else None


def _owners(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Each layer that has the weight, with the weight's name there."""
    for alias, first in first_names(model).items():
        if first == name:
            path, _, leaf = alias.rpartition(".")
            yield get_module(model, path), leaf
