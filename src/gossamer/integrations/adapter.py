"""Base class of the adapters: a manager that is attached, saved and finalized with the training of a library.

Each library's module determines when these things happen, and how many optimizer steps an epoch has. `write_state` and
`read_state` keep the recipe's state as a file of `torch.save` in the checkpoint folder of a library; reading it never
runs code. A mark in the file ties it to its checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gossamer.engine import Manager
from gossamer.engine.distributed_state import gathered_state
from gossamer.engine.learning_rate import RecipeRates
from gossamer.engine.removals import apply_saved_removals, thinned_shapes
from gossamer.engine.run import MetricLogger
from gossamer.engine.state import RunState
from gossamer.errors import GossamerError
from gossamer.io import atomic_write, load_torch
from gossamer.modifiers.base import Modifier, to_step
from gossamer.recipe import Recipe, load

logger = logging.getLogger("gossamer")
STATE_FILE = "gossamer.pt"
_FORMAT = 1


class MissingLibraryError(GossamerError, ImportError):
    """The library of an adapter is not installed."""


def missing(library: str, extra: str) -> MissingLibraryError:
    """The error for a library that cannot be imported."""
    module = f"gossamer.integrations.{extra}"
    return MissingLibraryError(f"{module} needs {library}; install it with: pip install 'gossamer[{extra}]'")


class Adapter:
    """Runs a recipe in trainings of a library.

    `recipe` is a path, the text, an open file, `builtin:NAME` or a `Recipe`; `variables` override those of the recipe.
    `steps_per_epoch` counts optimizer steps, and is needed only where the library does not know them. The other
    arguments are those of `Manager.modify`.
    """

    def __init__(
        self,
        recipe: Recipe | str | os.PathLike[str] | IO[str],
        *,
        variables: Mapping[str, Any] | str | None = None,
        steps_per_epoch: float | None = None,
        distillation_teacher: nn.Module | str | bool | None = None,
        grad_sampler: object = None,
        calibration_data: Iterable[Any] | None = None,
        example_inputs: Any = None,
    ) -> None:
        if isinstance(recipe, Recipe) and variables is not None:
            raise GossamerError("variables: a Recipe is already evaluated; use gossamer.load(…, variables=…)")
        self.recipe = recipe if isinstance(recipe, Recipe) else load(recipe, variables=variables)
        self.steps_per_epoch = steps_per_epoch
        self._arguments: dict[str, Any] = {
            "distillation_teacher": distillation_teacher,
            "grad_sampler": grad_sampler,
            "calibration_data": calibration_data,
            "example_inputs": example_inputs,
        }
        self._manager: Manager | None = None
        self._rates: RecipeRates | None = None
        self._load_hook: RemovableHandle | None = None
        self._final: dict[str, Any] | None = None
        """The state at the end of the last training."""

    @property
    def manager(self) -> Manager:
        """The manager, during training; raises at any other time."""
        if self._manager is None:
            raise GossamerError("the recipe is attached only during training")
        return self._manager

    def figures(self) -> dict[str, float]:
        """Metrics to log: `sparsity`, the share of zeros in all weights that the recipe has pruned."""
        if self._manager is None:
            return {}
        sizes = {name: mask.numel() for name, mask in self._manager.masks().items()}
        zeros = sum(share * sizes[name] for name, share in self._manager.sparsity().items())
        return {"sparsity": zeros / max(sum(sizes.values()), 1)}

    # For the library's module

    def _attach(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        steps_per_epoch: float,
        total_steps: float | None = None,
        state: Mapping[str, Any] | None = None,
        steps_done: int = 0,
        accumulation_steps: int = 1,
        scaler: Any = None,
        scheduler: Any = None,
        loggers: Sequence[MetricLogger] = (),
    ) -> Manager:
        """Start the recipe, or resume it from `state`; without a state, it starts in the middle after `steps_done`."""
        if self._manager is not None and state is not None:
            # A training was interrupted, and its model already has the weights of `state`. Releasing it applies masks,
            # which must be those that belong to the weights.
            self._manager.load_state_dict(state)
        self._release()
        inner = _torch_optimizer(optimizer)
        manager = Manager(self.recipe)
        if state is not None:
            manager.load_state_dict(state)
        elif steps_done:
            logger.warning(
                "Training resumes at step %d without the recipe's state: the recipe starts at epoch %.4g, "
                "with new masks",
                steps_done,
                steps_done / steps_per_epoch,
            )
        # The scaler that `modify` returns would count the steps that it skips. The library keeps its own, so that the
        # clock counts performed steps; the loss scale is read from the library's.
        manager.modify(
            model,
            inner,
            steps_per_epoch,
            epoch=steps_done / steps_per_epoch if steps_done else None,
            scaler=scaler,
            accumulation_steps=accumulation_steps,
            loggers=loggers,
            **self._arguments,
        )
        self._manager, self._rates, self._final = manager, manager.hold_rates(), None
        self._warn_of_conflicts(total_steps, steps_per_epoch, scheduler)
        return manager

    def _thin_on_load(
        self, model: nn.Module, states: Callable[[], Iterable[Mapping[str, Any]]], optimizer: Any = None
    ) -> None:
        """Shrink a new model when it loads the weights of a run that has removed filters.

        `states` returns the states of the checkpoints that may be loaded; it is called when weights are loaded. The
        shapes identify the right one: which filters were removed is in the weights, the rest is loaded with the state.
        """
        self._remove_load_hook()
        if not any(modifier.removal_epochs for modifier in self.recipe.modifiers):
            return

        def shrink(module: nn.Module, weights: Mapping[str, Any], *_: Any) -> None:
            for state in map(RunState.parse, states()):
                shapes = thinned_shapes(state)
                if shapes and all(name in weights and weights[name].shape == size for name, size in shapes.items()):
                    apply_saved_removals(module, state, optimizer)
                    return

        self._load_hook = model.register_load_state_dict_pre_hook(shrink)

    def _remove_load_hook(self) -> None:
        if self._load_hook is not None:
            self._load_hook.remove()
            self._load_hook = None

    def _warn_of_conflicts(self, total_steps: float | None, steps_per_epoch: float, scheduler: Any) -> None:
        """Warn if training is shorter than the recipe, or if a scheduler competes with the recipe."""
        end = last_step(self.recipe.modifiers, steps_per_epoch)
        if total_steps is not None and total_steps < end:
            logger.warning(
                "Training ends after %.4g epochs and the recipe after %.4g: the recipe will not complete",
                total_steps / steps_per_epoch,
                end / steps_per_epoch,
            )
        rates = self.manager.learning_rate_modifiers
        if rates and scheduler is not None:
            logger.warning(
                "The recipe sets the learning rate from epoch %.4g on: %s has no effect from there",
                max(min(modifier.start_epoch for modifier in rates), 0.0),
                type(scheduler).__name__,
            )

    def _state(self) -> dict[str, Any] | None:
        """The state to save in a checkpoint: of the current training, or of the last one.

        Every rank calls this: what is split over ranks is gathered, so that any number of ranks can resume.
        """
        if self._manager is None:
            return self._final
        if self._rates is not None:
            self._rates.restore()  # the state holds learning rates, which the library's scheduler may have changed
        return gathered_state(self._manager.state_dict())

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load another state into the current training."""
        self.manager.load_state_dict(state)

    def _finish(self) -> None:
        """End of training: finalize the manager, and keep the state to be saved."""
        if self._manager is None:
            return
        state = self._state()
        self._release(warn=True)
        self._final = state

    def _release(self, warn: bool = False) -> None:
        """Detach from the model and the optimizer; `warn` if the recipe did not complete."""
        if self._manager is not None:
            self._manager.finalize(warn=warn)
        self._manager = self._rates = None

    def _steps(self, batches: float | None, accumulation_steps: int) -> float:
        """Optimizer steps per epoch: the user's number, or that of the batches."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        if batches is None or not math.isfinite(batches):
            raise GossamerError(
                "the training dataloader has no length; pass the optimizer steps per epoch, steps_per_epoch=…"
            )
        return max(math.ceil(batches / accumulation_steps), 1)


def batches_in(loader: Any) -> int | None:
    """The number of batches of a dataloader, if it is known."""
    try:
        return len(loader) or None
    except TypeError:  # of an iterable dataset
        return None


def _torch_optimizer(optimizer: Any) -> Any:
    """The torch optimizer, whose hooks run in each step, inside Accelerate's wrapper."""
    while "AcceleratedOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GossamerError(
            f"{type(optimizer).__name__} does not run the step hooks of torch, which a recipe needs; "
            "use an optimizer of torch, without DeepSpeed"
        )
    return optimizer


def last_step(modifiers: Iterable[Modifier], steps_per_epoch: float) -> int:
    """The step at which the modifiers are complete."""
    ends = (max(modifier.start_epoch, modifier.end_epoch) for modifier in modifiers)
    return max((to_step(epoch, steps_per_epoch) for epoch in ends), default=0)


def write_state(folder: Path, state: Mapping[str, Any], mark: str = "") -> Path:
    """Write the file atomically."""
    path = folder / STATE_FILE
    try:
        with atomic_write(path, follow=True) as scratch:
            torch.save({"format": _FORMAT, "mark": mark, "state": dict(state)}, scratch)
    except OSError as error:
        raise GossamerError(f"{path}: the recipe's state cannot be written: {error.strerror or error}") from error
    return path


def read_state(folder: Path) -> tuple[dict[str, Any], str]:
    """The state and its mark."""
    path = folder / STATE_FILE
    try:
        content = load_torch(path)
    except FileNotFoundError:
        raise GossamerError(f"{path}: the checkpoint has no recipe state; it was saved without the recipe") from None
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise GossamerError(f"{path}: not a recipe state, or damaged; use another checkpoint") from error
    entries = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    version, mark, state = entries.get("format"), entries.get("mark"), entries.get("state")
    if type(version) is int and version > _FORMAT:
        raise GossamerError(f"{path}: has format {version}; this version of Gossamer reads up to {_FORMAT}")
    if type(version) is not int or version != _FORMAT or type(mark) is not str or type(state) is not dict:
        raise GossamerError(f"{path}: not a recipe state; use another checkpoint")
    return cast(dict[str, Any], state), mark
