"""Gradual pruning by curvature: the optimal brain surgeon and M-FAC.

Schedule, parameters and patterns are those of gradual magnitude pruning; only
the scores differ, and those are in `scoring.py`.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from gossamer.modifiers.base import register
from gossamer.modifiers.pruning import GMPruningModifier
from gossamer.modifiers.scoring import MFAC, OBS, FisherScorer, Scorer
from gossamer.quantities import Count, GradientCount, GradientCounts, PositiveFactor, RoundCount


class SecondOrderModifier(GMPruningModifier):
    """What both share: how many gradients, and the blocks of the Fisher matrix."""

    num_grads: GradientCount | GradientCounts
    """A number, or `{sparsity: number}`: the number of the last sparsity that was reached."""
    damp: PositiveFactor | None = None
    """Added to the diagonal of the Fisher matrix; null: a fraction (`scoring.DAMP`) of its mean diagonal."""
    fisher_block_size: Count | None
    """Weights in a block; null: a whole parameter is one block."""
    grad_sampler_kwargs: dict[str, Any] = Field(default_factory=dict)

    def gradients_at(self, sparsity: float) -> int:
        """How many gradients a sparsity asks for."""
        if isinstance(self.num_grads, int):
            return self.num_grads
        reached = [share for share in self.num_grads if share <= sparsity + 1e-9]
        return self.num_grads[max(reached, default=min(self.num_grads))]

    @property
    def most_gradients(self) -> int:
        return self.num_grads if isinstance(self.num_grads, int) else max(self.num_grads.values())

    def _scorer(self, *, compensate: bool) -> Scorer:
        return FisherScorer(
            self.gradients_at,
            self.damp,
            self.fisher_block_size,
            together=self.global_sparsity,
            compensate=compensate,
            needs_sampler=compensate,
        )


@register
class OBSPruningModifier(SecondOrderModifier):
    """Gradual pruning by the optimal brain surgeon on a block-wise Fisher matrix (Kurtic et al. 2022)."""

    num_grads: GradientCount | GradientCounts = OBS.num_grads
    fisher_block_size: Count | None = OBS.block
    num_recomputations: RoundCount = 1
    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] = "OBS"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def scorer(self) -> Scorer:
        return self._scorer(compensate=True)

    @property
    def rounds(self) -> int:
        return self.num_recomputations


@register
class MFACPruningModifier(SecondOrderModifier):
    """Gradual pruning by the Fisher saliency of the last training gradients (Frantar et al. 2021)."""

    num_grads: GradientCount | GradientCounts = MFAC.num_grads
    fisher_block_size: Count | None = MFAC.block
    num_pages: Count = 1
    available_devices: Any = None
    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] = "MFAC"  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="before")
    @classmethod
    def _older_options(cls, fields: Any) -> Any:
        """SparseML's first recipes put the fields of M-FAC into a mapping `mfac_options`."""
        if not isinstance(fields, dict) or not isinstance(cast(dict[str, Any], fields).get("mfac_options"), dict):
            return cast(Any, fields)
        given = cast(dict[str, Any], fields)
        return {**{key: value for key, value in given.items() if key != "mfac_options"}, **given["mfac_options"]}

    @property
    def scorer(self) -> Scorer:
        return self._scorer(compensate=False)
