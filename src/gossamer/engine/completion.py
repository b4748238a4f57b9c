"""Warnings about a run: one that does not complete its recipe, and one that regrows the zeros of a sparse model.

`Completion` holds the schedule, the counters and the masks, but neither the model nor the optimizer, so that a dropped
manager can be reported without keeping them alive.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gossamer.engine.binding import BoundModifier
from gossamer.engine.clock import Timing
from gossamer.engine.masks import Masks
from gossamer.engine.targets import final_shares, kept_shares
from gossamer.errors import MAX_SUGGESTED
from gossamer.model import get_parameter, has_parameter
from gossamer.modifiers import Modifier
from gossamer.sparse import Channel, Filter

if TYPE_CHECKING:
    from gossamer.engine.run import TrainingRun

logger = logging.getLogger("gossamer")

TOLERANCE = 0.05
"""The share of a recipe's steps that may be missing when they would no longer change the sparsity of the model.

Also how far below its target a sparsity may be when all modifiers have ended.
"""
REACHED = 0.005
"""How far below its target a sparsity counts as reached before the last update."""
_TRAINING_ONLY = ("epoch", "learning_rate", "distillation")
"""Families that affect training only, not the weights or structure of the model."""


@dataclass
class Progress:
    """Counters that a run keeps for its report."""

    step: int = 0
    furthest: int = 0
    """The largest step reached, even if the state of an earlier one was loaded afterwards."""
    stepped: bool = False
    """Whether the optimizer has stepped, or a GradScaler has skipped a step, since the recipe was attached."""
    saved_step: int | None = None
    """The step of the last `state_dict()`."""
    restored: bool = False
    """Whether a state was loaded."""

    def move(self, step: int) -> None:
        self.step, self.furthest = step, max(self.furthest, step)


@dataclass(frozen=True)
class _Part:
    """One modifier and its timing, without a reference to the run or the model."""

    modifier: Modifier
    timing: Timing

    @property
    def unit(self) -> str | None:
        """What its sparsity is a share of; None when it sets none."""
        if self._final is None:
            return None
        pattern = self.modifier.pattern
        return "filters" if isinstance(pattern, Filter) else "channels" if isinstance(pattern, Channel) else "weights"

    def changes_the_model_after(self, step: int) -> bool:
        """Whether running the modifier to its end would still change the model."""
        timing = self.timing
        if timing.start > step:
            return self.modifier.family not in _TRAINING_ONLY
        if self._final is None:
            return False
        epoch = step / timing.steps_per_epoch
        if timing.every is not None and timing.every != -1:
            epoch = timing.start_epoch + timing.updates_until(step) * timing.every  # masks are those of the last update
        return (self.modifier.sparsity_at(epoch) or 0.0) < self._final - REACHED

    @property
    def _final(self) -> float | None:
        return self.modifier.sparsity_at(self.modifier.last_epoch)


class Completion:
    """Compares the progress of a run with its recipe."""

    def __init__(
        self,
        modifiers: Sequence[BoundModifier],
        progress: Progress,
        module: nn.Module,
        masks: Masks,
        steps_per_epoch: float,
    ) -> None:
        self.progress = progress
        self._over = False
        self._steps_per_epoch = steps_per_epoch
        self._module = weakref.ref(module)
        self._masks = masks
        self._targets: Mapping[str, float] = final_shares(modifiers)
        self._sizes = {n: get_parameter(module, n).numel() for n in self._targets if has_parameter(module, n)}
        self._kept = [(names, share) for names, share in kept_shares(modifiers) if self._sizes.keys() >= set(names)]
        self._thins = any(own.modifier.removal_epochs for own in modifiers)
        self._parts = [_Part(own.modifier, own.timing) for own in modifiers if own.modifier.family != "logging"]

    @property
    def untrained(self) -> bool:
        """Whether nothing was trained with the masks: a new run whose optimizer has not stepped."""
        return not (self.progress.stepped or self.progress.restored)

    def close(self) -> None:
        """Report nothing from now on, and release the masks."""
        self._over, self._masks = True, Masks()

    def report(self, regrown: bool) -> str | None:
        """What was not carried out and how to fix it; None for a complete run."""
        if not self.progress.stepped:
            return self._never_stepped(regrown)
        unfinished = self._unfinished()
        if not unfinished:
            return self._below_target()
        names = ", ".join(dict.fromkeys(unfinished))
        return (
            f"the recipe was not carried out to its end: {self._figures()}; not finished: {names}. "
            f"Train for {self._end / self._steps_per_epoch:.4g} epochs, shorten the recipe, or pass another "
            f"steps_per_epoch if an epoch does not have {self._steps_per_epoch:g} optimizer steps"
        )

    def report_dropped(self) -> str | None:
        """The report for a run without `finalize`; one that was saved at its last step may be resumed."""
        if self._over or not (self.progress.stepped or self.regrown()):
            return None
        if (report := self.report(regrown=True)) is None:
            return None
        if self.progress.stepped and self.progress.saved_step == self.progress.step and self._unfinished():
            return (
                f"a run stopped and was saved before the end of its recipe: {self._figures()}. Load the saved state to "
                f"resume it. If training is over instead, correct steps_per_epoch={self._steps_per_epoch:g} or shorten "
                f"the recipe, and call finalize()"
            )
        return f"a manager was dropped without finalize(): {report}"

    def regrown(self) -> bool:
        """Whether masked weights are not zero although the optimizer never stepped, so that another one trains them."""
        module = None if self.progress.stepped else self._module()
        if module is None:
            return False
        for name in (name for name in self._masks.names() if has_parameter(module, name)):
            weight = get_parameter(module, name).detach()
            zeros = self._masks.zeros(name).to(weight.device)
            if zeros.shape == weight.shape and bool(weight.masked_select(zeros).count_nonzero()):
                return True
        return False

    def _never_stepped(self, regrown: bool) -> str | None:
        if not regrown and (self.progress.restored or not self._unfinished()):
            return None
        left = "; the weights are left as they are" if self.untrained else ""
        return (
            f"the recipe was not carried out: the optimizer passed to modify() never stepped: {self._figures()}. "
            f"Create the optimizer before modify(), and step the one that modify() was given{left}"
        )

    def _below_target(self) -> str | None:
        """Parameters that a loaded state left without masks, when all modifiers have ended; None without any."""
        if self._thins or not self.progress.restored:
            return None
        lost: list[str] = []
        for names, target in self._kept:
            zeros, size = [self._zeros(name) for name in names], sum(self._sizes[name] for name in names)
            if None in zeros:  # the layer is not in the model now
                continue
            share = sum(count or 0 for count in zeros) / max(size, 1)
            if share < target - max(TOLERANCE, len(names) / max(size, 1)):
                lost.append(f"'{names[0]}'{' and others' if names[1:] else ''} {share:.1%} of {target:.1%}")
        if not lost:
            return None
        more = f" and {len(lost) - MAX_SUGGESTED} more" if len(lost) > MAX_SUGGESTED else ""
        return (
            f"the recipe was carried out, but weights are less sparse than its targets: sparsity of "
            f"{', '.join(lost[:MAX_SUGGESTED])}{more}. A state was loaded that did not hold their masks: "
            "load the state of this model and recipe"
        )

    @property
    def _end(self) -> int:
        return max((part.timing.last for part in self._parts), default=0)

    def _unfinished(self) -> list[str]:
        """The names of modifiers that are not complete."""
        step = self.progress.step
        late = [part for part in self._parts if part.timing.last > step]
        if self.progress.furthest >= self._end * (1 - TOLERANCE):
            late = [part for part in late if part.changes_the_model_after(step)]
        return [part.modifier.name for part in late]

    def _figures(self) -> str:
        step, end = self.progress.step, self._end
        text = f"{step} of {end} steps (epoch {step / self._steps_per_epoch:.4g} of {end / self._steps_per_epoch:.4g})"
        reached, target = self._sparsity, self._target
        if reached is None:
            return text
        units = sorted({part.unit for part in self._parts if part.unit is not None})
        if units == ["weights"]:
            return f"{text}, sparsity {reached:.1%} of {target:.1%}"
        return f"{text}, sparsity {reached:.1%} of the weights (target: {target:.1%} of the {' and '.join(units)})"

    @property
    def _target(self) -> float:
        return sum(self._targets[n] * size for n, size in self._sizes.items()) / max(sum(self._sizes.values()), 1)

    @property
    def _sparsity(self) -> float | None:
        """Zeros over weights; None without targets, or when filters were removed."""
        if self._thins and self.progress.restored:
            return None  # weights that were removed before the state was saved cannot be counted
        zeros = [self._zeros(name) for name in self._sizes]
        if not zeros or None in zeros:
            return None
        return sum(count or 0 for count in zeros) / max(sum(self._sizes.values()), 1)

    def _zeros(self, name: str) -> int | None:
        module = self._module()
        if module is None:
            held = self._masks.zeros(name) if name in self._masks.names() else None
            return int(held.count_nonzero()) if held is not None and held.numel() == self._sizes[name] else None
        if not has_parameter(module, name) or (weight := get_parameter(module, name)).numel() != self._sizes[name]:
            return None
        return weight.numel() - int(weight.detach().count_nonzero())


def watch(manager: object, run: object, completion: Completion) -> None:
    """Report a run that did not finish when its manager is dropped, when the run is, or when the interpreter exits.

    A manager without a reference, as in `optimizer = Manager(recipe).modify(…)`, is dropped before the first step; its
    run exists as long as the optimizer.
    """
    _open[run] = completion
    for owner in (manager, run):
        weakref.finalize(owner, _report_dropped, completion).atexit = False


_LONGEST_WAIT = 1.0
"""Seconds that the garbage collector waits for a report: its thread may need a lock that the waiting one holds."""
_open: weakref.WeakKeyDictionary[object, Completion] = weakref.WeakKeyDictionary()
"""By run: what is checked at exit."""


def _report_dropped(completion: Completion) -> None:
    """Report from the garbage collector, which may run inside any operation of torch.

    While a model is traced, even counting zeros would be traced, or computed without data. Such modes are those of a
    thread, so the report is made in a new one.
    """
    thread = threading.Thread(target=_log, args=(completion,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits: no thread can be started
        return
    thread.join(_LONGEST_WAIT)


def _log(completion: Completion) -> None:
    report = completion.report_dropped()
    if report is not None:
        logger.warning("%s", report)
        completion.close()


@atexit.register
def _report_at_exit() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # the exception that ends the program is reported already
    for completion in list(_open.values()):
        _log(completion)  # no thread can be started at exit


_REGROWN = 0.05
"""The share of unmasked zeros up to which there is no warning: dense models have a few after training."""


def warn_of_regrowth(run: TrainingRun) -> None:
    """Warn when the recipe holds fewer zeros than the model has, so that training regrows the others.

    That happens when sparse weights are loaded without the manager's state. Called before the first optimizer step.
    """
    module, masks = run.module, run.masks
    names = [name for name in final_shares(run.modifiers) if has_parameter(module, name)]
    # What layers compute with a learned threshold or probability stays zero without a mask.
    names = [name for name in names if not any(own.weights.substitutes(name) for own in run.modifiers)]
    weights = {name: get_parameter(module, name).detach() for name in names}
    zeros = {name: weight.numel() - int(weight.count_nonzero()) for name, weight in weights.items()}
    # A parameter that is all zeros was initialized to zero and is not sparse.
    weights = {name: weight for name, weight in weights.items() if zeros[name] < weight.numel()}
    held = {name: masks.zeros(name) if name in masks.names() else None for name in weights}
    total = sum(weight.numel() for weight in weights.values())
    if sum(_free(weight, held[name]) for name, weight in weights.items()) <= _REGROWN * total:
        return
    kept = sum(int(mask.count_nonzero()) for mask in held.values() if mask is not None)
    logger.warning(
        "%.1f%% of the weights that the recipe prunes are zero already, and at epoch %.4g it holds %.1f%%: training "
        "will regrow the others. To resume a run, call manager.load_state_dict(state), best before modify(), or pass "
        "epoch=; to keep the zeros, use init_sparsity: __FROM_PARAM__, or a ConstantPruningModifier in front",
        100 * sum(zeros[name] for name in weights) / total,
        run.step / run.steps_per_epoch,
        100 * kept / total,
    )


def _free(weight: Tensor, held: Tensor | None) -> int:
    """Zeros that no mask holds."""
    zeros = weight == 0
    return int((zeros if held is None else zeros & ~held.to(weight.device)).count_nonzero())
