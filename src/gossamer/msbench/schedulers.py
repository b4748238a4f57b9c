"""The scheduler that all others extend: prepare a model, prune it while it trains, export it.

A scheduler comes to a recipe, which a run of the engine carries out; the
user's loop moves its clock by `prune_model(model, iteration)`. Methods that
learn what to prune put sparsers into the model instead.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.engine.binding import BoundModifier
from gossamer.engine.completion import TOLERANCE
from gossamer.engine.learning_rate import Restart
from gossamer.engine.masks import Masks
from gossamer.engine.optimizer import Arguments, StepWatch
from gossamer.engine.run import TrainingRun
from gossamer.engine.state import RunState, frozen
from gossamer.errors import GossamerError
from gossamer.model import expect_model, get_parameter, has_parameter, left_dense, prunable, unwrap
from gossamer.modifiers import LevelPruningModifier
from gossamer.modifiers.state import Item, Spec
from gossamer.msbench import selection, sparsers
from gossamer.msbench.config import NAME, Config
from gossamer.msbench.lowering import GeneratedLevels, Lowered, told_of_config
from gossamer.msbench.tracing import check_leaves, leaf_words, traced
from gossamer.recipe import Recipe

if TYPE_CHECKING:
    from gossamer.analysis.layers import LayerReport

logger = logging.getLogger("gossamer.msbench")
STATE_FORMAT = 1


class BaseScheduler(Lowered):
    """A constant sparsity, or what the sparsers of the config learn.

    `no_prune_keyword` holds parts of layer names and `no_prune_layer` whole
    layer names, each a list with commas, of layers that stay dense.
    """

    traces: ClassVar[bool] = True
    """Whether torch.fx is tried on the model."""
    recalibrates: ClassVar[bool] = False
    """Whether evaluation computes with other weights than training, so that batch norm must be recalibrated."""

    def __init__(self, config: Config, *, no_prune_keyword: str = "", no_prune_layer: str = "") -> None:
        super().__init__(config, no_prune_keyword, no_prune_layer)
        self.init_lr: float | list[float] | None = None
        self.iteration: int | None = None
        self.names: list[str] = []
        """The weights that are pruned; known when a model is prepared."""
        self.skipped: dict[str, str] = {}
        self.followed: tuple[Any, bool] = (None, False)
        """Example inputs to trace the model with, and whether it is traced in parts."""
        self._reference: weakref.ref[nn.Module] | None = None
        self._run: TrainingRun | None = None
        self._begun = False
        self._restart: Restart | None = None
        self._watch: StepWatch | None = None
        self._steps = 0
        self._untrained: set[int] = set()
        """What is learned and was in no optimizer that stepped so far, by id."""
        self._exported = Masks()
        """The zeros to keep in training that goes on after the export."""

    # The calls of a training script

    def prepare_sparse_model(
        self,
        model: nn.Module,
        config: Mapping[str, Any] | None = None,
        *,
        networks: Mapping[str, nn.Module] | None = None,
        example_inputs: Any = None,
    ) -> nn.Module:
        """The model, traced where torch.fx represents it rightly; weights keep their values and names.

        A `config` overrides parts of the scheduler's own. Build the optimizer behind this call: methods that learn
        add parameters. `networks`, for a model such as a detector that no graph can represent, are modules over its
        layers that torch.fx follows in its place: the model comes back as it is, and what lies outside of them is
        not pruned. `example_inputs` is what the model is followed with, to permute channels and to find filters that
        belong together.
        """
        expect_model(model, "prepare_sparse_model")
        if config is not None:
            self._reconfigure(config)
        owner = unwrap(model)
        if sparsers.nodes(owner):
            raise GossamerError("prepare_sparse_model: the model is prepared already; export_sparse_model ends that")
        if self.learns and owner is not model:
            raise GossamerError(
                f"prepare_sparse_model: {self.sparser.__name__} adds parameters, which {type(model).__name__} around "
                "the model would not train; prepare the model first and wrap it then"
            )
        if networks is not None:
            prepared = self._within(model, networks)
        else:
            prepared = traced(model, self.config.leaves) if self.traces and owner is model else model
        self.followed = (example_inputs, networks is not None)
        for scheduler in list(_living):
            scheduler.let_go(model)
        self._exported = Masks()
        self.install(prepared)
        self._untrained = {id(p) for node in sparsers.nodes(unwrap(prepared)).values() for p in node.parameters()}
        self._reference = weakref.ref(unwrap(prepared))
        _living.add(self)
        self._watch = StepWatch(unwrap(prepared), self._before_step, self._after_step)
        return prepared

    def prune_model(self, model: nn.Module, iteration: int) -> dict[str, Tensor]:
        """Do what is due at an iteration, counted from 0; call it once in each, best at its start."""
        self._check_prepared(model, "prune_model")
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"prune_model: iteration: expected a whole number from 0 on, found {iteration!r}")
        if self.iteration is not None and iteration < self.iteration:
            raise GossamerError(
                f"prune_model: iteration {iteration} lies before {self.iteration}, where pruning is already; "
                "a new training needs a new scheduler, a resumed one load_state_dict"
            )
        told = self.advance(model, iteration)
        self.iteration = iteration
        self._warn_of_untrained()
        return told or {}

    def init_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the optimizer. Where it is not named, the one that trains the model is noticed when it steps."""
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"init_optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
        if self._run is not None:
            self._run.optimizer = optimizer

    def set_lr_scheduler(self, lr_scheduler: Any) -> None:
        """Name the learning-rate scheduler, which levels start over."""
        self._restart = Restart(lr_scheduler, self.init_lr)
        if self._restart.begun:
            logger.warning(
                "set_lr_scheduler: it has made steps already, and levels will start over from there; "
                "name it before its state is loaded, or load the sparse scheduler's state behind this call"
            )
        if self._run is not None:
            self._run.restart = self._restart
        self.init_optimizer(self._restart.optimizer)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        """Write the zeros into the weights and take the sparsers out, in place.

        Training that goes on keeps the zeros, as long as the scheduler lives and no other prepares the model. A copy
        of the prepared model, such as an average, can be exported too, before or after it. Warns when `prune_model`
        was not called up to the length that the config gives.
        """
        owner = self._expect_names(model, "export_sparse_model")
        if self.iteration is None and not self._holds_masks and not self.learns:
            logger.warning("export_sparse_model: nothing is pruned; prune_model was never called")
        if self._run is not None:
            self._run.masks.apply_to_copy(owner)
        self._exported.apply_to_copy(owner)
        sparsers.fold(owner, self.names)
        if self._reference is not None and owner is self._reference():
            held = list(self.names)
            if self._run is not None:
                held += [name for name in self._run.masks.names() if name not in held]
                if self._begun:
                    self._run.finish()
            self._run = None
            for name in held:
                weight = get_parameter(owner, name).detach()
                self._exported.hold(0, name, weight != 0, weight)
            self._warn_of_early_export(owner)
            self.exported()
        return model

    def export_sparse_onnx(self, model: nn.Module, dummy_input: Any, onnx_name: str | os.PathLike[str]) -> str:
        """Write `onnx_name`.onnx with the zeros in the weights, and return its name; the model stays as it is."""
        from gossamer.msbench.onnx import write

        return write(self, model, dummy_input, onnx_name)

    def compute_sparse_rate(self, model: nn.Module) -> float:
        """Measured: zeros over weights of the layers that are pruned; 0.0 when they have no weights."""
        owner = self._expect_names(model, "compute_sparse_rate")
        weights = [sparsers.effective(owner, name) for name in self.names]
        total = sum(weight.numel() for weight in weights)
        return sum(weight.numel() - int(weight.count_nonzero()) for weight in weights) / max(total, 1)

    def update_sparsity_per_layer(self, model: nn.Module, sparsity_rate: float | Mapping[str, float]) -> None:
        """Prune now, to one sparsity or to one for each layer by its name."""
        self._check_prepared(model, "update_sparsity_per_layer")
        bound = self._bound
        if bound is None or not isinstance(bound.modifier, LevelPruningModifier):
            raise GossamerError(f"update_sparsity_per_layer: {type(self).__name__} decides the sparsity itself here")
        bound.modifier.prune(bound, selection.by_weight(sparsity_rate, self.names))
        assert self._run is not None
        self._run.apply_masks()

    def param_groups(
        self, model: nn.Module, weight_decay: float = 0.0, st_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Groups for an optimizer: the model's own parameters, and what sparsers learn, with a decay of their own.

        `st_decay` is that of STR's thresholds and drives the sparsity; without one it is the weight decay, as in the
        paper.
        """
        learned = {id(p): p for node in sparsers.nodes(unwrap(model)).values() for p in node.parameters()}
        own = [p for p in model.parameters() if id(p) not in learned]
        groups: list[dict[str, Any]] = [{"params": own, "weight_decay": weight_decay}]
        if learned:
            decay = weight_decay if st_decay is None else st_decay
            groups.append({"params": list(learned.values()), "weight_decay": decay})
        return groups

    # State

    def state_dict(self) -> dict[str, Any]:
        """What to save beside model, optimizer and learning-rate scheduler, to go on to the bit."""
        return {
            "format": STATE_FORMAT,
            "scheduler": type(self).__name__,
            "config": self.settings,
            "iteration": self.iteration,
            "run": self._run.state_dict() if self._run is not None and self._begun else None,
            "by_hand": frozen(self._run.masks.of(0)) if self._run is not None and not self._begun else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from a state; behind `prepare_sparse_model` and `set_lr_scheduler`.

        Returns what did not match, for a config that was edited since, and logs it.
        """
        if not isinstance(state, Mapping) or not {"format", "scheduler", "iteration", "run"} <= set(state):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError("load_state_dict: this is not what state_dict() of a sparse scheduler returned")
        item = Item(state, "load_state_dict")
        fields = item.fields(["format", "scheduler", "iteration", "run"], ["config", "by_hand", "statistics"])
        found = ascii(fields["scheduler"].text())[1:61].removesuffix("'"), fields["format"].integer()
        if found != (type(self).__name__, STATE_FORMAT):
            raise GossamerError(
                f"load_state_dict: the state is of {found[0]}, format {found[1]}, "
                f"and this is {type(self).__name__}, format {STATE_FORMAT}"
            )
        if self._reference is None:
            raise GossamerError("load_state_dict: call prepare_sparse_model(model) first")
        iteration = None if fields["iteration"].value is None else fields["iteration"].integer()
        run = None if fields["run"].value is None else RunState.parse(fields["run"].value)
        model = self._reference()
        assert model is not None
        if self._run is None and not self.learns and run is not None:
            raise GossamerError("load_state_dict: the model was exported; prepare it again and load the state then")
        problems: list[str] = []
        if "config" in fields and fields["config"].text() != self.settings:
            problems.append("the config is not the one that the state was saved under: levels go on by the new one")
        if self._run is not None and run is not None:
            problems += self._run.load_state_dict(run)
        elif self._run is not None:
            masks = self._by_hand(model, fields["by_hand"].entries() if "by_hand" in fields else {}, problems)
            self._run = self._new_run(model)
            for name, keep in masks.items():
                self._run.modifiers[0].masks.set(name, keep)
            self._run.apply_masks()
        self.iteration, self._begun = iteration, run is not None
        for problem in problems:
            logger.warning("state: %s", problem)
        return problems

    def _by_hand(self, model: nn.Module, saved: Mapping[str, Item], problems: list[str]) -> dict[str, Tensor]:
        """The masks of `update_sparsity_per_layer`, from before the first `prune_model`."""
        found: dict[str, Tensor] = {}
        for name, item in saved.items():
            spec, shape = Spec.of(name, get_parameter(model, name)) if name in self.names else None, item.shape()
            if spec is not None and spec.shape == shape:
                found[name] = item.mask(spec)
            else:
                problems.append(f"the mask of {name!r} {shape} is dropped: no weight of that name and shape is pruned")
        return found

    @property
    def _holds_masks(self) -> bool:
        return self._run is not None and bool(self._run.masks.names())

    # What is pruned

    @property
    def layers(self) -> dict[str, str | None]:
        """Every layer that could be pruned: None when it is, else the reason why it stays dense."""
        self._check_prepared(None, "layers")
        found: dict[str, str | None] = {**dict.fromkeys(self.names), **self.skipped}
        model = self._reference() if self._reference is not None else None
        order = [*prunable(model), *left_dense(model)] if model is not None else []
        return {selection.layer_of(name): found[name] for name in order if name in found}

    def sparse_analysis(self, model: nn.Module) -> LayerReport:
        """Layer by layer what the config comes to; for levels."""
        raise GossamerError(f"sparse_analysis: {type(self).__name__} has no levels to analyse")

    # For schedulers of one's own

    def install(self, model: nn.Module) -> None:
        """Bind the recipe to the model, so that what is wrong is told now; put the sparsers in."""
        run = self._new_run(model)
        self.names = [name for own in run.modifiers for name in own.bound]
        self.skipped = {name: why for own in run.modifiers for name, why in own.skipped.items()}
        self._run, self._begun, self.iteration = None if self.learns else run, False, None
        if type(self) is BaseScheduler and not self.learns and run.modifiers[0].modifier.sparsity_at(0.0) == 0:
            logger.warning("no sparsity is given: nothing is pruned until update_sparsity_per_layer")
        if self.learns:
            run.take_over_masks()
            for name in self.names:
                sparsers.attach(unwrap(model), name, self.make_sparser(get_parameter(model, name)))

    def _within(self, model: nn.Module, networks: Mapping[str, nn.Module]) -> nn.Module:
        """Follow each network by torch.fx, and leave out what lies outside of them; the model itself."""
        known = set[str]()
        for network in networks.values():
            own = leaf_words(network)
            known |= own
            if self.traces:
                traced(network, [leaf for leaf in self.config.leaves if not isinstance(leaf, str) or leaf in own])
        check_leaves(model, self.config.leaves, known)
        inside = {id(parameter) for network in networks.values() for parameter in network.parameters()}
        owner = unwrap(model)
        outside = [name for name in prunable(owner) if id(get_parameter(owner, name)) not in inside]
        self.exclude = [*self.exclude, *outside]
        return model

    def _new_run(self, model: nn.Module) -> TrainingRun:
        with told_of_config():
            recipe, example = Recipe.of(self.modifiers(), name=NAME), self.followed[0]
            run = TrainingRun(recipe, model, None, 1.0, example_inputs=example, restart=self._restart)
            run.bind()
        run.external_clock = True
        first = run.modifiers[0]
        if self.generator.mask_type is None and isinstance(first.modifier, LevelPruningModifier):
            first.modifier = GeneratedLevels.of(first.modifier, self.generator)
        return run

    def make_sparser(self, weight: Tensor) -> sparsers.FakeSparse:
        return self.sparser(weight, self.generator, **self.config.kwargs["fake_sparse"])

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        """What is due at an iteration."""
        self._enter(iteration)

    def before_step(self) -> None:
        """What to do when gradients are there, before the optimizer's step."""

    def after_step(self) -> None:
        """What to do after each step of an optimizer that trains the model."""

    def exported(self) -> None:
        """What to do when the prepared model itself was exported."""

    def let_go(self, model: nn.Module) -> None:
        """Keep the zeros of an exported model no longer: whoever prepares it decides about them from then on."""
        own = {id(parameter) for parameter in model.parameters()}
        exported = self._reference() if self._reference is not None else None
        if exported is not None and any(id(parameter) in own for parameter in exported.parameters()):
            self._exported = Masks()

    # Behind the scenes

    @property
    def _bound(self) -> BoundModifier | None:
        return self._run.modifiers[0] if self._run is not None else None

    def _enter(self, iteration: int) -> None:
        if self._run is not None:
            with told_of_config():
                (self._run.advance if self._begun else self._run.begin)(iteration)
            self._begun = True
            self._run.apply_masks()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        self._untrained -= {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.before_step()
        if self._run is None or not self._begun:
            return None
        if self._run.optimizer is None:
            self._run.optimizer = optimizer
        return self._run.before_step(optimizer, args, kwargs)

    def _warn_of_untrained(self) -> None:
        if self._untrained and self._steps > 1:
            logger.warning(
                "what %s learns is in no optimizer that steps; build the optimizer behind prepare_sparse_model",
                self.sparser.__name__,
            )
            self._untrained.clear()

    def _warn_of_early_export(self, model: nn.Module) -> None:
        done = 0 if self.iteration is None else self.iteration + 1
        if self.length is None or done >= self.length or not (done or self.learns):
            return
        final = self.final_sparsity or 0.0
        pruning = [modifier for modifier in self.modifiers() if modifier.prunes]
        is_final = any((modifier.sparsity_at(done - 1.0) or 0.0) > final - 1e-6 for modifier in pruning)
        if is_final and done >= self.length * (1 - TOLERANCE):
            return
        logger.warning(
            "export_sparse_model: the schedule was not carried out to its end: prune_model has done %d of %d "
            "iterations, sparsity %.1f%% (target: %.1f%%). Call prune_model(model, iteration) in each iteration, or "
            "correct the length in the config",
            done,
            self.length,
            100 * self.compute_sparse_rate(model),
            100 * final,
        )

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._reference() if self._reference is not None else None
        if model is None:
            return
        self._steps += 1
        if self._run is not None and self._begun and optimizer is self._run.optimizer:
            self._run.after_step(optimizer, (), {})
        elif self._run is not None:
            self._run.apply_masks()
        self._exported.apply(model)
        self.after_step()

    def _reconfigure(self, config: Mapping[str, Any]) -> None:
        from gossamer.msbench import build_sparse_scheduler

        other = build_sparse_scheduler(self.config.overridden(config))
        if type(other) is not type(self):
            raise GossamerError(
                f"prepare_sparse_model: the config names {type(other).__name__}, and this is {type(self).__name__}; "
                "build one with build_sparse_scheduler(config)"
            )
        restart = self._restart
        self.__dict__.update(vars(other))
        self._restart = restart

    def _check_prepared(self, model: nn.Module | None, call: str) -> None:
        prepared = self._reference() if self._reference is not None else None
        if prepared is None:
            raise GossamerError(f"{call}: call prepare_sparse_model(model) first, and keep the model that it returns")
        if model is not None and unwrap(model) is not prepared:
            raise GossamerError(f"{call}: this is not the model that prepare_sparse_model returned; pass that one")

    def _expect_names(self, model: nn.Module, call: str) -> nn.Module:
        """The user's model inside wrappers; it must have the weights of the prepared one."""
        self._check_prepared(None, call)
        owner = unwrap(model)
        for name in self.names:
            if not has_parameter(owner, name):
                raise GossamerError(f"{call}: this is no copy of the prepared model: it has no parameter '{name}'")
        return owner


_living: weakref.WeakSet[BaseScheduler] = weakref.WeakSet()
"""Schedulers that may still hold the zeros of a model that they have exported."""
