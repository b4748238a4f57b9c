"""A callback for the Trainer of Hugging Face Transformers.

Says when a recipe begins and ends there, how many optimizer steps an epoch
has, and where in the Trainer's checkpoints its state is. What a recipe does
is the manager's.
"""

from __future__ import annotations

import contextlib
import logging
import math
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
from gossamer.integrations.adapter import Adapter, batches_in, missing
from gossamer.integrations.state_file import NAME, read_state, write_state
from gossamer.modifiers.base import to_step

try:
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise missing("Transformers", "transformers") from error

logger = logging.getLogger("gossamer")

_KEY = "gossamer"
"""Where the Trainer's own state tells which file belongs to a checkpoint."""


class SparsityCallback(Adapter, TrainerCallback):
    """Trains with a recipe: `Trainer(…, callbacks=[SparsityCallback("recipe.yaml")])`.

    Each of the Trainer's checkpoints gets a file with the recipe's state, and `train(resume_from_checkpoint=…)` goes
    on from it. A checkpoint that lies elsewhere than in `output_dir` has to be named here, too: `resume_from`.
    """

    def __init__(self, *args: Any, resume_from: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resume_from = resume_from
        self._trainer: weakref.ref[Any] | None = None
        self._mark = ""
        self._pruned_by: int | None = None
        self._teaching: RemovableHandle | None = None

    def join(self, trainer: Any) -> None:
        """Add the callback to a trainer in front of those that report, so that TensorBoard and others get `sparsity`.

        With `Trainer(callbacks=[…])` it stands behind them, and only the console and `log_history` show it.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        self._trainer = weakref.ref(trainer)
        self.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if isinstance(model := kwargs.get("model"), nn.Module):
            self._cut_on_load(model, lambda: self._candidates(args), kwargs.get("optimizer"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check(args)
        self._loaded()
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
        end = _pruned_by(manager, steps)
        self._pruned_by = end if manager.step < end else None
        if manager.distillation_modifiers:
            self._teaching = model.register_forward_hook(
                _Teaching(manager, args.gradient_accumulation_steps), with_kwargs=True
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._manager is None:
            return
        # Every checkpoint that follows at this step says in its JSON which file is its own.
        entry = {"args": {}, "attributes": {"mark": self._marked()}}
        cast(dict[str, Any], state.stateful_callbacks)[_KEY] = entry
        if self._pruned_by is not None and self._manager.step >= self._pruned_by:
            self._pruned_by = None
            if args.load_best_model_at_end and state.best_metric is not None:
                logger.warning("pruning is over: the best model is looked for among the checkpoints from now on")
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        held = self._state() if self._manager is not None else None
        if held is not None and args.should_save:
            write_state(_checkpoint(args, state), held, self._marked())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if self._manager is None or "loss" not in logs:
            return
        shown = self.figures()
        if self._rates is not None and self._rates.used is not None:
            shown["learning_rate"] = self._rates.used  # the Trainer shows its scheduler's
        logs.update(shown)
        if state.log_history:
            state.log_history[-1].update(shown)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._manager is not None and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._return_to(Path(state.best_model_checkpoint))
        self._finish()

    def _return_to(self, best: Path) -> None:
        """The model has the weights of an earlier checkpoint now; masks that came later are not theirs."""
        if (best / NAME).exists():
            self._load(read_state(best)[0])
        else:
            logger.warning("%s: no state of the recipe; the best model gets the masks of the last step", best)

    def _release(self, warn: bool = False) -> None:
        if self._teaching is not None:
            self._teaching.remove()
            self._teaching = None
        super()._release(warn)

    def _marked(self) -> str:
        return f"{self._mark}:{self.manager.step}"

    def _wrapped(self, args: TrainingArguments, model: nn.Module) -> nn.Module:
        """The model inside what several processes share it with, where something has to be averaged over them."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            return cast(nn.Module, trainer.model_wrapped)
        if args.world_size > 1 and any(
            modifier.family in ("quantization", "distillation") for modifier in self.recipe.modifiers
        ):
            raise GossamerError(
                "with several processes, quantization and distillation have to know what the Trainer wrapped the model "
                "in: add the callback by callback.join(trainer) in place of Trainer(callbacks=…)"
            )
        return model

    def _candidates(self, args: TrainingArguments) -> Iterator[dict[str, Any]]:
        """The recipe's states in the checkpoints that may be loaded; the Trainer tells which one afterwards."""
        found = sorted(Path(cast(str, args.output_dir)).rglob(f"checkpoint-*/{NAME}"))
        named = [Path(place) / NAME for place in (self.resume_from, args.resume_from_checkpoint) if place is not None]
        for path in [*(path for path in named if path.exists()), *found]:
            with contextlib.suppress(GossamerError):
                yield read_state(path.parent)[0]

    def _saved(self, args: TrainingArguments, state: TrainerState) -> tuple[dict[str, Any] | None, str]:
        """State and mark to go on with; a new mark without a state."""
        entry = cast(dict[str, Any], state.stateful_callbacks).get(_KEY)
        if entry is None or not state.global_step:
            return None, uuid.uuid4().hex
        mark = str(entry["attributes"]["mark"])
        places = [self.resume_from, args.resume_from_checkpoint, _checkpoint(args, state)]
        for place in places:
            if place is not None and (Path(place) / NAME).exists():
                saved, found = read_state(Path(place))
                if found == mark:
                    return saved, mark.rpartition(":")[0]
        raise GossamerError(
            f"the training goes on from a checkpoint at step {state.global_step}, and the recipe's state of that "
            f"checkpoint is not in {_checkpoint(args, state)}; name its folder: SparsityCallback(…, resume_from=FOLDER)"
        )


class _Teaching:
    """Adds the teacher's part to the loss that a model computes inside its `forward`."""

    def __init__(self, manager: Manager, accumulation_steps: int) -> None:
        self._manager = manager
        self._accumulation_steps = accumulation_steps

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not module.training or not isinstance(outputs, MutableMapping):
            return None
        named = cast(MutableMapping[str, Any], outputs)
        if (loss := named.get("loss")) is None:
            return None
        # A loss over all tokens of a step has its share already; any other the Trainer divides afterwards.
        share = 1 if kwargs.get("num_items_in_batch") is not None else self._accumulation_steps
        inputs = kwargs if kwargs else args
        named["loss"] = self._manager.loss(loss / share, outputs, inputs) * share
        return named


def _check(args: TrainingArguments) -> None:
    if args.deepspeed is not None:
        raise GossamerError(
            "under DeepSpeed the optimizer steps where torch's hooks do not see it, so a recipe cannot drive it; "
            "use DDP or FSDP"
        )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer puts the checkpoint of this step."""
    folder = Path(cast(str, args.output_dir))
    return (folder / state.trial_name if state.trial_name else folder) / f"checkpoint-{state.global_step}"


def _pruned_by(manager: Manager, steps_per_epoch: float) -> int:
    """The step from which on the model is as sparse as the recipe says."""
    ends = (max(modifier.start_epoch, modifier.end_epoch) for modifier in manager.pruning_modifiers)
    return max((to_step(epoch, steps_per_epoch) for epoch in ends if math.isfinite(epoch)), default=0)
