"""Gradual pruning to a target, and holding the zeros a model already has.

The modifier says which weights, how sparse and when; `scoring.py` ranks,
`sparse/` makes the mask, the run holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from gossamer.errors import ModifierError, SparsityError
from gossamer.graph import match_excluded, match_prunable, prunable
from gossamer.modifiers.base import Epoch, Frequency, Modifier, ParamNames, Run, check_frequency, register
from gossamer.modifiers.scoring import (
    FILTER_KINDS,
    MFAC,
    OBS,
    FilterScorer,
    FisherScorer,
    MagnitudeScorer,
    MovementScorer,
    Scorer,
    outputs_first,
)
from gossamer.sparse import NM, Filter, Pattern, fraction, global_masks, interpolate, parse_pattern
from gossamer.sparse.schedules import Interpolation
from gossamer.sparse.scores import FilterKind
from gossamer.sparse.selection import refuse_nan

Sparsity = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
FROM_PARAM = "__FROM_PARAM__"
EXCLUDED = "excluded"
logger = logging.getLogger("gossamer")


class PruningModifier(Modifier):
    """What all modifiers that hold masks share: which weights, and in which pattern."""

    family: ClassVar[str] = "pruning"

    params: ParamNames = Field(default_factory=list)
    exclude: ParamNames = Field(default_factory=list)
    """Of these parameters, the ones to leave dense: names, `re:` patterns, `__DEPTHWISE__`."""
    leave_enabled: bool = True
    mask_type: str | list[int] = "unstructured"
    params_strict: bool = True

    @field_validator("mask_type")
    @classmethod
    def _known_pattern(cls, value: str | list[int]) -> str | list[int]:
        try:
            parse_pattern(value)
        except SparsityError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def pattern(self) -> Pattern:
        return parse_pattern(self.mask_type)

    def sparsity_at(self, epoch: float) -> float | None:
        """The scheduled sparsity at an epoch; None where this modifier sets none."""
        return None

    def bind(self, run: Run) -> list[str]:
        return self.bind_params(run, self.params)

    def bind_params(self, run: Run, wanted: str | Sequence[str], field: str = "params") -> list[str]:
        """The weights to prune; what the pattern does not fit is skipped, or refused when named exactly."""
        matches = match_prunable(run.module, wanted, field=field, strict=self.params_strict)
        for name, reason in matches.skipped.items():
            run.skip(name, reason)
        targets: list[str] = []
        outputs = next(reversed(prunable(run.module)), None)
        excluded, idle = match_excluded(run.module, self.exclude, field="exclude")
        for pattern in idle:
            logger.warning("%s: exclude: '%s' matches nothing", self.name, pattern)
        for name in matches.names:
            if name in excluded:
                run.skip(name, EXCLUDED)
                continue
            parameter = run.parameter(name)
            if parameter.numel() and bool(parameter.detach().isnan().any()):
                raise ModifierError(f"'{name}' holds NaN and cannot be pruned; repair the weights first", field)
            if isinstance(self.pattern, Filter) and name == outputs and name not in matches.exact:
                run.skip(name, "the last layer: pruning its filters would remove outputs; name it exactly to prune it")
                continue
            reason = self.pattern.fits(self._rows(run, name, parameter).shape)
            if reason and name in matches.exact:
                raise ModifierError(f"mask_type {self.mask_type} does not fit '{name}': {reason}", "mask_type")
            if reason:
                run.skip(name, f"mask_type {self.mask_type} does not fit: {reason}")
            else:
                targets.append(name)
        if not targets and set(matches.names) <= set(excluded):
            raise ModifierError("exclude: everything that params names is excluded; leave less out", "exclude")
        if not targets:
            raise ModifierError(f"mask_type {self.mask_type} fits none of the matched parameters", "mask_type")
        return targets

    def end(self, run: Run) -> None:
        if not self.leave_enabled:
            for name in run.targets:
                run.release_mask(name)

    def masks(self, run: Run, scores: Mapping[str, Tensor], sparsity: Mapping[str, float] | float) -> dict[str, Tensor]:
        """Masks for a sparsity per layer, or for one number over all layers together."""
        rows: dict[str, Tensor] = {}
        for name, score in scores.items():
            try:
                refuse_nan(score)
            except SparsityError as error:
                raise ModifierError(f"'{name}' cannot be pruned at step {run.step}: {error}") from None
            rows[name] = self._rows(run, name, score)
        if isinstance(sparsity, Mapping):
            kept = {name: self.pattern.mask(score, sparsity[name]) for name, score in rows.items()}
        else:
            kept = global_masks(rows, self.pattern, sparsity)
        return {name: self._rows(run, name, keep).contiguous() for name, keep in kept.items()}

    @staticmethod
    def _rows(run: Run, name: str, tensor: Tensor) -> Tensor:
        """A weight-shaped tensor with output channels first (its own inverse)."""
        return outputs_first(run, name, tensor)


@register
class GMPruningModifier(PruningModifier):
    """Prune from `init_sparsity` to `final_sparsity` between two epochs (Zhu & Gupta 2017)."""

    init_sparsity: Literal["__FROM_PARAM__"] | Sparsity
    final_sparsity: Sparsity | dict[Sparsity, list[str]]
    start_epoch: Epoch = Field(default=...)
    end_epoch: Epoch = Field(default=...)
    update_frequency: Frequency = Field(default=...)
    inter_func: Interpolation = "cubic"
    global_sparsity: bool = False
    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] | FilterKind = "magnitude"
    """How weights rank; whole filters under `magnitude` by their l1 norm."""
    permute: bool = False
    """Reorder channels first, so that N:M keeps larger weights; what the model computes stays the same."""
    phased: bool = False
    epsilon: float | None = None

    _frequency = field_validator("update_frequency")(check_frequency)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.end_epoch == -1:
            raise ValueError("end_epoch: expected the epoch at which the final sparsity is reached, found -1")
        if self.phased:
            raise ValueError("phased: true is not supported; use ACDCPruningModifier for alternating phases")
        if self.score_type in FILTER_KINDS and not isinstance(self.pattern, Filter):
            raise ValueError(
                f"score_type: {self.score_type} ranks whole filters and needs mask_type filter, found "
                f"{self.mask_type!r}; set mask_type: filter, or score_type: magnitude"
            )
        if self.permute and not (isinstance(self.pattern, NM) and self.pattern.permutable):
            raise ValueError(f"permute: expected mask_type N:M, as in 2:4, beside it, found {self.mask_type!r}")
        if isinstance(self.final_sparsity, dict):
            if self.params:
                raise ValueError("params: expected none beside a final_sparsity that lists its own, found both")
            if self.global_sparsity:
                raise ValueError("global_sparsity: one global threshold contradicts a final_sparsity per layer")
            if not self.final_sparsity:
                raise ValueError("final_sparsity: expected a number or {sparsity: [params]}, found an empty mapping")
        elif not self.params:
            raise ValueError("params: expected the parameters to prune, found none")
        if isinstance(self.pattern, NM):
            finals = self.final_sparsity if isinstance(self.final_sparsity, dict) else [self.final_sparsity]
            for final in finals:
                if abs(final - self.pattern.sparsity) > 1e-6:
                    raise ValueError(
                        f"final_sparsity: mask_type {self.mask_type} means {self.pattern.sparsity:g}, found {final:g}"
                    )
        return self

    @property
    def updates_every(self) -> float | None:
        return self.update_frequency

    @property
    def scorer(self) -> Scorer:
        match self.score_type:
            case "movement":
                return MovementScorer()
            case "OBS":
                return FisherScorer(lambda _: OBS.num_grads, OBS.damp, OBS.block, compensate=True, needs_sampler=True)
            case "MFAC":
                return FisherScorer(
                    lambda _: MFAC.num_grads, MFAC.damp, MFAC.block, compensate=False, needs_sampler=False
                )
            case "magnitude":
                return MagnitudeScorer()
            case kind:
                return FilterScorer(kind)

    @property
    def rounds(self) -> int:
        """How often scores are computed anew on the way to one update's sparsity."""
        return 1

    def warnings(self) -> list[str]:
        ignored = ["epsilon has no effect in Gossamer: counts are exact"] if self.epsilon is not None else []
        return super().warnings() + ignored

    def sparsity_at(self, epoch: float) -> float | None:
        if epoch < self.start_epoch or (epoch >= self.end_epoch and not self.leave_enabled):
            return None
        start, final = max(self.start_epoch, 0.0), self.final_sparsity
        target = final if not isinstance(final, dict) else sum(s * len(p) for s, p in final.items())
        if isinstance(final, dict):
            target /= sum(len(names) for names in final.values())
        initial = 0.0 if isinstance(self.init_sparsity, str) else self.init_sparsity
        span = self.end_epoch - start
        x = 1.0 if span <= 0 else (epoch - start) / span
        return interpolate(initial, target, x, self.inter_func)

    def bind(self, run: Run) -> list[str]:
        self.scorer.check(run)
        if not isinstance(self.final_sparsity, dict):
            return super().bind(run)
        finals: dict[str, float] = {}
        for sparsity, wanted in self.final_sparsity.items():
            for name in self.bind_params(run, wanted, "final_sparsity"):
                if finals.setdefault(name, sparsity) != sparsity:
                    raise ModifierError(f"final_sparsity: '{name}' is listed at two sparsities", "final_sparsity")
        run.plan["final"] = finals
        return list(finals)

    def start(self, run: Run) -> None:
        initial: dict[str, float] = {}
        for name in run.targets:
            zeros, total = run.zeros(name)
            initial[name] = zeros / max(total, 1) if self.init_sparsity == FROM_PARAM else float(self.init_sparsity)
        run.state["init_sparsity"] = initial
        if self.permute and isinstance(self.pattern, NM) and self.pattern.permutable:
            run.permute(run.targets, self.pattern.n, self.pattern.m)
        self.update(run)

    def update(self, run: Run) -> None:
        before: dict[str, float] = run.state.get("sparsity", {})
        target = self._sparsity(run)
        for part in range(1, self.rounds + 1):
            share = part / self.rounds
            step = {n: before.get(n, 0.0) + (s - before.get(n, 0.0)) * share for n, s in target.items()}
            self._prune(run, target if part == self.rounds else step)
        run.state["sparsity"] = target

    def end(self, run: Run) -> None:
        if run.state.get("sparsity") != self._sparsity(run):
            self.update(run)
        for sums in ("movement", "gradients"):
            run.state.pop(sums, None)
        super().end(run)

    def before_step(self, run: Run) -> None:
        self.scorer.observe(run)

    def _prune(self, run: Run, sparsity: Mapping[str, float]) -> None:
        scorer = self.scorer
        scores = scorer.scores(run, run.targets)
        if scorer.below_zero:
            self._rank_masked_last(run, scores, sparsity)
        if self.global_sparsity:
            if unseen := run.scratch.get("unseen"):
                raise ModifierError(
                    f"'{unseen[0]}' has no gradient and cannot be ranked against layers that have one; "
                    "take it out of params, or set global_sparsity: false",
                    "global_sparsity",
                )
            sizes = {name: run.parameter(name).numel() for name in run.targets}
            total = sum(sizes.values())
            shared = sum(sparsity[name] * size for name, size in sizes.items()) / max(total, 1)
            values = set(sparsity.values())
            masks = self.masks(run, scores, values.pop() if len(values) == 1 else shared)
        else:
            masks = self.masks(run, scores, sparsity)
        del scores
        scorer.settle(run, masks)
        for name, keep in masks.items():
            run.set_mask(name, keep)

    @staticmethod
    def _rank_masked_last(run: Run, scores: dict[str, Tensor], sparsity: Mapping[str, float]) -> None:
        """A masked weight scores 0, above what training moves towards zero; it must not come back for that."""
        for name, score in scores.items():
            keep = run.mask(name)
            before: dict[str, float] = run.state.get("sparsity", {})
            if keep is not None and sparsity[name] >= before.get(name, 0.0):
                scores[name] = score.masked_fill(~keep, -float("inf"))

    def _sparsity(self, run: Run) -> dict[str, float]:
        """Each target's scheduled sparsity at the run's step."""
        assert run.end_step is not None
        x = fraction(run.step, run.start_step, run.end_step)
        finals: dict[str, float] = run.plan.get("final", {})
        final = self.final_sparsity
        single = 0.0 if isinstance(final, dict) else final
        initial: dict[str, float] = run.state["init_sparsity"]
        first = 0.0 if isinstance(self.init_sparsity, str) else self.init_sparsity
        return {
            name: interpolate(initial.get(name, first), finals.get(name, single), x, self.inter_func)
            for name in run.targets
        }


@register
class MagnitudePruningModifier(GMPruningModifier):
    """Another name of `GMPruningModifier`."""


@register
class GlobalMagnitudePruningModifier(GMPruningModifier):
    """`GMPruningModifier` with one threshold over all layers."""

    global_sparsity: bool = True


@register
class MovementPruningModifier(GMPruningModifier):
    """Gradual pruning of the weights that training moves towards zero (Sanh et al. 2020)."""

    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] | FilterKind = "movement"


@register
class ConstantPruningModifier(PruningModifier):
    """Hold the zeros that the weights have at the start."""

    params: ParamNames = Field(default=...)

    def start(self, run: Run) -> None:
        for name in run.targets:
            keep = run.parameter(name).detach() != 0
            if bool(keep.all()):
                run.skip(name, "dense: it has no zeros to hold")
            else:
                run.set_mask(name, keep)
        if not any(run.mask(name) is not None for name in run.targets):
            logger.warning("%s holds nothing: no weight it names has a zero; load the sparse weights first", self.name)

    def end(self, run: Run) -> None:
        for name in run.targets:
            run.release_mask(name)
