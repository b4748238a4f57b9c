"""Recipes in a training loop of the user with Hugging Face Accelerate, whose states hold the recipe's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gossamer.engine import Manager
from gossamer.errors import GossamerError
from gossamer.integrations.adapter import Adapter, batches_in, missing, read_state, write_state

try:
    from accelerate import Accelerator, DistributedType
except ImportError as error:
    raise missing("Accelerate", "accelerate") from error


class Sparsity(Adapter):
    """Trains with a recipe: `attach` after `accelerator.prepare`, `finalize` after the loop."""

    _accelerator: Accelerator | None = None
    _handles: tuple[RemovableHandle, ...] = ()

    def attach(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        dataloader: Any = None,
        *,
        lr_scheduler: Any = None,
        epochs: float | None = None,
    ) -> Manager:
        """Start the recipe, which the optimizer's steps drive, and save its state with the accelerator's.

        Pass what `accelerator.prepare` returned. The dataloader determines the steps per epoch, unless
        `steps_per_epoch` is given. `lr_scheduler` and `epochs`, the length of the training, are used to warn about
        conflicts.
        """
        _check(accelerator)
        steps = self._steps_of(accelerator, dataloader)
        manager = self._attach(
            model,
            optimizer,
            steps_per_epoch=steps,
            total_steps=None if epochs is None else epochs * steps,
            accumulation_steps=accelerator.gradient_accumulation_steps,
            scaler=accelerator.scaler,
            scheduler=getattr(lr_scheduler, "scheduler", lr_scheduler),
            loggers=[lambda tag, value, step: accelerator.log({tag: value}, step=step)],
        )
        for handle in self._handles:
            handle.remove()
        self._accelerator = accelerator
        self._handles = (
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._restore),
        )
        return manager

    def finalize(self) -> None:
        """Finalize the recipe and detach from the optimizer; states saved later hold the recipe's last state."""
        self._finish()

    def _steps_of(self, accelerator: Accelerator, dataloader: Any) -> float:
        if self.steps_per_epoch is None and dataloader is None:
            raise GossamerError("attach: pass the training dataloader, or Sparsity(…, steps_per_epoch=…)")
        accumulated = accelerator.gradient_accumulation_steps
        batches = batches_in(dataloader)
        if self.steps_per_epoch is None and batches and not accelerator.gradient_state.sync_with_dataloader:
            return batches / accumulated  # the last batches of an epoch count for a step of the next
        return self._steps(batches, accumulated)

    def _save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        state = self._state()
        if state is not None and self._accelerator is not None and self._accelerator.is_main_process:
            write_state(Path(folder), state)

    def _restore(self, models: list[nn.Module], folder: str) -> None:
        if self._manager is not None:
            self._load(read_state(Path(folder))[0])


def _check(accelerator: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise GossamerError(f"attach: expected the accelerator first, found {type(accelerator).__name__}")
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise GossamerError(
            f"attach: {accelerator.distributed_type.value} does not run the step hooks of torch, which a recipe needs; "
            "use DDP, or split the model with fully_shard"
        )
