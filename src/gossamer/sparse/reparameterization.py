"""Weights as functions of learned parameters: soft thresholds and probabilistic masks.

Pure functions of tensors, with the gradients of what is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gossamer.errors import SparsityError
from gossamer.sparse.allocation import global_masks
from gossamer.sparse.patterns import Unstructured
from gossamer.sparse.sharding import Part, any_sharded, counts, is_sharded, largest, like, total

BORDER = 1e-6
"""How close to 0 and 1 a probability counts as it is; its logit is finite there."""

_RESOLUTION = 2.0**-24
"""How exactly a shift is found: the spacing of float32 below 1."""
_FIRST_PULL, _LARGEST_PULL = 2.0**-8, 64.0
"""The smallest and the largest strength that are tried in search of a bracket."""
_DRAWN = 1 << 20
"""How many random numbers are drawn at a time, of which a rank keeps its own."""
_MARGIN = 2.0**-7
"""How far below the largest magnitude of a layer a threshold stays, as a share of it; also in bfloat16."""
_SLACK = 2.0**-40
"""The share of a budget that is left over, so that every order of summation stays within it."""


def soft_threshold(weight: Tensor, s: Tensor) -> Tensor:
    """sign(W) · ReLU(|W| − σ(s)) (Kusupati et al. 2020, eq. 4 and 5); what is zero is +0.0.

    >>> soft_threshold(torch.tensor([-1.0, -0.5, 0.25, 2.0]), torch.tensor(0.0))
    tensor([-0.5000,  0.0000,  0.0000,  1.5000])
    """
    threshold = s.sigmoid().to(weight.dtype)
    # Not written as a product, which would leave -0.0 behind; and a NaN fails the comparison and stays in sight.
    return torch.where(weight.abs() <= threshold, 0.0, weight - weight.detach().sign() * threshold)


def threshold_gradient(weight: Tensor, gradient: Tensor, s: Tensor) -> Tensor:
    """∂L/∂s of `soft_threshold`, from ∂L/∂W: −σ′(s) · Σ sign(W) · ∂L/∂W.

    Both gradients are zero where |W| ≤ σ(s) and differ by the factor −σ′(s) sign(W) elsewhere, so that s need not be
    part of the backward pass.
    """
    slope = torch.sigmoid(s)
    return -slope * (1 - slope) * total(weight.detach().sign() * gradient.detach(), s.dtype)


def pulled(weights: Mapping[str, Tensor], thresholds: Mapping[str, Tensor], strength: float) -> dict[str, Tensor]:
    """Thresholds after a decay of this strength: s + strength · max(|s|, 1), which is (1 − strength) · s below −1.

    Near zero, where decay has no force, they go on all the same; a negative strength is the way back. None is raised
    beyond the largest magnitude of its weight: no layer is emptied.
    """
    return {name: _moved(s, strength, _highest(weights[name].abs(), s)) for name, s in thresholds.items()}


def _moved(s: Tensor, strength: float, highest: Tensor) -> Tensor:
    return torch.minimum(s + strength * s.abs().clamp_min(1), torch.maximum(s, highest))


def _highest(magnitude: Tensor, s: Tensor) -> Tensor:
    """The s whose threshold lies just below the largest magnitude."""
    if is_sharded(magnitude):
        top = torch.full_like(s, largest(magnitude))
    else:
        top = magnitude.max().to(s) if magnitude.numel() else torch.ones_like(s)
    return (top * (1 - _MARGIN)).logit(_RESOLUTION)


def threshold_pull(
    weights: Mapping[str, Tensor], thresholds: Mapping[str, Tensor], least: int, most: int, tolerance: int = 0
) -> float:
    """With which strength to pull every s so that `soft_threshold` leaves from `least` to `most` zeros in all weights.

    The smallest that does, within `tolerance` zeros; weights of equal magnitude go together. Where none is large
    enough, because each layer keeps its largest weight and all of 1 or more, the one that comes closest.

    >>> weights, s = {"a": torch.tensor([0.1, -0.2, 0.3]), "b": torch.tensor([0.05, 0.6])}, torch.tensor(-5.0)
    >>> moved = pulled(weights, {"a": s, "b": s}, threshold_pull(weights, {"a": s, "b": s}, least=3, most=4))
    >>> sum(int((soft_threshold(weight, moved[name]) == 0).sum()) for name, weight in weights.items())
    3
    """
    magnitudes = {name: weight.abs() for name, weight in weights.items()}
    highest = {name: _highest(magnitude, thresholds[name]) for name, magnitude in magnitudes.items()}

    def count(strength: float) -> int:
        moved = {name: _moved(thresholds[name], strength, highest[name]).sigmoid() for name in magnitudes}
        if any_sharded(magnitudes.values()):
            return sum(counts([m <= moved[name].to(m.dtype) for name, m in magnitudes.items()]))
        found = [(m <= moved[name].to(m.dtype)).sum() for name, m in magnitudes.items()]
        # One exchange with a GPU, not one for each layer.
        return int(torch.stack([count.to(found[0].device) for count in found]).sum()) if found else 0

    now = count(0.0)
    zeros = min(max(now, least), most)

    def excess(strength: float) -> int:
        return count(strength) - zeros

    low, below = 0.0, now - zeros
    if abs(below) <= tolerance:
        return 0.0
    high, above, width = low, below, _FIRST_PULL
    while below * above > 0 and abs(above) > tolerance:  # away from 0, until the count is on the other side
        if width > _LARGEST_PULL:
            return high if abs(above) < abs(now - zeros) else 0.0
        low, below = high, above
        high, width = width if below < 0 else -width, 2 * width
        above = excess(high)
    by_secant = True
    while min(abs(below), abs(above)) > tolerance and abs(high - low) > _RESOLUTION:
        middle = (low * above - high * below) / (above - below) if by_secant else (low + high) / 2
        found, by_secant = excess(middle), not by_secant
        if (found > 0) == (below > 0):
            low, below = middle, found
        else:
            high, above = middle, found
    strength, missing = (low, abs(below)) if abs(below) < abs(above) else (high, abs(above))
    return strength if missing < abs(now - zeros) else 0.0  # equal magnitudes may leave no way to come closer


def initial_probabilities(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """|W| / max|W| of each weight in its own tensor (float32); 1 where all are zero.

    Equal probabilities would keep every weight by the same chance at first, and what the weights know would be lost.

    >>> initial_probabilities({"a": torch.tensor([-2.0, 1.0]), "b": torch.zeros(1)})
    {'a': tensor([1.0000, 0.5000]), 'b': tensor([1.])}
    """
    return {name: _relative(weight.abs().float()) for name, weight in weights.items()}


def relaxed_mask(p: Tensor, noise: Tensor, tau: float | Tensor) -> Tensor:
    """σ((logit p + noise) / τ): a mask between 0 and 1, near one of them when τ is small (Zhou et al. 2021).

    With logistic noise and τ → 0 it is 1 with probability p. For its value p is taken as at least 1e-6 away from 0
    and 1; the gradient passes, so that a probability at the border still learns. The mask is float32, whatever p is:
    half precision has nothing between 1 − 1e-6 and 1.
    """
    p = p.float()
    inside = p + (_inside(p) - p).detach()
    return torch.sigmoid((torch.logit(inside) + noise) / tau)


def probability_gradient(weight: Tensor, gradient: Tensor, p: Tensor, mask: Tensor, tau: float) -> Tensor:
    """∂L/∂p of a layer that computes with W · mask, from ∂L/∂W, where mask is `relaxed_mask(p, …, tau)`.

    With G the gradient of the product, ∂L/∂W = G · mask and ∂L/∂p = G · W · mask · (1 − mask) / (τ p (1 − p)).
    """
    inside = _inside(p)
    return (gradient * weight).float() * (1 - mask) / (inside * (1 - inside) * tau)


def logistic_noise(
    shape: Sequence[int], seed: int, step: int, index: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard logistic noise (float32), the same for the same seed, step and index on one kind of device.

    It comes from a generator of its own: the global random state is neither read nor moved.
    """
    generator = _generator(seed, step, index, device)
    return torch.rand(tuple(shape), generator=generator, device=device).logit_(_RESOLUTION)


def logistic_noise_like(p: Tensor, seed: int, step: int, index: int) -> Tensor:
    """`logistic_noise` of the shape of `p`; each rank keeps its own part of it."""
    if not is_sharded(p):
        return logistic_noise(p.shape, seed, step, index, p.device)
    part = Part.of(p)
    generator = _generator(seed, step, index, part.values.device)
    first, length = part.rows()
    starts, own = cast(list[int], first.tolist()), torch.empty(part.values.numel(), device=part.values.device)
    size, at, row = p.numel(), 0, 0
    while at < size and row < len(starts) and length:
        drawn = torch.rand(min(_DRAWN, size - at), generator=generator, device=own.device)
        while row < len(starts) and starts[row] < at + len(drawn):
            begin, end = max(starts[row], at), min(starts[row] + length, at + len(drawn))
            place = row * length + begin - starts[row]
            own[place : place + end - begin] = drawn[begin - at : end - at]
            if starts[row] + length > at + len(drawn):
                break
            row += 1
        at += len(drawn)
    return like(own.logit_(_RESOLUTION).reshape(part.values.shape), p)


def _generator(seed: int, step: int, index: int, device: torch.device | str) -> torch.Generator:
    key = blake2b(f"{seed}/{step}/{index}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "big") >> 1)


def project(probabilities: Mapping[str, Tensor], budget: float) -> float:
    """In place p ← clamp(p − v, 0, 1) with the smallest v ≥ 0 such that Σp ≤ budget over all tensors; returns v.

    This is the nearest point within the budget (Zhou et al. 2021, theorem 1). Sums are taken in float64 over the
    stored values, and in the end they are within the budget, not nearly so. NaN and infinity raise `SparsityError`.

    >>> p = {"a": torch.tensor([0.75, 0.25]), "b": torch.tensor([1.0])}
    >>> round(project(p, 1.0), 6), float(p["a"][1])
    (0.375, 0.0)
    """
    if any(counts([~p.isfinite() for p in probabilities.values()])):
        raise SparsityError("probabilities are NaN or infinite: training diverged; lower the learning rate")
    total = _Sum.at(probabilities, 0.0)
    shift = 0.0 if total.value <= budget else _smallest_shift(probabilities, total, max(budget, 0.0) * (1 - _SLACK))
    for p in probabilities.values():
        p.sub_(shift).clamp_(0, 1)
    return shift


def hard_masks(probabilities: Mapping[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    """True at the largest p: all but round(N · sparsity) of the N over all tensors; of equals, the lower index."""
    return global_masks(probabilities, Unstructured(), sparsity)


def _relative(magnitude: Tensor) -> Tensor:
    top = largest(magnitude) if magnitude.numel() else 0.0
    return torch.ones_like(magnitude) if top == 0 else magnitude / top


def _inside(p: Tensor) -> Tensor:
    return p.float().clamp(BORDER, 1 - BORDER)


class _Sum(NamedTuple):
    """Σ clamp(p − shift, 0, 1) as it would be stored, and how many summands change with a larger or smaller shift."""

    value: float
    falling: int
    rising: int

    @classmethod
    def at(cls, probabilities: Mapping[str, Tensor], shift: float) -> _Sum:
        value, falling, rising = 0.0, 0, 0
        for p in probabilities.values():
            moved = p - shift
            positive = moved > 0
            below, under = counts([positive & (moved <= 1), positive & (moved < 1)])
            falling, rising = falling + below, rising + under
            value += float(total(moved.clamp_(0, 1), torch.float64))
        return cls(value, falling, rising)


def _smallest_shift(probabilities: Mapping[str, Tensor], below: _Sum, budget: float) -> float:
    """Bisection, by Newton's step where that halves the bracket: the sum is piecewise linear in the shift."""
    low, high = 0.0, max(largest(p) for p in probabilities.values() if p.numel())
    newton = True
    while high - low > _RESOLUTION:
        width = high - low
        step = (below.value - budget) / max(below.falling, 1) + _RESOLUTION / 2
        guess = low + (step if newton and step < width else width / 2)
        total = _Sum.at(probabilities, guess)
        if total.value > budget:
            low, below = guess, total
        else:
            high = guess
            if budget - total.value <= total.rising * _RESOLUTION:
                break  # a smaller shift that makes a difference would exceed the budget
        newton = not newton or high - low < width / 2
    return high
