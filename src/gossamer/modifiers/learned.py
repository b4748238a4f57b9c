"""Sparsity that training itself finds: learned thresholds (STR) and learned probabilities (ProbMask).

Layers compute with a function of the weight; the weight itself stays dense
until the end, and then becomes what the layers computed with. What is learned
gets its gradient from the weight's own, so that loss scales, accumulation,
`zero_grad` and several processes need no care here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from gossamer.modifiers.base import Epoch, ParamNames, Run, register, to_step
from gossamer.modifiers.pruning import PruningModifier, Sparsity
from gossamer.sparse import fraction, interpolate
from gossamer.sparse.reparameterization import (
    hard_masks,
    logistic_noise,
    probability_gradient,
    project,
    relaxed_mask,
    soft_threshold,
    threshold_gradient,
)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

THRESHOLDS, MOMENTA = "thresholds", "momenta"
PROBABILITIES, ADAM = "probabilities", "adam"
"""Under which keys the state holds what is learned, and what its optimizer remembers."""


class LearnedPruningModifier(PruningModifier):
    """What both share: layers that compute with something else than the weight, from start to end."""

    params: ParamNames = Field(default=...)

    learned: ClassVar[str]
    """The key of the state under which each weight has what is learned."""

    @model_validator(mode="after")
    def _single_weights(self) -> Self:
        if self.mask_type != "unstructured":
            raise ValueError(f"mask_type: {self.name} is defined for 'unstructured' only, found {self.mask_type!r}")
        return self

    def value(self, run: Run, name: str) -> Callable[[Tensor, bool], Tensor]:
        """What layers compute with, given the weight and whether they train."""
        raise NotImplementedError

    def settle(self, run: Run) -> None:
        """Leave in the weights what layers computed with, and hold their zeros."""
        raise NotImplementedError

    def names(self, run: Run) -> list[str]:
        """The targets that have something learned; a layer that is taken out at the moment has none."""
        return [name for name in run.targets if name in run.state.get(self.learned, {})]

    def restore(self, run: Run) -> None:
        for name in self.names(run):
            run.substitute(name, self.value(run, name))

    def undo(self, run: Run) -> None:
        for name in run.state.get(self.learned, {}):
            run.withdraw(name)

    def finish(self, run: Run) -> None:
        self.settle(run)
        self.undo(run)

    def end(self, run: Run) -> None:
        self.finish(run)
        super().end(run)


@register
class STRPruningModifier(LearnedPruningModifier):
    """Soft thresholds that are learned, one for each layer (Kusupati et al. 2020).

    Layers compute with sign(W) · ReLU(|W| − σ(s)). Weight decay pulls s up from far below zero and the loss holds
    against it, so that each layer finds its own sparsity. There is no target: more `st_decay`, a higher `s_init` or
    longer training give more zeros. A weight that gets no gradient keeps its threshold.
    """

    learned: ClassVar[str] = THRESHOLDS

    s_init: float = Field(default=-5.0, allow_inf_nan=False)
    """The first s; a weight up to σ(s) is zero, 0.0067 for −5."""
    st_decay: NotNegative = 5e-4
    """Weight decay on s."""
    st_lr: NotNegative | None = None
    """The learning rate of s; None: that of the weight, at each step."""

    @property
    def updates_every(self) -> float | None:
        return 1.0

    def start(self, run: Run) -> None:
        run.state[THRESHOLDS] = {
            name: torch.full((), self.s_init, device=run.parameter(name).device) for name in run.targets
        }
        run.state[MOMENTA] = {}
        self.restore(run)

    def update(self, run: Run) -> None:
        """Tell how sparse the model has become; nothing else does while no mask is held."""
        run.log("sparsity", effective_sparsity(run))

    def value(self, run: Run, name: str) -> Callable[[Tensor, bool], Tensor]:
        def thresholded(weight: Tensor, training: bool) -> Tensor:
            # A copy of the model, such as an average, computes on in this way when the run is over.
            s = run.state.get(THRESHOLDS, {}).get(name)
            return weight if s is None else soft_threshold(weight, s)

        return thresholded

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        """One step on each s, with the arithmetic of `torch.optim.SGD`."""
        thresholds: dict[str, Tensor] = run.state[THRESHOLDS]
        momenta: dict[str, Tensor] = run.state[MOMENTA]
        groups = _groups(run)
        for name in self.names(run):
            gradient, weight = run.gradient(name), run.parameter(name)
            group = groups.get(weight)
            if gradient is None or (group is None and self.st_lr is None):
                continue
            s = thresholds[name] = thresholds[name].to(weight.device)
            remembered = [momenta[name].to(s.device) if name in momenta else None]
            sgd(
                [s],
                [threshold_gradient(weight, gradient, s)],
                remembered,
                weight_decay=self.st_decay,
                momentum=_momentum(group or {}),
                lr=float((group or {})["lr"]) if self.st_lr is None else self.st_lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            if remembered[0] is not None:
                momenta[name] = remembered[0]

    def settle(self, run: Run) -> None:
        run.log("sparsity", effective_sparsity(run))
        for name in self.names(run):
            effective = soft_threshold(run.parameter(name).detach(), run.state[THRESHOLDS][name])
            run.write(name, effective)
            run.set_mask(name, effective != 0)
        run.state.pop(MOMENTA, None)


def effective_sparsity(run: Run) -> float:
    """The share of zeros in what the layers of an `STRPruningModifier` compute with."""
    thresholds: Mapping[str, Tensor] = run.state.get(THRESHOLDS, {})
    zeros = total = 0
    for name in run.targets:
        if name in thresholds:
            weight = run.parameter(name).detach()
            zeros += weight.numel() - int(soft_threshold(weight, thresholds[name]).count_nonzero())
            total += weight.numel()
    return zeros / max(total, 1)


def _groups(run: Run) -> dict[Tensor, dict[str, Any]]:
    """The optimizer's group of each parameter."""
    groups = run.optimizer.param_groups if run.optimizer is not None else []
    return {parameter: group for group in groups for parameter in group["params"]}


def _momentum(group: Mapping[str, Any]) -> float:
    """The momentum of a group, or what stands for it in the relatives of Adam; 0 when there is neither."""
    return float(group.get("momentum", group.get("betas", (0.0,))[0]))


@register
class ProbMaskPruningModifier(LearnedPruningModifier):
    """A probability to be kept for each weight, learned under one budget for all layers (Zhou et al. 2021).

    Training computes with W · σ((logit p + logistic noise) / τ); after every step p is projected so that Σp is within
    (1 − sparsity) · N. Evaluation, and the end, keep exactly that many of the largest p.
    """

    epoch_fields: ClassVar[tuple[str, ...]] = ("start_epoch", "end_epoch", "finetune_epoch")
    learned: ClassVar[str] = PROBABILITIES

    start_epoch: Epoch = Field(default=...)
    end_epoch: Epoch = Field(default=...)
    init_sparsity: Sparsity = 0.0
    final_sparsity: Sparsity
    finetune_epoch: Epoch | None = None
    """When the sparsity is final, between start and end."""
    score_lr: Positive = 6e-3
    """The learning rate of Adam on p."""
    tau_end: Positive = 0.03
    """The temperature τ at the end, linear from 1 at the start."""
    seed: int = 0
    """Of the noise."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end_epoch == -1:
            raise ValueError("end_epoch: expected the epoch at which the mask becomes final, found -1")
        if self.finetune_epoch is not None and not self.start_epoch <= self.finetune_epoch <= self.end_epoch:
            raise ValueError(
                f"finetune_epoch: expected an epoch from start_epoch ({self.start_epoch:g}) to end_epoch "
                f"({self.end_epoch:g}), found {self.finetune_epoch:g}"
            )
        return self

    @property
    def updates_every(self) -> float | None:
        return -1.0

    @property
    def ramp_end(self) -> float:
        """The epoch at which the sparsity is final."""
        start = max(self.start_epoch, 0.0)
        return start + RAMP * (self.end_epoch - start) if self.finetune_epoch is None else self.finetune_epoch

    def sparsity_at(self, epoch: float) -> float | None:
        if epoch < self.start_epoch or (epoch >= self.end_epoch and not self.leave_enabled):
            return None
        start = max(self.start_epoch, 0.0)
        span = self.ramp_end - start
        return interpolate(self.init_sparsity, self.final_sparsity, 1.0 if span <= 0 else (epoch - start) / span)

    def start(self, run: Run) -> None:
        largest = max(float(run.parameter(name).detach().abs().max()) for name in run.targets) or 1.0
        run.state[PROBABILITIES] = {
            name: 1 - TIE_BREAK * (1 - run.parameter(name).detach().abs().float() / largest) for name in run.targets
        }
        probabilities: dict[str, Tensor] = run.state[PROBABILITIES]
        run.state[ADAM] = {
            name: [torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())] for name, p in probabilities.items()
        }
        self.update(run)
        super().restore(run)

    def restore(self, run: Run) -> None:
        self._relax(run)
        super().restore(run)

    def update(self, run: Run) -> None:
        probabilities: dict[str, Tensor] = run.state[PROBABILITIES]
        count = sum(p.numel() for p in probabilities.values())
        project(probabilities, (1 - self._sparsity(run)) * count)
        self._relax(run)

    def value(self, run: Run, name: str) -> Callable[[Tensor, bool], Tensor]:
        def masked(weight: Tensor, training: bool) -> Tensor:
            if PROBABILITIES not in run.state:
                keep = run.mask(name)  # a copy of the model, such as an average, after the end
                return weight if keep is None else _zeroed(weight, keep)
            if training:
                return weight * run.scratch["relaxed"][name].to(weight)
            return _zeroed(weight, self._kept(run)[name])

        return masked

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        """One step of `torch.optim.Adam` on the probabilities."""
        relaxed: Mapping[str, Tensor] = run.scratch["relaxed"]
        gradients = {name: run.gradient(name) for name in self.names(run)}
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            weight = run.parameter(name)
            p = run.state[PROBABILITIES][name] = run.state[PROBABILITIES][name].to(weight.device)
            first, second, step = run.state[ADAM][name]
            adam(
                [p],
                [probability_gradient(weight, gradient, p, relaxed[name], self._tau(run))],
                [first],
                [second],
                [],
                [step],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self.score_lr,
                weight_decay=0.0,
                eps=1e-8,
                maximize=False,
            )

    def settle(self, run: Run) -> None:
        masks = hard_masks(run.state[PROBABILITIES], self._sparsity(run))
        for name in self.names(run):
            run.set_mask(name, masks[name])

    def end(self, run: Run) -> None:
        super().end(run)
        run.state.clear()

    def _sparsity(self, run: Run) -> float:
        ramp_end = to_step(self.ramp_end, run.steps_per_epoch)
        x = fraction(run.step, run.start_step, ramp_end)
        return interpolate(self.init_sparsity, self.final_sparsity, x)

    def _tau(self, run: Run) -> float:
        assert run.end_step is not None
        return interpolate(1.0, self.tau_end, fraction(run.step, run.start_step, run.end_step), "linear")

    def _relax(self, run: Run) -> None:
        """Draw the masks of this step: one for all its forward passes."""
        tau, probabilities = self._tau(run), run.state[PROBABILITIES]
        run.scratch["relaxed"] = {
            name: relaxed_mask(p, logistic_noise(p.shape, self.seed, run.step, index, p.device), tau)
            for index, (name, p) in enumerate(probabilities.items())
        }
        run.scratch.pop("kept", None)

    def _kept(self, run: Run) -> dict[str, Tensor]:
        """The mask without chance, found at the first evaluation after p has changed."""
        if "kept" not in run.scratch:
            run.scratch["kept"] = hard_masks(run.state[PROBABILITIES], self._sparsity(run))
        return run.scratch["kept"]


RAMP = 0.5
TIE_BREAK = 1e-3


def _zeroed(weight: Tensor, keep: Tensor) -> Tensor:
    return weight.masked_fill(keep.to(weight.device).logical_not(), 0)
