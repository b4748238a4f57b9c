"""A callback for Lightning's Trainer: when a recipe starts and ends, and where its state and metrics go."""

from __future__ import annotations

from typing import Any

from torch import nn

from gossamer.engine.state import RunState
from gossamer.errors import GossamerError
from gossamer.integrations.adapter import Adapter, missing

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
except ImportError as error:
    raise missing("Lightning", "lightning") from error


class SparsityCallback(Adapter, Callback):
    """Trains with a recipe: `Trainer(callbacks=[SparsityCallback("recipe.yaml")])`.

    Names in the recipe are those of the LightningModule's parameters. Lightning's checkpoints hold the recipe's
    state, from which `fit(ckpt_path=…)` resumes. The share of zeros is logged as `sparsity` after each epoch.
    """

    _pending: dict[str, Any] | None = None
    _steps_at_end = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # A checkpoint is loaded after this. One that was loaded for a test is not one to resume from.
        self._pending = None
        self._thin_on_load(pl_module, lambda: self._states_in_checkpoint(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_load_hook()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_load_hook()
        optimizers = trainer.optimizers
        if len(optimizers) != 1:
            raise GossamerError(
                f"{type(pl_module).__name__} has {len(optimizers)} optimizers, and a recipe drives one; "
                "use a gossamer.Manager for each of them instead"
            )
        state, self._pending = self._pending, None
        if state is None and self._final is not None and trainer.global_step == self._steps_at_end:
            state = self._final  # the same training with more epochs
        steps = self._steps_of(trainer, pl_module)
        automatic = pl_module.automatic_optimization
        wrapped = trainer.strategy.model  # the module in its distributed wrapper, such as DDP
        self._attach(
            wrapped if isinstance(wrapped, nn.Module) else pl_module,
            optimizers[0],
            steps_per_epoch=steps,
            total_steps=_total(trainer, steps),
            state=state,
            steps_done=trainer.global_step,
            accumulation_steps=trainer.accumulate_grad_batches if automatic else 1,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            scheduler=next((config.scheduler for config in trainer.lr_scheduler_configs), None),
            loggers=[_to_loggers(trainer)],
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        # After the scheduler's step, so that monitors show the recipe's learning rate.
        if self._rates is not None:
            self._rates.restore()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in self.figures().items():
            pl_module.log(name, value, sync_dist=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in on_train_end, where an averaging callback copies its weights into the model.
        self._steps_at_end = trainer.global_step
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._manager is not None:
            self._steps_at_end, state = trainer.global_step, self._state()
            self._release()
            self._final = state

    def state_dict(self) -> dict[str, Any]:
        state = self._state()
        return {} if state is None else {"recipe": self.recipe.text, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict.get("state")
        if state is not None:
            RunState.parse(state)
        self._pending = state

    def _states_in_checkpoint(self, trainer: Trainer) -> list[dict[str, Any]]:
        """The recipe's state in the checkpoint that Lightning loads; callbacks receive it only after the weights."""
        connector = getattr(trainer, "_checkpoint_connector", None)
        checkpoint: dict[str, Any] = getattr(connector, "_loaded_checkpoint", {})
        state = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("state")
        return [] if state is None else [state]

    def _steps_of(self, trainer: Trainer, module: LightningModule) -> float:
        if self.steps_per_epoch is None:
            name = type(module).__name__
            if not module.automatic_optimization:
                raise GossamerError(
                    f"{name} steps its optimizer itself (automatic_optimization = False): "
                    "pass the optimizer steps per epoch, SparsityCallback(…, steps_per_epoch=…)"
                )
            for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
                if isinstance(callback, GradientAccumulationScheduler) and len(set(callback.scheduling.values())) > 1:
                    raise GossamerError(
                        "GradientAccumulationScheduler changes the number of optimizer steps per epoch, in which a "
                        "recipe counts time; pass it, SparsityCallback(…, steps_per_epoch=…)"
                    )
        return self._steps(trainer.num_training_batches, trainer.accumulate_grad_batches)


def _total(trainer: Trainer, steps_per_epoch: float) -> float | None:
    """Optimizer steps until the end; None if Lightning has no limit."""
    limits = [float(trainer.max_steps)] if trainer.max_steps != -1 else []
    if trainer.max_epochs is not None and trainer.max_epochs != -1:
        limits.append(trainer.max_epochs * steps_per_epoch)
    return min(limits, default=None)


def _to_loggers(trainer: Trainer) -> Any:
    def log(tag: str, value: float, step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({tag: value}, step)

    return log
