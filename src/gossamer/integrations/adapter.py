"""What the adapters share: the constructor, and a manager that is attached, saved and let go with a training.

Knows the manager and its arguments, and no library; each library's module
says when these things happen there and what the numbers are.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gossamer.engine import Manager
from gossamer.engine.learning_rate import RecipeRates
from gossamer.engine.run import Logger
from gossamer.engine.state import RunState
from gossamer.engine.thinning import cut_as, thinned_shapes
from gossamer.errors import GossamerError
from gossamer.modifiers.base import to_step
from gossamer.recipe import Recipe, load

logger = logging.getLogger("gossamer")


class MissingLibraryError(GossamerError, ImportError):
    """The library that an adapter is for is not installed."""


def missing(library: str, extra: str) -> MissingLibraryError:
    """The error for a library that cannot be imported."""
    where = f"gossamer.integrations.{extra}"
    return MissingLibraryError(f"{where} needs {library}; install it with: pip install 'gossamer[{extra}]'")


class Adapter:
    """A recipe for trainings of a library.

    `recipe` is a path, the text, an open file, `builtin:NAME` or a `Recipe`; `variables` replace those of the recipe.
    `steps_per_epoch` counts optimizer steps, and is needed only where the library cannot tell. The others are those of
    `Manager.modify`.
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
            raise GossamerError("variables: a Recipe has its values; give them to gossamer.load(…, variables=…)")
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
        self._loading: RemovableHandle | None = None
        self._final: dict[str, Any] | None = None
        """The state at the end of the last training."""

    @property
    def manager(self) -> Manager:
        """The manager of the training that goes on; an error at any other time."""
        if self._manager is None:
            raise GossamerError("the recipe is attached only while a training goes on, and none does now")
        return self._manager

    def figures(self) -> dict[str, float]:
        """What a logger may show now: `sparsity`, the share of zeros in all weights that the recipe has pruned."""
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
        loggers: Sequence[Logger] = (),
    ) -> Manager:
        """Begin, or go on from `state`; without one, a training that has made steps is entered in the middle."""
        if self._manager is not None and state is not None:
            # A training was broken off, and its model has the weights of `state` already: letting go of it applies
            # masks, and these have to be the ones that belong to the weights.
            self._manager.load_state_dict(state)
        self._release()
        inner = _plain(optimizer)
        manager = Manager(self.recipe)
        if state is not None:
            manager.load_state_dict(state)
        elif steps_done:
            logger.warning(
                "the training goes on at step %d, without a state of the recipe: it is entered at epoch %.4g, "
                "and masks are made anew",
                steps_done,
                steps_done / steps_per_epoch,
            )
        # Before the manager's own hooks: a step begins with the recipe's rates, whatever a scheduler wrote.
        rates = RecipeRates(manager, inner, steps_per_epoch)
        # The scaler that comes back would count the steps that it skips. It is not put in the library's place, so
        # that the clock shows performed steps; the loss scale is read from the library's own.
        try:
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
        except BaseException:
            rates.remove()
            raise
        rates.begin()
        self._manager, self._rates, self._final = manager, rates, None
        self._tell(total_steps, steps_per_epoch, scheduler)
        return manager

    def _cut_on_load(
        self, model: nn.Module, states: Callable[[], Iterable[Mapping[str, Any]]], optimizer: Any = None
    ) -> None:
        """Have a model that is built anew cut before it gets weights of a run that had removed filters.

        `states` are asked when weights are loaded: those of checkpoints that may be the one. That the shapes are the
        right ones is enough: which filters went is in the weights, and the rest comes with the state itself.
        """
        self._loaded()
        if not any(modifier.removal_epochs for modifier in self.recipe.modifiers):
            return

        def cut(module: nn.Module, weights: Mapping[str, Any], *_: Any) -> None:
            for state in map(RunState.parse, states()):
                shapes = thinned_shapes(state)
                if shapes and all(name in weights and weights[name].shape == size for name, size in shapes.items()):
                    cut_as(module, state, optimizer)
                    return

        self._loading = model.register_load_state_dict_pre_hook(cut)

    def _loaded(self) -> None:
        """Whatever was to be loaded has been."""
        if self._loading is not None:
            self._loading.remove()
            self._loading = None

    def _tell(self, total_steps: float | None, steps_per_epoch: float, scheduler: Any) -> None:
        last_step = _last_step(self.recipe, steps_per_epoch)
        if total_steps is not None and total_steps < last_step:
            logger.warning(
                "the training ends after %.4g epochs and the recipe after %.4g: it will not be carried out to its end",
                total_steps / steps_per_epoch,
                last_step / steps_per_epoch,
            )
        rates = self.manager.learning_rate_modifiers
        if rates and scheduler is not None:
            logger.warning(
                "the recipe sets the learning rate from epoch %.4g on: what %s says has no effect from there",
                max(min(modifier.start_epoch for modifier in rates), 0.0),
                type(scheduler).__name__,
            )

    def _state(self) -> dict[str, Any] | None:
        """What a checkpoint has to hold: of the training that goes on, or of the last one."""
        if self._manager is None or self._rates is None:
            return self._final
        self._rates.put_back()  # the state holds rates, and the library's scheduler may have written since
        return self._manager.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Bring the training that goes on to another state."""
        self.manager.load_state_dict(state)
        assert self._rates is not None
        self._rates.take()

    def _finish(self) -> None:
        """The training is over: zeros are exact, the optimizer is free, and the state can still be saved."""
        if self._manager is None:
            return
        state = self._state()
        self._release(warn=True)
        self._final = state

    def _release(self, warn: bool = False) -> None:
        """Off the model and the optimizer, at any time; `warn` when the recipe was not carried out to its end."""
        if self._rates is not None:
            self._rates.remove()
        if self._manager is not None:
            self._manager.finalize(warn=warn)
        self._manager = self._rates = None

    def _steps(self, batches: float | None, accumulation_steps: int, source: str = "the training dataloader") -> float:
        """Optimizer steps in an epoch: the user's number, or as many as these batches make."""
        if self.steps_per_epoch is not None:
            return self.steps_per_epoch
        if batches is None or not math.isfinite(batches):
            raise GossamerError(f"{source} has no length: say how many optimizer steps an epoch has, steps_per_epoch=…")
        return max(math.ceil(batches / accumulation_steps), 1)


def batches_in(loader: Any) -> int | None:
    """How many batches a dataloader has, when it knows."""
    try:
        return len(loader) or None
    except TypeError:  # its dataset can only be iterated
        return None


def _plain(optimizer: Any) -> Any:
    """The optimizer whose step hooks fire: torch's own, inside Accelerate's wrapper."""
    while "AcceleratedOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GossamerError(
            f"{type(optimizer).__name__} steps where torch's hooks do not see it, so a recipe cannot drive it; "
            "use an optimizer of torch, without DeepSpeed"
        )
    return optimizer


def _last_step(recipe: Recipe, steps_per_epoch: float) -> int:
    """The step at which the recipe has done all it does."""
    ends = (max(modifier.start_epoch, modifier.end_epoch) for modifier in recipe.modifiers)
    return max((to_step(epoch, steps_per_epoch) for epoch in ends), default=0)
