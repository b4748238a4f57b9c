"""A copy of a run, its model and its optimizer at one moment, to roll back to.

One is taken when a recipe is attached, and one when a state is loaded into a run and a modifier may fail to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.engine.optimizer import group_options, restore_group_options
from gossamer.model.parameters import named_state

if TYPE_CHECKING:
    from gossamer.engine.binding import Status
    from gossamer.engine.run import TrainingRun


@dataclass
class _Saved:
    """A tensor with its values and its version, the number of writes in place."""

    tensor: Tensor
    values: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Saved:
        return cls(tensor, tensor.detach().clone(), tensor._version)  # pyright: ignore[reportPrivateUsage]

    @property
    def untouched(self) -> bool:
        """Whether nothing has written the tensor; moving it to another device does not count."""
        return self.tensor._version == self.version  # pyright: ignore[reportPrivateUsage]

    @property
    def cut(self) -> bool:
        return self.tensor.shape != self.values.shape

    def mark_untouched(self) -> None:
        """Count writes from now on only."""
        self.version = self.tensor._version  # pyright: ignore[reportPrivateUsage]

    def restore(self) -> None:
        if self.cut:
            self.tensor.grad = None
            self.tensor.data = self.values.to(self.tensor.device)
        else:
            self.tensor.copy_(self.values)


class Snapshot:
    """The values of all tensors, and the state of the run; of the optimizer's state if `with_moments`, or later."""

    def __init__(self, run: TrainingRun, *, with_moments: bool = False) -> None:
        self._run = run
        teacher = None if run.distillation is None else run.distillation.teacher
        self._teacher = None if teacher is None else (teacher, teacher.module, teacher.released)
        layers = [layer for bound in run.modifiers for layer in bound.modifier.replaced_layers(bound).values()]
        modules = [run.module, *layers, *([teacher.module] if teacher is not None and teacher.own else [])]
        tensors = {id(tensor): tensor for module in modules for _, tensor in shaped_tensors(module)}
        self._trained = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors.values()]
        gradients = [tensor.grad for tensor in tensors.values() if tensor.grad is not None]
        self._saved = [_Saved.of(tensor) for tensor in (*tensors.values(), *gradients)]
        self._moments_kept = False
        self._moments: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """The optimizer's dictionary for each parameter, and a copy of it."""
        if with_moments:
            self.keep_moments()
        self._group_options = group_options(run.optimizer)
        self._modifiers: list[tuple[Status, dict[str, Any], dict[str, Any], dict[str, str]]]
        self._modifiers = [
            (bound.status, bound.state, dict(bound.scratch), dict(bound.skipped)) for bound in run.modifiers
        ]
        self._restore_masks = run.masks.snapshot()
        self._counts = (run.step, run.skipped_steps, run.before_first_step)
        self._progress, self._scheduler_reset = copy(run.progress), copy(run.scheduler_reset)
        self._before_attach = run.before_attach
        self._untouched = (
            [] if run.before_attach is None else [one for one in run.before_attach._saved if one.untouched]
        )

    def keep_moments(self) -> None:
        """Copy the optimizer's state too, which only moving or removing channels changes."""
        if not self._moments_kept:
            self._moments_kept = True
            states: Mapping[Any, dict[str, Any]] = {} if self._run.optimizer is None else self._run.optimizer.state
            self._moments = {id(key): (held, deepcopy(held)) for key, held in states.items()}

    def keep_changed(self) -> None:
        """Drop what has not changed; `roll_back_untouched` restores what nothing else writes from now on."""
        if not self._moments_kept:  # removing channels replaces data, which is not a write in place
            self._saved = [one for one in self._saved if not one.untouched]
        for one in self._saved:
            one.mark_untouched()

    def uncut(self) -> dict[str, Tensor]:
        """By name: the tensors of the model that `roll_back_untouched` will restore to another shape."""
        values = {id(one.tensor): one.values for one in self._saved if one.cut and one.untouched}
        return {name: values[id(tensor)] for name, tensor in named_state(self._run.module) if id(tensor) in values}

    def roll_back_untouched(self) -> None:
        """Restore the tensors that nothing has written since `keep_changed`."""
        self._restore_tensors([one for one in self._saved if one.untouched])

    def roll_back(self) -> None:
        """Restore model, optimizer and run, after active modifiers undo what they changed besides tensors."""
        run = self._run
        run.undo_modifiers()
        self._restore_tensors(self._saved)
        for tensor, trained, gradient in self._trained:
            tensor.requires_grad_(trained)
            tensor.grad = gradient
        if self._teacher is not None:
            teacher, teacher.module, teacher.released = self._teacher
        restore_group_options(run.optimizer, self._group_options)
        for bound, held in zip(run.modifiers, self._modifiers, strict=True):
            bound.status, bound.state, bound.scratch, bound.skipped = held
        self._restore_masks()
        run.step, run.skipped_steps, run.before_first_step = self._counts
        vars(run.progress).update(vars(self._progress))  # others refer to this object
        if run.scheduler_reset is not None:
            vars(run.scheduler_reset).update(vars(self._scheduler_reset))
        if run.rates is not None:
            run.rates.record()
        for bound in run.modifiers:
            if bound.status == "active":
                bound.modifier.restore(bound)
        run.before_attach = self._before_attach
        for one in self._untouched:
            one.mark_untouched()

    def _restore_tensors(self, tensors: list[_Saved]) -> None:
        cut = any(one.cut for one in tensors)
        with torch.no_grad():
            for one in tensors:
                one.restore()
        if cut:
            from gossamer.model.thin.cuts import resize

            resize(self._run.module, {name: tuple(tensor.shape) for name, tensor in shaped_tensors(self._run.module)})
        states: Mapping[Any, dict[str, Any]] = {} if self._run.optimizer is None else self._run.optimizer.state
        for key, held in states.items():
            kept = self._moments.get(id(key))
            if kept is not None and held is kept[0]:  # not when a state was loaded into the optimizer
                held.clear()
                held.update(kept[1])


def shaped_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that have a shape; lazy ones have none before the first forward pass."""
    return [(name, tensor) for name, tensor in named_state(module) if not is_lazy(tensor)]
