"""Pruning in levels: a list of sparsities, each with a fixed mask for an equal share of the training time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from gossamer.errors import FieldError, ModifierError, SparsityError
from gossamer.model import ALL_PRUNABLE
from gossamer.modifiers.base import EndEpoch, Outlook, ParamNames, Run
from gossamer.modifiers.pruning import PruningModifier
from gossamer.modifiers.scoring import FilterScorer, Scorer
from gossamer.modifiers.state import StateField, number
from gossamer.quantities import Epoch, Factor, PartialSparsity, Sparsity
from gossamer.sparse import NM, Filter, energy, erdos_renyi, uniform, zero_count
from gossamer.sparse.scores import FilterKind

Allocation = Literal["uniform", "erk", "global", "energy"]


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
        shares: dict[float, dict[str, float]] = run.plan.setdefault("shares", {})
        if level not in shares:
            shares[level] = erdos_renyi({other: run.weights.parameter(other).shape for other in run.targets}, level)
        return shares[level].get(name)

    def outlook(self, run: Run) -> dict[str, Outlook]:
        even = isinstance(self.pattern, NM) or self.allocation in ("uniform", "erk")
        certainty = "exact" if even else "estimated"
        return {
            name: self._outlook(round(share * run.weights.parameter(name).numel()), certainty)
            for name, share in self.shares(run, self.levels[-1]).items()
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

    def shares(self, run: Run, sparsity: float) -> dict[str, float]:
        """The sparsity of each layer at a level, by the weights as they are now."""
        masks = self._masks_at(run, sparsity)
        return {name: 1 - int(keep.count_nonzero()) / max(keep.numel(), 1) for name, keep in masks.items()}

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
