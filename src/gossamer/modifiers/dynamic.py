"""Dynamic sparse training, where pruned weights can grow back: AC/DC, RigL, Top-KAST and ADMM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gossamer.errors import FieldError, GossamerError, ModifierError, SparsityError
from gossamer.modifiers.base import EndEpoch, Outlook, ParamNames, Run
from gossamer.modifiers.pruning import RankedPruningModifier
from gossamer.modifiers.state import LARGEST_WEIGHT, Item, Spec, StateField, flag, masks, same_names, tensors
from gossamer.quantities import Epoch, Frequency, GradientCount, PositiveFactor, PositiveShare, Sparsity, WeightDecay
from gossamer.sparse import cosine, erdos_renyi, fraction, magnitude, smallest, uniform
from gossamer.sparse.sharding import count, is_sharded


class DynamicPruningModifier(RankedPruningModifier):
    """Masks that change between two epochs, every `update_frequency` epochs."""

    params: ParamNames = Field(default=...)
    start_epoch: Epoch = Field(default=...)
    end_epoch: EndEpoch = Field(default=...)
    update_frequency: Frequency = Field(default=...)

    periodic: ClassVar[bool] = True
    _sparsity_field: ClassVar[str]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.check_final(getattr(self, self._sparsity_field), self._sparsity_field)
        return self

    @property
    def goal(self) -> float | None:
        return float(getattr(self, self._sparsity_field))

    @property
    def ranks_by_weights(self) -> bool:
        return True

    def magnitude_masks(self, run: Run, sparsity: float, scores: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Masks of the largest weights, layer by layer or over all layers."""
        ranked = self.rank(run) if scores is None else scores
        return self.masks(run, ranked, sparsity if self.global_sparsity else dict.fromkeys(run.targets, sparsity))


class ACDCPruningModifier(DynamicPruningModifier):
    """Alternate dense and sparse phases of `update_frequency` epochs (Peste et al. 2021).

    Even phases are dense, odd ones sparse, and the last one is sparse.
    """

    _sparsity_field: ClassVar[str] = "compression_sparsity"

    compression_sparsity: Sparsity
    global_sparsity: bool = True
    momentum_buffer_reset: bool = True

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.update_frequency == -1:
            raise FieldError("expected the length of a phase in epochs, found -1", "update_frequency")
        return self

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {**super().state_fields(run), "sparse": flag()}

    def is_sparse(self, phase: int) -> bool:
        """Whether a phase, counted from 0, is a sparse one."""
        length = self.end_epoch - max(self.start_epoch, 0.0)
        phases = max(1, math.ceil(round(length / self.update_frequency, 9)))
        return phase % 2 == 1 or phase >= phases - 1

    def scheduled(self, epoch: float) -> float | None:
        phase = math.floor(round((epoch - max(self.start_epoch, 0.0)) / self.update_frequency, 9))
        return self.compression_sparsity if self.is_sparse(phase) else 0.0

    def start(self, run: Run) -> None:
        self.update(run)

    def update(self, run: Run) -> None:
        sparse = self.is_sparse(run.clock.updates_done)
        if sparse and not run.state.get("sparse", False):
            self.hold(run, self.magnitude_masks(run, self.compression_sparsity))
        elif not sparse and run.state.get("sparse", False):
            self.release(run)
            for name in run.targets if self.momentum_buffer_reset else ():
                run.optimizer.reset_moments(name)
        run.state["sparse"] = sparse

    def end(self, run: Run) -> None:
        self.update(run)
        super().end(run)


class RigLPruningModifier(DynamicPruningModifier):
    """Drop the smallest weights, grow where gradients are largest, at constant sparsity (Evci et al. 2020).

    The first mask keeps the largest weights, so that it is the same on every rank.
    """

    any_pattern: ClassVar[bool] = False
    keeps_norms: ClassVar[bool] = False
    _sparsity_field: ClassVar[str] = "final_sparsity"

    final_sparsity: Sparsity
    sparsity_strategy: Literal["erdos_renyi_kernel", "erdos_renyi", "uniform"] = "erdos_renyi_kernel"
    init_update_fraction: PositiveShare = 0.3
    num_grads: GradientCount = 1
    grad_sampler_kwargs: dict[str, object] = Field(default_factory=dict)
    momentum_buffer_reset: bool = True

    def scheduled(self, epoch: float) -> float | None:
        return self.final_sparsity

    def sparsity_of(self, run: Run, name: str, epoch: float) -> float | None:
        if self.sparsity_at(epoch) is None:
            return None
        if "sparsities" not in run.plan:
            run.plan["sparsities"] = self._sparsities(run)
        return run.plan["sparsities"].get(name)

    def outlook(self, run: Run) -> dict[str, Outlook]:
        return self._exact_outlook(run, self._sparsities(run))

    def start(self, run: Run) -> None:
        for name, keep in self.masks(run, self.rank(run), self._sparsities(run)).items():
            run.masks.set(name, keep)

    def _sparsities(self, run: Run) -> dict[str, float]:
        """The sparsity of each layer, which depends on its shape."""
        shapes = {name: tuple(run.weights.parameter(name).shape) for name in run.targets}
        if self.sparsity_strategy == "uniform":
            return uniform(shapes, self.final_sparsity)
        return erdos_renyi(shapes, self.final_sparsity, kernel=self.sparsity_strategy == "erdos_renyi_kernel")

    def before_step(self, run: Run) -> None:
        if run.clock.next_update == run.clock.step + 1:  # also before the end, which drops the gradients
            gradients = {name: run.weights.gradient(name) for name in run.targets}
            run.scratch["gradients"] = {n: g.detach().abs() for n, g in gradients.items() if g is not None}

    def end(self, run: Run) -> None:
        run.scratch.pop("gradients", None)
        super().end(run)

    def update(self, run: Run) -> None:
        assert run.clock.end is not None
        exchanged = cosine(self.init_update_fraction, 0.0, fraction(run.clock.step, run.clock.start, run.clock.end))
        gradients: dict[str, Tensor] = run.scratch.pop("gradients", {})
        for name, gradient in gradients.items():
            old = run.masks.get(name)
            if old is None:
                continue
            try:
                keep = self.exchange(run.weights.parameter(name).detach(), gradient, old, exchanged)
            except SparsityError as error:
                raise ModifierError(f"'{name}' cannot be pruned at step {run.clock.step}: {error}") from None
            run.masks.set(name, keep)
            if self.momentum_buffer_reset:
                run.optimizer.reset_moments(name, keep & ~old)

    @staticmethod
    def exchange(weight: Tensor, gradient: Tensor, keep: Tensor, share: float) -> Tensor:
        """The mask after `share` of the kept weights, the smallest, is replaced by those with the largest gradients."""
        kept = count(keep)
        moves = round(kept * share)
        if moves == 0:
            return keep
        infinity = torch.tensor(float("inf"), dtype=weight.dtype, device=weight.device)
        alive = torch.where(keep, weight.abs(), -infinity)
        stay = ~_smallest(alive, alive.numel() - kept + moves)
        candidates = torch.where(stay, -infinity, gradient.to(weight.dtype))
        grown = ~_smallest(candidates, candidates.numel() - moves)
        return stay | grown


class TopKASTPruningModifier(DynamicPruningModifier):
    """Run forward on the largest weights, train a larger set (Jayakumar et al. 2021).

    The weights in the larger set B but not in the forward set A are zero in the model and stored in `run.state`; they
    are restored for the optimizer's step only.
    """

    any_pattern: ClassVar[bool] = False
    _sparsity_field: ClassVar[str] = "forward_sparsity"

    end_epoch: Epoch = Field(default=...)
    forward_sparsity: Sparsity
    backward_sparsity: Sparsity
    active_weight_decay: WeightDecay = 1e-4

    @model_validator(mode="after")
    def _nested(self) -> Self:
        if self.backward_sparsity > self.forward_sparsity:
            raise FieldError(
                f"expected at most forward_sparsity ({self.forward_sparsity:g}), found {self.backward_sparsity:g}",
                "backward_sparsity",
            )
        return self

    def scheduled(self, epoch: float) -> float | None:
        return self.forward_sparsity

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        aside = tensors(least=-LARGEST_WEIGHT, most=LARGEST_WEIGHT, required=True)
        return {**super().state_fields(run), "aside": aside, "backward": masks()}

    def check_state(self, item: Item, state: Mapping[str, Any]) -> None:
        for name in state.get("backward", {}):
            if name not in state.get("aside", {}):
                raise GossamerError(f"{item.where}.aside: '{name}' is missing, but 'backward' has it")

    def start(self, run: Run) -> None:
        run.state["aside"] = {}
        self.update(run)

    def update(self, run: Run) -> None:
        aside: dict[str, Tensor] = run.state["aside"]
        whole = {
            n: run.weights.parameter(n).detach() + aside[n] if n in aside else run.weights.parameter(n)
            for n in run.targets
        }
        scores = {name: magnitude(weight) for name, weight in whole.items()}
        forward = self.magnitude_masks(run, self.forward_sparsity, scores)
        run.state["backward"] = self.magnitude_masks(run, self.backward_sparsity, scores)
        for name, keep in forward.items():
            values = whole[name].detach()
            aside[name] = values.masked_fill(keep, 0)
            run.weights.write(name, values.masked_fill(~keep, 0))
            run.masks.set(name, keep)

    def before_step(self, run: Run) -> None:
        """Restore the weights outside A, and train only B; A decays by λ, B∖A by λ / density of A."""
        run.scratch["whole"] = []
        backward: dict[str, Tensor] = run.state.get("backward", {})
        for name in [name for name in run.targets if name in backward]:
            parameter, forward, inside = run.weights.parameter(name), run.masks.get(name), backward[name]
            if parameter.grad is None or forward is None:
                continue
            aside: Tensor = run.state["aside"][name]
            with torch.no_grad():
                decay = torch.where(forward, parameter, aside / max(1 - self.forward_sparsity, 1e-9))
                rate = self.active_weight_decay * run.optimizer.loss_scale
                parameter.grad.add_(decay.to(parameter.grad.dtype), alpha=rate)
                parameter.grad.masked_fill_(~inside, 0)
                parameter.add_(aside)
            run.scratch["whole"].append(name)

    def after_step(self, run: Run) -> None:
        """Store the weights outside A again; those outside B keep their value."""
        for name in run.scratch.pop("whole", []):
            values, inside, forward = (
                run.weights.parameter(name).detach(),
                run.state["backward"][name],
                run.masks.get(name),
            )
            assert forward is not None
            run.state["aside"][name] = torch.where(inside, values, run.state["aside"][name]).masked_fill_(forward, 0)

    def end(self, run: Run) -> None:
        self.update(run)
        run.state.clear()
        super().end(run)


class ADMMPruningModifier(DynamicPruningModifier):
    """Pull the weights towards a pattern during training, then prune to it (Zhang et al. 2018).

    Every step adds ρ (W − Z + U) to the gradient, that of ρ/2 · ‖W − Z + U‖². Every update sets Z to the nearest
    tensor to W + U that has the pattern at `final_sparsity`, and then adds W − Z to U.
    """

    _sparsity_field: ClassVar[str] = "final_sparsity"

    final_sparsity: Sparsity
    rho: PositiveFactor = 1e-2

    def scheduled(self, epoch: float) -> float | None:
        return self.final_sparsity if epoch >= self.end_epoch else 0.0

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        sums = tensors(Spec.wide, -LARGEST_WEIGHT, LARGEST_WEIGHT, required=True)
        return {**super().state_fields(run), "sums": sums, "kept": masks(required=True)}

    def check_state(self, item: Item, state: Mapping[str, Any]) -> None:
        same_names(item, state, "sums", "kept")

    def start(self, run: Run) -> None:
        run.state.update(sums={}, kept={})
        self.update(run)
        sums: dict[str, Tensor] = run.state["sums"]
        for name, keep in run.state["kept"].items():
            sums[name] = sums[name].masked_fill(~keep, 0)  # U is initially zero

    def update(self, run: Run) -> None:
        """Z ← projection of W + U, U ← U + W − Z; one tensor holds both, Z inside the mask and U outside."""
        sums, kept = run.state["sums"], run.state["kept"]
        for name in run.targets:
            weight = _wide(run.weights.parameter(name))
            sums[name] = weight + sums[name].masked_fill(kept[name], 0).to(weight) if name in sums else weight.clone()
        scores = {name: magnitude(sums[name]) for name in run.targets}
        kept.update(self.magnitude_masks(run, self.final_sparsity, scores))

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        sums, kept = run.state["sums"], run.state["kept"]
        for name in run.targets:
            parameter = run.weights.parameter(name)
            if parameter.grad is not None and name in sums:
                near = torch.where(kept[name], sums[name], -sums[name]).to(parameter.device)  # Z − U
                pull = (_wide(parameter) - near).to(parameter.grad.dtype)
                parameter.grad.add_(pull, alpha=self.rho * run.optimizer.loss_scale)

    def end(self, run: Run) -> None:
        run.state.clear()
        self.hold(run, self.magnitude_masks(run, self.final_sparsity))
        super().end(run)


def _smallest(scores: Tensor, count: int) -> Tensor:
    """`smallest` for any shape."""
    return smallest(scores, count) if is_sharded(scores) else smallest(scores.reshape(-1), count).reshape(scores.shape)


def _wide(parameter: Tensor) -> Tensor:
    """The weight in at least float32, because U sums small differences."""
    weight = parameter.detach()
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
