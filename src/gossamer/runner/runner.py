"""A run: builds what a config names, trains it, tests it, saves it and writes the model that comes out.

Each step of the building is a method that a subclass may replace. Knows the
order of things; the things themselves are in the modules beside this one.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gossamer.errors import GossamerError
from gossamer.graph import unwrap
from gossamer.runner.checkpoints import Checkpoint, Checkpoints
from gossamer.runner.config import Loaded, task_of
from gossamer.runner.config.schema import Source
from gossamer.runner.data import Batches, ImageData
from gossamer.runner.data.decoding import ImageFileError
from gossamer.runner.display import Display
from gossamer.runner.exporting import write_model
from gossamer.runner.hooks import build_hooks
from gossamer.runner.loop import Loop, Progress, Stop, stopped_by_signals
from gossamer.runner.models import build_net
from gossamer.runner.pictures import draw_tests
from gossamer.runner.processes import Place, gathered, same_everywhere, send_buffers, send_state
from gossamer.runner.random_states import random_states, restore_random_states, seed_all
from gossamer.runner.rates import WarmUp, build_lr_scheduler, build_optimizer
from gossamer.runner.records import Records
from gossamer.runner.run_data import Purpose, read_run_data
from gossamer.runner.sparsity import Sparsifier
from gossamer.runner.starting import (
    Start,
    changed_settings,
    check_fits,
    load_weights,
    restore_optimizer,
    start_of_evaluation,
    start_of_training,
)
from gossamer.runner.tasks import Task, build_task
from gossamer.runner.testing import tell_left_out, tested

logger = logging.getLogger("gossamer")
TOLERANCE = 0.01
"""How far the sparsity of a best model may lie below the target: layers that a method leaves alone count too."""


class Runner:
    """Trains a float model. `build()` comes first, then `train()` or `evaluate()`."""

    sparse: ClassVar[bool] = False

    def __init__(
        self, loaded: Loaded, place: Place, *, purpose: Purpose = "train", display: Display | None = None
    ) -> None:
        self.loaded, self.config, self.place = loaded, loaded.config, place
        self.purpose: Purpose = purpose
        self.training = purpose == "train"
        self.display = display or Display(shown=place.first)
        self.folder = self.config.saver.save_dir or Path("runs") / loaded.name
        keep = 1 if self.config.trainer.only_save_latest else self.config.saver.keep
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep)
        self.hooks = build_hooks(self.config.hooks)
        self.kind: Literal["classification", "detection"] = task_of(self.config)
        self.best: float | None = None
        self.metrics: dict[str, float] = {}
        """Of the last test."""
        self.tested_at: int | None = None
        self.saved_at: int | None = None
        self.sparsifier: Sparsifier | None = None
        self.average: AveragedModel | None = None
        self.records: Records | None = None
        self.seconds = 0.0
        """Time spent in `train`, over all sessions of the run."""
        self._began = time.perf_counter()

    # Building, in this order

    def build(self) -> None:
        """Everything that training or testing needs."""
        self.build_env()
        self.build_data()
        self.build_model()
        self.load_ckpt()
        self.prepare_sparse_model()
        self.load_resumed_model()
        self.distribute()
        self.build_trainer()
        self.build_ema()
        self.sparse_post_process()
        self.restore()

    def build_env(self) -> None:
        runtime = self.config.runtime
        # Data order is everybody's; what layers draw is each process's own.
        self.seed = int(same_everywhere(runtime.seed, self.place))
        seed_all(runtime.seed + self.place.rank)
        self.start = self._start()

    def build_data(self) -> None:
        saved = self.start.checkpoint.state.get("classes") if self.start.checkpoint is not None else None
        data = read_run_data(self.config, self.kind, self.seed, self.purpose, saved)
        self.train_data, self.test_data = data.train, data.test
        self.classes, self.num_classes = data.classes, data.num_classes
        train, test = self.config.dataset.train, self.config.dataset.test
        if self.training and self.train_data is not None and train is not None:
            self.train_batches = self._batches(self.train_data, train, train=True)
            self._count_steps()
        if self.test_data is not None and test is not None:
            self.test_batches = self._batches(self.test_data, test, train=False)

    def build_model(self) -> None:
        self.model: nn.Module = build_net(self.config.net, self.num_classes, self.kind)
        self.channels_last = self._wants_channels_last()
        self._place_model()
        self.task: Task = build_task(self.config, self.model, self.num_classes, self.classes)

    def load_ckpt(self) -> None:
        """Weights to begin with; a checkpoint that holds averaged weights gives those."""
        if self.start.weights is not None:
            load_weights(self.model, self.start.weights, tuple(self.config.saver.pretrain_except))
            logger.info("weights from %s", self.start.weights)
        send_state(self.model, self.place)

    def prepare_sparse_model(self) -> None:
        """Nothing in a float run."""

    def load_resumed_model(self) -> None:
        """The weights of a checkpoint; for an evaluation the averaged ones, where it has them."""
        checkpoint = self.start.checkpoint
        if checkpoint is None:
            return
        averaged: Any = checkpoint.ema
        state = checkpoint.weights if averaged is None or self.training else averaged
        check_fits(self.sparse, self.model, checkpoint, training=self.training)
        try:
            self.model.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise GossamerError(f"{checkpoint.path}: is of another model or method: {reason[:300]}") from error

    def distribute(self) -> None:
        if self.place.world > 1:
            devices = [self.place.device] if self.place.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.model, device_ids=devices)

    def build_trainer(self) -> None:
        """Optimizer and learning-rate scheduler."""
        trainer = self.config.trainer
        self.optimizer = build_optimizer(trainer.optimizer, self.parameter_groups())
        self.lr_scheduler: WarmUp | None = None
        if trainer.lr_scheduler is not None and self.training and not self._rates_are_set():
            per_unit = 1 if trainer.max_iter is not None else self.steps_per_epoch
            courses = self.sparsifier.courses if self.sparsifier is not None else 1
            self.lr_scheduler = build_lr_scheduler(
                trainer.lr_scheduler,
                self.optimizer,
                per_unit=per_unit,
                length=max(self.length // courses, 1),
                steps_per_epoch=self.steps_per_epoch,
            )
        on_gpu = self.place.device.type == "cuda"
        self.half = (torch.float16 if on_gpu else torch.bfloat16) if trainer.fp16 else None
        self.scaler: Any = torch.amp.GradScaler("cuda") if self.half is torch.float16 else None  # pyright: ignore[reportPrivateImportUsage]

    def parameter_groups(self) -> Any:
        """What the optimizer is built on."""
        return self.model.parameters()

    def build_ema(self) -> None:
        if self.config.ema.enable and self.training:
            decay: Any = get_ema_multi_avg_fn(self.config.ema.decay)  # pyright: ignore[reportUnknownVariableType]
            self.average = AveragedModel(unwrap(self.model), multi_avg_fn=decay, use_buffers=True)

    def sparse_post_process(self) -> None:
        """Nothing in a float run."""

    def restore(self) -> None:
        """Everything of a resumed run besides the weights."""
        checkpoint = self.start.checkpoint
        self.iteration = 0
        if checkpoint is None or not self.training:
            return
        state = checkpoint.state
        try:
            self._restore(checkpoint)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise GossamerError(f"{checkpoint.path}: does not fit this config: {reason[:300]}") from error
        if len(state["random"]) == self.place.world:
            restore_random_states(state["random"][self.place.rank])
        else:
            logger.warning(
                "the run was saved by %d processes and goes on with %d: not to the bit",
                len(state["random"]),
                self.place.world,
            )
        logger.info("going on from iteration %d of %s", self.iteration, checkpoint.path)
        for change in changed_settings(checkpoint.config, self.loaded.text):
            logger.warning("%s", change)

    # Work

    def train(self) -> bool:
        """Train to the end; whether it got there, or was asked to stop before."""
        if self.iteration >= self.length:
            logger.info("the run is complete: %d iterations", self.iteration)
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
            self._began = time.perf_counter()
            stopped = loop.run(lambda: self._iteration_done(loop, stop), self._tell)
            tell_left_out(loop.skipped, loop.notes, "dataset.train")
            if not stopped and not self.counts_for_best():
                logger.warning("the model is less sparse than it was to become; was the training long enough?")
            if stopped and self.saved_at != self.iteration:
                self.save()
            for hook in self.hooks:
                hook.train_ends(self)
        return not stopped

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
        send_buffers(unwrap(self.model), self.place)
        was_training = self.model.training
        try:
            return tested(
                self.outcome, self.task, self.test_batches, self.place.device, self.display, self.channels_last
            )
        finally:
            self.model.train(was_training)

    @property
    def outcome(self) -> nn.Module:
        """The model that the run is for: the average where one is kept."""
        return unwrap(self.model if self.average is None else self.average.module)

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
        if self.place.first:
            epoch = self.iteration / self.steps_per_epoch
            metrics = self.metrics if self.tested_at == self.iteration else {}
            path = self.checkpoints.save(state, iteration=self.iteration, epoch=epoch, metrics=metrics, best=is_best)
            for hook in self.hooks:
                hook.saved(self, path)
        self.saved_at = self.iteration

    def is_best(self) -> bool:
        """Whether a test at this iteration found the best model so far."""
        if self.tested_at != self.iteration or not self.counts_for_best():
            return False
        return self.best is None or self.metrics[self.task.metric] > self.best

    def counts_for_best(self) -> bool:
        """Whether the model is what the run is for: a model that is not yet sparse may be better, and is not."""
        if self.sparsifier is None:
            return True
        target = self.sparsifier.target(self.model)
        return target is None or self.sparsifier.now(self.model) > target - TOLERANCE

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
            "random": gathered(random_states(), self.place),
            "classes": self.classes,
            "length": self.length,
            "steps_per_epoch": self.steps_per_epoch,
            "config": self.loaded.text,
            "seconds": self._elapsed(),
        }

    def finish(self) -> list[Path]:
        """Write the model that came out; the files."""
        if self.sparsifier is not None:
            self.sparsifier.finish(self.model)
        if not self.place.first:
            return []
        return write_model(self.outcome, self.task, self.example(), self.folder, self.config.saver.export)

    def example(self) -> torch.Tensor:
        """One image (1, C, H, W) of the data, as the model gets it."""
        data = self.test_data or self.train_data
        assert data is not None
        for index in range(len(data)):
            with suppress(ImageFileError):
                return data[index][0].unsqueeze(0).to(self.place.device)
        raise GossamerError("dataset: no image can be read")

    def draw(self, name: str) -> None:
        """Pictures of what was found on the first images of the test data."""
        if self.kind == "detection" and self.test_data is not None:
            model = unwrap(self.model if self.average is None else self.average.module)
            draw_tests(
                model, self.task, self.test_data, self.classes, self.folder / "pictures" / name, self.place.device
            )

    # Behind the scenes

    def _start(self) -> Start:
        choose = start_of_training if self.training else start_of_evaluation
        return choose(self.config.saver, self.loaded.given, self.checkpoints)

    def _batches(self, data: ImageData, source: Source, *, train: bool) -> Batches:
        pinned = self.place.device.type == "cuda"
        place = self.place
        return Batches(data, source, train=train, seed=self.seed, rank=place.rank, world=place.world, pin_memory=pinned)

    def _count_steps(self) -> None:
        trainer = self.config.trainer
        batches = self.train_batches.batches_per_epoch
        if batches < trainer.accumulate:
            raise GossamerError(
                f"trainer.accumulate: an epoch has {batches} batches, fewer than the {trainer.accumulate} of one step; "
                "lower accumulate or dataset.train.batch_size"
            )
        self.steps_per_epoch = batches // trainer.accumulate
        if trainer.max_iter is not None:
            self.length = trainer.max_iter
        else:
            self.length = self.epochs() * self.steps_per_epoch

    def epochs(self) -> int:
        """How long to train, when that is counted in epochs."""
        if self.config.trainer.max_epoch is None:
            raise GossamerError("trainer: give max_epoch or max_iter")
        return self.config.trainer.max_epoch

    def _rates_are_set(self) -> bool:
        if self.sparsifier is not None and self.sparsifier.sets_rates:
            logger.warning("trainer.lr_scheduler has no effect: the recipe sets the learning rate")
            return True
        return False

    def _wants_channels_last(self) -> bool:
        wanted = self.config.runtime.channels_last
        return self.place.device.type == "cuda" if wanted == "auto" else wanted

    def _place_model(self) -> None:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        self.model = self.model.to(self.place.device)
        if self.channels_last:
            self.model = self.model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.iteration, self.best = checkpoint.iteration, state["best"]
        self.saved_at = self.iteration
        self.seconds = float(state["seconds"])
        restore_optimizer(self.optimizer, state["optimizer"])
        for part, key in ((self.lr_scheduler, "lr_scheduler"), (self.scaler, "scaler")):
            if (part is None) != (state[key] is None):
                logger.warning("the config has %s %s, which the saved run had not", "no" if part is None else "a", key)
            elif part is not None:
                part.load_state_dict(state[key])
        if self.average is not None and state["ema"] is not None:
            self.average.module.load_state_dict(state["ema"])
            self.average.n_averaged.copy_(state["ema_steps"])

    def _iteration_done(self, loop: Loop, stop: Stop) -> bool:
        self.iteration = loop.iteration
        if loop.iteration % self.steps_per_epoch == 0:
            tell_left_out(loop.skipped, loop.notes, "dataset.train")
            loop.skipped, loop.notes = [], []
        for hook in self.hooks:
            hook.iteration_done(self)
        if self.test_data is not None and self._is_due(self.config.trainer.test_freq):
            self.test()
        if self._is_due(self.config.trainer.save_freq, default=self.steps_per_epoch) or self.is_best():
            self.save()
        return stop.agreed(self.iteration, self.config.trainer.log_freq) and self.iteration < self.length

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
            self.records.train(progress.iteration, progress.epoch, values)

    def _elapsed(self) -> float:
        now = time.perf_counter()
        self.seconds += now - self._began
        self._began = now
        return self.seconds
