"""`BaseScheduler`, which all schedulers extend: prepares a model, prunes it during training, exports it.

A scheduler builds modifiers from its config and runs them with the engine; `prune_model(model, iteration)` advances
that run. Methods that learn what to prune insert fake-sparse modules (sparsers) into the model instead.
"""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from gossamer.engine.binding import BoundModifier
from gossamer.engine.completion import TOLERANCE
from gossamer.engine.learning_rate import SchedulerReset
from gossamer.engine.masks import ZeroMasks
from gossamer.engine.optimizer import GlobalStepHooks, StepArguments
from gossamer.engine.run import TrainingRun
from gossamer.engine.state import RunState, to_saved
from gossamer.errors import GossamerError, Key, Problem, nearest, within
from gossamer.model import (
    ALL_PRUNABLE,
    expect_model,
    get_parameter,
    has_parameter,
    layer_path,
    left_dense,
    prunable,
    unwrap,
)
from gossamer.model.distribution import is_distributed, refuse_unsupported
from gossamer.model.weights import duplicate
from gossamer.modifiers import EpochRangeModifier, LevelPruningModifier, Modifier, STRPruningModifier
from gossamer.modifiers.base import known_names
from gossamer.modifiers.state import Item, Spec, short
from gossamer.msbench import generators, sparsers
from gossamer.msbench.config import LOCATION, Config
from gossamer.msbench.generated_levels import GeneratedLevels
from gossamer.msbench.generators import MaskGenerator
from gossamer.msbench.tracing import as_graph_module, check_leaves
from gossamer.recipe import Recipe
from gossamer.sparse.sharding import count
from gossamer.validation import problems_of

if TYPE_CHECKING:
    from gossamer.analysis.layers import LayerReport

M = TypeVar("M", bound=Modifier)
logger = logging.getLogger("gossamer.msbench")
STATE_FORMAT = 1
SCHEDULER_KWARGS = ("scheduler", "kwargs")
"""The key, in a config, of the arguments of a scheduler."""


class BaseScheduler:
    """Prunes to a constant sparsity, or trains the sparsers of the config.

    Layers stay dense if their name contains an entry of `no_prune_keyword` or is an entry of `no_prune_layer`. Both
    are lists separated by commas.

    A scheduler goes through these states, and `prepare_sparse_model` returns it to the second one from any of them:

    - built: `prepared` is None.
    - prepared: `_run` is bound to the model, but not begun; `iteration` is None.
    - begun, by the first `prune_model`: `_begun` is True, and `iteration` is the last one pruned for.
    - exported: `_run` is None, and `_exported` has the zeros, which are still held after each optimizer step.

    If the method learns (`learns`), `_run` is always None: fake-sparse modules in the model replace the masks.
    """

    required_sparser: ClassVar[type[sparsers.FakeSparse] | None] = None
    """The required class of sparser, subclasses included; None for any that needs no scheduler."""
    uses_fx: ClassVar[bool] = True
    """Whether the model is traced with torch.fx."""
    recalibrates: ClassVar[bool] = False
    """Whether evaluation uses other weights than training, so that batch norm must be recalibrated."""
    needs_model: ClassVar[bool] = False
    """Whether the recipe depends on the shapes of the layers."""
    extra_state_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that a subclass adds to `state_dict`."""
    field_keys: ClassVar[Mapping[str, Key]] = {"levels": ("mask_generator", "kwargs", "sparsity")}
    """The key of the config that a field of a modifier comes from."""

    def __init__(self, config: Config, *, no_prune_keyword: str = "", no_prune_layer: str = "") -> None:
        self.config = config
        self.exclude = exclusions(no_prune_keyword, no_prune_layer)
        self.generator = cast(MaskGenerator, config.types["mask_generator"](**config.kwargs["mask_generator"]))
        self.sparser = cast(type[sparsers.FakeSparse], config.types["fake_sparse"])
        self._check_parts()
        self.init_lr: float | list[float] | None = None
        self.iteration: int | None = None
        self.names: list[str] = []
        """The weights that are pruned; set by `prepare_sparse_model`."""
        self.skipped: dict[str, str] = {}
        self.example_inputs: Any = None
        self.in_parts = False
        """Whether `networks` were given."""
        self._reference: weakref.ref[nn.Module] | None = None
        self._run: TrainingRun | None = None
        self._begun = False
        self._restart: SchedulerReset | None = None
        self._step_watch: GlobalStepHooks | None = None
        self._steps = 0
        self._untrained: set[int] = set()
        """The ids of learned parameters that no optimizer has stepped yet."""
        self._exported = ZeroMasks()
        """The zeros to hold if training continues after the export."""

    # Calls of a training script

    def prepare_sparse_model(
        self,
        model: nn.Module,
        config: Mapping[str, Any] | None = None,
        *,
        networks: Mapping[str, nn.Module] | None = None,
        example_inputs: Any = None,
    ) -> nn.Module:
        """Bind the scheduler to a model; returns the model, traced if torch.fx represents it correctly.

        Weights keep their values and names. A `config` overrides parts of the scheduler's own. Build the optimizer
        after this call, because methods that learn add parameters. `networks` are parts of a model that cannot be
        traced as a whole, such as a detector: the model is returned as it is, and layers outside of them are not
        pruned. `example_inputs` are used to trace the model when channels are permuted or filters depend on each other.

        Schedulers that have exported this model before stop holding its zeros.
        """
        expect_model(model, "prepare_sparse_model")
        if config is not None:
            self._reconfigure(config)
        owner = unwrap(model)
        if sparsers.fake_sparse_modules(owner):
            raise GossamerError("prepare_sparse_model: the model is already prepared; call export_sparse_model first")
        refuse_unsupported(model, "prepare_sparse_model")
        if self.learns and is_distributed(model):
            raise GossamerError(
                f"prepare_sparse_model: {self.sparser.__name__} adds parameters, which is not supported for a model "
                "whose parameters are split over ranks; use STRPruningModifier or ProbMaskPruningModifier in a recipe"
            )
        if self.learns and owner is not model:
            raise GossamerError(
                f"prepare_sparse_model: {self.sparser.__name__} adds parameters, which {type(model).__name__} around "
                "the model would not train; prepare the model first, then wrap it"
            )
        check_leaves([model, *(networks or {}).values()], self.config.leaves)
        prepared = model
        if networks is not None:
            inside = {id(parameter) for network in networks.values() for parameter in network.parameters()}
            outside = [name for name in prunable(owner) if id(get_parameter(owner, name)) not in inside]
            self.exclude = [*self.exclude, *outside]
        elif self.uses_fx and owner is model and not is_distributed(model):
            prepared = as_graph_module(model, self.config.leaves)
        self.example_inputs, self.in_parts = example_inputs, networks is not None
        for scheduler in list(_schedulers):
            scheduler.release(model)
        self._exported = ZeroMasks()
        self.install(prepared)
        self._untrained = {
            id(p) for module in sparsers.fake_sparse_modules(unwrap(prepared)).values() for p in module.parameters()
        }
        self._reference = weakref.ref(unwrap(prepared))
        _schedulers.add(self)
        self._step_watch = GlobalStepHooks(unwrap(prepared), self._before_step, self._after_step)
        return prepared

    def prune_model(self, model: nn.Module, iteration: int) -> None:
        """Prune as scheduled for an iteration, counted from 0; call it once in each, preferably at its start."""
        self._check_prepared(model, "prune_model")
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"prune_model: iteration: expected a whole number from 0 on, found {iteration!r}")
        if self.iteration is not None and iteration < self.iteration:
            raise GossamerError(
                f"prune_model: iteration {iteration} is before {self.iteration}, which was already pruned for; "
                "use a new scheduler for a new training, or load_state_dict to resume"
            )
        self.advance(model, iteration)
        self.iteration = iteration
        self._warn_untrained()

    def init_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer. Without this call, it is the first one that steps and has parameters of the model."""
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"init_optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
        if self._run is not None:
            self._run.optimizer = optimizer

    def set_lr_scheduler(self, lr_scheduler: Any) -> None:
        """Set the learning-rate scheduler that each level restarts."""
        self._restart = SchedulerReset(lr_scheduler, self.init_lr)
        if self._restart.begun:
            logger.warning(
                "set_lr_scheduler: it has already made steps, and levels will restart it from there; "
                "call this before its state is loaded, or load the sparse scheduler's state after this call"
            )
        if self._run is not None:
            self._run.scheduler_reset = self._restart
        self.init_optimizer(self._restart.optimizer)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        """Write the zeros into the weights and remove the sparsers, in place.

        The zeros are held if training continues, as long as the scheduler exists and no other one prepares the model.
        A copy of the prepared model, such as an average, can be exported too, before or after it. Warns if
        `prune_model` was not called up to the length that the config sets.
        """
        owner = self._check_copy(model, "export_sparse_model")
        if self.iteration is None and not self._holds_masks and not self.learns:
            logger.warning("export_sparse_model: nothing is pruned; prune_model was never called")
        if self._run is not None:
            self._run.masks.apply_to_copy(owner)
        self._exported.apply_to_copy(owner)
        sparsers.fold_into_weights(owner, self.names)
        if owner is self.prepared:
            held = list(self.names)
            if self._run is not None:
                held += [name for name in self._run.masks.names() if name not in held]
                if self._begun:
                    self._run.finish()
            self._run = None
            for name in held:
                weight = get_parameter(owner, name).detach()
                self._exported.hold(0, name, weight != 0, weight)
            self._warn_early_export(owner)
        return model

    def export_sparse_onnx(self, model: nn.Module, dummy_input: Any, onnx_name: str | os.PathLike[str]) -> str:
        """Write `onnx_name`.onnx with the zeros in the weights, and return its path; the model is not changed.

        A list of whole numbers as `dummy_input` is the shape of a tensor. The batch dimension is dynamic. If the model
        supports only one batch size, so does the file, with a warning.
        """
        from gossamer.export import to_onnx

        copy = self.export_sparse_model(duplicate(unwrap(model)))
        inputs: Any = dummy_input
        sizes: list[Any] = list(inputs) if isinstance(dummy_input, list | torch.Size) else []
        if sizes and all(type(size) is int for size in sizes):
            if min(sizes) < 1:
                raise GossamerError(f"export_sparse_onnx: {sizes} is not a shape")
            like = next(copy.parameters(), torch.empty(0))
            inputs = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        target = f"{os.fspath(onnx_name).removesuffix('.onnx')}.onnx"
        try:
            return str(to_onnx(copy, target, inputs))
        except GossamerError as error:
            path = to_onnx(copy, target, inputs, dynamic_batch=False)  # raises if the batch is not the cause
            logger.warning("%s: the file supports only the batch size of the example: %s", target, error)
            return str(path)

    def compute_sparse_rate(self, model: nn.Module) -> float:
        """The measured share of zeros in the layers that are pruned; 0.0 if they have no weights."""
        owner = self._check_copy(model, "compute_sparse_rate")
        weights = [sparsers.effective_weight(owner, name) for name in self.names]
        total = sum(weight.numel() for weight in weights)
        return sum(weight.numel() - count(weight.detach()) for weight in weights) / max(total, 1)

    def update_sparsity_per_layer(self, model: nn.Module, sparsity_rate: float | Mapping[str, float]) -> None:
        """Prune now, to one sparsity or to one for each layer by its name."""
        self._check_prepared(model, "update_sparsity_per_layer")
        sparsities = sparsity_by_weight(sparsity_rate, self.names)
        bound = self._bound
        if bound is None or not bound.modifier.prune_to(bound, sparsities):
            raise GossamerError(f"update_sparsity_per_layer: {type(self).__name__} decides the sparsity itself")
        assert self._run is not None
        self._run.apply_masks()

    def param_groups(
        self, model: nn.Module, weight_decay: float = 0.0, st_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: the model's own parameters, and those that sparsers learn.

        `st_decay` is the weight decay of STR's thresholds and determines the sparsity; it defaults to `weight_decay`,
        as in the paper.
        """
        learned = {
            id(p): p for module in sparsers.fake_sparse_modules(unwrap(model)).values() for p in module.parameters()
        }
        own = [p for p in model.parameters() if id(p) not in learned]
        groups: list[dict[str, Any]] = [{"params": own, "weight_decay": weight_decay}]
        if learned:
            decay = weight_decay if st_decay is None else st_decay
            groups.append({"params": list(learned.values()), "weight_decay": decay})
        return groups

    @property
    def layers(self) -> dict[str, str | None]:
        """Every layer that could be pruned: None if it is, else the reason why it stays dense."""
        self._check_prepared(None, "layers")
        reasons: dict[str, str | None] = {**dict.fromkeys(self.names), **self.skipped}
        model = self.prepared
        order = [*prunable(model), *left_dense(model)] if model is not None else []
        return {layer_path(name): reasons[name] for name in order if name in reasons}

    def sparse_analysis(self, model: nn.Module) -> LayerReport:
        """The effect of the config on each layer; for levels."""
        raise GossamerError(f"sparse_analysis: {type(self).__name__} has no levels to analyse")

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        """The config as a recipe; a manager that runs it ends with the same weights."""
        if custom := self.config.custom_classes():
            raise GossamerError(f"recipe: {' and '.join(custom)} cannot be written into a recipe, which has no code")
        metadata = {"source": f"MSBench {type(self).__name__}", "steps_per_epoch": steps_per_epoch}
        modifiers = list(self.modifiers(steps_per_epoch))
        if self.length is not None and all(m.end_epoch < self.length / steps_per_epoch for m in modifiers):
            modifiers.append(EpochRangeModifier(start_epoch=0.0, end_epoch=self.length / steps_per_epoch))
        return Recipe.of(modifiers, metadata=metadata, name="msbench")

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state to save with model, optimizer and learning-rate scheduler, to resume bit for bit."""
        return {
            "format": STATE_FORMAT,
            "scheduler": type(self).__name__,
            "config": self.config_fingerprint,
            "iteration": self.iteration,
            "run": self._run.state_dict() if self._run is not None and self._begun else None,
            "by_hand": to_saved(self._run.masks.of(0)) if self._run is not None and not self._begun else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a state; call it after `prepare_sparse_model` and `set_lr_scheduler`.

        Returns and logs differences from a config that has changed since.
        """
        if not isinstance(state, Mapping) or not {"format", "scheduler", "iteration", "run"} <= set(state):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError("load_state_dict: this is not what state_dict() of a sparse scheduler returned")
        item = Item(state, "load_state_dict")
        entries = item.entries()
        saved = entries["scheduler"].text(), entries["format"].integer()
        if saved != (type(self).__name__, STATE_FORMAT):
            raise GossamerError(
                f"load_state_dict: the state is of {short(saved[0])}, format {saved[1]}, "
                f"and this is {type(self).__name__}, format {STATE_FORMAT}"
            )
        fields = item.fields(["format", "scheduler", "iteration", "run"], ["config", "by_hand", *self.extra_state_keys])
        if self._reference is None:
            raise GossamerError("load_state_dict: call prepare_sparse_model(model) first")
        iteration = None if fields["iteration"].value is None else fields["iteration"].integer()
        run = None if fields["run"].value is None else RunState.parse(fields["run"].value)
        model = self.prepared
        assert model is not None
        if self._run is None and not self.learns and run is not None:
            raise GossamerError("load_state_dict: the model was exported; prepare it again before loading the state")
        differences: list[str] = []
        if "config" in fields and fields["config"].text() != self.config_fingerprint:
            differences.append("the config has changed since the state was saved; pruning continues by the new one")
        if self._run is not None and run is not None:
            differences += self._run.load_state_dict(run)
        elif self._run is not None:
            masks = self._parse_masks(model, fields["by_hand"].entries() if "by_hand" in fields else {}, differences)
            self._run = self._new_run(model)
            for name, keep in masks.items():
                self._run.modifiers[0].masks.set(name, keep)
            self._run.apply_masks()
        self.iteration, self._begun = iteration, run is not None
        for difference in differences:
            logger.warning("state: %s", difference)
        return differences

    def _parse_masks(self, model: nn.Module, saved: Mapping[str, Item], differences: list[str]) -> dict[str, Tensor]:
        """Masks that `update_sparsity_per_layer` set before the first `prune_model`."""
        masks: dict[str, Tensor] = {}
        for name, item in saved.items():
            spec, shape = Spec.of(name, get_parameter(model, name)) if name in self.names else None, item.shape()
            if spec is not None and spec.shape == shape:
                masks[name] = item.mask(spec)
            else:
                differences.append(
                    f"the mask of {name!r} {shape} is dropped: no weight of that name and shape is pruned"
                )
        return masks

    @property
    def config_fingerprint(self) -> str:
        """The modifiers as text, to detect that a config has changed since a state was saved."""
        return repr([(modifier.name, modifier.model_dump(exclude_unset=True)) for modifier in self.modifiers()])

    # For custom schedulers

    @property
    def learns(self) -> bool:
        """Whether sparsers replace the weights, instead of masks."""
        return self.sparser is not sparsers.FakeSparse

    @property
    def final_sparsity(self) -> float | None:
        """The final sparsity of what is pruned, if the config determines it."""
        return None

    @property
    def length(self) -> int | None:
        """The iterations of the whole training, if the config sets it."""
        return None

    @property
    def prepared(self) -> nn.Module | None:
        """The model that `prepare_sparse_model` returned, without wrappers; None if it is gone."""
        return self._reference() if self._reference is not None else None

    def final_sparsities(self) -> Mapping[str, float]:
        """The final sparsity of each weight, if it is known before training."""
        final = self.final_sparsity
        return {} if final is None or self.learns else dict.fromkeys(self.names, final)

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        """The modifiers that do what the config describes, with times in epochs of `steps_per_epoch` iterations."""
        if issubclass(self.sparser, sparsers.STRFakeSparse):
            kwargs = self.config.kwargs["fake_sparse"]
            given = {"s_init": kwargs["sInit_value"]} if "sInit_value" in kwargs else {}
            return [self.build(STRPruningModifier, {"params": ALL_PRUNABLE, **self.excluding, **given})]
        sparsity = self.generator.sparsity
        target = self.config.sparsity.get("target_sparsity", 0.0) if sparsity is None else sparsity
        uniform = self.config.sparsity.get("uniform", True)
        return [self.levels([target], 1.0, **({} if uniform else {"allocation": "global"}))]

    def levels(self, levels: Sequence[float], end_epoch: float, **more: Any) -> LevelPruningModifier:
        """A modifier with the pattern and the score of the mask generator."""
        fields: dict[str, Any] = {"params": ALL_PRUNABLE, **self.excluding, "levels": list(levels)}
        if self.generator.mask_type not in (None, "unstructured"):
            fields["mask_type"] = self.generator.mask_type
        if self.generator.score_type != "magnitude":
            fields["score_type"] = self.generator.score_type
        modifier = self.build(LevelPruningModifier, {**fields, "end_epoch": end_epoch, **more})
        return modifier if self.generator.mask_type is not None else GeneratedLevels.of(modifier, self.generator)

    def build(self, kind: type[M], fields: Mapping[str, Any]) -> M:
        """A modifier with these fields; problems name the keys of the config that the fields come from."""
        try:
            return kind.model_validate(fields)
        except ValidationError as error:
            raise GossamerError(self._problem(problem) for problem in problems_of(error, fields, kind)) from None

    @property
    def excluding(self) -> dict[str, list[str]]:
        return {"exclude": self.exclude} if self.exclude else {}

    def install(self, model: nn.Module) -> None:
        """Bind the modifiers to the model, which raises if they do not fit, and insert the sparsers."""
        run = self._new_run(model)
        self.names = [name for own in run.modifiers for name in own.bound_names]
        self.skipped = {name: why for own in run.modifiers for name, why in own.skipped.items()}
        self._run, self._begun, self.iteration = None if self.learns else run, False, None
        if type(self) is BaseScheduler and not self.learns and run.modifiers[0].modifier.sparsity_at(0.0) == 0:
            logger.warning("no sparsity is set: nothing is pruned until update_sparsity_per_layer")
        if self.learns:
            run.take_over_masks()
            for name in self.names:
                sparsers.attach(unwrap(model), name, self.make_sparser(get_parameter(model, name)))

    def make_sparser(self, weight: Tensor) -> sparsers.FakeSparse:
        return self.sparser(weight, self.generator, **self.config.kwargs["fake_sparse"])

    def advance(self, model: nn.Module, iteration: int) -> None:
        """Prune as scheduled for an iteration."""
        if self._run is not None:
            with self.config_errors():
                (self._run.advance if self._begun else self._run.begin)(iteration)
            self._begun = True
            self._run.apply_masks()

    def after_step(self) -> None:
        """Called after each step of an optimizer that trains the model."""

    def release(self, model: nn.Module) -> None:
        """Stop holding the zeros of an exported model, because another scheduler prepares it."""
        parameters = {id(parameter) for parameter in model.parameters()}
        exported = self.prepared
        if exported is not None and any(id(parameter) in parameters for parameter in exported.parameters()):
            self._exported = ZeroMasks()

    @contextmanager
    def config_errors(self) -> Generator[None]:
        """Errors of modifiers become errors of the config."""
        try:
            yield
        except GossamerError as error:
            raise GossamerError(self._problem(problem) for problem in error.problems) from error

    # Internals

    @property
    def _holds_masks(self) -> bool:
        return self._run is not None and bool(self._run.masks.names())

    @property
    def _bound(self) -> BoundModifier | None:
        return self._run.modifiers[0] if self._run is not None else None

    def _problem(self, problem: Problem) -> Problem:
        """A problem of a modifier as one of the config."""
        key = problem.key[1:] if problem.key and problem.key[0] in known_names() else problem.key
        keys = {"exclude": (*SCHEDULER_KWARGS, "no_prune_layer"), **self.field_keys}
        key = (*keys.get(str(key[0]), (key[0],)), *key[1:]) if key else ()
        return replace(problem, key=key, location=LOCATION)

    def _check_modifiers(self) -> None:
        """Raise for arguments from which no modifiers can be built."""
        self.modifiers()

    def _check_parts(self) -> None:
        """Raise for parts that belong to other schedulers."""
        for kind, sparser in (
            (generators.STRMaskGenerator, sparsers.STRFakeSparse),
            (generators.ProbMaskGenerator, sparsers.ProbMaskFakeSparse),
        ):
            if isinstance(self.generator, kind) and not issubclass(self.sparser, sparser):
                raise GossamerError(f"{kind.__name__} needs {sparser.__name__}", "fake_sparse")
        if self.required_sparser is None and issubclass(self.sparser, sparsers.ProbMaskFakeSparse):
            raise GossamerError("ProbMaskFakeSparse needs ProbMaskPruneScheduler", "scheduler")
        # A custom sparser in place of a weight would hide its masks, so a subclass of FakeSparse is refused too.
        masks_only = self.required_sparser is sparsers.FakeSparse and self.learns
        if self.required_sparser is not None and (masks_only or not issubclass(self.sparser, self.required_sparser)):
            needed, given = self.required_sparser.__name__, self.sparser.__name__
            raise GossamerError(f"{type(self).__name__} needs {needed}, found {given}", "fake_sparse")

    def _new_run(self, model: nn.Module) -> TrainingRun:
        with self.config_errors():
            recipe, example = Recipe.of(self.modifiers(), name=LOCATION.file), self.example_inputs
            run = TrainingRun(recipe, model, None, 1.0, example_inputs=example, scheduler_reset=self._restart)
            run.bind()
        run.external_clock = True
        return run

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        self._untrained -= {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self._run is None or not self._begun:
            return None
        if self._run.optimizer is None:
            self._run.optimizer = optimizer
        return self._run.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self.prepared
        if model is None:
            return
        self._steps += 1
        if self._run is not None and self._begun and optimizer is self._run.optimizer:
            self._run.after_step(optimizer, (), {})
        elif self._run is not None:
            self._run.apply_masks()
        self._exported.apply(model)
        self.after_step()

    def _warn_untrained(self) -> None:
        if self._untrained and self._steps > 1:
            logger.warning(
                "no optimizer trains the parameters of %s; build the optimizer after prepare_sparse_model",
                self.sparser.__name__,
            )
            self._untrained.clear()

    def _warn_early_export(self, model: nn.Module) -> None:
        done = 0 if self.iteration is None else self.iteration + 1
        if self.length is None or done >= self.length or not (done or self.learns):
            return
        final = self.final_sparsity or 0.0
        pruning = [modifier for modifier in self.modifiers() if modifier.prunes]
        is_final = any((modifier.sparsity_at(done - 1.0) or 0.0) > final - 1e-6 for modifier in pruning)
        if is_final and done >= self.length * (1 - TOLERANCE):
            return
        logger.warning(
            "export_sparse_model: the schedule did not finish: prune_model was called for %d of %d iterations, "
            "sparsity %.1f%% (target: %.1f%%). Call prune_model(model, iteration) in each iteration, or correct the "
            "length in the config",
            done,
            self.length,
            100 * self.compute_sparse_rate(model),
            100 * final,
        )

    def _reconfigure(self, config: Mapping[str, Any]) -> None:
        """Become the scheduler of a config with some parts overridden; nothing changes if it is not valid."""
        with within(location=LOCATION):
            other = scheduler_of(self.config.overridden(config))
        if type(other) is not type(self):
            raise GossamerError(
                f"prepare_sparse_model: the config names {type(other).__name__}, and this is {type(self).__name__}; "
                "build one with build_sparse_scheduler(config)"
            )
        self._adopt(other)

    def _adopt(self, other: BaseScheduler) -> None:
        """Take all attributes of a scheduler that was just built, except the learning-rate scheduler of this one."""
        other._restart = self._restart
        self.__dict__.update(vars(other))

    def _check_prepared(self, model: nn.Module | None, call: str) -> None:
        prepared = self.prepared
        if prepared is None:
            raise GossamerError(f"{call}: call prepare_sparse_model(model) first, and keep the model that it returns")
        if model is not None and unwrap(model) is not prepared:
            raise GossamerError(f"{call}: this is not the model that prepare_sparse_model returned; pass that one")

    def _check_copy(self, model: nn.Module, call: str) -> nn.Module:
        """The user's model inside wrappers; raises unless it has the weights of the prepared one."""
        self._check_prepared(None, call)
        owner = unwrap(model)
        for name in self.names:
            if not has_parameter(owner, name):
                raise GossamerError(f"{call}: this is not a copy of the prepared model: it has no parameter '{name}'")
        return owner


def scheduler_of(config: Config) -> BaseScheduler:
    """The scheduler that a checked config describes."""
    return cast(BaseScheduler, config.types["scheduler"](config, **config.kwargs["scheduler"]))


_schedulers: weakref.WeakSet[BaseScheduler] = weakref.WeakSet()
"""Schedulers that may hold the zeros of a model that they have exported."""


# Selection of layers

_PREFIX = "module."
"""DistributedDataParallel's prefix of names."""


def exclusions(keywords: str, layers: str) -> list[str]:
    """The `exclude` of a modifier for two lists with commas: parts of layer names, and layer names.

    >>> exclusions("conv, module.a,", "fc")
    ['re:.*conv.*\\\\.[^.]+$', 're:(.*module\\\\.a|a).*\\\\.[^.]+$', 'fc']
    """
    return [_keyword_pattern(keyword) for keyword in _entries(keywords)] + _entries(layers)


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _keyword_pattern(keyword: str) -> str:
    """Weights of layers whose name, without that of the weight, contains the keyword."""
    anywhere, bare = f".*{re.escape(keyword)}", keyword.removeprefix(_PREFIX)
    layer = anywhere if bare == keyword else f"({anywhere}|{re.escape(bare)})"
    return f"re:{layer}.*\\.[^.]+$"


def sparsity_by_weight(given: float | Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """A sparsity for each weight, from one for all or from one per layer (or weight); other layers are left out."""
    if not isinstance(given, Mapping):
        given = dict.fromkeys(names, given)
    weights: dict[str, list[str]] = {name: [name] for name in names}
    for name in names:
        weights.setdefault(layer_path(name), []).append(name)
    sparsities: dict[str, float] = {}
    for layer, sparsity in given.items():
        selected = weights.get(layer, weights.get(layer.removeprefix(_PREFIX)))
        if selected is None:
            raise GossamerError(f"sparsity_rate: no layer '{layer}' is pruned{nearest(layer, weights)}")
        if not 0 <= sparsity <= 1:
            raise GossamerError(f"sparsity_rate: '{layer}': expected a share between 0 and 1, found {sparsity!r}")
        sparsities.update(dict.fromkeys(selected, float(sparsity)))
    return sparsities
