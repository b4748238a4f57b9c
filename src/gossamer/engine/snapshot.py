"""A record of a run, its model and its optimizer at one moment, to roll back to.

One is taken when a recipe is attached, and one when a state is loaded into a run and a modifier may fail to start.
Attaching copies a tensor only when something is about to write it, so that a large model is not held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.engine.optimizer import group_options, restore_group_options
from gossamer.model.parameters import named_state
from gossamer.sparse.sharding import local

if TYPE_CHECKING:
    from gossamer.engine.binding import Status
    from gossamer.engine.run import TrainingRun


@dataclass
class _Saved:
    """Values of a tensor before it was written, and its version, the number of writes in place."""

    tensor: Tensor
    values: Tensor
    """All of them, or those at `positions` of this rank's part."""
    positions: Tensor | None = None
    moments: tuple[dict[str, Any], dict[str, Any]] | None = None
    """Of a parameter that was cut: the optimizer's dictionary for it, and what that held."""
    versions: tuple[int, int] = (-1, -1)
    """Of the tensor, and of this rank's part of it."""

    def __post_init__(self) -> None:
        self.mark_untouched()

    @property
    def untouched(self) -> bool:
        """Whether nothing has written the tensor; moving it to another device does not count."""
        return self._versions() == self.versions

    @property
    def cut(self) -> bool:
        return self.positions is None and self.tensor.shape != self.values.shape

    def mark_untouched(self) -> None:
        """Count writes from now on only."""
        self.versions = self._versions()

    def _versions(self) -> tuple[int, int]:
        return self.tensor._version, local(self.tensor)._version  # pyright: ignore[reportPrivateUsage]

    def restore(self) -> None:
        if self.cut:
            self.tensor.grad = None
            self.tensor.data = self.values.to(self.tensor.device)
        elif self.positions is None:
            self.tensor.copy_(self.values)
        else:
            local(self.tensor.detach())[self.positions.to(self.tensor.device)] = self.values.to(self.tensor.device)
        if self.moments is not None:
            held, before = self.moments
            held.clear()
            held.update(before)


class Snapshot:
    """The state of a run, and the values of tensors from before they are written.

    Whoever writes a tensor calls `record`, `record_zeroing` or `record_cut`; with `whole`, all tensors of the model and
    of the optimizer are copied at once.
    """

    def __init__(self, run: TrainingRun, *, whole: bool = False) -> None:
        self._run = run
        self._recording = True
        self._saved: list[_Saved] = []
        """In the order of the writes."""
        teacher = None if run.distillation is None else run.distillation.teacher
        self._teacher = None if teacher is None else (teacher, teacher.module, teacher.released)
        layers = [layer for bound in run.modifiers for layer in bound.modifier.replaced_layers(bound).values()]
        modules = [run.module, *layers, *([teacher.module] if teacher is not None and teacher.own else [])]
        tensors = {id(tensor): tensor for module in modules for _, tensor in shaped_tensors(module)}
        # A tensor that was made in inference mode has no version, and nothing can write it outside that mode.
        tensors = [tensor for tensor in tensors.values() if not tensor.is_inference()]
        self._trained = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors]
        self._moments: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """With `whole`: the optimizer's dictionary for each parameter, and a copy of it."""
        if whole:
            self.record([*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)])
            self._moments = {id(key): (held, deepcopy(held)) for key, held in self._states.items()}
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

    @property
    def _states(self) -> Mapping[Any, dict[str, Any]]:
        return {} if self._run.optimizer is None else self._run.optimizer.state

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors that are about to be written."""
        if self._recording:
            copied = {id(one.tensor) for one in self._saved if one.positions is None}
            self._saved += [_Saved(one, one.detach().clone()) for one in tensors if id(one) not in copied]

    def record_zeroing(self, tensor: Tensor, zeros: Tensor) -> None:
        """Copy the values of a tensor that are about to be zeroed, unless they are zero already."""
        where = local(zeros)
        values = local(tensor.detach())[where]
        if bool(values.any()):
            self._saved.append(_Saved(tensor, values, where.clone()))

    def record_cut(self, tensor: Tensor, before: Tensor) -> None:
        """Keep the values of a tensor that has new, smaller data; the optimizer's state is cut next."""
        if self._recording:
            held = self._states.get(tensor)
            self._saved.append(_Saved(tensor, before, moments=None if held is None else (held, dict(held))))

    def stop_recording(self) -> None:
        """Ignore later writes; `roll_back_untouched` restores what they leave."""
        self._recording = False
        for one in self._saved:
            one.mark_untouched()

    def uncut(self) -> dict[str, Tensor]:
        """By name: the tensors of the model that `roll_back_untouched` will restore to another shape."""
        values = {id(one.tensor): one.values for one in reversed(self._saved) if one.cut and one.untouched}
        return {name: values[id(tensor)] for name, tensor in named_state(self._run.module) if id(tensor) in values}

    def roll_back_untouched(self) -> None:
        """Restore the tensors that nothing has written since `stop_recording`."""
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
            for one in reversed(tensors):
                one.restore()
        if cut:
            from gossamer.model.thin.cuts import resize

            resize(self._run.module, {name: tuple(tensor.shape) for name, tensor in shaped_tensors(self._run.module)})
        for key, held in self._states.items():
            kept = self._moments.get(id(key))
            if kept is not None and held is kept[0]:  # not when a state was loaded into the optimizer
                held.clear()
                held.update(kept[1])


def shaped_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that have a shape; lazy ones have none before the first forward pass."""
    return [(name, tensor) for name, tensor in named_state(module) if not is_lazy(tensor)]
