"""The training loop: iterations of batches, backward passes and optimizer steps, and what is due between them.

An iteration is one optimizer step, on `accumulate` batches. Knows the parts it
is given, and not where they come from; `building.py` makes them.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.errors import GossamerError
from gossamer.runner.data import Batch, Batches
from gossamer.runner.processes import Place, any_of
from gossamer.runner.rates import WarmUp
from gossamer.runner.sparsity import Sparsifier
from gossamer.runner.tasks import Task


@dataclass
class Progress:
    """What is told of the last iterations."""

    iteration: int
    epoch: float
    loss: float
    parts: dict[str, float]
    lr: float
    images_per_s: float


@dataclass
class Loop:
    """Everything that an iteration needs."""

    model: nn.Module
    task: Task
    batches: Batches
    optimizer: torch.optim.Optimizer
    lr_scheduler: WarmUp | None
    place: Place
    steps_per_epoch: int
    length: int
    accumulate: int = 1
    clip: float | None = None
    scaler: Any = None
    half: torch.dtype | None = None
    channels_last: bool = False
    sparsifier: Sparsifier | None = None
    average: Any = None
    """An exponential moving average of the model."""
    log_freq: int = 10
    iteration: int = 0
    """Iterations that are done."""
    skipped: list[str] = field(default_factory=list[str])
    """Images that could not be used, one sentence each, in order."""
    notes: list[str] = field(default_factory=list[str])
    """Images that are used though something is wrong with them."""

    def run(
        self,
        done: Callable[[], bool | None],
        report: Callable[[Progress], None],
        before_step: Callable[[float], None] | None = None,
    ) -> bool:
        """Train to the end. `done` is called after each iteration, and True ends the run early; returns whether.

        `before_step` is called with the learning rate of each optimizer step, after everything that sets it.
        """
        if before_step is None:
            return self._run(done, report)

        def call(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            before_step(self._lr())

        # A recipe may set the learning rate in a hook of its own, which was registered before this one.
        hook = self.optimizer.register_step_pre_hook(call)
        try:
            return self._run(done, report)
        finally:
            hook.remove()

    def _run(self, done: Callable[[], bool | None], report: Callable[[Progress], None]) -> bool:
        self.model.train()
        clock = _Clock()
        sums: dict[str, Tensor] = {}
        count = 0
        while self.iteration < self.length:
            epoch, within = divmod(self.iteration, self.steps_per_epoch)
            batches = self.batches.epoch(epoch, start=within * self.accumulate)
            for _ in range(within, min(self.steps_per_epoch, self.length - epoch * self.steps_per_epoch)):
                parts = self._step(batches, clock)
                count += 1
                for name, value in parts.items():
                    sums[name] = sums[name] + value if name in sums else value
                self.iteration += 1
                if self.iteration % self.log_freq == 0 or self.iteration == self.length:
                    report(self._progress({name: float(total) / count for name, total in sums.items()}, clock))
                    sums, count = {}, 0
                clock.stop()
                if done():
                    return True
                clock.start()
        return False

    def _step(self, batches: Iterator[Batch], clock: _Clock) -> dict[str, Tensor]:
        """One optimizer step; the mean losses of its batches."""
        if self.sparsifier is not None:
            self.sparsifier.begin(self.model, self.iteration)
        total: dict[str, Tensor] = {}
        for index in range(self.accumulate):
            batch = next(batches)
            self.skipped += batch.skipped
            self.notes += batch.notes
            clock.images += len(batch) * self.place.world
            batch = batch.to(self.place.device, channels_last=self.channels_last)
            with self._unsynchronized(last=index == self.accumulate - 1):
                with self._autocast():
                    losses = self.task.losses(self.model, batch)
                    loss = torch.stack([value.float().sum() for value in losses.values()]).sum() / self.accumulate
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            for name, value in losses.items():
                part = value.detach().float() / self.accumulate
                total[name] = total[name] + part if name in total else part
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return total

    def _progress(self, parts: dict[str, float], clock: _Clock) -> Progress:
        loss = sum(parts.values())
        if not math.isfinite(loss):
            worst = next(name for name, value in parts.items() if not math.isfinite(value))
            raise GossamerError(
                f"the loss '{worst}' is {parts[worst]} at iteration {self.iteration}: lower "
                "trainer.optimizer.kwargs.lr, warm up longer, or set trainer.clip_grad_norm; "
                "checkpoints from before are intact"
            )
        epoch = self.iteration / self.steps_per_epoch
        return Progress(self.iteration, epoch, loss, parts, self._lr(), clock.rate())

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self.place.device.type, self.half)

    def _unsynchronized(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged with the last batch of a step only."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not last else nullcontext()


class _Clock:
    """Images per second of training alone, since it was last asked."""

    def __init__(self) -> None:
        self.images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def rate(self) -> float:
        self.stop()
        self.start()
        rate = self.images / self._seconds if self._seconds else 0.0
        self.images, self._seconds = 0, 0.0
        return rate


class Stop:
    """Whether somebody asked the run to end: by Ctrl-C, or by the signal that a cluster sends."""

    def __init__(self, place: Place) -> None:
        self.asked = False
        self._place = place

    def agreed(self, iteration: int) -> bool:
        """Whether all processes end at this iteration, as they do when one is asked to.

        A GPU would wait for the answer, so there they compare notes once in ten iterations.
        """
        return (self._place.device.type != "cuda" or iteration % 10 == 0) and any_of(self.asked, self._place)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """What a signal does."""
        if self.asked and self._place.world == 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopped_by_signals(place: Place) -> Generator[Stop]:
    """The first signal asks the run to save and end; a second Ctrl-C ends it at once."""
    stop = Stop(place)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.ask) for number in wanted]
    try:
        yield stop
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)
