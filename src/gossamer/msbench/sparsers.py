"""Sparsers: what stands in a weight's place while its layer computes.

A sparser is a small module beside the weight, `weight_fake_sparse`, so that
what it learns is trained by the user's optimizer and saved with the model.
The weight keeps its name. A plain `FakeSparse` needs no such module: the
zeros of its masks are in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.graph import first_names, get_module, get_parameter, named_modules
from gossamer.graph.substitution import Substitution, withdraw_all
from gossamer.msbench.generators import MaskGenerator, ProbMaskGenerator
from gossamer.sparse.reparameterization import (
    hard_masks,
    initial_probabilities,
    logistic_noise,
    project,
    relaxed_mask,
    soft_threshold,
)

SUFFIX = "_fake_sparse"


class FakeSparse(nn.Module):
    """The weight itself. A sparser of one's own overrides `forward`."""

    def __init__(self, weight: Tensor, generator: MaskGenerator) -> None:
        super().__init__()

    def forward(self, weight: Tensor) -> Tensor:
        """What the layer computes with; in evaluation mode it must not be random."""
        return weight


class STRFakeSparse(FakeSparse):
    """sign(W)·ReLU(|W| − σ(s)) with one learned s (Kusupati et al. 2020); a lower `sInit_value` starts denser."""

    def __init__(self, weight: Tensor, generator: MaskGenerator, *, sInit_value: float = -5.0) -> None:  # noqa: N803
        super().__init__(weight, generator)
        self.s = nn.Parameter(torch.tensor(float(sInit_value), dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return soft_threshold(weight, self.s)


@dataclass
class Pool:
    """What the probabilities of all layers of a model share: one budget, one temperature, one clock."""

    members: list[ProbMaskFakeSparse] = field(default_factory=list["ProbMaskFakeSparse"])
    seed: int = 0
    _key: tuple[object, ...] = ()
    _masks: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def probabilities(self) -> dict[str, Tensor]:
        return {str(index): member.scores.detach() for index, member in enumerate(self.members)}

    @property
    def rate(self) -> float:
        return self.members[0].settings()[0]

    def set(self, rate: float, tau: float, step: int) -> None:
        for member in self.members:
            member.clock.copy_(_as_bits(rate, tau, step))

    @torch.no_grad()
    def begin(self, weights: Sequence[Tensor]) -> None:
        """Probabilities of nearly 1, in the order of the weights' magnitudes."""
        first = initial_probabilities({str(index): weight for index, weight in enumerate(weights)})
        for index, member in enumerate(self.members):
            member.scores.copy_(first[str(index)])

    @torch.no_grad()
    def project(self) -> None:
        """Bring Σp down to the budget."""
        probabilities = self.probabilities()
        total = sum(p.numel() for p in probabilities.values())
        project(probabilities, (1.0 - self.rate) * total)

    def hard_mask(self, member: ProbMaskFakeSparse) -> Tensor:
        """The largest probabilities of all layers, exactly as many as the budget says; this layer's part."""
        key = (self.rate, *((id(m.scores), m.scores._version) for m in self.members))  # pyright: ignore[reportPrivateUsage]
        if key != self._key:
            self._masks, self._key = hard_masks(self.probabilities(), self.rate), key
        return self._masks[str(next(i for i, m in enumerate(self.members) if m is member))]


class ProbMaskFakeSparse(FakeSparse):
    """W·m with m near 0 or 1 by a learned probability of each weight (Zhou et al. 2021)."""

    clock: Tensor
    """Prune rate, temperature and iteration; saved, so that a loaded model evaluates as the saved one did."""

    def __init__(self, weight: Tensor, generator: MaskGenerator, pool: Pool | None = None) -> None:
        super().__init__(weight, generator)
        self.pool = pool if pool is not None else Pool()
        self.pool.members.append(self)
        self.index = len(self.pool.members) - 1
        self.scores = nn.Parameter(torch.ones_like(weight.detach(), dtype=torch.float32))
        tau = generator.tau if isinstance(generator, ProbMaskGenerator) else 1.0
        self.register_buffer("clock", _as_bits(0.0, tau, 0).to(weight.device))

    def settings(self) -> tuple[float, float, float]:
        """Prune rate, temperature and iteration."""
        rate, tau, step = (float(value) for value in self.clock.view(torch.float64))
        return rate, tau, step

    def forward(self, weight: Tensor) -> Tensor:
        if not self.training:
            return torch.where(self.pool.hard_mask(self), weight, 0.0)
        rate, tau, step = self.settings()
        if rate == 0.0:
            # All are kept; the probabilities still take part, for DDP waits for the gradient of every parameter.
            return weight + 0.0 * self.scores.to(weight.dtype)
        noise = logistic_noise(weight.shape, self.pool.seed, int(step), self.index, weight.device)
        return weight * relaxed_mask(self.scores, noise, tau).to(weight.dtype)


def _as_bits(*numbers: float) -> Tensor:
    """Numbers that casting a model to half precision leaves alone."""
    return torch.tensor(numbers, dtype=torch.float64).view(torch.int64)


# Nodes in a model


def attach(model: nn.Module, name: str, sparser: FakeSparse) -> Substitution:
    """Put a sparser beside a weight, in each layer that holds it, and let the layers compute through it."""
    for owner, leaf in _homes(model, name):
        owner.add_module(leaf + SUFFIX, sparser)
    sparser.train(get_module(model, name.rpartition(".")[0]).training)
    return Substitution(model, name, Through(name.rpartition(".")[2]))


class Through:
    """From a layer's weight to what its sparser makes of it; finds the sparser in the layer, so it can be copied."""

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf

    def __call__(self, owner: nn.Module, weight: Tensor) -> Tensor:
        return getattr(owner, self.leaf + SUFFIX)(weight)


def effective(model: nn.Module, name: str) -> Tensor:
    """The weight as the model evaluates with it."""
    path, _, leaf = name.rpartition(".")
    weight = get_parameter(model, name).detach()
    node = getattr(get_module(model, path), leaf + SUFFIX, None)
    if not isinstance(node, FakeSparse):
        return weight
    training = node.training
    try:
        with torch.no_grad():
            return node.eval()(weight)
    finally:
        node.train(training)


@torch.no_grad()
def fold(model: nn.Module, names: list[str]) -> None:
    """Write what the sparsers make of the weights into the weights, and take the sparsers out."""
    values = {name: effective(model, name) for name in names}
    withdraw_all(model)
    for name, value in values.items():
        weight = get_parameter(model, name)
        if value is not weight:
            weight.copy_(torch.where(value == 0, 0.0, value))
        for owner, leaf in _homes(model, name):
            owner._modules.pop(leaf + SUFFIX, None)  # pyright: ignore[reportPrivateUsage]


def nodes(model: nn.Module) -> dict[str, FakeSparse]:
    """The sparsers of a model by the name of their weight."""
    return {path.removesuffix(SUFFIX): child for path, child in named_modules(model) if isinstance(child, FakeSparse)}


def _homes(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Each layer that holds the weight, with the weight's name there."""
    for alias, first in first_names(model).items():
        if first == name:
            path, _, leaf = alias.rpartition(".")
            yield get_module(model, path), leaf
