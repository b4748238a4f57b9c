"""The training loop: iterations of batches, backward passes and optimizer steps, and what is due between them.

An iteration is one optimizer step, on `accumulate` batches. Knows the parts it
is given, and not where they come from; `building.py` makes them.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gossamer.errors import GossamerError
from gossamer.export.weights.reading import THINNED, emulate_as, is_thinned
from gossamer.model import unwrap
from gossamer.model.counting import count_by_kind
from gossamer.model.recalibration import BATCHES, recalibrate
from gossamer.model.thin.cuts import shrink_to
from gossamer.quantization import is_emulated
from gossamer.runner.builders import build_net
from gossamer.runner.checkpoint import Checkpoint, CheckpointError, Checkpoints, MisfitError
from gossamer.runner.config import Loaded, task_of
from gossamer.runner.config.schema import Source
from gossamer.runner.data import Batch, Batches, ImageData
from gossamer.runner.data.images import ImageFileError
from gossamer.runner.data.sources import Purpose, read_run_data
from gossamer.runner.display import Display
from gossamer.runner.distributed import (
    Place,
    any_of,
    done_by_first,
    gathered,
    same_everywhere,
    send_buffers,
    send_state,
)
from gossamer.runner.hooks import build_hooks
from gossamer.runner.model_files import Export, describe_model, write_model
from gossamer.runner.networks import as_example
from gossamer.runner.optimizer import WarmUp, build_lr_scheduler, build_optimizer
from gossamer.runner.pictures import draw_tests
from gossamer.runner.records import Records, ScheduleLog
from gossamer.runner.reporting.notes import Weights, weights_of
from gossamer.runner.sparsity import ByRecipe, Sparsifier, build_sparsifier
from gossamer.runner.start import (
    Start,
    changed_settings,
    check_fits,
    describes_another_run,
    load_weights,
    start_of_evaluation,
    start_of_training,
)
from gossamer.runner.tasks import Task, build_task
from gossamer.runner.training_state import (
    LONGEST_CONFIG,
    Continuation,
    continuation_of,
    random_states,
    restore_average,
    restore_optimizer,
    restore_random_states,
    restore_scaler,
    seed_all,
    setting_of,
    settings_of,
)

if TYPE_CHECKING:
    from gossamer.export.saving import Written


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


logger = logging.getLogger("gossamer")


def tested(
    model: nn.Module,
    task: Task,
    batches: Batches,
    device: torch.device,
    display: Display,
    told: set[str],
    channels_last: bool,
) -> dict[str, float]:
    """The task's numbers. The model stays in evaluation mode; it must not be wrapped: ranks may differ in batches."""
    evaluator = task.evaluator()
    model.eval()
    skipped: list[str] = []
    notes: list[str] = []
    with torch.no_grad(), display.testing(batches.batches_per_epoch) as advance:
        for batch in batches.epoch(0):
            skipped += batch.skipped
            notes += batch.notes
            if len(batch):  # else none of its images can be read
                evaluator.update(model, batch.to(device, channels_last=channels_last))
            advance()
        metrics = evaluator.compute()
    tell_left_out(skipped, notes, "dataset.test", told)
    return metrics


def tell_left_out(skipped: list[str], notes: list[str], place: str, told: set[str]) -> None:
    """Say once how many images were not used, or used though something is wrong; all processes call this.

    `told` holds what was said before.
    """
    skipped, notes = ([word for own in gathered(words) for word in own] for words in (skipped, notes))
    for sentences, what in ((skipped, "left out"), (notes, "used as they are")):
        new = [sentence for sentence in dict.fromkeys(sentences) if f"{place}: {sentence}" not in told]
        told.update(f"{place}: {sentence}" for sentence in new)
        if new:
            images = "1 image is" if len(new) == 1 else f"{len(new)} images are"
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            logger.warning("%s: %s %s: %s%s", place, images, what, new[0], more)


class Built:
    """The parts of a run, made by `build()`."""

    sparse: ClassVar[bool] = False
    chosen: Checkpoint | None = None
    """What to test or export, whatever the config names: the model of a run that has just ended."""

    unusable: Mapping[Path, CheckpointError] = MappingProxyType({})
    """Checkpoints that this run could not go on with, and why."""
    float_weights: str | None = None
    """A warning about a file of float weights that is tested or exported although the recipe quantizes."""
    start: Start = Start()
    start_shapes: dict[str, list[int]] | None = None
    """Of all tensors of the model at the start of training, where it starts from a thinned file; else None."""

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
        self.hooks = build_hooks(self.config.hooks, loaded.trust)
        self.kind: Literal["classification", "detection"] = task_of(self.config)
        self.best: float | None = None
        self.metrics: dict[str, float] = {}
        """Of the last test."""
        self.tested_at: int | None = None
        self.saved_at: int | None = None
        self.sparsifier: Sparsifier | None = None
        self.average: AveragedModel | None = None
        self.records: Records | None = None
        self.told: set[str] = set()
        """What is wrong with images and was told already."""

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
        self._check_same_start()
        checkpoint = self.start.checkpoint
        self.setting = None if checkpoint is None else setting_of(checkpoint)
        self.continuation = None if checkpoint is None or not self.training else continuation_of(checkpoint)

    def build_data(self) -> None:
        saved = self.setting.classes if self.setting is not None else None
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
        self.model: nn.Module = build_net(self.config.net, self.num_classes, self.kind, trust=self.loaded.trust)
        self.channels_last = self._wants_channels_last()
        self._place_model()
        self.task: Task = build_task(self.config, self.model, self.num_classes, self.classes)
        self._check_channels()

    def load_ckpt(self) -> None:
        """Weights to begin with; a checkpoint that holds averaged weights gives those."""
        if self.start.weights is not None:
            left_out = self.config.saver.pretrain_except if self.training else []
            load_weights(self.model, self.start.weights, tuple(left_out), num_classes=self.num_classes)
            if is_thinned(self.start.weights):
                self.start_shapes = {name: list(value.shape) for name, value in self.model.state_dict().items()}
            if not self.training:
                emulate_as(self.model, self.start.weights)
            logger.info("weights from %s", self.start.weights)
        if self.setting is not None and self.setting.start_shapes is not None:
            self.start_shapes = self.setting.start_shapes
            shrink_to(self.model, self.start_shapes)
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
            raise MisfitError(f"{checkpoint.path}: is of another model or method: {reason[:300]}") from error
        if self.start_shapes is not None:
            self._check_layers(checkpoint)

    @torch.no_grad()
    def _check_layers(self, checkpoint: Checkpoint) -> None:
        """Raise if layers do not fit together whose shapes come from a checkpoint."""
        was_training = self.model.training
        try:
            example = as_example(self.model, self.example())
            self.model.eval()(*example if isinstance(example, tuple) else (example,))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise MisfitError(f"{checkpoint.path}: its layers do not fit together: {reason[:200]}") from error
        finally:
            self.model.train(was_training)

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
        assert self.continuation is not None
        assert self.setting is not None
        with self.fitting():
            self._restore(checkpoint, self.continuation)
        random = self.continuation.random
        if len(random) == self.place.world:
            restore_random_states(random[self.place.rank])
        else:
            logger.warning(
                "the run was saved by %d processes and goes on with %d: not to the bit", len(random), self.place.world
            )
        logger.info("going on from iteration %d of %s", self.iteration, checkpoint.path)
        if len(checkpoint.config) > LONGEST_CONFIG:
            logger.warning("the config is too long to say what has changed in it since the checkpoint")
        for change in changed_settings(self.continuation.config, settings_of(self.loaded.text, self.folder)):
            logger.warning("%s", change)
        before = self.setting.steps_per_epoch
        if before != self.steps_per_epoch:
            logger.warning(
                "an epoch has %d iterations now and had %d: the run goes on at epoch %.2f, and was at epoch %.2f",
                self.steps_per_epoch,
                before,
                self.iteration / self.steps_per_epoch,
                self.iteration / before,
            )

    @contextmanager
    def fitting(self) -> Generator[None]:
        """Where a checkpoint is applied: what does not fit is said with its file."""
        checkpoint = self.start.checkpoint
        try:
            yield
        except GossamerError as error:
            if checkpoint is None or isinstance(error, MisfitError):
                raise
            raise MisfitError(f"{checkpoint.path}: does not fit this config: {error}") from error

    def describes_another_run(self) -> bool:
        """Whether the config is of another run than the one that the checkpoint is from."""
        before = None if self.continuation is None else self.continuation.config
        return describes_another_run(before, settings_of(self.loaded.text, self.folder))

    # Behind the scenes

    def epochs(self) -> int:
        """How long to train, when that is counted in epochs."""
        if self.config.trainer.max_epoch is None:
            raise GossamerError("trainer: give max_epoch or max_iter")
        return self.config.trainer.max_epoch

    def example(self) -> torch.Tensor:
        """One image (1, C, H, W) of the data, as the model gets it."""
        data = self.test_data or self.train_data
        assert data is not None
        for index in range(len(data)):
            with suppress(ImageFileError):
                return data[index][0].unsqueeze(0).to(self.place.device)
        raise GossamerError("dataset: no image can be read")

    def _start(self) -> Start:
        if self.chosen is not None:
            return Start(checkpoint=self.chosen, source=self.chosen.path)
        if not self.training:
            return start_of_evaluation(self.config.saver, self.loaded.given, self.checkpoints)
        return start_of_training(self.config.saver, self.loaded.given, self.checkpoints, self.unusable)

    def _check_same_start(self) -> None:
        """All processes must begin at the same place: a folder that only one of them sees is not enough."""
        checkpoint = self.start.checkpoint
        own = (None if checkpoint is None else checkpoint.iteration, self.start.weights is not None)
        found = gathered(own)
        if any(other != own for other in found):
            starts = ", ".join("nothing" if at is None else f"iteration {at}" for at, _ in found)
            raise GossamerError(
                f"the processes would start from different places ({starts}); let all of them see the same "
                "saver.save_dir and the same files"
            )

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

    def _check_channels(self) -> None:
        """Raise for transforms that leave images with other channels than a model by name takes."""
        data = self.train_data if self.training else self.test_data
        first = next((part for part in self.model.modules() if isinstance(part, nn.Conv2d)), None)
        if data is None or first is None or ":" in self.config.net.type or "/" in self.config.net.type:
            return  # not of torchvision: another layer may come before that convolution
        channels = data.read_batch([0], train=True).images[0].shape[0]
        if channels != first.in_channels:
            split = "train" if self.training else "test"
            raise GossamerError(
                f"dataset.{split}.transforms: images have {channels} channels in the end, and {self.config.net.type} "
                f"takes {first.in_channels}; leave out Grayscale, or add RGB behind it"
            )

    def _rates_are_set(self) -> bool:
        if self.sparsifier is not None and self.sparsifier.sets_rates:
            logger.warning("trainer.lr_scheduler has no effect: the recipe sets the learning rate")
            return True
        return False

    def _wants_channels_last(self) -> bool:
        wanted = self.config.runtime.channels_last
        return self.place.device.type == "cuda" if wanted == "auto" else wanted

    def _place_model(self) -> None:
        self.model = self.model.to(self.place.device)
        if self.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def _restore(self, checkpoint: Checkpoint, saved: Continuation) -> None:
        """Raises `GossamerError` for what does not fit."""
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


class SparseRunner(Runner):
    """What a float run does, and the sparsity that the config describes."""

    sparse: ClassVar[bool] = True

    def epochs(self) -> int:
        """A recipe may say how long to train."""
        assert self.config.sparsity is not None
        if self.config.trainer.max_epoch is None and self.config.sparsity.recipe is not None:
            epochs = ByRecipe(self.config.sparsity).epochs
            if not epochs:
                raise GossamerError(f"{self.config.sparsity.recipe}: says no end; give trainer.max_epoch or max_iter")
            return epochs
        return super().epochs()

    def _tell_length(self, epochs: int) -> None:
        """A recipe that goes on behind the end of training is cut off there."""
        trained = self.length / self.steps_per_epoch
        if epochs > trained:
            logger.warning(
                "the recipe goes to epoch %d, and the training to epoch %g: what comes later is not done; set "
                "trainer.max_epoch=%d, or leave it out",
                epochs,
                trained,
                epochs,
            )

    def prepare_sparse_model(self) -> None:
        """The model, with what sparse training adds; torch.fx follows its network, and not its post-processing."""
        assert self.config.sparsity is not None
        saved = None if self.setting is None else self.setting.sparsity
        if not self.training and saved is None:
            self._check_quantized()
            return  # a plain file of weights, such as an exported model, needs nothing added
        length = self.length if self.training or self.setting is None else self.setting.length
        self.sparsifier = build_sparsifier(self.config.sparsity, length=length, folder=self.folder)
        image = self.example()
        networks = None
        if self.kind == "detection":
            networks = {name: network.module for name, network in self.task.networks(self.model, image).items()}
        self.model.train()
        self.model = self.sparsifier.prepare(self.model, networks, as_example(self.model, image))
        if self.start.checkpoint is not None and saved is not None:
            with self.fitting():
                self.sparsifier.reshape(self.model, saved, self.start.checkpoint.epoch)
        # Parameters that were added go where the others are.
        self._place_model()

    def _check_quantized(self) -> None:
        """Warn about float weights where the recipe quantizes: they do not compute what the run does."""
        assert self.config.sparsity is not None
        if self.config.sparsity.recipe is None or is_emulated(self.model):
            return
        if ByRecipe(self.config.sparsity).manager.quantization_modifiers:
            self.float_weights = (
                f"{self.start.source or self.start.weights}: holds float weights, and the recipe quantizes: results "
                "differ from those of the run; name the run itself, or its bitmask file"
            )
            logger.warning("%s", self.float_weights)

    def parameter_groups(self) -> Any:
        if self.sparsifier is None:
            return super().parameter_groups()
        return self.sparsifier.groups(self.model, float(self.config.trainer.optimizer.kwargs.get("weight_decay", 0.0)))

    def build_ema(self) -> None:
        """None: an average of weights under changing masks is not sparse. Reading the config has told it."""

    def sparse_post_process(self) -> None:
        """Bind the sparsity to the optimizer and the learning-rate scheduler, in the state of a resumed run."""
        if self.sparsifier is None:
            return
        if self.training:
            self._tell_length(self.sparsifier.epochs)
        steps = self.steps_per_epoch if self.training or self.setting is None else self.setting.steps_per_epoch
        with self.fitting():
            self.scaler = self.sparsifier.attach(
                self.model,
                self.optimizer,
                self.lr_scheduler,
                None if self.setting is None else self.setting.sparsity,
                scaler=self.scaler,
                steps_per_epoch=steps,
                accumulation_steps=self.config.trainer.accumulate,
                example_inputs=as_example(self.model, self.example()),
            )
        if not self.training and self.start.checkpoint is not None:
            self.sparsifier.begin(self.model, max(self.start.checkpoint.iteration - 1, 0))
        self._tell_layers()

    def _tell_layers(self) -> None:
        assert self.sparsifier is not None
        dense = self.sparsifier.left_dense()
        logger.info("%s: %d weights stay dense", self.sparsifier.method, len(dense))
        for name, reason in dense.items():
            logger.info("'%s' stays dense: %s", name, reason)
