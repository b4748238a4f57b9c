"""What makes a run sparse, an MSBench config or a recipe, behind one interface for the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.engine import Manager
from gossamer.errors import within
from gossamer.model import get_parameter, named_parameters, unwrap
from gossamer.model.additions import evaluated
from gossamer.modifiers import Modifier
from gossamer.modifiers.base import to_step
from gossamer.msbench import BaseScheduler, build_sparse_scheduler
from gossamer.quantization import is_emulated
from gossamer.recipe import Recipe
from gossamer.runner.config.loading import msbench_config
from gossamer.runner.config.schema import Sparsity


class Sparsifier:
    """Makes the model of a run sparse; this class leaves it dense.

    The trainer calls `prepare`, `parameter_groups`, `attach`, and `before_step` in each iteration.
    """

    sparse = False
    """Whether weights are made sparse."""
    method = "dense"
    """Name for logs."""
    recipe: str | None = None
    """The recipe's text."""
    epochs = 0
    """The last epoch of the recipe; 0 if it has no end."""
    quantizes = False
    """Whether the model is quantized at the end."""
    lr_cycles = 1
    """How often the learning-rate schedule repeats in a training."""
    sets_learning_rate = False
    """Whether the recipe sets the learning rate, so that `trainer.lr_scheduler` has no effect."""
    recalibrates = False
    """Whether evaluation uses other weights than training, so that batch norm needs recalibration."""

    def prepare(self, model: nn.Module, networks: Mapping[str, nn.Module] | None, example: Any) -> nn.Module:
        """Add the parameters that the method learns. Called before the optimizer is built; returns the model."""
        return model

    def restore_structure(self, model: nn.Module, state: Mapping[str, Any], epoch: float) -> None:
        """Give a model the layers that it had in a saved run, before its weights are loaded."""

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> Any:
        """The parameters or groups that the optimizer is built on."""
        return model.parameters()

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        state: Mapping[str, Any] | None,
        **setting: Any,
    ) -> Any:
        """Attach to model and optimizer, and load a saved state if given. Returns the GradScaler to use, or None.

        `setting` has scaler, steps_per_epoch, accumulation_steps and example_inputs.
        """
        return setting["scaler"]

    def before_step(self, model: nn.Module, iteration: int) -> None:
        """Update masks at the start of an iteration, counted from 0; a recipe does that in hooks of the optimizer."""

    def pruned(self) -> Sequence[str]:
        """The names of the weights that are made sparse."""
        return ()

    def left_dense(self) -> Mapping[str, str]:
        """The names of weights or layers that stay dense, each with the reason."""
        return {}

    def target(self) -> float | None:
        """The final sparsity of the pruned layers together; None if training determines it."""
        return None

    def planned(self, iteration: int) -> float | None:
        """The scheduled sparsity after this number of iterations; None if there is no schedule."""
        return None

    def planned_in(self, iteration: int) -> float | None:
        """The scheduled sparsity during an iteration, counted from 0; None if there is no schedule."""
        return self.planned(iteration)

    def mask_changes(self) -> int | None:
        """A counter that increases whenever a mask changes; None if the method does not count changes."""
        return None

    def target_sparsities(self) -> Mapping[str, float]:
        """The final sparsity by weight, where it is known before training."""
        return {}

    def thinned(self, model: nn.Module) -> bool:
        """Whether filters were removed from the model."""
        return False

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def finalize(self, model: nn.Module) -> None:
        """Write the zeros into the weights and remove what `prepare` and `attach` added."""

    def sparsity(self, model: nn.Module) -> float | None:
        """Zeros over weights of the pruned layers, counted; None if the run is dense. Removed filters are zeros."""
        return None

    def settled(self, model: nn.Module, iteration: int, *, at_end: bool) -> bool:
        """Whether the model has its final sparsity after this number of iterations; `at_end` of the training.

        The schedule decides, because a target in filters or channels is a different share of the weights.
        """
        return True

    def shortfall(self, model: nn.Module) -> str:
        """What is missing in a model that is not settled."""
        return "the model is less sparse than its target"


def build_sparsifier(config: Sparsity, recipe: Recipe | None, *, length: int, folder: Path) -> Sparsifier:
    """The sparsifier of a config, for a training of `length` iterations in a run folder; `recipe` is what it names."""
    return RecipeSparsifier(recipe) if recipe is not None else MSBenchSparsifier(config, length, folder)


def _reached(planned: float | None, target: float) -> bool:
    return planned is not None and planned > target - 1e-6


class MSBenchSparsifier(Sparsifier):
    """An MSBench scheduler."""

    sparse = True

    def __init__(self, config: Sparsity, length: int, folder: Path) -> None:
        with within("sparsity"):
            self.scheduler: BaseScheduler = build_sparse_scheduler(msbench_config(config, length, folder))
        self.method = type(self.scheduler).__name__.removesuffix("Scheduler")
        self.lr_cycles = len(getattr(self.scheduler, "table", [0]))
        self._modifiers: list[Modifier] = []
        self.recalibrates = self.scheduler.recalibrates

    def prepare(self, model: nn.Module, networks: Mapping[str, nn.Module] | None, example: Any) -> nn.Module:
        return self.scheduler.prepare_sparse_model(model, networks=networks, example_inputs=example)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> Any:
        return self.scheduler.param_groups(model, weight_decay) if self.scheduler.learns else model.parameters()

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        state: Mapping[str, Any] | None,
        **setting: Any,
    ) -> Any:
        if lr_scheduler is not None:
            self.scheduler.set_lr_scheduler(lr_scheduler)
        self.scheduler.init_optimizer(optimizer)
        if state is not None:
            self.scheduler.load_state_dict(state)
        return setting["scaler"]

    def before_step(self, model: nn.Module, iteration: int) -> None:
        self.scheduler.prune_model(model, iteration)

    def pruned(self) -> Sequence[str]:
        return self.scheduler.names

    def left_dense(self) -> Mapping[str, str]:
        return {name: reason for name, reason in self.scheduler.layers.items() if reason is not None}

    def sparsity(self, model: nn.Module) -> float:
        return self.scheduler.compute_sparse_rate(model)

    def target(self) -> float | None:
        return self.scheduler.final_sparsity

    def settled(self, model: nn.Module, iteration: int, *, at_end: bool) -> bool:
        """A method that learns the sparsity is settled at the end of the training only."""
        final = self.scheduler.final_sparsity
        if final is None:
            return at_end or not self.scheduler.learns
        sparsities = self._scheduled(iteration - 1)
        return not sparsities or any(_reached(sparsity, final) for sparsity in sparsities)

    def planned(self, iteration: int) -> float | None:
        """Masks change at the start of an iteration, so those of the last iteration hold."""
        if self.scheduler.learns and self.scheduler.final_sparsity is None:
            return None
        sparsities = self._scheduled(max(iteration - 1, 0))
        return next((sparsity for sparsity in sparsities if sparsity is not None), self.scheduler.final_sparsity)

    def planned_in(self, iteration: int) -> float | None:
        return self.planned(iteration + 1)

    def _scheduled(self, iteration: int) -> list[float | None]:
        """The scheduled sparsity of each pruning modifier during an iteration; None before pruning starts."""
        self._modifiers = self._modifiers or list(self.scheduler.modifiers())
        return [modifier.sparsity_at(float(iteration)) for modifier in self._modifiers if modifier.prunes]

    def target_sparsities(self) -> Mapping[str, float]:
        return self.scheduler.final_sparsities()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def finalize(self, model: nn.Module) -> None:
        self.scheduler.export_sparse_model(unwrap(model))


class RecipeSparsifier(Sparsifier):
    """A recipe, applied by a `Manager`."""

    sparse = True

    def __init__(self, recipe: Recipe) -> None:
        self.manager = Manager(recipe)
        self.manager.report_when_dropped = False  # the trainer reports a run that fails or is interrupted
        self.method, self.recipe = "recipe", self.manager.recipe
        self.epochs = max(self.manager.max_epochs, 0)
        self.quantizes = bool(self.manager.quantization_modifiers)
        self.sets_learning_rate = bool(self.manager.learning_rate_modifiers)
        self.recalibrates = any(modifier.recalibrates for modifier in self.manager.modifiers)
        self._sizes: dict[str, int] = {}
        """Sizes of all parameters before filters were removed."""
        self._steps_per_epoch = 1

    def prepare(self, model: nn.Module, networks: Mapping[str, nn.Module] | None, example: Any) -> nn.Module:
        self._sizes = {name: parameter.numel() for name, parameter in named_parameters(unwrap(model))}
        return model

    def restore_structure(self, model: nn.Module, state: Mapping[str, Any], epoch: float) -> None:
        self.manager.load_state_dict(state)
        self.manager.apply_structure(unwrap(model), epoch)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        state: Mapping[str, Any] | None,
        **setting: Any,
    ) -> Any:
        self._steps_per_epoch = int(setting["steps_per_epoch"])
        if state is not None:
            self.manager.load_state_dict(state)
        scaler = self.manager.modify(model, optimizer, lr_scheduler=lr_scheduler, **setting)
        return scaler if setting["scaler"] is not None else None

    def pruned(self) -> Sequence[str]:
        """The weights that have a mask now or will have one."""
        return list(dict.fromkeys([*self.manager.planned(), *self.manager.masks()]))

    def left_dense(self) -> Mapping[str, str]:
        return {name: reason for skipped in self.manager.skipped.values() for name, reason in skipped.items()}

    def sparsity(self, model: nn.Module) -> float:
        names = self.pruned()
        if not names:
            return 0.0
        owner = unwrap(model)
        values = {id(weight): value for weight, value in evaluated(owner)}
        weights = [get_parameter(owner, name) for name in names]
        nonzero = sum(int(values.get(id(weight), weight).count_nonzero()) for weight in weights)
        return 1 - nonzero / max(sum(self._sizes[name] for name in names), 1)

    def settled(self, model: nn.Module, iteration: int, *, at_end: bool) -> bool:
        """Whether targets are reached, thresholds learned, filters removed and weights quantized."""
        if (self.quantizes and not is_emulated(model)) or self._thins_later() or (self._learns() and not at_end):
            return False
        planned = self.manager.planned(iteration)
        return all(_reached(planned.get(name), target) for name, target in self.manager.planned().items())

    def shortfall(self, model: nn.Module) -> str:
        if self.quantizes and not is_emulated(model):
            return "the recipe quantizes the model, and it is not quantized"
        if self._thins_later():
            return "the recipe thins the model, and it is not thinned"
        return super().shortfall(model)

    def _thins_later(self) -> bool:
        epochs = [epoch for modifier in self.manager.modifiers for epoch in modifier.removal_epochs]
        done = round(self.manager.epoch * self._steps_per_epoch)
        return any(to_step(epoch, self._steps_per_epoch) > done for epoch in epochs)

    def _learns(self) -> bool:
        """Whether a modifier is still learning a sparsity for which the recipe sets no target."""
        return any(
            modifier.learns_sparsity
            and modifier.sparsity_at(modifier.end_epoch) is None
            and not -1 < modifier.end_epoch <= self.manager.epoch
            for modifier in self.manager.pruning_modifiers
        )

    def target(self) -> float | None:
        return self._mean(self.manager.planned())

    def planned(self, iteration: int) -> float | None:
        return self._mean(self.manager.planned(iteration))

    def _mean(self, sparsities: Mapping[str, float]) -> float | None:
        """The sparsity of all pruned weights together; None if some of them have no target of their own."""
        if not sparsities or set(sparsities) != set(self.pruned()):
            return None
        return sum(sparsity * self._sizes[name] for name, sparsity in sparsities.items()) / sum(
            self._sizes[n] for n in sparsities
        )

    def mask_changes(self) -> int | None:
        return self.manager.mask_changes

    def target_sparsities(self) -> Mapping[str, float]:
        return self.manager.targets()

    def thinned(self, model: nn.Module) -> bool:
        return any(p.numel() < self._sizes.get(name, 0) for name, p in named_parameters(unwrap(model)))

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()

    def finalize(self, model: nn.Module) -> None:
        self.manager.finalize(unwrap(model))
