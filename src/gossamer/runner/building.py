"""Building a run from its config, step by step; each step is a method that a subclass may replace.

Knows the order of things; the things themselves are in the modules beside this
one, and what is done with them is in `runner.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gossamer.errors import GossamerError
from gossamer.export.weights.reading import emulate_as, is_thinned
from gossamer.model import unwrap
from gossamer.model.thin.cuts import shrink_to
from gossamer.runner.checkpoint_file import MisfitError
from gossamer.runner.checkpoints import Checkpoint, CheckpointError, Checkpoints
from gossamer.runner.config import Loaded, task_of
from gossamer.runner.config.schema import Source
from gossamer.runner.data import Batches, ImageData
from gossamer.runner.data.decoding import ImageFileError
from gossamer.runner.display import Display
from gossamer.runner.hooks import build_hooks
from gossamer.runner.models import build_net
from gossamer.runner.networks import as_example
from gossamer.runner.optimizer_state import restore_average, restore_optimizer, restore_scaler
from gossamer.runner.processes import Place, gathered, same_everywhere, send_state
from gossamer.runner.random_states import restore_random_states, seed_all
from gossamer.runner.rates import WarmUp, build_lr_scheduler, build_optimizer
from gossamer.runner.records import Records
from gossamer.runner.run_data import Purpose, read_run_data
from gossamer.runner.run_state import LONGEST_CONFIG, Continuation, continuation_of, setting_of, settings_of
from gossamer.runner.sparsity import Sparsifier
from gossamer.runner.starting import (
    Start,
    changed_settings,
    check_fits,
    describes_another_run,
    load_weights,
    start_of_evaluation,
    start_of_training,
)
from gossamer.runner.tasks import Task, build_task

logger = logging.getLogger("gossamer")


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
