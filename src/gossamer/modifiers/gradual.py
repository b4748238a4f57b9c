"""Pruning to a target, gradually by magnitude, movement or second-order scores, or in levels with a fixed mask each.

A modifier defines which weights, how sparse and when; `scoring.py` ranks the weights, `sparse/` computes the mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator
from torch import Tensor

from gossamer.errors import FieldError, ModifierError, Problem, SparsityError
from gossamer.model import ALL_PRUNABLE
from gossamer.model.distribution import is_distributed
from gossamer.modifiers.base import EndEpoch, Outlook, ParamName, ParamNames, Run
from gossamer.modifiers.pruning import PruningModifier, RankedPruningModifier
from gossamer.modifiers.scoring import (
    FILTER_KINDS,
    MFAC,
    OBS,
    FilterScorer,
    FisherDefaults,
    FisherScorer,
    MovementScorer,
    Scorer,
)
from gossamer.modifiers.state import Item, Spec, StateField, by_target, number, tensors
from gossamer.quantities import (
    Count,
    Epoch,
    Factor,
    Frequency,
    GradientCount,
    GradientCounts,
    PartialSparsity,
    PositiveFactor,
    RoundCount,
    Sparsity,
)
from gossamer.sparse import NM, Filter, energy, erdos_renyi, fraction, interpolate, uniform, zero_count
from gossamer.sparse.schedules import Interpolation
from gossamer.sparse.scores import FilterKind
from gossamer.sparse.sharding import count, split_like

FROM_PARAM = "__FROM_PARAM__"
Allocation = Literal["uniform", "erk", "global", "energy"]


class GMPruningModifier(RankedPruningModifier):
    """Prune from `init_sparsity` to `final_sparsity` between two epochs (Zhu & Gupta 2017)."""

    periodic: ClassVar[bool] = True

    init_sparsity: Literal["__FROM_PARAM__"] | Sparsity
    final_sparsity: Sparsity | dict[Sparsity, list[ParamName]]
    start_epoch: Epoch = Field(default=...)
    end_epoch: EndEpoch = Field(default=...)
    update_frequency: Frequency = Field(default=...)
    inter_func: Interpolation = "cubic"
    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] | FilterKind = "magnitude"
    """How weights rank; whole filters under `magnitude` by their l1 norm."""
    permute: bool = False
    """Reorder channels first, so that N:M keeps larger weights; what the model computes stays the same."""
    phased: bool = False
    epsilon: Factor | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.phased:
            raise FieldError("true is not supported; use ACDCPruningModifier for alternating phases", "phased")
        if self.score_type in FILTER_KINDS and not isinstance(self.pattern, Filter):
            raise FieldError(
                f"{self.score_type} ranks whole filters and needs mask_type filter, found "
                f"{self.mask_type!r}; set mask_type: filter, or score_type: magnitude",
                "score_type",
            )
        if self.permute and not (isinstance(self.pattern, NM) and self.pattern.permutable):
            raise FieldError(f"expected mask_type N:M, as in 2:4, beside it, found {self.mask_type!r}", "permute")
        if isinstance(self.final_sparsity, dict):
            if self.params:
                raise FieldError("expected none beside a final_sparsity that lists its own, found both", "params")
            if self.global_sparsity:
                raise FieldError("one global threshold contradicts a final_sparsity per layer", "global_sparsity")
            if not self.final_sparsity:
                raise FieldError("expected a number or {sparsity: [params]}, found an empty mapping", "final_sparsity")
        elif not self.params:
            raise FieldError("expected the parameters to prune, found none", "params")
        for final in self.final_sparsity if isinstance(self.final_sparsity, dict) else [self.final_sparsity]:
            self.check_final(final, "final_sparsity")
        return self

    @property
    def goal(self) -> float | None:
        return None if isinstance(self.final_sparsity, dict) else self.final_sparsity

    @property
    def ranks_by_weights(self) -> bool:
        return not self.scorer.uses_gradients

    def rank(self, run: Run) -> dict[str, Tensor]:
        return self.scorer.scores(run, run.targets)

    @property
    def scorer(self) -> Scorer:
        match self.score_type:
            case "movement":
                return MovementScorer()
            case "OBS":
                return self._fisher(OBS, surgeon=True)
            case "MFAC":
                return self._fisher(MFAC, surgeon=False)
            case "magnitude":
                return Scorer()
            case kind:
                return FilterScorer(kind)

    def _fisher(self, defaults: FisherDefaults, *, surgeon: bool) -> FisherScorer:
        return FisherScorer(lambda _: defaults.num_grads, None, defaults.block, self.global_sparsity, surgeon)

    @property
    def rounds(self) -> int:
        """How often scores are recomputed within one update."""
        return 1

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {
            **super().state_fields(run),
            "init_sparsity": by_target(_share, required=True),
            "sparsity": by_target(_share),
            "movement": tensors(Spec.wide),
            "gradients": by_target(self._gradients),
        }

    def _gradients(self, item: Item, weight: Spec) -> list[Tensor]:
        """The last gradients of a weight, flat; no more than an update uses."""
        flat = Spec((math.prod(weight.shape),), weight.dtype, weight.device)
        kept = item.items()[-self.most_gradients :]
        kept = [gradient for gradient in kept if gradient.shape() in (flat.shape, weight.shape)]
        if weight.template is None:
            whole = [gradient.tensor(flat if gradient.shape() == flat.shape else weight) for gradient in kept]
            return [gradient.reshape(-1) for gradient in whole]
        # Flat ones are those of a single process; a weight that is split over ranks keeps its shape.
        return [
            split_like(gradient.tensor(flat).reshape(weight.shape), weight.template)
            if gradient.shape() == flat.shape != weight.shape
            else gradient.tensor(weight)
            for gradient in kept
        ]

    @property
    def most_gradients(self) -> int:
        """How many gradients of a weight are kept."""
        return MFAC.num_grads

    def warnings(self) -> list[Problem]:
        ignored = Problem("has no effect in Gossamer: counts are exact", ("epsilon",))
        return super().warnings() + [ignored] * (self.epsilon is not None)

    def scheduled(self, epoch: float) -> float | None:
        final = self.final_sparsity
        if isinstance(final, dict):
            final = sum(share * len(names) for share, names in final.items()) / sum(map(len, final.values()))
        return self._interpolated(final, epoch)

    def sparsity_of(self, run: Run, name: str, epoch: float) -> float | None:
        finals: dict[str, float] = run.plan.get("final", {})
        if name not in finals or self.sparsity_at(epoch) is None:
            return super().sparsity_of(run, name, epoch)
        return self._interpolated(finals[name], epoch)

    def _interpolated(self, final: float, epoch: float) -> float:
        start = max(self.start_epoch, 0.0)
        initial = 0.0 if isinstance(self.init_sparsity, str) else self.init_sparsity
        span = self.end_epoch - start
        return interpolate(initial, final, 1.0 if span <= 0 else (epoch - start) / span, self.inter_func)

    def bind(self, run: Run) -> list[str]:
        self.scorer.check(run)
        if self.permute and is_distributed(run.module):
            raise ModifierError(
                "channels cannot be reordered in a model whose parameters are split over ranks", "permute"
            )
        if not isinstance(self.final_sparsity, dict):
            return super().bind(run)
        finals: dict[str, float] = {}
        for sparsity, params in self.final_sparsity.items():
            for name in self.bind_params(run, params, "final_sparsity"):
                if finals.setdefault(name, sparsity) != sparsity:
                    raise ModifierError(f"'{name}' is listed at two sparsities", "final_sparsity")
        run.plan["final"] = finals
        self.bind_filters(run, list(finals))
        return list(finals)

    def own_sparsity(self, run: Run) -> Mapping[str, float]:
        return run.plan.get("final", {})

    def start(self, run: Run) -> None:
        initial: dict[str, float] = {}
        for name in run.targets:
            zeros, total = run.weights.zeros(name)
            initial[name] = zeros / max(total, 1) if self.init_sparsity == FROM_PARAM else float(self.init_sparsity)
        run.state["init_sparsity"] = initial
        if self.permute and isinstance(self.pattern, NM) and self.pattern.permutable:
            run.weights.permute(run.targets, self.pattern.n, self.pattern.m)
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
        if scorer.signed:
            self._rank_masked_last(run, scores, sparsity)
        if self.global_sparsity:
            if unseen := run.scratch.get("unseen"):
                raise ModifierError(
                    f"'{unseen[0]}' has no gradient and cannot be ranked against layers that have one; "
                    "take it out of params, or set global_sparsity: false",
                    "global_sparsity",
                )
            sizes = {name: run.weights.parameter(name).numel() for name in run.targets}
            total = sum(sizes.values())
            shared = sum(sparsity[name] * size for name, size in sizes.items()) / max(total, 1)
            values = set(sparsity.values())
            masks = self.masks(run, scores, values.pop() if len(values) == 1 else shared)
        else:
            masks = self.masks(run, scores, sparsity)
        del scores
        scorer.compensate(run, masks)
        self.hold(run, masks)

    @staticmethod
    def _rank_masked_last(run: Run, scores: dict[str, Tensor], sparsity: Mapping[str, float]) -> None:
        """Keep masked weights masked: their score is 0, more than that of a weight that moves towards zero."""
        for name, score in scores.items():
            keep = run.masks.get(name)
            before: dict[str, float] = run.state.get("sparsity", {})
            if keep is not None and sparsity[name] >= before.get(name, 0.0):
                scores[name] = score.masked_fill(~keep, -float("inf"))

    def _sparsity(self, run: Run) -> dict[str, float]:
        """Each target's scheduled sparsity at the run's step."""
        assert run.clock.end is not None
        x = fraction(run.clock.step, run.clock.start, run.clock.end)
        finals: dict[str, float] = run.plan.get("final", {})
        final = self.final_sparsity
        single = 0.0 if isinstance(final, dict) else final
        initial: dict[str, float] = run.state["init_sparsity"]
        first = 0.0 if isinstance(self.init_sparsity, str) else self.init_sparsity
        return {
            name: interpolate(initial.get(name, first), finals.get(name, single), x, self.inter_func)
            for name in run.targets
        }


def _share(item: Item, _: Spec) -> float:
    return item.number(0, 1)


_SCHEDULE = {"start", "end", "start_epoch", "end_epoch", "init_sparsity", "final_sparsity", "update_frequency"}


class MagnitudePruningModifier(GMPruningModifier):
    """Another name of `GMPruningModifier`; with `sparsity` and without epochs, pruning in one shot."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_shot(cls, fields: Any, build: ModelWrapValidatorHandler[Self]) -> Any:
        if not isinstance(fields, dict) or "sparsity" not in fields or _SCHEDULE & fields.keys():
            return build(fields)
        from gossamer.modifiers.oneshot import OneShotMagnitudePruningModifier

        return OneShotMagnitudePruningModifier.model_validate(fields)


class GlobalMagnitudePruningModifier(GMPruningModifier):
    """`GMPruningModifier` with one threshold over all layers."""

    global_sparsity: bool = True


class MovementPruningModifier(GMPruningModifier):
    """Gradual pruning of the weights that training moves towards zero (Sanh et al. 2020)."""

    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] | FilterKind = "movement"


class SecondOrderModifier(GMPruningModifier):
    """The base class of second-order methods: the number of gradients, and the blocks of the Fisher matrix."""

    num_grads: GradientCount | GradientCounts
    """A number, or `{sparsity: number}`, which applies from that sparsity on."""
    damp: PositiveFactor | None = None
    """Added to the diagonal of the Fisher matrix; null: a fraction (`scoring.DAMP`) of its mean diagonal."""
    fisher_block_size: Count | None
    """Weights in a block; null: a whole parameter is one block."""
    grad_sampler_kwargs: dict[str, Any] = Field(default_factory=dict)

    def gradients_at(self, sparsity: float) -> int:
        """The number of gradients at a sparsity."""
        if isinstance(self.num_grads, int):
            return self.num_grads
        reached = [share for share in self.num_grads if share <= sparsity + 1e-9]
        return self.num_grads[max(reached, default=min(self.num_grads))]

    @property
    def most_gradients(self) -> int:
        return self.num_grads if isinstance(self.num_grads, int) else max(self.num_grads.values())

    def _scorer(self, *, surgeon: bool) -> Scorer:
        return FisherScorer(self.gradients_at, self.damp, self.fisher_block_size, self.global_sparsity, surgeon)


class OBSPruningModifier(SecondOrderModifier):
    """Gradual pruning by the optimal brain surgeon on a block-wise Fisher matrix (Kurtic et al. 2022)."""

    num_grads: GradientCount | GradientCounts = OBS.num_grads
    fisher_block_size: Count | None = OBS.block
    num_recomputations: RoundCount = 1
    score_type: Literal["magnitude", "movement", "MFAC", "OBS"] = "OBS"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def scorer(self) -> Scorer:
        return self._scorer(surgeon=True)

    @property
    def rounds(self) -> int:
        return self.num_recomputations


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
        return self._scorer(surgeon=False)


class LevelPruningModifier(PruningModifier):
    """Prune to each sparsity of `levels` in turn; level n starts n/L of the way from start to end.

    Within a level the mask is fixed. At the start of the next level a new mask is computed from the remaining weights,
    and the learning-rate scheduler that was given to the manager (`modify(…, lr_scheduler=…)`) restarts.
    """

    params: ParamNames = ALL_PRUNABLE
    levels: list[PartialSparsity]
    start_epoch: Epoch = 0.0
    end_epoch: EndEpoch = Field(default=...)
    allocation: Allocation = "uniform"
    """How layers share a level: equally, by Erdős–Rényi-kernel, or by one threshold on magnitudes or on energy."""
    energy_slope: Factor = 0.5
    """With `energy`: how much less small layers are pruned; 0 removes the same share of energy from all."""
    max_layer_sparsity: Sparsity = 0.99
    """With `energy`: no layer becomes sparser than this."""
    tolerance: Sparsity = 0.015
    """With `energy`: how far a level may be below its target if all layers are at their maximum."""
    score_type: Literal["magnitude"] | FilterKind = "magnitude"
    restart_lr: bool = True

    @field_validator("levels")
    @classmethod
    def _rising(cls, levels: list[float]) -> list[float]:
        if not levels:
            raise ValueError("expected sparsities that rise, as in [0.3, 0.5, 0.7], found none")
        if any(after <= before for before, after in pairwise(levels)):
            raise ValueError(f"expected sparsities that rise, as in [0.3, 0.5, 0.7], found {levels}")
        return levels

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.score_type != "magnitude" and not isinstance(self.pattern, Filter):
            raise FieldError(f"{self.score_type} ranks whole filters; set mask_type: filter beside it", "score_type")
        if isinstance(self.pattern, NM) and self.allocation in ("erk", "energy"):
            raise FieldError(
                f"{self.allocation} gives layers shares that mask_type {self.mask_type} lacks", "allocation"
            )
        self.check_final(self.levels[-1], "levels")
        return self

    @property
    def updates_every(self) -> float | None:
        return -1.0

    @property
    def scorer(self) -> Scorer:
        return Scorer() if self.score_type == "magnitude" else FilterScorer(self.score_type)

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        # A recipe that was edited may have fewer levels than the state.
        level = StateField(lambda item, _: min(item.integer(), len(self.levels) - 1))
        return {**super().state_fields(run), "level": level, "target": number(0, 1, required=True)}

    def scheduled(self, epoch: float) -> float | None:
        start = max(self.start_epoch, 0.0)
        share = (epoch - start) / (self.end_epoch - start) if self.end_epoch > start else 1.0
        return self.levels[min(int(share * len(self.levels)), len(self.levels) - 1)]

    def sparsity_of(self, run: Run, name: str, epoch: float) -> float | None:
        """Known for `uniform` and `erk`; the other allocations depend on the weights at the start of the level."""
        level = self.sparsity_at(epoch)
        if level is None or self.allocation == "uniform":
            return level
        if self.allocation != "erk":
            return None
        sparsities: dict[float, dict[str, float]] = run.plan.setdefault("sparsities", {})
        if level not in sparsities:
            sparsities[level] = erdos_renyi({other: run.weights.parameter(other).shape for other in run.targets}, level)
        return sparsities[level].get(name)

    def outlook(self, run: Run) -> dict[str, Outlook]:
        even = isinstance(self.pattern, NM) or self.allocation in ("uniform", "erk")
        certainty = "exact" if even else "estimated"
        return {
            name: self._outlook(round(sparsity * run.weights.parameter(name).numel()), certainty)
            for name, sparsity in self.sparsities(run, self.levels[-1]).items()
        }

    def starts(self, start: int, end: int) -> list[int]:
        """The step at which each level starts: n·total // L steps after the start."""
        return [start + n * (end - start) // len(self.levels) for n in range(len(self.levels))]

    def bind(self, run: Run) -> list[str]:
        assert run.clock.end is not None
        if (steps := run.clock.end - run.clock.start) < len(self.levels):
            raise ModifierError(
                f"{len(self.levels)} levels do not fit into {steps} steps; let it end later", "end_epoch"
            )
        self.scorer.check(run)
        return super().bind(run)

    def start(self, run: Run) -> None:
        level = self._level(run)
        if run.clock.step > self._starts(run)[level] and self._is_at(run, self.levels[level]):
            # Started within a level, with pruned weights but without the state: the zeros are the mask.
            masks = {name: run.weights.parameter(name).detach() != 0 for name in run.targets}
            self.hold(run, masks, zeros_only=True)
            run.state.update(level=level, target=self.levels[level])
        else:
            self._enter(run, level)

    def update(self, run: Run) -> None:
        level = self._level(run)
        if self.levels[level] != run.state["target"]:
            self._enter(run, level)
            if self.restart_lr:
                run.optimizer.restart_learning_rate()

    def end(self, run: Run) -> None:
        if run.state.get("target") != self.levels[-1]:  # the clock skipped the start of the last level
            self._enter(run, len(self.levels) - 1)
        super().end(run)

    def prune_to(self, run: Run, sparsity: Mapping[str, float] | float) -> bool:
        """Set masks for one sparsity over all layers, or for one sparsity per named layer."""
        names = [name for name in run.targets if name in sparsity] if isinstance(sparsity, Mapping) else run.targets
        self.hold(run, self.masks(run, self.scorer.scores(run, names), sparsity))
        return True

    def allocated(self, weights: Mapping[str, Tensor], sparsity: float) -> dict[str, float] | float:
        """A sparsity for each layer, or one number for all of them together."""
        shapes = {name: weight.shape for name, weight in weights.items()}
        match self.allocation:
            case "global":
                return sparsity
            case "erk":
                return erdos_renyi(shapes, sparsity)
            case "energy":
                magnitudes = {name: weight.detach().abs() for name, weight in weights.items()}
                return energy(magnitudes, sparsity, self.energy_slope, self.max_layer_sparsity, self.tolerance)
            case "uniform":
                return uniform(shapes, sparsity)

    def sparsities(self, run: Run, sparsity: float) -> dict[str, float]:
        """The sparsity of each layer at a level, by the weights as they are now."""
        masks = self._masks_at(run, sparsity)
        return {name: 1 - count(keep) / max(keep.numel(), 1) for name, keep in masks.items()}

    def _masks_at(self, run: Run, sparsity: float) -> dict[str, Tensor]:
        shared = self.allocated({name: run.weights.parameter(name) for name in run.targets}, sparsity)
        return self.masks(run, self.scorer.scores(run, run.targets), shared)

    def _enter(self, run: Run, level: int) -> None:
        try:
            masks = self._masks_at(run, self.levels[level])
        except SparsityError as error:
            raise ModifierError(f"level {level + 1} of {len(self.levels)}: {error}", "levels") from None
        self.hold(run, masks)
        run.state.update(level=level, target=self.levels[level])
        run.log.value(f"{self.name}/level", self.levels[level])

    def _starts(self, run: Run) -> list[int]:
        assert run.clock.end is not None
        return self.starts(run.clock.start, run.clock.end)

    def _level(self, run: Run) -> int:
        """The last level that has started."""
        return max(n for n, start in enumerate(self._starts(run)) if start <= max(run.clock.step, run.clock.start))

    def _is_at(self, run: Run, sparsity: float) -> bool:
        """Whether the weights have exactly the zeros of this sparsity."""
        counts = [run.weights.zeros(name) for name in run.targets]
        if self.allocation == "uniform":
            return all(zeros == zero_count(total, sparsity) for zeros, total in counts)
        return sum(zeros for zeros, _ in counts) == zero_count(sum(total for _, total in counts), sparsity)
