"""A run that makes its model sparse: by an MSBench config, or by a recipe."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from gossamer.errors import GossamerError
from gossamer.quantization import is_emulated
from gossamer.runner.networks import as_example
from gossamer.runner.runner import Runner
from gossamer.runner.sparsity import ByRecipe, build_sparsifier

logger = logging.getLogger("gossamer")


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
