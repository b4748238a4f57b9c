"""A callback for the Trainer of Hugging Face Transformers: when a recipe starts and ends, and where its state goes."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import weakref
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.utils.hooks import RemovableHandle

from gossamer.engine import Manager
from gossamer.errors import GossamerError
from gossamer.integrations.adapter import STATE_FILE, Adapter, batches_in, last_step, missing, read_state, write_state

try:
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise missing("Transformers", "transformers") from error

logger = logging.getLogger("gossamer")

_KEY = "gossamer"
"""The key in the Trainer's own state that ties a state file to its checkpoint."""


class SparsityCallback(Adapter, TrainerCallback):
    """Trains with a recipe: `Trainer(…, callbacks=[SparsityCallback("recipe.yaml")])`.

    Each of the Trainer's checkpoints gets a file with the recipe's state, from which
    `train(resume_from_checkpoint=…)` resumes. Pass a checkpoint outside of `output_dir` here too, as `resume_from`.
    """

    def __init__(self, *args: Any, resume_from: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resume_from = resume_from
        self._trainer: weakref.ref[Any] | None = None
        self._mark = ""
        self._pruning_end: int | None = None
        self._distillation: RemovableHandle | None = None

    def join(self, trainer: Any) -> None:
        """Add the callback to a trainer before its reporting callbacks, so that TensorBoard and others get `sparsity`.

        `Trainer(callbacks=[…])` adds it after them: then only the console and `log_history` show it.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        self._trainer = weakref.ref(trainer)
        self.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if isinstance(model := kwargs.get("model"), nn.Module):
            self._thin_on_load(model, lambda: self._candidate_states(args), kwargs.get("optimizer"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.deepspeed is not None:
            raise GossamerError("DeepSpeed does not run the step hooks of torch, which a recipe needs; use DDP")
        self._remove_load_hook()
        optimizer, model, loader = kwargs["optimizer"], kwargs["model"], kwargs["train_dataloader"]
        steps = self._steps(batches_in(loader), args.gradient_accumulation_steps)
        saved, self._mark = self._saved(args, state)
        manager = self._attach(
            self._wrapped(args, model),
            optimizer,
            steps_per_epoch=steps,
            total_steps=state.max_steps,
            state=saved,
            steps_done=state.global_step,
            accumulation_steps=args.gradient_accumulation_steps,
            scaler=getattr(optimizer, "scaler", None),
            scheduler=kwargs.get("lr_scheduler"),
        )
        end = last_step(manager.pruning_modifiers, steps)
        self._pruning_end = end if manager.step < end else None
        if manager.distillation_modifiers:
            self._distillation = model.register_forward_hook(
                _DistillationLoss(manager, args.gradient_accumulation_steps), with_kwargs=True
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._manager is None:
            return
        # Checkpoints at this step hold in their JSON the mark of their state file.
        entry = {"args": {}, "attributes": {"mark": self._step_mark()}}
        cast(dict[str, Any], state.stateful_callbacks)[_KEY] = entry
        if self._pruning_end is not None and self._manager.step >= self._pruning_end:
            self._pruning_end = None
            if args.load_best_model_at_end and state.best_metric is not None:
                logger.warning("Pruning is complete: the best model is selected from later checkpoints")
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        saved = self._state() if self._manager is not None else None
        if saved is not None and args.should_save:
            write_state(_checkpoint(args, state), saved, self._step_mark())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if self._manager is None or "loss" not in logs:
            return
        shown = self.figures()
        if self._rates is not None and self._rates.used is not None:
            shown["learning_rate"] = self._rates.used  # the Trainer logs that of its scheduler
        logs.update(shown)
        if state.log_history:
            state.log_history[-1].update(shown)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._manager is not None and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best(Path(state.best_model_checkpoint))
        self._finish()

    def _load_best(self, best: Path) -> None:
        """Load the state of the best checkpoint, whose weights the model has now: later masks do not fit them."""
        if (best / STATE_FILE).exists():
            self._load(read_state(best)[0])
        else:
            logger.warning("%s: no recipe state; the best model gets the masks of the last step", best)

    def _release(self, warn: bool = False) -> None:
        if self._distillation is not None:
            self._distillation.remove()
            self._distillation = None
        super()._release(warn)

    def _step_mark(self) -> str:
        return f"{self._mark}:{self.manager.step}"

    def _wrapped(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        """The model in its distributed wrapper, which quantization and distillation need to average over ranks."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            return cast(nn.Module, trainer.model_wrapped)
        if args.world_size > 1 and any(
            modifier.family in ("quantization", "distillation") for modifier in self.recipe.modifiers
        ):
            raise GossamerError(
                "distributed quantization and distillation need the wrapped model: add the callback with "
                "callback.join(trainer) instead of Trainer(callbacks=…)"
            )
        return model

    def _candidate_states(self, args: TrainingArguments) -> Iterator[dict[str, Any]]:
        """The recipe's states in all checkpoints that may be loaded: the Trainer reveals later which one it is."""
        saved = sorted(Path(cast(str, args.output_dir)).rglob(f"checkpoint-*/{STATE_FILE}"))
        folders = [folder for folder in (self.resume_from, args.resume_from_checkpoint) if folder is not None]
        named = [Path(folder) / STATE_FILE for folder in folders]
        for path in [*(path for path in named if path.exists()), *saved]:
            with contextlib.suppress(GossamerError):
                yield read_state(path.parent)[0]

    def _saved(self, args: TrainingArguments, state: TrainerState) -> tuple[dict[str, Any] | None, str]:
        """The state to resume from and its mark; None and a new mark without one."""
        entry = cast(dict[str, Any], state.stateful_callbacks).get(_KEY)
        if entry is None or not state.global_step:
            return None, uuid.uuid4().hex
        mark = str(entry["attributes"]["mark"])
        for folder in (self.resume_from, args.resume_from_checkpoint, _checkpoint(args, state)):
            if folder is not None and (Path(folder) / STATE_FILE).exists():
                saved, saved_mark = read_state(Path(folder))
                if saved_mark == mark:
                    return saved, mark.rpartition(":")[0]
        raise GossamerError(
            f"training resumes from a checkpoint at step {state.global_step}, and the recipe's state of that "
            f"checkpoint is not in {_checkpoint(args, state)}; pass its folder: SparsityCallback(…, resume_from=FOLDER)"
        )


class _DistillationLoss:
    """Adds the distillation loss to the loss that a model computes in its `forward`."""

    def __init__(self, manager: Manager, accumulation_steps: int) -> None:
        self._manager = manager
        self._accumulation_steps = accumulation_steps

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not module.training or not isinstance(outputs, MutableMapping):
            return None
        named = cast(MutableMapping[str, Any], outputs)
        if (loss := named.get("loss")) is None:
            return None
        # A loss over all tokens of a step is already divided; any other the Trainer divides afterwards.
        share = 1 if kwargs.get("num_items_in_batch") is not None else self._accumulation_steps
        inputs = kwargs if kwargs else args
        named["loss"] = self._manager.loss(loss / share, outputs, inputs) * share
        return named


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of this step's checkpoint."""
    folder = Path(cast(str, args.output_dir))
    return (folder / state.trial_name if state.trial_name else folder) / f"checkpoint-{state.global_step}"
