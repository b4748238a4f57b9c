"""The trainer: builds a run from its config, trains, tests and saves it, and exports the model.

`build` calls the steps in order; a subclass may replace any of them. An iteration is one optimizer step, on
`trainer.accumulate` batches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gossamer.errors import GossamerError
from gossamer.export.weights import THINNED, emulate_as, is_thinned
from gossamer.model import unwrap
from gossamer.model.counting import count_by_kind
from gossamer.model.recalibration import BATCHES, recalibrate
from gossamer.model.thin.cuts import shrink_to
from gossamer.quantization import is_emulated
from gossamer.runner.builders import build_hooks, build_net
from gossamer.runner.checkpoint import Checkpoint, CheckpointError, Checkpoints, MisfitError
from gossamer.runner.config import Loaded, task_of
from gossamer.runner.config.schema import Source
from gossamer.runner.data import Batch, Batches, ImageData
from gossamer.runner.data.examples import ImageFileError
from gossamer.runner.data.sources import Purpose, read_run_data
from gossamer.runner.detectors import as_example
from gossamer.runner.display import Display
from gossamer.runner.distributed import (
    Distributed,
    Stop,
    all_gather,
    broadcast_object,
    broadcast_tensors,
    on_first_rank,
    stop_on_signals,
)
from gossamer.runner.model_files import Export, describe_model, write_model
from gossamer.runner.optimizer import WarmUp, build_lr_scheduler, build_optimizer
from gossamer.runner.records import Records, ScheduleLog
from gossamer.runner.sparsity import Sparsifier, build_sparsifier
from gossamer.runner.tasks import Task, build_task
from gossamer.runner.training_state import (
    MAX_CONFIG,
    RunSetting,
    TrainingState,
    random_states,
    read_training_state,
    restore_average,
    restore_optimizer,
    restore_random_states,
    restore_scaler,
    run_setting,
    seed_all,
    settings_of,
)
from gossamer.runner.weights import (
    Start,
    changed_settings,
    check_fits,
    describes_another_run,
    load_pretrained,
    start_of_evaluation,
    start_of_training,
)

if TYPE_CHECKING:
    from gossamer.export.saving import Written
    from gossamer.runner.notes import LayerWeights

logger = logging.getLogger("gossamer")
REMEDY = (
    "lower trainer.optimizer.kwargs.lr, warm up longer, or set trainer.clip_grad_norm; earlier checkpoints are intact"
)


class Trainer:
    """Trains, tests and exports the model of a run. Call `build()` first, then `train()` or `evaluate()`.

    `purpose` decides what is built: an evaluation has no optimizer state and needs no training data. `checkpoint` is
    used in place of what the config names. `unusable` are checkpoints that could not be resumed, with the reason.
    """

    sparse: ClassVar[bool] = False
    """Whether the run applies the config's `sparsity`."""

    def __init__(
        self,
        loaded: Loaded,
        distributed: Distributed,
        *,
        purpose: Purpose = "train",
        display: Display | None = None,
        checkpoint: Checkpoint | None = None,
        unusable: Mapping[Path, CheckpointError] = MappingProxyType({}),
    ) -> None:
        self.loaded, self.config, self.distributed = loaded, loaded.config, distributed
        self.purpose: Purpose = purpose
        self.training = purpose == "train"
        self.display = display or Display(shown=distributed.first)
        self.folder = self.config.saver.save_dir or Path("runs") / loaded.name
        keep = 1 if self.config.trainer.only_save_latest else self.config.saver.keep
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep)
        self.hooks = build_hooks(self.config.hooks, loaded.trust)
        self.kind: Literal["classification", "detection"] = task_of(self.config)
        self.start = Start()
        self.iteration = 0
        """Iterations that are done."""
        self.best: float | None = None
        """The best metric of the model at its final sparsity."""
        self.metrics: dict[str, float] = {}
        """Of the last test."""
        self.tested_at: int | None = None
        self.saved_at: int | None = None
        self.sparsifier = Sparsifier()
        self.average: AveragedModel | None = None
        self.records: Records | None = None
        self.start_weights: dict[str, LayerWeights] | None = None
        """Histograms of the weights before the first iteration; None in a resumed run."""
        self.start_shapes: dict[str, list[int]] | None = None
        """The shapes of all tensors at the start, if the run starts from a thinned model."""
        self.float_weights: str | None = None
        """A warning about float weights that are evaluated although the recipe quantizes."""
        self._checkpoint, self._unusable = checkpoint, unusable
        self._reported: set[str] = set()
        """Problems with images that were logged already."""

    @property
    def place(self) -> Distributed:
        """The former name of `distributed`."""
        return self.distributed

    # Building

    def build(self) -> None:
        """Build everything that training or testing needs."""
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
        """Seed the random generators, and find the checkpoint or the weights to start from."""
        # All ranks use one data order. Random layers, as dropout, differ between ranks.
        self.seed = int(broadcast_object(self.config.runtime.seed, self.distributed))
        seed_all(self.config.runtime.seed + self.distributed.rank)
        if self._checkpoint is not None:
            self.start = Start(checkpoint=self._checkpoint)
        elif self.training:
            self.start = start_of_training(self.config.saver, self.loaded.given, self.checkpoints, self._unusable)
        else:
            self.start = start_of_evaluation(self.config.saver, self.loaded.given, self.checkpoints)
        checkpoint = self.start.checkpoint
        own = (None if checkpoint is None else checkpoint.iteration, self.start.weights is not None)
        starts = all_gather(own)
        if any(other != own for other in starts):
            found = ", ".join("nothing" if at is None else f"iteration {at}" for at, _ in starts)
            raise GossamerError(
                f"the processes would start from different checkpoints ({found}); let all of them see the same "
                "saver.save_dir and the same files"
            )
        self.setting = RunSetting() if checkpoint is None else run_setting(checkpoint)
        self.saved_state = None if checkpoint is None or not self.training else read_training_state(checkpoint)
        self._recipe = self._build_sparsifier(0) if self.sparse and self.loaded.recipe is not None else None

    def build_data(self) -> None:
        """Read the data sets and build their loaders."""
        data = read_run_data(self.config, self.kind, self.seed, self.purpose, self.setting.classes)
        self.train_data, self.test_data = data.train, data.test
        self.classes, self.num_classes = data.classes, data.num_classes
        train, test = self.config.dataset.train, self.config.dataset.test
        if self.training and self.train_data is not None and train is not None:
            self.train_batches = self._batches(self.train_data, train, train=True)
            self._count_steps()
        if self.test_data is not None and test is not None:
            self.test_batches = self._batches(self.test_data, test, train=False)

    def build_model(self) -> None:
        """Build the float model and its task."""
        self.model: nn.Module = build_net(self.config.net, self.num_classes, self.kind, trust=self.loaded.trust)
        channels_last = self.config.runtime.channels_last
        self.channels_last = self.distributed.device.type == "cuda" if channels_last == "auto" else channels_last
        self._move_model()
        self.task: Task = build_task(self.config, self.model, self.num_classes, self.classes)
        self._check_channels()

    def load_ckpt(self) -> None:
        """Load the weights to start from. Of a checkpoint that has averaged weights, load those."""
        if self.start.weights is not None:
            skipped = self.config.saver.pretrain_except if self.training else []
            load_pretrained(self.model, self.start.weights, tuple(skipped), num_classes=self.num_classes)
            if is_thinned(self.start.weights):
                self.start_shapes = {name: list(value.shape) for name, value in self.model.state_dict().items()}
            if not self.training:
                emulate_as(self.model, self.start.weights)
            logger.info("weights from %s", self.start.weights)
        if self.setting.start_shapes is not None:
            self.start_shapes = self.setting.start_shapes
            shrink_to(self.model, self.start_shapes)
        broadcast_tensors(self.model.state_dict().values(), self.distributed)
        reported = self.distributed.first and self.config.runtime.report.enable
        if self.training and self.start.checkpoint is None and reported:
            from gossamer.runner.notes import weights_of

            self.start_weights = weights_of(self.model)

    def prepare_sparse_model(self) -> None:
        """Build the sparsifier and add the parameters that it learns."""
        if not self.sparse:
            return
        saved = self.setting.sparsity
        if not self.training and saved is None:
            self._warn_of_float_weights()
            return  # a file of weights, such as an exported model, needs nothing added
        length = self.length if self.training else self.setting.length
        self.sparsifier = self._recipe or self._build_sparsifier(length)
        image = self.example()
        networks = None
        if self.kind == "detection":  # torch.fx traces the networks, not the post-processing
            networks = {name: network.module for name, network in self.task.networks(self.model, image).items()}
        self.model.train()
        self.model = self.sparsifier.prepare(self.model, networks, as_example(self.model, image))
        if self.start.checkpoint is not None and saved is not None:
            with self._applying_checkpoint():
                self.sparsifier.restore_structure(self.model, saved, self.start.checkpoint.epoch)
        self._move_model()  # moves the parameters that were added

    def load_resumed_model(self) -> None:
        """Load the weights of a checkpoint. An evaluation uses the averaged weights, if there are any."""
        checkpoint = self.start.checkpoint
        if checkpoint is None:
            return
        averaged: Any = checkpoint.ema
        state = checkpoint.weights if averaged is None or self.training else averaged
        check_fits(self.model, checkpoint, sparse=self.sparse if self.training else None)
        try:
            self.model.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise MisfitError(checkpoint.path, f"is of another model or method: {reason[:300]}") from error
        if self.start_shapes is not None:
            self._check_layers(checkpoint)

    def distribute(self) -> None:
        """Wrap the model by DDP if there are several processes."""
        if self.distributed.world_size > 1:
            devices = [self.distributed.device] if self.distributed.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.model, device_ids=devices)

    def build_trainer(self) -> None:
        """Build optimizer, learning-rate scheduler and GradScaler."""
        trainer = self.config.trainer
        self.optimizer = build_optimizer(trainer.optimizer, self.parameter_groups())
        self.lr_scheduler: WarmUp | None = None
        if trainer.lr_scheduler is not None and self.training:
            if self.sparsifier.sets_learning_rate:
                logger.warning("trainer.lr_scheduler has no effect: the recipe sets the learning rate")
            else:
                self.lr_scheduler = build_lr_scheduler(
                    trainer.lr_scheduler,
                    self.optimizer,
                    per_unit=1 if trainer.max_iter is not None else self.steps_per_epoch,
                    length=max(self.length // self.sparsifier.lr_cycles, 1),
                    steps_per_epoch=self.steps_per_epoch,
                )
        on_gpu = self.distributed.device.type == "cuda"
        self.half = (torch.float16 if on_gpu else torch.bfloat16) if trainer.fp16 else None
        self.scaler: Any = torch.amp.GradScaler("cuda") if self.half is torch.float16 else None  # pyright: ignore[reportPrivateImportUsage]

    def parameter_groups(self) -> Any:
        """The parameters or groups that the optimizer is built on."""
        weight_decay = float(self.config.trainer.optimizer.kwargs.get("weight_decay", 0.0))
        return self.sparsifier.parameter_groups(self.model, weight_decay)

    def build_ema(self) -> None:
        """Build the moving average of the weights. A sparse run has none: an average over masks is not sparse."""
        if self.config.ema.enable and self.training and not self.sparse:
            decay: Any = get_ema_multi_avg_fn(self.config.ema.decay)  # pyright: ignore[reportUnknownVariableType]
            self.average = AveragedModel(unwrap(self.model), multi_avg_fn=decay, use_buffers=True)

    def sparse_post_process(self) -> None:
        """Attach the sparsifier to optimizer and learning-rate scheduler, in the state of a resumed run."""
        if not self.sparsifier.sparse:
            return
        if self.training and self.sparsifier.epochs > self.length / self.steps_per_epoch:
            epochs = self.sparsifier.epochs
            logger.warning(
                "the recipe ends at epoch %d and the training at epoch %g, which skips the rest of the recipe; "
                "set trainer.max_epoch=%d, or remove it",
                epochs,
                self.length / self.steps_per_epoch,
                epochs,
            )
        with self._applying_checkpoint():
            self.scaler = self.sparsifier.attach(
                self.model,
                self.optimizer,
                self.lr_scheduler,
                self.setting.sparsity,
                scaler=self.scaler,
                steps_per_epoch=self.steps_per_epoch if self.training else self.setting.steps_per_epoch,
                accumulation_steps=self.config.trainer.accumulate,
                example_inputs=as_example(self.model, self.example()),
            )
        if not self.training and self.start.checkpoint is not None:
            self.sparsifier.before_step(self.model, max(self.start.checkpoint.iteration - 1, 0))
        dense = self.sparsifier.left_dense()
        logger.info("%s: %d weights stay dense", self.sparsifier.method, len(dense))
        for name, reason in dense.items():
            logger.info("'%s' stays dense: %s", name, reason)

    def restore(self) -> None:
        """Restore the rest of a checkpoint: optimizer, schedulers, average and random states."""
        checkpoint, saved = self.start.checkpoint, self.saved_state
        if checkpoint is None or saved is None:
            return
        with self._applying_checkpoint():
            self._restore(checkpoint, saved)
        if len(saved.random) == self.distributed.world_size:
            restore_random_states(saved.random[self.distributed.rank])
        else:
            logger.warning(
                "the run was saved by %d processes and continues with %d: results are not identical to the bit",
                len(saved.random),
                self.distributed.world_size,
            )
        logger.info("resuming from iteration %d of %s", self.iteration, checkpoint.path)
        if len(checkpoint.config) > MAX_CONFIG:
            logger.warning("the config is too long to compare it with that of the checkpoint")
        for change in changed_settings(saved.config, settings_of(self.loaded.text, self.folder)):
            logger.warning("%s", change)
        before = self.setting.steps_per_epoch
        if before != self.steps_per_epoch:
            logger.warning(
                "an epoch has %d iterations now and had %d: the run continues at epoch %.2f, and was at epoch %.2f",
                self.steps_per_epoch,
                before,
                self.iteration / self.steps_per_epoch,
                self.iteration / before,
            )

    def describes_another_run(self) -> bool:
        """Whether the config describes another run than the one that wrote the checkpoint."""
        before = None if self.saved_state is None else self.saved_state.config
        return describes_another_run(before, settings_of(self.loaded.text, self.folder))

    # Training

    def train(self) -> bool:
        """Train to the end. Returns False if a signal stopped the training early, after a checkpoint was saved."""
        if self.iteration >= self.length:
            more = "; make it longer with --set trainer.max_epoch=…" if self.iteration == self.length else ""
            self.display.message(f"The run is complete: {self.iteration} of {self.length} iterations{more}.")
            self.metrics = dict(self.start.checkpoint.metrics) if self.start.checkpoint is not None else {}
            return True
        with ExitStack() as stack:
            if self.distributed.first:
                self.records = stack.enter_context(
                    Records(self.folder, resumed=self.iteration, tensorboard=self.config.runtime.tensorboard)
                )
            stop = stack.enter_context(stop_on_signals(self.distributed))
            stack.enter_context(self.display.training(self.length, self.steps_per_epoch, self.iteration))
            for hook in self.hooks:
                hook.train_begins(self)
            with self._recording_schedule():
                stopped = self._run_epochs(stop)
            self._report_images()
            if not stopped and not self.counts_for_best():
                logger.warning("%s; was the training long enough?", self.sparsifier.shortfall(self.model))
            if stopped:
                logger.info("stopped by a signal at iteration %d", self.iteration)
                if self.saved_at != self.iteration:
                    self.save()
            for hook in self.hooks:
                hook.train_ends(self)
        return not stopped

    def _run_epochs(self, stop: Stop) -> bool:
        """Iterate to the end. Returns whether the run was stopped early."""
        trainer = self.config.trainer
        self.model.train()
        timer = _Timer()
        sums: dict[str, Tensor] = {}
        count = 0
        self._skipped: list[str] = []
        self._notes: list[str] = []
        while self.iteration < self.length:
            epoch, done = divmod(self.iteration, self.steps_per_epoch)
            batches = self.train_batches.epoch(epoch, start=done * trainer.accumulate)
            for _ in range(done, min(self.steps_per_epoch, self.length - epoch * self.steps_per_epoch)):
                for name, value in self.train_step(batches, timer).items():
                    sums[name] = sums[name] + value if name in sums else value
                count += 1
                self.iteration += 1
                if self.iteration % trainer.log_freq == 0 or self.iteration == self.length:
                    self._log({name: float(total) / count for name, total in sums.items()}, timer.images_per_s())
                    sums, count = {}, 0
                with timer.paused():
                    self._after_step()
                    if stop.agreed(self.iteration) and self.iteration < self.length:
                        return True
        return False

    def train_step(self, batches: Iterator[Batch], timer: _Timer) -> dict[str, Tensor]:
        """One optimizer step. Returns the mean losses of its batches by name."""
        trainer = self.config.trainer
        self.sparsifier.before_step(self.model, self.iteration)
        means: dict[str, Tensor] = {}
        for index in range(trainer.accumulate):
            batch = next(batches)
            self._skipped += batch.skipped
            self._notes += batch.notes
            timer.images += len(batch) * self.distributed.world_size
            batch = batch.to(self.distributed.device, channels_last=self.channels_last)
            with self._no_sync(last=index == trainer.accumulate - 1):
                with nullcontext() if self.half is None else torch.autocast(self.distributed.device.type, self.half):
                    losses = self.task.losses(self.model, batch)
                    loss = torch.stack([value.float().sum() for value in losses.values()]).sum() / trainer.accumulate
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            for name, value in losses.items():
                part = value.detach().float() / trainer.accumulate
                means[name] = means[name] + part if name in means else part
        if trainer.clip_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), trainer.clip_grad_norm)
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
        return means

    def _after_step(self) -> None:
        """Call hooks, test and save, as far as they are due at this iteration."""
        if self.iteration % self.steps_per_epoch == 0:
            self._report_images()
        for hook in self.hooks:
            hook.iteration_done(self)
        testing = self.test_data is not None and self._is_due(self.config.trainer.test_freq)
        if testing or self.iteration == self.length:
            self.recalibrate()
        if testing:
            self.test()
        if self._is_due(self.config.trainer.save_freq, default=self.steps_per_epoch) or self.is_best():
            self.save()

    def _is_due(self, frequency: int | None, default: int | None = None) -> bool:
        """Whether an action of a frequency in the config's unit of time is due; `default` counts iterations."""
        unit = 1 if self.config.trainer.max_iter is not None else self.steps_per_epoch
        every = default if frequency is None else frequency * unit
        return self.iteration == self.length or (every is not None and self.iteration % every == 0)

    def _no_sync(self, last: bool) -> AbstractContextManager[Any]:
        """DDP exchanges gradients with the last batch of a step only."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) and not last else nullcontext()

    # Testing

    @property
    def outcome(self) -> nn.Module:
        """The model that is tested and exported: the average if there is one."""
        return unwrap(self.model if self.average is None else self.average.module)

    def evaluate(self) -> dict[str, float]:
        """Test the model, or its average, without gradients. Returns the task's metrics."""
        if self.test_data is None:
            raise GossamerError("missing; name the data to evaluate on", "dataset", "test")
        # Not wrapped by DDP, because the ranks may have different numbers of batches.
        model = self.outcome
        broadcast_tensors(model.buffers(), self.distributed)  # as DDP does before each forward pass in training
        evaluator = self.task.evaluator()
        skipped: list[str] = []
        notes: list[str] = []
        was_training = self.model.training
        model.eval()
        try:
            with torch.no_grad(), self.display.testing(self.test_batches.batches_per_epoch) as show:
                for number, batch in enumerate(self.test_batches.epoch(0), 1):
                    skipped += batch.skipped
                    notes += batch.notes
                    if len(batch):  # otherwise none of its images can be read
                        evaluator.update(model, batch.to(self.distributed.device, channels_last=self.channels_last))
                    show(number)
                metrics = evaluator.compute()
        finally:
            self.model.train(was_training)
        self._warn_of_images("dataset.test", skipped, notes)
        return metrics

    def test(self) -> None:
        """Evaluate, and record the metrics."""
        self.metrics, self.tested_at = self.evaluate(), self.iteration
        if self.lr_scheduler is not None:
            self.lr_scheduler.tested(self.metrics[self.task.metric])
        if self.distributed.first:
            if self.records is not None:
                self.records.write("test", self.iteration, self.iteration / self.steps_per_epoch, self.metrics)
            self.display.tested(self.metrics, self.iteration)
            values = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
            logger.info("test at iteration %d: %s", self.iteration, values)
        self.draw(f"iter_{self.iteration:08d}.png")
        for hook in self.hooks:
            hook.tested(self, self.metrics)

    def recalibrate(self) -> None:
        """Estimate batch norm's statistics for weights that training does not use: an average, or ProbMask's.

        In place, on training images in a fixed order. Gradients do not depend on the statistics, checkpoints contain
        them, and random states are restored, so that a resumed run stays identical to the bit.
        """
        if self.average is None and not self.sparsifier.recalibrates:
            return
        assert self.train_data is not None
        assert self.config.dataset.train is not None
        random = random_states()
        reader = self._batches(self.train_data, self.config.dataset.train, train=True)
        try:
            recalibrate(self.outcome, islice(self._images(reader), BATCHES))
            if self.average is not None and self.sparsifier.recalibrates:
                recalibrate(unwrap(self.model), islice(self._images(reader), BATCHES))
        finally:
            reader.close()
            restore_random_states(random)

    def draw(self, name: str) -> None:
        """Draw the detections on the first test images into the folder `pictures`."""
        if self.kind == "detection" and self.test_data is not None:
            from gossamer.runner.pictures import draw_tests

            path, data = self.folder / "pictures" / name, self.test_data
            on_first_rank(
                lambda: draw_tests(self.outcome, self.task, data, self.classes, path, self.distributed.device),
                self.distributed,
            )

    # Saving

    def save(self) -> None:
        """Write a checkpoint. All ranks call this."""
        for name, weight in unwrap(self.model).named_parameters():
            # Older checkpoints would be removed to make room for useless ones.
            if not bool(torch.isfinite(weight).all()):
                raise GossamerError(f"the weight '{name}' is not finite at iteration {self.iteration}: {REMEDY}")
        state = self.state()
        is_best = self.is_best()
        self.best = self.metrics[self.task.metric] if is_best else self.best
        state["best"] = self.best
        path = on_first_rank(
            lambda: self.checkpoints.save(
                state,
                iteration=self.iteration,
                epoch=self.iteration / self.steps_per_epoch,
                metrics=self.metrics if self.tested_at == self.iteration else {},
                best=is_best,
                weights=count_by_kind(self.outcome),
            ),
            self.distributed,
        )
        self.saved_at = self.iteration
        if path is not None:
            for hook in self.hooks:
                hook.saved(self, path)

    def is_best(self) -> bool:
        """Whether the test at this iteration found the best model so far."""
        if self.tested_at != self.iteration or not self.counts_for_best():
            return False
        return self.best is None or self.metrics[self.task.metric] > self.best

    def counts_for_best(self) -> bool:
        """Whether the model has its final sparsity: a denser model may be better, and is not the goal of the run."""
        return self.sparsifier.settled(self.model, self.iteration, at_end=self.iteration == self.length)

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs; `training_state` reads it."""
        return {
            "model": unwrap(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ema": None if self.average is None else self.average.module.state_dict(),
            "ema_steps": None if self.average is None else self.average.n_averaged,
            "sparsity": self.sparsifier.state_dict(),
            "random": all_gather(random_states()),
            "classes": self.classes,
            "length": self.length,
            "steps_per_epoch": self.steps_per_epoch,
            "config": self.loaded.text,
            "start_shapes": self.start_shapes,
        }

    # Exporting

    @property
    def thinned(self) -> bool:
        """Whether layers of the model are smaller than in the network that its code builds."""
        return self.start_shapes is not None or self.sparsifier.thinned(self.outcome)

    def finalize(self) -> None:
        """Write the zeros into the weights and remove what sparse training added."""
        self.sparsifier.finalize(self.model)

    def export(self, folder: Path | None = None, plan: Export | None = None) -> list[Written]:
        """Finalize the model and write its files, by default those of `saver.export` into the run folder."""
        self.finalize()
        image = self.example()
        about = describe_model(self.folder.resolve().name, self.kind, self.config.net, self.num_classes, image)
        if self.thinned:
            about |= THINNED
        written = on_first_rank(
            lambda: write_model(
                self.outcome,
                as_example(self.outcome, image),
                lambda model: self.task.networks(model, image),
                folder or self.folder,
                replace(plan or Export(self.config.saver.export), about=about),
            ),
            self.distributed,
        )
        return written or []

    def example(self) -> Tensor:
        """One image (1, C, H, W) of the data, as the model takes it."""
        data = self.test_data or self.train_data
        assert data is not None
        for index in range(len(data)):
            with suppress(ImageFileError):
                return data[index][0].unsqueeze(0).to(self.distributed.device)
        raise GossamerError("none of its images can be read", "dataset")

    # Helpers of building

    def epochs(self) -> int:
        """The length of the training in epochs, from the config or from its recipe."""
        if self.config.trainer.max_epoch is not None:
            return self.config.trainer.max_epoch
        if self._recipe is None:
            raise GossamerError("give max_epoch or max_iter", "trainer")
        if not self._recipe.epochs:
            assert self.config.sparsity is not None
            raise GossamerError(f"{self.config.sparsity.recipe}: has no end; give trainer.max_epoch or max_iter")
        return self._recipe.epochs

    def _count_steps(self) -> None:
        trainer = self.config.trainer
        batches = self.train_batches.batches_per_epoch
        if batches < trainer.accumulate:
            raise GossamerError(
                f"an epoch has {batches} batches, fewer than the {trainer.accumulate} of one step; "
                "lower accumulate or dataset.train.batch_size",
                "trainer",
                "accumulate",
            )
        self.steps_per_epoch = batches // trainer.accumulate
        self.length = trainer.max_iter if trainer.max_iter is not None else self.epochs() * self.steps_per_epoch

    def _build_sparsifier(self, length: int) -> Sparsifier:
        assert self.config.sparsity is not None
        return build_sparsifier(self.config.sparsity, self.loaded.recipe, length=length, folder=self.folder)

    def _warn_of_float_weights(self) -> None:
        """Warn about float weights if the recipe quantizes: they do not compute what the run computes."""
        if self._recipe is not None and self._recipe.quantizes and not is_emulated(self.model):
            self.float_weights = (
                f"{self.start.source}: has float weights, and the recipe quantizes: results "
                "differ from those of the run; name the run itself, or its bitmask file"
            )
            logger.warning("%s", self.float_weights)

    def _batches(self, data: ImageData, source: Source, *, train: bool) -> Batches:
        distributed = self.distributed
        return Batches(
            data,
            source,
            train=train,
            seed=self.seed,
            rank=distributed.rank,
            world=distributed.world_size,
            pin_memory=distributed.device.type == "cuda",
        )

    def _images(self, reader: Batches) -> Iterator[tuple[Any]]:
        for batch in reader.epoch(0):
            if len(batch):  # otherwise none of its images can be read
                yield (batch.to(self.distributed.device, channels_last=self.channels_last).images,)

    def _check_channels(self) -> None:
        """Raise if the images have other channels than a torchvision model takes."""
        data = self.train_data if self.training else self.test_data
        first = next((part for part in self.model.modules() if isinstance(part, nn.Conv2d)), None)
        if data is None or first is None or ":" in self.config.net.type or "/" in self.config.net.type:
            return  # in other models the first convolution may not be the first layer
        channels = data.read_batch([(0, 0)], train=True).images[0].shape[0]
        if channels != first.in_channels:
            split = "train" if self.training else "test"
            raise GossamerError(
                f"images have {channels} channels after the transforms, and "
                f"{self.config.net.type} takes {first.in_channels}; remove Grayscale, or add RGB after it",
                "dataset",
                split,
                "transforms",
            )

    def _move_model(self) -> None:
        self.model = self.model.to(self.distributed.device)
        if self.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @torch.no_grad()
    def _check_layers(self, checkpoint: Checkpoint) -> None:
        """Raise if the shapes that a checkpoint gives to the layers do not fit together."""
        was_training = self.model.training
        try:
            example = as_example(self.model, self.example())
            self.model.eval()(*example if isinstance(example, tuple) else (example,))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise MisfitError(checkpoint.path, f"its layers do not fit together: {reason[:200]}") from error
        finally:
            self.model.train(was_training)

    @contextmanager
    def _applying_checkpoint(self) -> Generator[None]:
        """Name the checkpoint in errors about a state that does not fit."""
        checkpoint = self.start.checkpoint
        try:
            yield
        except GossamerError as error:
            if checkpoint is None or isinstance(error, MisfitError):
                raise
            raise MisfitError(checkpoint.path, "does not fit this config", details=error.problems) from error

    def _restore(self, checkpoint: Checkpoint, saved: TrainingState) -> None:
        self.iteration, self.best = checkpoint.iteration, saved.best
        self.saved_at = self.iteration
        restore_optimizer(self.optimizer, saved.optimizer)
        for part, state, key in (
            (self.lr_scheduler, saved.lr_scheduler, "lr_scheduler"),
            (self.scaler, saved.scaler, "scaler"),
            (self.average, saved.ema, "ema"),
        ):
            if part is None and state is not None:
                logger.warning("the config has no %s, and the saved run had one", key)
            elif part is not None and state is None:
                logger.warning("the config has %s, and the saved run had none", key)
        if self.lr_scheduler is not None and saved.lr_scheduler is not None:
            self.lr_scheduler.check(saved.lr_scheduler, self.iteration)
            self.lr_scheduler.load_state_dict(saved.lr_scheduler)
        if self.scaler is not None and saved.scaler is not None:
            restore_scaler(self.scaler, saved.scaler)
        if self.average is not None and saved.ema is not None:
            restore_average(self.average, saved.ema, saved.ema_steps)

    # Logging

    def _log(self, losses: Mapping[str, float], images_per_s: float) -> None:
        """Show and record the mean losses since the last call. Raises if they are not finite."""
        loss, lr = sum(losses.values()), self._lr()
        if not math.isfinite(loss):
            worst = next(name for name, value in losses.items() if not math.isfinite(value))
            raise GossamerError(f"the loss '{worst}' is {losses[worst]} at iteration {self.iteration}: {REMEDY}")
        if not self.distributed.first:
            return
        sparsity, target = self.sparsifier.sparsity(self.model), self.sparsifier.target()
        planned = self.sparsifier.planned(self.iteration)
        logger.info("iteration %d: loss %.4f, lr %.4g", self.iteration, loss, lr)
        self.display.update(
            self.iteration, loss=loss, lr=lr, sparsity=sparsity, target=target, images_per_s=images_per_s
        )
        if self.records is not None:
            values: dict[str, float] = {"loss": loss, "lr": lr, "images_per_s": images_per_s}
            values |= {} if len(losses) < 2 else {f"loss_{name}": value for name, value in losses.items()}
            values |= {} if sparsity is None else {"sparsity": sparsity}
            values |= {} if planned is None else {"target": planned}
            self.records.write("train", self.iteration, self.iteration / self.steps_per_epoch, values)

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @contextmanager
    def _recording_schedule(self) -> Generator[None]:
        """Record the learning rate and the sparsity of each optimizer step when they change."""
        if self.records is None:
            yield
            return
        log = ScheduleLog(self.records, self.steps_per_epoch)

        def record(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            log.step(self.iteration, self._lr(), self.sparsifier, self.model)

        # A recipe sets the learning rate in a hook of its own, which was registered before and runs first.
        hook = self.optimizer.register_step_pre_hook(record)
        try:
            yield
        finally:
            hook.remove()

    def _report_images(self) -> None:
        self._warn_of_images("dataset.train", self._skipped, self._notes)
        self._skipped, self._notes = [], []

    def _warn_of_images(self, key: str, skipped: list[str], notes: list[str]) -> None:
        """Warn once about each image that was skipped, or used although something is wrong. All ranks call this."""
        for messages, what in ((skipped, "skipped"), (notes, "used as they are")):
            distinct = dict.fromkeys(message for own in all_gather(messages) for message in own)
            new = [message for message in distinct if f"{key}: {message}" not in self._reported]
            self._reported.update(f"{key}: {message}" for message in new)
            if new:
                logger.warning("%s: images that are %s: %d, such as %s", key, what, len(new), new[0])


class SparseRunner(Trainer):
    """The trainer with `sparse = True`: applies the config's `sparsity`, an MSBench config or a recipe."""

    sparse: ClassVar[bool] = True


Runner = Trainer
"""United Perception's name, under which users subclass the trainer."""


class _Timer:
    """Images per second of training, without the time in which it is paused."""

    def __init__(self) -> None:
        self.images = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Generator[None]:
        self._seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def images_per_s(self) -> float:
        """The rate since the last call."""
        with self.paused():
            rate = self.images / self._seconds if self._seconds else 0.0
            self.images, self._seconds = 0, 0.0
        return rate
