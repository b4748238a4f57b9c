"""Learned sparsity: learned thresholds (STR) and learned mask probabilities (ProbMask).

Layers compute with a function of the weight. The weight itself stays dense until the end and is then replaced by that
function's value. The gradient of what is learned is derived from the weight's gradient, so that loss scaling,
accumulation, `zero_grad` and DDP need no special handling.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim.adam import adam

from gossamer.errors import FieldError, ModifierError, Problem
from gossamer.model import get_module
from gossamer.model.recalibration import BATCHES, recalibrate, running_means
from gossamer.modifiers.base import EndEpoch, ParamNames, Run, sgd_options, sgd_step, to_step
from gossamer.modifiers.pruning import PruningModifier
from gossamer.modifiers.state import LARGEST_SETTING, Item, Spec, StateField, by_target, same_names, tensors, vector
from gossamer.quantities import (
    Epoch,
    LearningRate,
    Logit,
    PartialSparsity,
    PositiveRate,
    Seed,
    Sparsity,
    Temperature,
    WeightDecay,
)
from gossamer.sparse import (
    fraction,
    hard_masks,
    initial_probabilities,
    interpolate,
    logistic_noise_like,
    probability_gradient,
    project,
    pulled,
    relaxed_mask,
    soft_threshold,
    threshold_gradient,
    threshold_pull,
    zero_count,
)
from gossamer.sparse.sharding import count, counts, full_like, local, sharded_dims

TRAVEL, SLOWEST, FASTEST = 5.0, 6e-3, 0.2
"""The default learning rate of probabilities is TRAVEL / steps, between SLOWEST and FASTEST."""
CONTROLLED = 5e-4
"""How far the sparsity under learned thresholds may be from its schedule; it is exact at the end epoch."""
MISSED = 0.01
"""A sparsity further below its target than this is reported."""
STATISTICS = ("first_statistics", "statistics")
"""The state keys of batch norm's running means at the start of ProbMask and after its last step."""
ADAM = ("probabilities", "first", "second")
"""The state keys of what Adam trains, and of its two moments."""

logger = logging.getLogger("gossamer")


class LearnedPruningModifier(PruningModifier):
    """The base class: layers compute with a function of the weight from start to end."""

    params: ParamNames = Field(default=...)

    any_pattern: ClassVar[bool] = False
    keeps_norms: ClassVar[bool] = False
    learns_sparsity: ClassVar[bool] = True
    learned: ClassVar[str]
    """The state key of the learned values, by weight."""

    def sparsity_of(self, run: Run, name: str, epoch: float) -> float | None:
        return None  # one budget for all layers

    @abstractmethod
    def value(self, run: Run, name: str) -> Callable[[Tensor, bool], Tensor]:
        """The function that layers compute with in place of the weight: (weight, training) -> value."""

    @abstractmethod
    def settle(self, run: Run) -> None:
        """Write the values that layers compute with to the weights, and mask the zeros."""

    def bind(self, run: Run) -> list[str]:
        targets = super().bind(run)
        trains = run.optimizer.instance is not None
        frozen = [name for name in targets if trains and not run.weights.parameter(name).requires_grad]
        for name in frozen:
            run.log.skip(name, "frozen: learned sparsity needs the gradient of the weight")
        if len(frozen) == len(targets):
            raise ModifierError("all matching parameters are frozen; unfreeze them, or name others", "params")
        return [name for name in targets if name not in frozen]

    def names(self, run: Run) -> list[str]:
        """The targets with learned values, without layers that are replaced at the moment."""
        return [name for name in run.targets if name in run.state.get(self.learned, {})]

    def restore(self, run: Run) -> None:
        for name in self.names(run):
            run.weights.substitute(name, self.value(run, name))

    def undo(self, run: Run) -> None:
        for name in run.state.get(self.learned, {}):
            run.weights.withdraw(name)

    def finish(self, run: Run) -> None:
        self.settle(run)
        self.undo(run)

    def discard(self, run: Run) -> None:
        self.undo(run)

    def end(self, run: Run) -> None:
        self.finish(run)
        super().end(run)


class STRPruningModifier(LearnedPruningModifier):
    """Learned soft thresholds, one per weight tensor (Kusupati et al. 2020).

    Layers compute with sign(W) · ReLU(|W| − σ(s)). Weight decay pulls s up from far below zero against the gradient of
    the loss, so that each layer reaches its own sparsity: more `st_decay`, a higher `s_init`, a higher `st_lr` or
    longer training give more zeros. With `final_sparsity` the decay is controlled: after every step all s are pulled
    with one common strength, so that the sparsity of all layers together follows a cubic schedule to its target, and
    the gradients determine how layers share it.
    """

    learned: ClassVar[str] = "thresholds"

    final_sparsity: PartialSparsity | None = None
    """The sparsity of all layers together, reached halfway between start and end; None: not controlled."""
    s_init: Logit = -5.0
    """The initial s; weights within σ(s) of zero are zero, 0.0067 for −5."""
    st_decay: WeightDecay = 5e-4
    """Weight decay on s; no effect with `final_sparsity`."""
    st_lr: LearningRate | None = None
    """The learning rate of s; None: the weight's current learning rate."""

    @model_validator(mode="after")
    def _ends_at_its_target(self) -> Self:
        if self.final_sparsity is not None and self.end_epoch == -1:
            raise FieldError(
                "expected the epoch at which final_sparsity is written to the weights, found -1", "end_epoch"
            )
        return self

    def warnings(self) -> list[Problem]:
        idle = self.final_sparsity is not None and "st_decay" in self.model_fields_set
        ignored = Problem("has no effect with final_sparsity, which controls the decay", ("st_decay",))
        return super().warnings() + [ignored] * idle

    @property
    def goal(self) -> float | None:
        return self.final_sparsity

    @property
    def updates_every(self) -> float | None:
        return 1.0

    @property
    def ramp_end(self) -> float:
        """The epoch at which the final sparsity is reached."""
        return (max(self.start_epoch, 0.0) + self.end_epoch) / 2

    def scheduled(self, epoch: float) -> float | None:
        """The minimum at an epoch; gradients may raise it, up to the final sparsity."""
        if self.final_sparsity is None:
            return None
        start = max(self.start_epoch, 0.0)
        x = 1.0 if epoch >= self.ramp_end else (epoch - start) / (self.ramp_end - start)
        return interpolate(0.0, self.final_sparsity, x)

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        one = tensors(_scalar, -LARGEST_SETTING, LARGEST_SETTING, required=True)
        return {**super().state_fields(run), "thresholds": one, "momenta": one}

    def start(self, run: Run) -> None:
        devices = {name: run.weights.parameter(name).device for name in run.targets}
        run.state["thresholds"] = {name: torch.full((), self.s_init, device=at) for name, at in devices.items()}
        run.state["momenta"] = {}
        self.restore(run)

    def update(self, run: Run) -> None:
        """Log the sparsity, which no mask shows before the end."""
        run.log.value("effective_sparsity", effective_sparsity(run))

    def value(self, run: Run, name: str) -> Callable[[Tensor, bool], Tensor]:
        def thresholded(weight: Tensor, training: bool) -> Tensor:
            # A copy of the model, such as an average, keeps this function after the end.
            s = run.state.get("thresholds", {}).get(name)
            return weight if s is None else soft_threshold(weight, s)

        return thresholded

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        """One step on each s, with the arithmetic of `torch.optim.SGD`."""
        thresholds: dict[str, Tensor] = run.state["thresholds"]
        momenta: dict[str, Tensor] = run.state["momenta"]
        options = sgd_options(run)
        decay = self.st_decay if self.final_sparsity is None else 0.0
        for name in self.names(run):
            gradient, weight = run.weights.gradient(name), run.weights.parameter(name)
            rate, momentum = options.get(weight, (None, 0.0))
            rate = rate if self.st_lr is None else self.st_lr
            if gradient is not None and rate is not None:
                s = thresholds[name] = thresholds[name].to(weight.device)
                sgd_step(s, threshold_gradient(weight, gradient, s), momenta, name, (rate, momentum), decay)

    def after_step(self, run: Run) -> None:
        if self.final_sparsity is not None:
            self._control(run, run.clock.step + 1, CONTROLLED)

    @torch.no_grad()
    def _control(self, run: Run, step: int, tolerance: float) -> None:
        """Pull all s to where the sparsity of all layers together is the scheduled one."""
        assert self.final_sparsity is not None
        thresholds: dict[str, Tensor] = run.state["thresholds"]
        weights = {name: run.weights.parameter(name).detach() for name in self.names(run)}
        found = {name: thresholds[name].to(weight.device) for name, weight in weights.items()}
        x = fraction(step, run.clock.start, to_step(self.ramp_end, run.clock.steps_per_epoch))
        strength = controlled_pull(weights, found, self.final_sparsity, x, tolerance)
        thresholds.update(pulled(weights, found, strength))

    def settle(self, run: Run) -> None:
        ended = run.clock.step >= (run.clock.end or 0)
        if self.final_sparsity is not None:
            # Exact at the end only: a run that stops earlier keeps the thresholds that it was evaluated with.
            self._control(run, run.clock.step, tolerance=0.0 if ended else CONTROLLED)
        reached = effective_sparsity(run)
        run.log.value("effective_sparsity", reached)
        if self.final_sparsity is not None and ended and reached < self.final_sparsity - MISSED:
            logger.warning(
                "%s reached a sparsity of %.1f %%, below its target of %.1f %%: thresholds are below 1, so weights of "
                "1 or more are never zeroed, and each layer keeps its largest weights",
                self.name,
                100 * reached,
                100 * self.final_sparsity,
            )
        for name in self.names(run):
            effective = soft_threshold(run.weights.parameter(name).detach(), run.state["thresholds"][name])
            if not count(effective):
                field = "st_decay" if self.final_sparsity is None else "final_sparsity"
                logger.warning("%s zeroed all of '%s'; reduce %s or st_lr", self.name, name, field)
            run.weights.write(name, effective)
            run.masks.set(name, effective != 0)
        run.state.pop("momenta", None)


def controlled_pull(
    weights: Mapping[str, Tensor], thresholds: Mapping[str, Tensor], final: float, x: float, tolerance: float = 0.0
) -> float:
    """The common pull on all thresholds at progress `x` that gives at least the scheduled sparsity, at most `final`."""
    total = sum(weight.numel() for weight in weights.values())
    least, most = (zero_count(total, share) for share in (interpolate(0.0, final, x), final))
    return threshold_pull(weights, thresholds, least, most, int(tolerance * total))


def effective_sparsity(run: Run) -> float:
    """The share of zeros in what the layers of an `STRPruningModifier` compute with now."""
    thresholds: Mapping[str, Tensor] = run.state["thresholds"]
    weights = {name: run.weights.parameter(name).detach() for name in run.targets if name in thresholds}
    kept = sum(counts([soft_threshold(weight, thresholds[name]) for name, weight in weights.items()]))
    return 1 - kept / max(sum(weight.numel() for weight in weights.values()), 1)


class ProbMaskPruningModifier(LearnedPruningModifier):
    """A learned probability to keep each weight, under one budget for all layers (Zhou et al. 2021).

    Initially p is |W| / max|W| of the layer. Training computes with W · σ((logit p + logistic noise) / τ); after every
    step p is projected so that Σp ≤ (1 − sparsity) · N. Evaluation, and the end, keep exactly that many weights, those
    with the largest p.
    """

    epoch_fields: ClassVar[tuple[str, ...]] = ("start_epoch", "end_epoch", "finetune_epoch")
    learned: ClassVar[str] = "probabilities"
    recalibrates: ClassVar[bool] = True

    start_epoch: Epoch = Field(default=...)
    end_epoch: EndEpoch = Field(default=...)
    init_sparsity: Sparsity = 0.0
    final_sparsity: Sparsity
    finetune_epoch: Epoch | None = None
    """The epoch at which the final sparsity is reached, between start and end; None: halfway."""
    score_lr: PositiveRate | None = None
    """The learning rate of Adam on p; None: 5 over the number of steps, at least 0.006 and at most 0.2."""
    tau_end: Temperature = 0.03
    """The temperature τ at the end; it decreases linearly from 1."""
    seed: Seed = 0
    """The seed of the noise."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.finetune_epoch is not None and not self.start_epoch <= self.finetune_epoch <= self.end_epoch:
            between = f"an epoch from start_epoch ({self.start_epoch:g}) to end_epoch ({self.end_epoch:g})"
            raise FieldError(f"expected {between}, found {self.finetune_epoch:g}", "finetune_epoch")
        return self

    @property
    def goal(self) -> float | None:
        return self.final_sparsity

    @property
    def updates_every(self) -> float | None:
        return -1.0

    @property
    def ramp(self) -> tuple[float, float]:
        """The epochs between which the sparsity rises."""
        start = max(self.start_epoch, 0.0)
        return start, (start + self.end_epoch) / 2 if self.finetune_epoch is None else self.finetune_epoch

    def scheduled(self, epoch: float) -> float | None:
        start, final = self.ramp
        x = 1.0 if epoch >= final else (epoch - start) / (final - start)
        return interpolate(self.init_sparsity, self.final_sparsity, x)

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {
            **super().state_fields(run),
            "probabilities": tensors(_single, 0, 1, required=True),
            "first": tensors(_single, required=True),
            "second": tensors(_single, 0, required=True),
            "steps": by_target(lambda item, _: item.integer(), required=True),
            **{key: vector() for key in STATISTICS},
        }

    def check_state(self, item: Item, state: Mapping[str, Any]) -> None:
        same_names(item, state, *ADAM, "steps")

    def bind(self, run: Run) -> list[str]:
        targets = super().bind(run)
        for name in targets:
            if len(sharded_dims(run.weights.parameter(name))) > 1:
                raise ModifierError(
                    f"'{name}' is split along two dimensions of the mesh, which {self.name} does not support", "params"
                )
        return targets

    def start(self, run: Run) -> None:
        first = initial_probabilities({name: run.weights.parameter(name).detach() for name in run.targets})
        run.state["probabilities"] = first
        for moment in ADAM[1:]:
            run.state[moment] = {name: torch.zeros_like(p) for name, p in first.items()}
        run.state["steps"] = dict.fromkeys(first, 0)
        self.update(run)
        super().restore(run)

    def restore(self, run: Run) -> None:
        self._draw(run)
        super().restore(run)

    def update(self, run: Run) -> None:
        probabilities: dict[str, Tensor] = run.state["probabilities"]
        project(probabilities, (1 - self._sparsity(run)) * sum(p.numel() for p in probabilities.values()))
        self._draw(run)
        note_statistics(run.module, run.state)

    def value(self, run: Run, name: str) -> Callable[[Tensor, bool], Tensor]:
        # torch.compile cannot trace the ranking of all weights within the graph of one layer.
        rank = cast(Callable[[Run], dict[str, Tensor]], torch.compiler.disable(self._rank))

        def masked(weight: Tensor, training: bool) -> Tensor:
            if "probabilities" not in run.state:  # a copy of the model, such as an average, after the end
                keep = run.masks.get(name)
                return weight if keep is None else _only(weight, keep)
            if training:
                return weight * full_like(run.scratch["drawn"][name], weight).to(weight)
            return _only(weight, (run.scratch["kept"] if "kept" in run.scratch else rank(run))[name])

        return masked

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        """One step of `torch.optim.Adam` on the probabilities; `update` projects them when the clock has moved."""
        found = {name: gradient for name in self.names(run) if (gradient := run.weights.gradient(name)) is not None}
        for name, gradient in found.items():
            weight = run.weights.parameter(name)
            for part in ADAM:
                run.state[part][name] = run.state[part][name].to(weight.device)
            p, drawn = run.state["probabilities"][name], run.scratch["drawn"][name].to(weight.device)
            found[name] = probability_gradient(weight, gradient, p, drawn, self._temperature(run))
        probabilities, first, second = ([run.state[part][name] for name in found] for part in ADAM)
        steps: dict[str, int] = run.state["steps"]
        adam(
            [local(p) for p in probabilities],
            [local(gradient) for gradient in found.values()],
            [local(moment) for moment in first],
            [local(moment) for moment in second],
            [],
            [torch.tensor(float(steps[name])) for name in found],
            lr=self._rate(run),
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )
        steps.update({name: steps[name] + 1 for name in found})

    def settle(self, run: Run) -> None:
        masks = hard_masks(run.state["probabilities"], self._sparsity(run))
        for name in self.names(run):
            run.masks.set(name, masks[name])

    def finish(self, run: Run) -> None:
        """Recalibrate batch norm, whose statistics are those of sampled masks, if there is calibration data."""
        if run.data.calibration is not None:
            self._recalibrate(run, islice(run.data.calibration, BATCHES))
        super().finish(run)

    def end(self, run: Run) -> None:
        note_statistics(run.module, run.state)
        super().end(run)
        noted = {key: run.state[key] for key in STATISTICS if key in run.state}
        run.state.clear()
        run.state.update(noted)

    def finalized(self, run: Run) -> None:
        warn_of_stale_statistics(run.module, run.state, self.name, "pass calibration_data to modify(), or ")

    def _recalibrate(self, run: Run, batches: Iterable[Any]) -> None:
        # Before `settle`: in evaluation mode layers already compute with the final mask.
        for first in batches:
            names = recalibrate(run.module, chain([first], batches))
            layers = [get_module(run.module, name) for name in names]
            run.distributed.average(
                [getattr(layer, key) for layer in layers for key in ("running_mean", "running_var")]
            )
            return
        logger.warning("%s: calibration_data is empty, batch norm is not recalibrated", self.name)

    def _sparsity(self, run: Run) -> float:
        x = fraction(run.clock.step, run.clock.start, to_step(self.ramp[1], run.clock.steps_per_epoch))
        return interpolate(self.init_sparsity, self.final_sparsity, x)

    def _temperature(self, run: Run) -> float:
        assert run.clock.end is not None
        return interpolate(1.0, self.tau_end, fraction(run.clock.step, run.clock.start, run.clock.end), "linear")

    def _rate(self, run: Run) -> float:
        assert run.clock.end is not None
        needed = TRAVEL / max(run.clock.end - run.clock.start, 1)  # the paper's 6e-3 is too small for a short run
        return min(max(needed, SLOWEST), FASTEST) if self.score_lr is None else self.score_lr

    def _draw(self, run: Run) -> None:
        """Sample the masks of this step, which all its forward passes share."""
        probabilities: dict[str, Tensor] = run.state["probabilities"]
        tau = self._temperature(run)
        run.scratch["drawn"] = {
            name: relaxed_mask(p, logistic_noise_like(p, self.seed, run.clock.step, index), tau)
            for index, (name, p) in enumerate(probabilities.items())
        }
        run.scratch.pop("kept", None)

    def _rank(self, run: Run) -> dict[str, Tensor]:
        """The deterministic masks, computed when an evaluation first needs them."""
        run.scratch["kept"] = hard_masks(run.state["probabilities"], self._sparsity(run))
        return run.scratch["kept"]


def note_statistics(module: nn.Module, noted: dict[str, Any]) -> None:
    """Record batch norm's running means after a step with sampled masks, or before the first step."""
    if (found := running_means(module)) is not None:
        noted.setdefault(STATISTICS[0], found)
        noted[STATISTICS[1]] = found


def warn_of_stale_statistics(module: nn.Module, noted: Mapping[str, Any], caller: str, advice: str = "") -> None:
    """Warn if batch norm's statistics come from sampled masks: training changed them, and nothing has since."""
    now = running_means(module)
    if now is None or any(key not in noted for key in STATISTICS):
        return
    first, last = (noted[key].to(now.device) for key in STATISTICS)
    if torch.equal(now, last) and not torch.equal(now, first):
        logger.warning(
            "%s: the statistics of batch norm come from sampled masks, not from the final mask; "
            "%scall gossamer.recalibrate(model, batches)",
            caller,
            advice,
        )


def _scalar(weight: Spec) -> Spec:
    return Spec((), torch.get_default_dtype(), weight.device)


def _single(weight: Spec) -> Spec:
    """Probabilities are float32, whatever the weight is."""
    return Spec(weight.shape, torch.float32, weight.device)


def _only(weight: Tensor, keep: Tensor) -> Tensor:
    return weight.masked_fill(full_like(keep, weight).to(weight.device).logical_not(), 0)
