"""Pruning by the alternating direction method of multipliers: weights are drawn to a pattern before they are cut.

Parameters, pattern and update times are those of the other methods between
two epochs. The loss is the user's own: what ADMM adds enters by the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor

from gossamer.errors import FieldError
from gossamer.modifiers.base import Run, register
from gossamer.modifiers.dynamic import DynamicPruningModifier
from gossamer.modifiers.pruning import Sparsity
from gossamer.modifiers.state import LARGEST_WEIGHT, Item, Spec, StateField, masks, same_names, tensors
from gossamer.quantities import PositiveFactor
from gossamer.sparse import magnitude


@register
class ADMMPruningModifier(DynamicPruningModifier):
    """Draw the weights towards a pattern while they train, then cut them to it (Zhang et al. 2018).

    Every step adds ρ (W − Z + U) to the gradient, that of ρ/2 · ‖W − Z + U‖². Every update sets Z to the nearest
    tensor to W + U that has the pattern at `final_sparsity`, and then adds W − Z to U.
    """

    _sparsity_field: ClassVar[str] = "final_sparsity"

    final_sparsity: Sparsity
    rho: PositiveFactor = 1e-2

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.end_epoch == -1:
            raise FieldError("expected the epoch at which the weights are cut, found -1", "end_epoch")
        return self

    def sparsity_at(self, epoch: float) -> float | None:
        if epoch < self.start_epoch or (epoch >= self.end_epoch and not self.leave_enabled):
            return None
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
            sums[name] = sums[name].masked_fill(~keep, 0)  # U begins at zero

    def update(self, run: Run) -> None:
        """Z ← projection of W + U, U ← U + W − Z; both are kept in one tensor, for where one is not zero the other is.

        What was W + U is Z inside the mask and U outside.
        """
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


def _wide(parameter: Tensor) -> Tensor:
    """The weight in at least float32: small differences add up in U."""
    weight = parameter.detach()
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
