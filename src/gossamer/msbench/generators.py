"""Mask generators: which weights of a layer a config prunes first.

Each names a pattern and a score of the engine. A custom one subclasses `MaskGenerator` and computes masks itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.modifiers import LevelPruningModifier, Modifier
from gossamer.quantities import Sparsity, Temperature
from gossamer.sparse import magnitude, parse_pattern
from gossamer.sparse.scores import FilterKind, filter_scores


class MaskGenerator:
    """Computes the mask of one weight; `sparsity` is set before each call of `generate_mask`."""

    pattern_name: str | None = None
    """The `mask_type` of a recipe that does the same."""
    score_type: Literal["magnitude"] | FilterKind = "magnitude"
    """The `score_type` of a recipe that does the same."""

    def __init__(self, *, sparsity: Sparsity | None = None) -> None:
        self.sparsity = sparsity

    @property
    def mask_type(self) -> str | None:
        """The pattern that the engine computes; None for a generator that computes its own masks."""
        return self.pattern_name if type(self).generate_mask is MaskGenerator.generate_mask else None

    def generate_mask(self, weight: Tensor) -> Tensor:
        """The mask of a weight `(out, in, *kernel)`, in its shape: true or nonzero where it is kept."""
        if self.pattern_name is None:
            raise NotImplementedError(f"{type(self).__name__}.generate_mask: return the mask of a weight")
        detached, pattern = weight.detach(), parse_pattern(self.pattern_name)
        if pattern.fits(detached.shape) is not None:
            return torch.ones_like(detached, dtype=torch.bool)
        if self.score_type == "magnitude":
            scores = magnitude(detached)
        else:
            by_filter = filter_scores(detached, self.score_type)
            scores = by_filter.reshape(-1, *[1] * (detached.dim() - 1)).expand_as(detached)
        return pattern.mask(scores, self.sparsity or 0.0)


class NormalMaskGenerator(MaskGenerator):
    """The smallest weights of a layer; with `structured` whole filters by their norm, p1 or p2."""

    def __init__(
        self, *, structured: bool = False, func: Literal["p1", "p2"] | None = None, sparsity: Sparsity | None = None
    ) -> None:
        super().__init__(sparsity=sparsity)
        self.pattern_name = "filter" if structured else "unstructured"
        self.score_type = "l2" if structured and func == "p2" else "magnitude"


class NMMaskGenerator(MaskGenerator):
    """2:4."""

    pattern_name = "2:4"

    def __init__(self) -> None:
        super().__init__(sparsity=0.5)


class _FilterMaskGenerator(MaskGenerator):
    pattern_name = "filter"

    def __init__(self, *, structured: bool = True, sparsity: Sparsity | None = None) -> None:
        super().__init__(sparsity=sparsity)
        if not structured:
            message = f"{type(self).__name__} prunes whole filters; structured must be True"
            raise GossamerError(message, "mask_generator", "kwargs", "structured")


FPGM: dict[str, FilterKind] = {"l1": "fpgm_l1", "l2": "fpgm_l2", "cos": "fpgm_cos"}


class FPGMMaskGenerator(_FilterMaskGenerator):
    """The filters nearest to their geometric median (He et al. 2019)."""

    def __init__(
        self, *, structured: bool = True, func: Literal["l1", "l2", "cos"] = "l2", sparsity: Sparsity | None = None
    ) -> None:
        super().__init__(structured=structured, sparsity=sparsity)
        self.score_type = FPGM[func]


class NuclearMaskGenerator(_FilterMaskGenerator):
    """The filters whose removal reduces the layer's nuclear norm least."""

    score_type = "nuclear"

    def __init__(self, *, structured: bool = True, func: str | None = None, sparsity: Sparsity | None = None) -> None:
        super().__init__(structured=structured, sparsity=sparsity)


class STRMaskGenerator(MaskGenerator):
    """For STR: learned thresholds decide, not a sparsity."""

    pattern_name = "unstructured"


class ProbMaskGenerator(MaskGenerator):
    """For ProbMask: learned probabilities decide; `tau` is the first temperature."""

    pattern_name = "unstructured"

    def __init__(self, *, tau: Temperature = 1.0) -> None:
        super().__init__()
        self.tau = tau


class GeneratedLevels(LevelPruningModifier):
    """Levels whose masks a custom mask generator computes; it cannot be written into a recipe."""

    _generator: MaskGenerator

    @classmethod
    def of(cls, levels: Modifier, generator: MaskGenerator) -> GeneratedLevels:
        modifier = cls.model_validate(levels.model_dump(exclude_unset=True))
        modifier._generator = generator
        return modifier

    @property
    def name(self) -> str:
        return LevelPruningModifier.__name__  # the key of its state

    def masks(self, run: Any, scores: Mapping[str, Tensor], sparsity: Mapping[str, float] | float) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, score in scores.items():
            weight = run.weights.parameter(name).detach()
            self._generator.sparsity = sparsity[name] if isinstance(sparsity, Mapping) else sparsity
            mask = cast(object, self._generator.generate_mask(weight))
            if not isinstance(mask, Tensor) or mask.shape != score.shape:
                returned = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise GossamerError(
                    f"{type(self._generator).__name__}.generate_mask: expected a mask of shape {tuple(weight.shape)} "
                    f"for '{name}', found {returned}"
                )
            masks[name] = mask != 0
        return masks
