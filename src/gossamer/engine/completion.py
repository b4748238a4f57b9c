"""Warnings about a run that does not complete its recipe, or whose recipe holds fewer zeros than the model has."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gossamer.engine.masks import ZeroMasks
from gossamer.engine.planned_sparsity import final_sparsities, kept_sparsities
from gossamer.engine.timing import Timing
from gossamer.errors import MAX_SUGGESTED
from gossamer.model import get_parameter, has_parameter
from gossamer.modifiers.base import Modifier
from gossamer.sparse import Channel, Filter
from gossamer.sparse.sharding import count, counts, local

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
class RunProgress:
    """The schedule of a run and how far it came, without a reference to the run or the model.

    So a dropped manager can be reported without keeping anything alive.
    """

    parts: list[tuple[Modifier, Timing]]
    steps_per_epoch: float
    step: int = 0
    furthest: int = 0
    """The largest step reached, even if the state of an earlier one was loaded afterwards."""
    stepped: bool = False
    """Whether the optimizer has stepped, or a GradScaler has skipped a step, since the recipe was attached."""
    saved_step: int | None = None
    """The step of the last `state_dict()`."""
    restored: bool = False
    """Whether a state was loaded."""
    reported: bool = False
    """Whether the run has ended with `finalize`, or was reported."""
    pruned: PrunedWeights | None = None
    """What to count zeros in when the manager is dropped; None if that is not reported."""

    def end(self) -> None:
        """Report nothing from now on, and release the masks."""
        self.reported, self.pruned = True, None

    def move(self, step: int) -> None:
        self.step, self.furthest = step, max(self.furthest, step)

    @property
    def untrained(self) -> bool:
        """Whether nothing was trained with the masks: a new run whose optimizer has not stepped."""
        return not (self.stepped or self.restored)

    def report(self, sparsity: str = "", regrown: bool = False) -> str | None:
        """What was not carried out and how to fix it; None for a complete run, and if a state was loaded only.

        `regrown`: whether masked weights are not zero, so that an optimizer has trained them that was not given.
        """
        end, per_epoch = max((timing.last for _, timing in self.parts), default=0), self.steps_per_epoch
        unfinished = self._unfinished(end)
        if not regrown and (not unfinished or (self.restored and not self.stepped)):
            return None
        figures = f"{self.step} of {end} steps (epoch {self.step / per_epoch:.4g} of {end / per_epoch:.4g}){sparsity}"
        if not self.stepped:
            left = "; the weights are left as they are" if self.untrained else ""
            return (
                f"the recipe was not carried out: the optimizer passed to modify() never stepped: {figures}. Create "
                f"the optimizer before modify(), and step the one that modify() was given{left}"
            )
        return (
            f"the recipe was not carried out to its end: {figures}; not finished: {', '.join(unfinished)}. "
            f"Train for {end / per_epoch:.4g} epochs, shorten the recipe, or pass another "
            f"steps_per_epoch if an epoch does not have {per_epoch:g} optimizer steps"
        )

    def _unfinished(self, end: int) -> list[str]:
        """The names of modifiers that are not complete."""
        late = [part for part in self.parts if part[1].last > self.step]
        if self.furthest >= end * (1 - TOLERANCE):
            late = [part for part in late if _changes_the_model_after(self.step, *part)]
        return list(dict.fromkeys(modifier.name for modifier, _ in late))


def _changes_the_model_after(step: int, modifier: Modifier, timing: Timing) -> bool:
    """Whether running the modifier to its end would still change the model."""
    if timing.start > step:
        return modifier.family not in _TRAINING_ONLY
    final = modifier.sparsity_at(modifier.last_epoch)
    if final is None:
        return False
    epoch = step / timing.steps_per_epoch
    if timing.every is not None and timing.every != -1:
        epoch = timing.start_epoch + timing.updates_until(step) * timing.every  # masks are those of the last update
    return (modifier.sparsity_at(epoch) or 0.0) < final - REACHED


@dataclass(frozen=True)
class PrunedWeights:
    """The weights that a recipe prunes, without a reference that keeps the model alive."""

    module: weakref.ref[nn.Module]
    masks: ZeroMasks
    targets: dict[str, float]
    """By parameter: the final sparsity; empty under masks of filters or channels, which are not shares of weights."""

    @classmethod
    def of(cls, run: TrainingRun) -> PrunedWeights:
        structured = any(isinstance(bound.modifier.pattern, Filter | Channel) for bound in run.modifiers)
        return cls(weakref.ref(run.module), run.masks, {} if structured else final_sparsities(run.modifiers))

    def regrown(self) -> bool:
        """Whether masked weights are not zero."""
        module = self.module()
        return module is not None and self.masks.regrown(module)

    def reached(self) -> str:
        """`, sparsity 40.0% of 80.0%`; empty without a target or a model."""
        module = self.module()
        if module is None:
            return ""
        names = [name for name in self.targets if has_parameter(module, name)]
        # Of a distributed model, this rank's part: the garbage collector does not run on all ranks at once.
        weights = {name: local(get_parameter(module, name).detach()) for name in names}
        total = sum(weight.numel() for weight in weights.values())
        if not total:
            return ""
        target = sum(self.targets[name] * weight.numel() for name, weight in weights.items()) / total
        kept = sum(int(weight.count_nonzero()) for weight in weights.values())
        return f", sparsity {1 - kept / total:.1%} of {target:.1%}"


def report_lost_sparsity(run: TrainingRun) -> str | None:
    """For a complete run: the parameters that a loaded state left without masks; None without any."""
    if not (run.progress.restored and run.progress.stepped):
        return None
    lost: list[str] = []
    for names, target in kept_sparsities(run.modifiers):
        if all(has_parameter(run.module, name) for name in names):
            weights = [get_parameter(run.module, name).detach() for name in names]
            size = max(sum(weight.numel() for weight in weights), 1)
            sparsity = 1 - sum(counts(weights)) / size
            if sparsity < target - max(TOLERANCE, len(names) / size):  # each layer rounds to whole weights
                lost.append(f"'{names[0]}'{' and others' if names[1:] else ''} {sparsity:.1%} of {target:.1%}")
    if not lost:
        return None
    more = f" and {len(lost) - MAX_SUGGESTED} more" if len(lost) > MAX_SUGGESTED else ""
    return (
        f"the recipe was carried out, but weights are less sparse than its targets: sparsity of "
        f"{', '.join(lost[:MAX_SUGGESTED])}{more}. A state was loaded that did not hold their masks: "
        "load the state of this model and recipe"
    )


def report_if_dropped(manager: object, run: TrainingRun) -> None:
    """Report a run that did not finish when its manager is dropped, when the run is, or when the interpreter exits.

    A manager without a reference, as in `optimizer = Manager(recipe).modify(…)`, is dropped before the first step; its
    run exists as long as the optimizer.
    """
    run.progress.pruned = PrunedWeights.of(run)
    _open[run] = run.progress
    for owner in (manager, run):
        weakref.finalize(owner, _report_dropped, run.progress).atexit = False


_open: weakref.WeakKeyDictionary[object, RunProgress] = weakref.WeakKeyDictionary()
"""By run: what is checked at exit."""


_LONGEST_WAIT = 1.0
"""Seconds that the garbage collector waits for a report: its thread may need a lock that the waiting one holds."""


def _report_dropped(progress: RunProgress) -> None:
    """Report from the garbage collector, which may run inside any operation of torch.

    While a model is traced, even counting zeros would be traced, or computed without data. Such modes are those of a
    thread, so the report is made in a new one.
    """
    if progress.reported:
        return
    thread = threading.Thread(target=_warn_of_dropped, args=(progress,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits, and `_report_at_exit` has reported
        return
    thread.join(_LONGEST_WAIT)


def _warn_of_dropped(progress: RunProgress) -> None:
    pruned = progress.pruned
    if progress.reported or pruned is None:
        return
    regrown = not progress.stepped and pruned.regrown()
    if not progress.stepped and not regrown:
        return
    if (report := progress.report(pruned.reached(), regrown)) is not None:
        saved = progress.stepped and progress.saved_step == progress.step
        resume = "; to resume the run, load the state that was saved at this step" if saved else ""
        logger.warning("a manager was dropped without finalize(): %s%s", report, resume)
        progress.end()


@atexit.register
def _report_at_exit() -> None:
    if getattr(sys, "last_value", None) is None:  # the exception that ends a program is reported already
        for progress in list(_open.values()):
            _warn_of_dropped(progress)  # no thread can be started at exit


_REGROWN = 0.05
"""The share of unmasked zeros up to which there is no warning: dense models have a few after training."""


def warn_of_regrowth(run: TrainingRun) -> None:
    """Warn when the recipe holds fewer zeros than the model has, so that training regrows the others.

    That happens when sparse weights are loaded without the manager's state. Called before the first optimizer step.
    """
    masks, weights = run.masks, dict[str, Tensor]()
    for name in final_sparsities(run.modifiers):
        # What layers compute with a learned threshold or probability stays zero without a mask.
        if has_parameter(run.module, name) and not any(bound.weights.substitutes(name) for bound in run.modifiers):
            weight = get_parameter(run.module, name).detach()
            if count(weight):  # a parameter that is all zeros was initialized to zero and is not sparse
                weights[name] = weight
    total = sum(weight.numel() for weight in weights.values())
    zeros = total - sum(counts(list(weights.values())))
    held = {name: masks.zero_mask(name).to(weight.device) for name, weight in weights.items() if name in masks.names()}
    kept = sum(counts(list(held.values())))
    masked = sum(counts([(weights[name] == 0).logical_and_(mask) for name, mask in held.items()]))
    if zeros - masked > _REGROWN * total:
        logger.warning(
            "%.1f%% of the weights that the recipe prunes are zero already, and at epoch %.4g it holds %.1f%%: "
            "training will regrow the others. To resume a run, call manager.load_state_dict(state), best before "
            "modify(), or pass epoch=; to keep the zeros, use init_sparsity: __FROM_PARAM__, or a "
            "ConstantPruningModifier in front",
            100 * zeros / total,
            run.step / run.steps_per_epoch,
            100 * kept / total,
        )
