"""The base classes of modifiers that hold masks, and the one that holds the zeros of a sparse model.

They match the weights, compute masks in the recipe's pattern and respect the bounds of layers. Subclasses define how
weights are ranked and when they are pruned.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from gossamer.errors import FieldError, ModifierError, SparsityError
from gossamer.model import (
    ALL_PRUNABLE,
    embedding_tables,
    has_parameter,
    is_depthwise,
    match,
    match_excluded,
    match_prunable,
    prunable,
    stored_weight,
)
from gossamer.model.parameters import TIED, with_norms_kept
from gossamer.model.weights import WHOLE
from gossamer.modifiers.base import (
    EXCLUDED,
    SPARED_EMBEDDINGS,
    Certainty,
    ExcludedNames,
    Modifier,
    Outlook,
    ParamName,
    ParamNames,
    Run,
)
from gossamer.modifiers.filters import SAVED, FilterPlan, hold_vectors, is_held, leaves, plan_filters
from gossamer.modifiers.scoring import outputs_first
from gossamer.modifiers.state import LARGEST_WEIGHT, StateField, tensors
from gossamer.quantities import Sparsity
from gossamer.sparse import (
    NM,
    Channel,
    Filter,
    Pattern,
    Unstructured,
    expand_units,
    global_masks,
    layer_masks,
    magnitude,
    parse_pattern,
    unit_vector,
    within_reach,
    zero_count,
)
from gossamer.sparse.masks import refuse_nan
from gossamer.sparse.sharding import any_sharded, count, counts, is_sharded

logger = logging.getLogger("gossamer")


def _known_pattern(value: str | list[int]) -> str | list[int]:
    parse_pattern(value)
    return value


MaskType = Annotated[str | list[int], AfterValidator(_known_pattern)]
"""The shape of the zeros, as `parse_pattern` reads it."""


class PruningModifier(Modifier):
    """The base class of modifiers with masks: matches the weights and applies the pattern."""

    family: ClassVar[str] = "pruning"
    prunes: ClassVar[bool] = True

    params: ParamNames = Field(default_factory=list)
    exclude: ExcludedNames = Field(default_factory=list)
    """Parameters to leave dense: names, `re:` patterns, `__DEPTHWISE__`."""
    leave_enabled: bool = True
    mask_type: MaskType = "unstructured"
    params_strict: bool = True

    spares_embeddings: ClassVar[bool] = True
    """Whether `__ALL_PRUNABLE__` excludes weights that are tied to an embedding."""
    keeps_norms: ClassVar[bool] = True
    """Whether its masks keep a weight in every row that weight norm normalizes."""

    any_pattern: ClassVar[bool] = True
    """False when the method is defined for single weights only."""

    @model_validator(mode="after")
    def _fits_the_method(self) -> Self:
        if not self.any_pattern and self.mask_type != "unstructured":
            raise FieldError(f"{self.name} is defined for 'unstructured' only, found {self.mask_type!r}", "mask_type")
        return self

    def check_final(self, sparsity: float, field: str) -> None:
        """Raise if an N:M pattern means another sparsity."""
        if isinstance(self.pattern, NM) and abs(sparsity - self.pattern.sparsity) > 1e-6:
            raise FieldError(f"mask_type {self.mask_type} means {self.pattern.sparsity:g}, found {sparsity:g}", field)

    @property
    def pattern(self) -> Pattern:
        return parse_pattern(self.mask_type)

    def sparsity_at(self, epoch: float) -> float | None:
        released = self.released_epoch
        if epoch < self.start_epoch or (released is not None and epoch >= released):
            return None
        return self.scheduled(epoch)

    def scheduled(self, epoch: float) -> float | None:
        """The sparsity at an epoch while masks are held; None where this modifier sets none."""
        return None

    @property
    def released_epoch(self) -> float | None:
        return None if self.leave_enabled else super().released_epoch

    def outlook(self, run: Run) -> dict[str, Outlook]:
        share = self.sparsity_at(math.inf if self.end_epoch == -1 else self.end_epoch)
        if share is None or self.learns_sparsity:
            return dict.fromkeys(run.targets, self._outlook(None, "learned"))
        return self._exact_outlook(run, dict.fromkeys(run.targets, share), "estimated")

    def _exact_outlook(
        self, run: Run, sparsity: Mapping[str, float], certainty: Certainty = "exact"
    ) -> dict[str, Outlook]:
        """The zeros of weights that are pruned to a sparsity each."""
        shapes = {name: self._rows(run, name, run.weights.parameter(name)).shape for name in sparsity}
        return {
            name: self._outlook(pattern_zeros(self.pattern, shapes[name], share), certainty)
            for name, share in sparsity.items()
        }

    def _outlook(self, zeros: int | None, certainty: Certainty) -> Outlook:
        mask_type = self.mask_type
        pattern = mask_type if isinstance(mask_type, str) else "×".join(map(str, mask_type))
        return Outlook(zeros, pattern, certainty, self.name)

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {SAVED: tensors(least=-LARGEST_WEIGHT, most=LARGEST_WEIGHT, of=lambda layout: layout.tensors)}

    def bind(self, run: Run) -> list[str]:
        targets = self.bind_params(run, self.params)
        self.bind_filters(run, targets)
        return targets

    def bind_filters(self, run: Run, targets: Sequence[str]) -> None:
        """Find coupled filters, if the pattern is whole filters or channels."""
        run.plan["targets"] = list(targets)
        if (filters := self.filters(run)) is not None:
            for message in filters.notes:
                logger.warning("%s: %s", self.name, message)
            for pool in filters.pools.pools:
                if len(pool.weights) > 1:
                    logger.info("%s prunes together: %s", self.name, ", ".join(pool.weights))

    def bind_params(self, run: Run, params: str | Sequence[str], field: str = "params") -> list[str]:
        """The weights to prune; those that the pattern does not fit are skipped, or an error if named exactly."""
        matches = match_prunable(run.module, params, field=field, strict=self.params_strict)
        for name, reason in matches.skipped.items():
            run.log.skip(name, reason)
        targets: list[str] = []
        excluded, idle = match_excluded(run.module, self.exclude, field="exclude")
        for pattern in idle:
            logger.warning("%s: exclude: '%s' matches nothing", self.name, pattern)
        every = self.spares_embeddings and ALL_PRUNABLE in ([params] if isinstance(params, str) else params)
        tables = embedding_tables(run.module) if every else set[str]()
        last, spared = next(reversed(prunable(run.module)), None), ""
        for name in matches.names:
            if name in excluded:
                run.log.skip(name, EXCLUDED)
                continue
            parameter = run.weights.parameter(name)
            if parameter.numel() and count(parameter.detach().isnan()):
                raise ModifierError(f"'{name}' contains NaN and cannot be pruned; fix the weights first", field)
            reason = self._divides_by_zero(run, name)
            if reason and name in matches.exact:
                raise ModifierError(f"'{name}' cannot be pruned: {reason}", field)
            if reason is None and name not in matches.exact:
                if name in tables:
                    run.plan.setdefault(SPARED_EMBEDDINGS, set()).add(name)
                reason = TIED if name in tables else self._spared(run, name, name == last)
                reason = reason and f"{reason}; name it exactly to prune it"
            if reason:
                spared = reason
                run.log.skip(name, reason)
                continue
            reason = self.pattern.fits(self._rows(run, name, parameter).shape)
            if reason and name in matches.exact:
                raise ModifierError(f"{self.mask_type} does not fit '{name}': {reason}", "mask_type")
            if reason:
                run.log.skip(name, f"mask_type {self.mask_type} does not fit: {reason}")
            else:
                targets.append(name)
        if not targets and set(matches.names) <= set(excluded):
            raise ModifierError("excludes all parameters that match params; exclude fewer", "exclude")
        if not targets and spared:
            raise ModifierError(f"mask_type {self.mask_type} skips all matched parameters; the last: {spared}", field)
        if not targets:
            raise ModifierError(f"{self.mask_type} fits none of the matched parameters", "mask_type")
        return targets

    def end(self, run: Run) -> None:
        if not self.leave_enabled:
            self.release(run)

    def hold(self, run: Run, masks: Mapping[str, Tensor], *, zeros_only: bool = False) -> None:
        """Set masks, with those of biases and batch norm for whole filters; `zeros_only` changes no value."""
        for name, keep in masks.items():
            run.masks.set(name, keep)
        self._hold_vectors(run, zeros_only)

    def release(self, run: Run) -> None:
        """Release all masks; biases and batch norm parameters that were masked with filters are restored."""
        for name in run.targets:
            run.masks.release(name)
        self._hold_vectors(run)

    def _hold_vectors(self, run: Run, zeros_only: bool = False) -> None:
        filters = self.filters(run)
        if filters is not None and isinstance(self.pattern, Filter):
            hold_vectors(run, filters.vectors, filters.graph, zeros_only)

    def filters(self, run: Run) -> FilterPlan | None:
        """The coupled filters or channels; None for other patterns."""
        if not isinstance(self.pattern, Filter | Channel):
            return None
        names = [name for name in run.plan.get("targets", run.targets) if has_parameter(run.module, name)]
        shapes = {name: tuple(self._rows(run, name, run.weights.parameter(name)).shape) for name in names}
        found: FilterPlan | None = run.plan.get("filters")
        if found is None or found.shapes != shapes:
            groups = [[name for name in group if name in shapes] for group in run.plan.get("groups", ())]
            found = run.plan["filters"] = plan_filters(
                run,
                shapes,
                isinstance(self.pattern, Channel),
                [group for group in groups if group],
                self.own_sparsity(run),
            )
        return found

    def own_sparsity(self, run: Run) -> Mapping[str, float]:
        """Sparsities that the recipe sets per weight; weights with different ones do not share a mask."""
        return {}

    def _spared(self, run: Run, name: str, last: bool) -> str | None:
        """Why filters or channels of a weight that is not named exactly are not pruned."""
        if isinstance(self.pattern, Channel) and is_depthwise(run.module, name):
            return "a depthwise convolution, which reads each channel on its own"
        if not isinstance(self.pattern, Filter | Channel):
            return None
        graph = run.weights.filter_graph()
        if isinstance(self.pattern, Channel):
            first = graph is not None and graph.reads_input(name)
            return "it reads the model's input, whose channels would be ignored" if first else None
        if last and (graph is None or is_held(graph, name)):
            return "the last layer: pruning its filters would remove outputs"
        if graph is not None and leaves(graph, name):
            return "its filters are outputs of the model, or of a part that was traced separately"
        return None

    def _divides_by_zero(self, run: Run, name: str) -> str | None:
        """Why a layer with weight norm, which divides rows by their norm, would compute NaN, or is not supported."""
        weight = stored_weight(run.module, name)
        if (
            weight is not None
            and is_sharded(run.weights.parameter(name))
            and (weight.norm, weight.mask) != (None, None)
        ):
            return "its layer computes it from other tensors, which is not supported where it is split over ranks"
        if weight is None or weight.norm in (None, WHOLE):
            return None
        remedy = "remove weight norm from the layer first"
        if not self.keeps_norms:
            return f"weight norm divides a row of zeros by zero, and {self.name} may leave one; {remedy}"
        if isinstance(self.pattern, Filter | Channel):
            return f"weight norm divides a row of zeros by zero; {remedy}, or choose another mask_type"
        values = run.weights.parameter(name)
        share, rows = self.sparsity_of(run, name, self.last_epoch), int(values.shape[weight.norm])
        if (
            isinstance(self.pattern, Unstructured)
            and share
            and zero_count(values.numel(), share) > values.numel() - rows
        ):
            most = 1 - rows / values.numel()
            return f"weight norm needs a weight in each of {rows} rows, so at most {most:.1%} can be zero; {remedy}"
        return None

    def masks(self, run: Run, scores: Mapping[str, Tensor], sparsity: Mapping[str, float] | float) -> dict[str, Tensor]:
        """Masks for a sparsity per layer, or for one number over all layers together."""
        rows: dict[str, Tensor] = {}
        nans = counts([score.isnan() for score in scores.values()]) if any_sharded(scores.values()) else None
        for index, (name, score) in enumerate(scores.items()):
            try:
                if nans is None or nans[index]:
                    refuse_nan(score)
            except SparsityError as error:
                raise ModifierError(f"'{name}' cannot be pruned at step {run.clock.step}: {error}") from None
            rows[name] = self._rows(run, name, with_norms_kept(run.module, name, score))
        if (filters := self.filters(run)) is not None:
            units = {name: unit_vector(self.pattern, score) for name, score in rows.items()}
            numels = {name: score.numel() for name, score in rows.items()}
            parts = filters.pools.keep(units, sparsity, self.caps(run), numels)
            if not isinstance(sparsity, Mapping):
                self._warn_of_emptied(run, [name for name, part in parts.items() if part.numel() and not part.any()])
            kept = {name: expand_units(self.pattern, part, rows[name]) for name, part in parts.items()}
        elif isinstance(sparsity, Mapping):
            kept = layer_masks(rows, self.pattern, sparsity)
        else:
            kept = global_masks(rows, self.pattern, sparsity, self.caps(run))
        return {name: self._rows(run, name, keep).contiguous() for name, keep in kept.items()}

    def _warn_of_emptied(self, run: Run, names: Sequence[str]) -> None:
        """Warn once per layer that all its filters or channels are pruned, so that the output is constant."""
        reported: set[str] = run.scratch.setdefault("emptied", set())
        if new := [name for name in names if name not in reported]:
            reported.update(new)
            logger.warning(
                "%s prunes every %s of %s: the other layers have too few to reach the sparsity over all layers; "
                "set max_layer_sparsity, or a lower sparsity",
                self.name,
                "channel" if isinstance(self.pattern, Channel) else "filter",
                ", ".join(f"'{name}'" for name in new),
            )

    def caps(self, run: Run) -> float | Mapping[str, float]:
        """With one threshold over all layers: the largest sparsity of every layer, or by layer."""
        return 1.0

    @staticmethod
    def _rows(run: Run, name: str, tensor: Tensor) -> Tensor:
        """A weight-shaped tensor with output channels first (its own inverse)."""
        return outputs_first(run, name, tensor)


class RankedPruningModifier(PruningModifier):
    """Modifiers that may rank the weights of all layers together, under one threshold."""

    global_sparsity: bool = False
    max_layer_sparsity: Sparsity | dict[Sparsity, list[ParamName]] = 1.0
    """With one threshold: the largest sparsity of a layer, or `{bound: [params]}` for some layers."""

    @property
    def ranks_by_weights(self) -> bool:
        """Whether the weights alone determine how layers share a threshold."""
        return False

    @model_validator(mode="after")
    def _bounded_together(self) -> Self:
        if self.max_layer_sparsity != 1.0 and not self.global_sparsity:
            raise FieldError(
                "applies to layers that share one threshold; set global_sparsity: true", "max_layer_sparsity"
            )
        lowest = self.max_layer_sparsity
        if isinstance(lowest, float) and self.goal is not None and lowest < self.goal:
            raise FieldError(
                f"expected at least the final sparsity {self.goal:g}, found {lowest:g}", "max_layer_sparsity"
            )
        return self

    def sparsity_of(self, run: Run, name: str, epoch: float) -> float | None:
        return None if self.global_sparsity else super().sparsity_of(run, name, epoch)

    def rank(self, run: Run) -> dict[str, Tensor]:
        """The scores of all targets, by the weights as they are now."""
        return {name: magnitude(run.weights.parameter(name)) for name in run.targets}

    def outlook(self, run: Run) -> dict[str, Outlook]:
        if self.goal is None:
            finals: dict[str, float] = run.plan.get("final", {})
            return self._exact_outlook(run, {name: finals[name] for name in run.targets if name in finals})
        if not self.global_sparsity or isinstance(self.pattern, NM):
            return self._exact_outlook(run, dict.fromkeys(run.targets, self.goal))
        if not self.ranks_by_weights:
            return dict.fromkeys(run.targets, self._outlook(None, "learned"))
        masks = self.masks(run, self.rank(run), self.goal)
        return {name: self._outlook(keep.numel() - count(keep), "estimated") for name, keep in masks.items()}

    def bind(self, run: Run) -> list[str]:
        targets = super().bind(run)
        run.plan["caps"] = caps = self._caps(run, targets)
        if self.goal is not None and self.max_layer_sparsity != 1.0:
            if (filters := self.filters(run)) is not None:
                units, bounds = filters.pools.sizes(), filters.pools.bounds(caps)
            else:
                rows = {name: self._rows(run, name, run.weights.parameter(name).detach()).shape for name in targets}
                units = {
                    name: self.pattern.unit_scores(torch.empty(shape, device="meta")).numel()
                    for name, shape in rows.items()
                }
                bounds = caps
            try:
                within_reach(units, self.goal, bounds)
            except SparsityError as error:
                raise ModifierError(error.problems, "max_layer_sparsity") from None
        return targets

    def caps(self, run: Run) -> float | Mapping[str, float]:
        return run.plan.get("caps", 1.0)

    def _caps(self, run: Run, targets: Sequence[str]) -> float | dict[str, float]:
        """The bounds by name; the lower of two for one layer."""
        if not isinstance(self.max_layer_sparsity, dict):
            return self.max_layer_sparsity
        found: dict[str, float] = {}
        for bound, params in self.max_layer_sparsity.items():
            for item in params:
                names = match(run.module, item, field="max_layer_sparsity", strict=self.params_strict)
                if names and not set(names) & set(targets):
                    raise ModifierError(
                        f"'{item}' is not pruned by this modifier; add it to params, or remove its bound",
                        "max_layer_sparsity",
                    )
                for name in names:
                    found[name] = min(bound, found.get(name, 1.0))
        return found


class ConstantPruningModifier(PruningModifier):
    """Mask the zeros that the weights have at the start."""

    only_holds: ClassVar[bool] = True
    spares_embeddings: ClassVar[bool] = False
    params: ParamNames = Field(default=...)

    @property
    def released_epoch(self) -> float | None:
        return None if self.end_epoch == -1 else self.end_epoch

    def outlook(self, run: Run) -> dict[str, Outlook]:
        zeros = {name: run.weights.zeros(name)[0] for name in run.targets}
        return {name: self._outlook(count, "held") for name, count in zeros.items() if count}

    def start(self, run: Run) -> None:
        masks: dict[str, Tensor] = {}
        for name in run.targets:
            keep = run.weights.parameter(name).detach() != 0
            if not count(~keep):
                run.log.skip(name, "dense: it has no zeros")
            else:
                masks[name] = keep
        self.hold(run, masks, zeros_only=True)
        if not any(run.masks.get(name) is not None for name in run.targets):
            logger.warning("%s has no effect: its weights have no zeros; load the sparse weights first", self.name)

    def end(self, run: Run) -> None:
        self.release(run)


def pattern_zeros(pattern: Pattern, shape: Sequence[int], sparsity: float) -> int:
    """How many weights `(out, in, …)` a pattern zeroes at a sparsity, to the last one.

    >>> from gossamer.sparse import Filter
    >>> pattern_zeros(NM(2, 4), (8, 16, 3, 3), 0.5), pattern_zeros(Filter(), (10, 7), 0.25)
    (576, 14)
    """
    size = math.prod(shape)
    if isinstance(pattern, NM):
        return size // pattern.m * (pattern.m - pattern.n) if pattern.reached(sparsity) else zero_count(size, sparsity)
    units = pattern.unit_scores(torch.empty(tuple(shape), device="meta")).numel()
    return zero_count(units, sparsity) * size // max(units, 1)
