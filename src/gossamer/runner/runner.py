"""A run: trains what was built, tests it, saves it and writes the model that comes out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.export.weights.reading import THINNED
from gossamer.model import unwrap
from gossamer.model.counting import count_by_kind
from gossamer.model.recalibration import BATCHES, recalibrate
from gossamer.runner.building import Built
from gossamer.runner.data import Batches
from gossamer.runner.exporting import Export, describe_model, write_model
from gossamer.runner.loop import Loop, Progress, Stop, stopped_by_signals
from gossamer.runner.networks import as_example
from gossamer.runner.pictures import draw_tests
from gossamer.runner.processes import done_by_first, gathered, send_buffers
from gossamer.runner.random_states import random_states, restore_random_states
from gossamer.runner.records import Records
from gossamer.runner.reporting.notes import Weights, weights_of
from gossamer.runner.schedule_log import ScheduleLog
from gossamer.runner.testing import tell_left_out, tested

if TYPE_CHECKING:
    from gossamer.export.saving import Written

logger = logging.getLogger("gossamer")


class Runner(Built):
    """Trains a float model. `build()` comes first, then `train()` or `evaluate()`."""

    start_weights: Weights | None = None
    """How the weights spread before the first iteration; None in a resumed run."""

    def train(self) -> bool:
        """Train to the end; whether it got there, or was asked to stop before."""
        if self.iteration >= self.length:
            more = "; make it longer by --set trainer.max_epoch=…" if self.iteration == self.length else ""
            self.display.message(f"The run is complete: {self.iteration} of {self.length} iterations{more}.")
            self.metrics = dict(self.start.checkpoint.metrics) if self.start.checkpoint is not None else {}
            return True
        loop = self.loop()
        with ExitStack() as stack:
            if self.place.first:
                self.records = stack.enter_context(
                    Records(self.folder, resumed=self.iteration, tensorboard=self.config.runtime.tensorboard)
                )
            stop = stack.enter_context(stopped_by_signals(self.place))
            stack.enter_context(self.display.training(self.length, self.steps_per_epoch, self.iteration))
            for hook in self.hooks:
                hook.train_begins(self)
            stopped = loop.run(lambda: self._iteration_done(loop, stop), self._tell, self._schedule_log())
            tell_left_out(loop.skipped, loop.notes, "dataset.train", self.told)
            if not stopped and self.sparsifier is not None and not self.counts_for_best():
                logger.warning("%s; was the training long enough?", self.sparsifier.shortfall(self.model))
            if stopped:
                logger.info("asked to stop at iteration %d", self.iteration)
                if self.saved_at != self.iteration:
                    self.save()
            for hook in self.hooks:
                hook.train_ends(self)
        return not stopped

    def load_ckpt(self) -> None:
        """The report compares the weights at the end with those that the run begins with."""
        super().load_ckpt()
        if self.training and self.start.checkpoint is None and self.place.first and self.config.runtime.report.enable:
            self.start_weights = weights_of(self.model)

    def loop(self) -> Loop:
        trainer = self.config.trainer
        return Loop(
            self.model,
            self.task,
            self.train_batches,
            self.optimizer,
            self.lr_scheduler,
            self.place,
            self.steps_per_epoch,
            self.length,
            accumulate=trainer.accumulate,
            clip=trainer.clip_grad_norm,
            scaler=self.scaler,
            half=self.half,
            channels_last=self.channels_last,
            sparsifier=self.sparsifier,
            average=self.average,
            log_freq=trainer.log_freq,
            iteration=self.iteration,
        )

    def evaluate(self) -> dict[str, float]:
        """Test the model, or its average where one is kept."""
        if self.test_data is None:
            raise GossamerError("dataset.test: is missing; name the data to evaluate on")
        send_buffers(self.outcome, self.place)
        was_training = self.model.training
        try:
            return tested(
                self.outcome,
                self.task,
                self.test_batches,
                self.place.device,
                self.display,
                self.told,
                self.channels_last,
            )
        finally:
            self.model.train(was_training)

    @property
    def outcome(self) -> nn.Module:
        """The model that the run is for: the average where one is kept."""
        return unwrap(self.model if self.average is None else self.average.module)

    @property
    def thinned(self) -> bool:
        """Whether the model has smaller layers than the network that its code builds."""
        return self.start_shapes is not None or (self.sparsifier is not None and self.sparsifier.thinned(self.outcome))

    def recalibrate(self) -> None:
        """Estimate batch norm's statistics for weights that training did not see: those of an average, or ProbMask's.

        In place, on training images in a fixed order: gradients do not depend on the statistics, checkpoints hold them,
        and random states are put back, so that a resumed run stays the same to the bit.
        """
        if self.average is None and (self.sparsifier is None or not self.sparsifier.recalibrates):
            return
        assert self.train_data is not None
        assert self.config.dataset.train is not None
        random = random_states()
        reader = self._batches(self.train_data, self.config.dataset.train, train=True)
        try:
            recalibrate(self.outcome, islice(self._images(reader), BATCHES))
            if self.average is not None and self.sparsifier is not None and self.sparsifier.recalibrates:
                recalibrate(unwrap(self.model), islice(self._images(reader), BATCHES))
        finally:
            reader.close()
            restore_random_states(random)

    def _images(self, reader: Batches) -> Iterator[tuple[Any]]:
        for batch in reader.epoch(0):
            if len(batch):  # else none of its images can be read
                yield (batch.to(self.place.device, channels_last=self.channels_last).images,)

    def test(self) -> None:
        """Evaluate, and note what came out."""
        self.metrics, self.tested_at = self.evaluate(), self.iteration
        if self.lr_scheduler is not None:
            self.lr_scheduler.tested(self.metrics[self.task.metric])
        if self.place.first:
            if self.records is not None:
                self.records.test(self.iteration, self.iteration / self.steps_per_epoch, self.metrics)
            self.display.tested(self.metrics, self.iteration)
            told = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
            logger.info("test at iteration %d: %s", self.iteration, told)
        self.draw(f"iter_{self.iteration:08d}.png")
        for hook in self.hooks:
            hook.tested(self, self.metrics)

    def save(self) -> None:
        """Write a checkpoint; all processes call this."""
        self._check_weights()
        state = self.state()
        is_best = self.is_best()
        self.best = self.metrics[self.task.metric] if is_best else self.best
        state["best"] = self.best
        epoch = self.iteration / self.steps_per_epoch
        metrics = self.metrics if self.tested_at == self.iteration else {}
        path = done_by_first(
            lambda: self.checkpoints.save(
                state,
                iteration=self.iteration,
                epoch=epoch,
                metrics=metrics,
                best=is_best,
                weights=count_by_kind(self.outcome),
            ),
            self.place,
        )
        self.saved_at = self.iteration
        if path is not None:
            for hook in self.hooks:
                hook.saved(self, path)

    def is_best(self) -> bool:
        """Whether a test at this iteration found the best model so far."""
        if self.tested_at != self.iteration or not self.counts_for_best():
            return False
        return self.best is None or self.metrics[self.task.metric] > self.best

    def counts_for_best(self) -> bool:
        """Whether the model is what the run is for: a model that is not yet sparse may be better, and is not."""
        if self.sparsifier is None:
            return True
        return self.sparsifier.settled(self.model, self.iteration, at_end=self.iteration == self.length)

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "model": unwrap(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": None if self.average is None else self.average.module.state_dict(),
            "ema_steps": None if self.average is None else self.average.n_averaged,
            "sparsity": None if self.sparsifier is None else self.sparsifier.state_dict(),
            "random": gathered(random_states()),
            "classes": self.classes,
            "length": self.length,
            "steps_per_epoch": self.steps_per_epoch,
            "config": self.loaded.text,
            "start_shapes": self.start_shapes,
        }

    def finish(self, folder: Path | None = None, wanted: Export | None = None) -> list[Written]:
        """Write the model that came out, by default into the run folder as the config says; the files."""
        if self.sparsifier is not None:
            self.sparsifier.finish(self.model)
        image, plan = self.example(), wanted or Export(self.config.saver.export)
        about = describe_model(self.folder.resolve().name, self.kind, self.config.net, self.num_classes, image)
        if self.thinned:
            about |= THINNED
        written = done_by_first(
            lambda: write_model(
                self.outcome,
                as_example(self.outcome, image),
                lambda model: self.task.networks(model, image),
                folder or self.folder,
                replace(plan, about=about),
            ),
            self.place,
        )
        return written or []

    def draw(self, name: str) -> None:
        """Pictures of what was found on the first images of the test data."""
        if self.kind == "detection" and self.test_data is not None:
            path, data = self.folder / "pictures" / name, self.test_data
            done_by_first(
                lambda: draw_tests(self.outcome, self.task, data, self.classes, path, self.place.device), self.place
            )

    # Behind the scenes

    def _iteration_done(self, loop: Loop, stop: Stop) -> bool:
        self.iteration = loop.iteration
        if loop.iteration % self.steps_per_epoch == 0:
            tell_left_out(loop.skipped, loop.notes, "dataset.train", self.told)
            loop.skipped, loop.notes = [], []
        for hook in self.hooks:
            hook.iteration_done(self)
        testing = self.test_data is not None and self._is_due(self.config.trainer.test_freq)
        if testing or self.iteration == self.length:
            self.recalibrate()
        if testing:
            self.test()
        if self._is_due(self.config.trainer.save_freq, default=self.steps_per_epoch) or self.is_best():
            self.save()
        return stop.agreed(self.iteration) and self.iteration < self.length

    def _schedule_log(self) -> Callable[[float], None] | None:
        """What records the learning rate and the sparsity of each step; None in processes that write no records."""
        if self.records is None:
            return None
        log = ScheduleLog(self.records, self.steps_per_epoch)
        return lambda lr: log.step(self.iteration, lr, self.sparsifier, self.model)

    def _is_due(self, frequency: int | None, default: int | None = None) -> bool:
        """Whether something is due that is done so often, in the config's unit of time; `default` is in iterations."""
        unit = 1 if self.config.trainer.max_iter is not None else self.steps_per_epoch
        every = default if frequency is None else frequency * unit
        return self.iteration == self.length or (every is not None and self.iteration % every == 0)

    def _check_weights(self) -> None:
        """Raise rather than save weights that are no numbers: sound checkpoints would go to make room for them."""
        for name, weight in unwrap(self.model).named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise GossamerError(
                    f"the weight '{name}' is not finite at iteration {self.iteration}: lower "
                    "trainer.optimizer.kwargs.lr, warm up longer, or set trainer.clip_grad_norm; checkpoints from "
                    "before are intact"
                )

    def _tell(self, progress: Progress) -> None:
        if not self.place.first:
            return
        now = self.sparsifier.now(self.model) if self.sparsifier is not None else None
        target = self.sparsifier.target(self.model) if self.sparsifier is not None else None
        planned = self.sparsifier.planned(self.model, progress.iteration) if self.sparsifier is not None else None
        logger.info("iteration %d: loss %.4f, lr %.4g", progress.iteration, progress.loss, progress.lr)
        self.display.update(
            progress.iteration,
            loss=progress.loss,
            lr=progress.lr,
            sparsity=now,
            target=target,
            images_per_s=progress.images_per_s,
        )
        if self.records is not None:
            values: dict[str, float] = {"loss": progress.loss, "lr": progress.lr, "images_per_s": progress.images_per_s}
            values |= {} if len(progress.parts) < 2 else {f"loss_{name}": part for name, part in progress.parts.items()}
            values |= {} if now is None else {"sparsity": now}
            values |= {} if planned is None else {"target": planned}
            self.records.train(progress.iteration, progress.epoch, values)
