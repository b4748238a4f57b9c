"""Mask generators: which weights of a layer a config prunes first.

Each is the name of a pattern and a score of the engine. One of the user's own
subclasses `MaskGenerator` and computes masks itself.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.quantities import Sparsity, Temperature
from gossamer.sparse import magnitude, parse_pattern
from gossamer.sparse.scores import FilterKind, filter_scores


class MaskGenerator:
    """Makes the mask of one weight; `sparsity` says how sparse, and whoever uses the generator sets it."""

    def __init__(self, *, sparsity: Sparsity | None = None) -> None:
        self.sparsity = sparsity

    @property
    def mask_type(self) -> str | None:
        """The `mask_type` of a recipe that stands for this; None for a generator that computes masks of its own."""
        return None

    @property
    def score_type(self) -> Literal["magnitude"] | FilterKind:
        """The `score_type` of that recipe."""
        return "magnitude"

    def generate_mask(self, weight: Tensor) -> Tensor:
        """Where to keep weights (true, or not 0), in the shape of the weight `(out, in, *kernel)`."""
        raise NotImplementedError(f"{type(self).__name__}.generate_mask: return the mask of a weight")


class _Known(MaskGenerator):
    """A pattern with a score."""

    @property
    def mask_type(self) -> str | None:
        own = type(self).generate_mask is not _Known.generate_mask
        return None if own else self.pattern_name

    @property
    def pattern_name(self) -> str:
        return "unstructured"

    def scores(self, weight: Tensor) -> Tensor:
        kind = self.score_type
        return magnitude(weight) if kind == "magnitude" else _spread(filter_scores(weight, kind), weight)

    def generate_mask(self, weight: Tensor) -> Tensor:
        detached, pattern = weight.detach(), parse_pattern(self.pattern_name)
        if pattern.fits(detached.shape) is not None:
            return torch.ones_like(detached, dtype=torch.bool)
        return pattern.mask(self.scores(detached), self.sparsity or 0.0)


class NormalMaskGenerator(_Known):
    """The smallest weights of a layer; with `structured` whole filters by their norm, p1 or p2."""

    def __init__(
        self, *, structured: bool = False, func: Literal["p1", "p2"] | None = None, sparsity: Sparsity | None = None
    ) -> None:
        super().__init__(sparsity=sparsity)
        self.structured, self.func = structured, func

    @property
    def pattern_name(self) -> str:
        return "filter" if self.structured else "unstructured"

    @property
    def score_type(self) -> Literal["magnitude"] | FilterKind:
        return "l2" if self.structured and self.func == "p2" else "magnitude"


class NMMaskGenerator(_Known):
    """2:4."""

    def __init__(self) -> None:
        super().__init__(sparsity=0.5)

    @property
    def pattern_name(self) -> str:
        return "2:4"


class _FilterMaskGenerator(_Known):
    def __init__(self, *, structured: bool = True, sparsity: Sparsity | None = None) -> None:
        super().__init__(sparsity=sparsity)
        if not structured:
            raise GossamerError(f"mask_generator: {type(self).__name__} prunes whole filters; structured must be True")

    @property
    def pattern_name(self) -> str:
        return "filter"


FPGM: dict[str, FilterKind] = {"l1": "fpgm_l1", "l2": "fpgm_l2", "cos": "fpgm_cos"}


class FPGMMaskGenerator(_FilterMaskGenerator):
    """The filters nearest to their geometric median (He et al. 2019)."""

    def __init__(
        self, *, structured: bool = True, func: Literal["l1", "l2", "cos"] = "l2", sparsity: Sparsity | None = None
    ) -> None:
        super().__init__(structured=structured, sparsity=sparsity)
        self.func: Literal["l1", "l2", "cos"] = func

    @property
    def score_type(self) -> Literal["magnitude"] | FilterKind:
        return FPGM[self.func]


class NuclearMaskGenerator(_FilterMaskGenerator):
    """The filters without which the layer's nuclear norm falls least."""

    def __init__(self, *, structured: bool = True, func: str | None = None, sparsity: Sparsity | None = None) -> None:
        super().__init__(structured=structured, sparsity=sparsity)

    @property
    def score_type(self) -> Literal["magnitude"] | FilterKind:
        return "nuclear"


class STRMaskGenerator(_Known):
    """What learned thresholds leave; they, not a sparsity, decide."""


class ProbMaskGenerator(_Known):
    """What learned probabilities leave; `tau` is the temperature that they start from."""

    def __init__(self, *, tau: Temperature = 1.0) -> None:
        super().__init__()
        self.tau = tau


def _spread(scores: Tensor, weight: Tensor) -> Tensor:
    """One score per filter at each of its weights."""
    return scores.reshape(-1, *[1] * (weight.dim() - 1)).expand_as(weight)
