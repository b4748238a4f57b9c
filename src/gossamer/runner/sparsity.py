"""How a run becomes sparse: by an MSBench config or by a recipe, seen by the runner through one interface.

Each lowers to the engine's own door; nothing here prunes. Knows no data and no
files of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.engine import Manager
from gossamer.errors import GossamerError
from gossamer.model import get_parameter, named_parameters, unwrap
from gossamer.model.additions import evaluated
from gossamer.modifiers import Modifier
from gossamer.modifiers.base import to_step
from gossamer.msbench import BaseScheduler, build_sparse_scheduler
from gossamer.msbench.levels import AmbaLevelPruneScheduler
from gossamer.quantization import is_emulated
from gossamer.recipe import load
from gossamer.runner.config.schema import Sparsity
from gossamer.runner.config.sparse import msbench_config


class Sparsifier(ABC):
    """What makes a run sparse. The calls come in this order, `begin` in each iteration."""

    method: str
    """What it does, in a word or two."""
    courses = 1
    """How often the learning-rate schedule is run through."""
    sets_rates = False
    """Whether it decides the learning rate itself."""
    recalibrates = False
    """Whether evaluation computes with other weights than training, so that batch norm must be recalibrated."""

    def prepare(self, model: nn.Module, networks: Mapping[str, nn.Module] | None, example: Any) -> nn.Module:
        """The model to train, with what it needs to learn; before the optimizer is built."""
        return model

    def reshape(self, model: nn.Module, state: Mapping[str, Any], epoch: float) -> None:
        """Give a model the shape that it had in a saved run, before its weights are loaded."""
        return

    def groups(self, model: nn.Module, weight_decay: float) -> Any:
        """What the optimizer is built on."""
        return model.parameters()

    @property
    def epochs(self) -> int:
        """How long it wants to train; 0 when it does not say."""
        return 0

    @property
    def recipe(self) -> str | None:
        """The text of a recipe, where it is one."""
        return None

    @abstractmethod
    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        state: Mapping[str, Any] | None,
        **setting: Any,
    ) -> Any:
        """Bind it to what trains the model, in a saved state if one is given; the GradScaler to use, if there is one.

        `setting` has scaler, steps_per_epoch, accumulation_steps and example_inputs.
        """

    @abstractmethod
    def begin(self, model: nn.Module, iteration: int) -> None:
        """What is due at the start of an iteration, counted from 0."""

    @abstractmethod
    def pruned(self) -> Sequence[str]:
        """The names of the weights that are made sparse."""

    @abstractmethod
    def left_dense(self) -> Mapping[str, str]:
        """What stays dense, with the reason."""

    @abstractmethod
    def target(self, model: nn.Module) -> float | None:
        """The sparsity in the end; None when that is learned."""

    def planned(self, model: nn.Module, iteration: int) -> float | None:
        """The sparsity that the schedule asks for when so many iterations are done; None when it says none."""
        return None

    def planned_in(self, model: nn.Module, iteration: int) -> float | None:
        """The sparsity that the schedule asks for during one iteration, counted from 0; None when it says none."""
        return self.planned(model, iteration)

    def mask_changes(self) -> int | None:
        """Increases whenever a mask changes; None if the method does not count changes."""
        return None

    def targets(self) -> Mapping[str, float]:
        """By weight: the sparsity in the end, where it can be told; before the training."""
        return {}

    def thinned(self, model: nn.Module) -> bool:
        """Whether it has removed filters from the model."""
        return False

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def finish(self, model: nn.Module) -> None:
        """Write the zeros into the weights and take out what was added."""

    @abstractmethod
    def now(self, model: nn.Module) -> float:
        """Zeros over weights, counted, of the layers that are made sparse."""

    @abstractmethod
    def settled(self, model: nn.Module, iteration: int, *, at_end: bool) -> bool:
        """Whether the model is as sparse as it is to become, with so many iterations done; `at_end`: with all done.

        The schedule decides: a target that counts filters or channels is another share of the weights.
        """

    def shortfall(self, model: nn.Module) -> str:
        """What a model that is not settled lacks."""
        return "the model is less sparse than it was to become"


def _is_final(planned: float | None, target: float) -> bool:
    """Whether a schedule has reached its target."""
    return planned is not None and planned > target - 1e-6


def build_sparsifier(config: Sparsity, *, length: int, folder: Path) -> Sparsifier:
    """What a config's `sparsity` describes, for a training of `length` iterations in a run folder."""
    return ByRecipe(config) if config.recipe is not None else ByScheduler(config, length, folder)


class ByScheduler(Sparsifier):
    """An MSBench config."""

    def __init__(self, config: Sparsity, length: int, folder: Path) -> None:
        try:
            self.scheduler: BaseScheduler = build_sparse_scheduler(msbench_config(config, length, folder))
        except GossamerError as error:
            raise GossamerError(str(error).replace("sparsity_config: ", "sparsity.")) from error
        self.method = type(self.scheduler).__name__.removesuffix("Scheduler")
        self.courses = len(getattr(self.scheduler, "table", [0]))
        self._modifiers: list[Modifier] = []
        self.recalibrates = self.scheduler.recalibrates

    def prepare(self, model: nn.Module, networks: Mapping[str, nn.Module] | None, example: Any) -> nn.Module:
        return self.scheduler.prepare_sparse_model(model, networks=networks, example_inputs=example)

    def groups(self, model: nn.Module, weight_decay: float) -> Any:
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

    def begin(self, model: nn.Module, iteration: int) -> None:
        self.scheduler.prune_model(model, iteration)

    def pruned(self) -> Sequence[str]:
        return self.scheduler.names

    def left_dense(self) -> Mapping[str, str]:
        return {name: reason for name, reason in self.scheduler.layers.items() if reason is not None}

    def now(self, model: nn.Module) -> float:
        return self.scheduler.compute_sparse_rate(model)

    def target(self, model: nn.Module) -> float | None:
        return self.scheduler.final_sparsity

    def settled(self, model: nn.Module, iteration: int, *, at_end: bool) -> bool:
        """Where training itself finds the sparsity, there is none to wait for but that at the end."""
        final = self.scheduler.final_sparsity
        if final is None:
            return at_end or not self.scheduler.learns
        shares = self._scheduled(iteration - 1)
        return not shares or any(_is_final(share, final) for share in shares)

    def planned(self, model: nn.Module, iteration: int) -> float | None:
        """Masks change at the start of an iteration: those of the last one hold."""
        if self.scheduler.learns and self.scheduler.final_sparsity is None:
            return None
        shares = self._scheduled(max(iteration - 1, 0))
        return next((share for share in shares if share is not None), self.scheduler.final_sparsity)

    def _scheduled(self, iteration: int) -> list[float | None]:
        """By modifier: the scheduled sparsity during an iteration, counted from 0; None before pruning begins."""
        self._modifiers = self._modifiers or list(self.scheduler.modifiers())
        pruning = [modifier for modifier in self._modifiers if modifier.prunes]
        return [modifier.sparsity_at(float(iteration)) for modifier in pruning]

    def planned_in(self, model: nn.Module, iteration: int) -> float | None:
        """Masks change at the start of an iteration."""
        return self.planned(model, iteration + 1)

    def targets(self) -> Mapping[str, float]:
        final = self.scheduler.final_sparsity
        if isinstance(self.scheduler, AmbaLevelPruneScheduler):
            return self.scheduler.final_shares()
        return dict.fromkeys(self.scheduler.names, final) if final is not None and not self.scheduler.learns else {}

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def finish(self, model: nn.Module) -> None:
        self.scheduler.export_sparse_model(unwrap(model))


class ByRecipe(Sparsifier):
    """A recipe, carried out by a manager."""

    def __init__(self, config: Sparsity) -> None:
        assert config.recipe is not None
        self.manager = Manager(load(config.recipe, variables=config.recipe_variables or None))
        self.manager.report_when_dropped = False  # a run that fails or is interrupted says so itself
        self.method = "recipe"
        self.sets_rates = bool(self.manager.learning_rate_modifiers)
        self.recalibrates = any(modifier.recalibrates for modifier in self.manager.modifiers)
        self._sizes: dict[str, int] = {}
        """Of all parameters, before any of them lost filters."""
        self._steps_per_epoch = 1

    def prepare(self, model: nn.Module, networks: Mapping[str, nn.Module] | None, example: Any) -> nn.Module:
        self._sizes = {name: parameter.numel() for name, parameter in named_parameters(unwrap(model))}
        return model

    @property
    def epochs(self) -> int:
        return max(self.manager.max_epochs, 0)

    @property
    def recipe(self) -> str | None:
        return self.manager.recipe

    def reshape(self, model: nn.Module, state: Mapping[str, Any], epoch: float) -> None:
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
        found = self.manager.modify(model, optimizer, lr_scheduler=lr_scheduler, **setting)
        return found if setting["scaler"] is not None else None

    def begin(self, model: nn.Module, iteration: int) -> None:
        """The optimizer's own steps drive a recipe."""

    def pruned(self) -> Sequence[str]:
        """Those that have a mask by now, or will have one."""
        return list(dict.fromkeys([*self.manager.planned(), *self.manager.masks()]))

    def left_dense(self) -> Mapping[str, str]:
        return {name: reason for skipped in self.manager.skipped.values() for name, reason in skipped.items()}

    def now(self, model: nn.Module) -> float:
        """What was removed counts as zeros."""
        return self._share(model, self.pruned())

    def settled(self, model: nn.Module, iteration: int, *, at_end: bool) -> bool:
        """Whether targets are reached, thresholds learned, filters removed and weights quantized, as the recipe says.

        A model that is still dense, whole or in floats may be better, and is not what the run is for.
        """
        if self.manager.quantization_modifiers and not is_emulated(model):
            return False
        if self._thins_later():
            return False
        if self._learns() and not at_end:
            return False
        planned = self.manager.planned(iteration)
        return all(_is_final(planned.get(name), target) for name, target in self.manager.planned().items())

    def shortfall(self, model: nn.Module) -> str:
        if self.manager.quantization_modifiers and not is_emulated(model):
            return "the model is not quantized, as the recipe says"
        if self._thins_later():
            return "the model is not thinned, as the recipe says"
        return super().shortfall(model)

    def _thins_later(self) -> bool:
        """Whether filters are still to be removed."""
        epochs = [epoch for modifier in self.manager.modifiers for epoch in modifier.removal_epochs]
        done = round(self.manager.epoch * self._steps_per_epoch)
        return any(to_step(epoch, self._steps_per_epoch) > done for epoch in epochs)

    def _learns(self) -> bool:
        """Whether a modifier without a target of its own is still finding one."""
        return any(
            modifier.learns_sparsity
            and modifier.sparsity_at(modifier.end_epoch) is None
            and not -1 < modifier.end_epoch <= self.manager.epoch
            for modifier in self.manager.pruning_modifiers
        )

    def _share(self, model: nn.Module, names: Sequence[str]) -> float:
        """Zeros over weights, as the model evaluates."""
        owner = unwrap(model)
        values = {id(weight): value for weight, value in evaluated(owner)}
        weights = {name: get_parameter(owner, name) for name in names}
        left = sum(int(values.get(id(weight), weight).count_nonzero()) for weight in weights.values())
        return 1 - left / max(sum(self._sizes[name] for name in names), 1) if names else 0.0

    def target(self, model: nn.Module) -> float | None:
        """Of all weights that are pruned together; None when some of them have no target of their own."""
        return self._mean(self.manager.planned())

    def planned(self, model: nn.Module, iteration: int) -> float | None:
        return self._mean(self.manager.planned(iteration))

    def _mean(self, shares: Mapping[str, float]) -> float | None:
        return self._weighted(shares) if set(shares) == set(self.pruned()) else None

    def _weighted(self, shares: Mapping[str, float]) -> float | None:
        if not shares:
            return None
        return sum(share * self._sizes[name] for name, share in shares.items()) / sum(self._sizes[n] for n in shares)

    def mask_changes(self) -> int | None:
        return self.manager.mask_changes

    def targets(self) -> Mapping[str, float]:
        return self.manager.targets()

    def thinned(self, model: nn.Module) -> bool:
        return any(p.numel() < self._sizes.get(name, 0) for name, p in named_parameters(unwrap(model)))

    def state_dict(self) -> dict[str, Any]:
        return self.manager.state_dict()

    def finish(self, model: nn.Module) -> None:
        self.manager.finalize(unwrap(model))
