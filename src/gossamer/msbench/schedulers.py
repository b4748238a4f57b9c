"""The scheduler that all others extend: prepare a model, prune it while it trains, export it.

A scheduler comes to a recipe, which a run of the engine carries out; the
user's loop moves its clock by `prune_model(model, iteration)`. Methods that
learn what to prune put sparsers into the model instead.
"""

from __future__ import annotations

import logging
import os
import re
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.graph import ALL_PRUNABLE, get_parameter, unwrap
from gossamer.modifiers import LevelPruningModifier, Modifier, STRPruningModifier
from gossamer.msbench import selection, sparsers
from gossamer.msbench.config import NAME, Config, complaint, sentence
from gossamer.msbench.generators import MaskGenerator
from gossamer.msbench.tracing import traced
from gossamer.recipe import Recipe
from gossamer.training.attachment import Attachment
from gossamer.training.masks import Masks
from gossamer.training.restart import Restart
from gossamer.training.run import TrainingRun
from gossamer.training.state import check_state
from gossamer.training.watching import Arguments, Watch

logger = logging.getLogger("gossamer.msbench")
STATE_FORMAT = 1
M = TypeVar("M", bound=Modifier)
LEVEL_ARGUMENTS = {
    "levels": "scheduler.kwargs.sparsity_table",
    "energy_slope": "scheduler.kwargs.prun_algo_tuning",
    "tolerance": "scheduler.kwargs.sparse_rate_tolerance",
    "max_layer_sparsity": "scheduler.kwargs.prune_tolerance_max",
    "end_epoch": "scheduler.kwargs.total_iters",
}
"""Where the fields of `LevelPruningModifier` come from."""


class BaseScheduler:
    """A constant sparsity, or what the sparsers of the config learn.

    `no_prune_keyword` holds parts of layer names and `no_prune_layer` whole
    layer names, each a list with commas, of layers that stay dense.
    """

    traces: ClassVar[bool] = True
    """Whether torch.fx is tried on the model."""

    def __init__(self, config: Config, *, no_prune_keyword: str = "", no_prune_layer: str = "") -> None:
        self.config = config
        self.exclude = selection.patterns(selection.words(no_prune_keyword), selection.words(no_prune_layer))
        self.generator = cast(MaskGenerator, config.types["mask_generator"](**config.kwargs["mask_generator"]))
        self.sparser = cast(type[sparsers.FakeSparse], config.types["fake_sparse"])
        self.init_lr: float | list[float] | None = None
        self.iteration: int | None = None
        self.leads = True
        """Whether `prune_model` comes before the optimizer's step in an iteration, as seen in the first one."""
        self.names: list[str] = []
        """The weights that are pruned; known when a model is prepared."""
        self.skipped: dict[str, str] = {}
        self._reference: weakref.ref[nn.Module] | None = None
        self._run: TrainingRun | None = None
        self._begun = False
        self._restart: Restart | None = None
        self._watch: Watch | None = None
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._exported = Masks()

    # The calls of a training script

    def prepare_sparse_model(self, model: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
        """The model, traced where torch.fx represents it rightly; weights keep their values and names.

        A `config` overrides parts of the scheduler's own. Build the optimizer behind this call: methods that learn
        add parameters.
        """
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"prepare_sparse_model: expected a torch.nn.Module, found {type(model).__name__}")
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
        prepared = traced(model, self.config.leaves) if self.traces and owner is model else model
        self._exported = Masks()
        self._stepped = weakref.WeakSet()
        self.install(prepared)
        self._reference = weakref.ref(unwrap(prepared))
        self._watch = Watch(unwrap(prepared), self._before_step, self._after_step)
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
        if self.iteration is None:
            self.leads = not self._stepped
        told = self.advance(model, iteration)
        self.iteration = iteration
        return told or {}

    def init_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Name the optimizer. Where it is not named, the one that trains the model is noticed when it steps."""
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"init_optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
        if self._run is not None:
            self._run.shared.optimizer = optimizer

    def set_lr_scheduler(self, lr_scheduler: Any) -> None:
        """Name the learning-rate scheduler, which levels start over."""
        self._restart = Restart(lr_scheduler, self.init_lr)
        if self._restart.begun:
            logger.warning(
                "set_lr_scheduler: it has made steps already, and levels will start over from there; "
                "name it before its state is loaded, or load the sparse scheduler's state behind this call"
            )
        if self._run is not None:
            self._run.shared.restart = self._restart
        self.init_optimizer(self._restart.optimizer)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        """Write the zeros into the weights and take the sparsers out, in place; training on keeps the zeros.

        A copy of the prepared model, such as an average, can be exported too, and the training goes on.
        """
        owner = self._expect_names(model, "export_sparse_model")
        if self._run is not None and self._begun:
            self._run.shared.masks.apply_to_copy(owner)
        sparsers.fold(owner, self.names)
        if self._reference is not None and owner is self._reference():
            if self._run is not None and self._begun:
                self._run.finish()
            self._run = None
            for name in self.names:
                weight = get_parameter(owner, name).detach()
                self._exported.hold(0, name, weight != 0, weight)
            self.exported()
        return model

    def export_sparse_onnx(self, model: nn.Module, dummy_input: Any, onnx_name: str | os.PathLike[str]) -> str:
        """Write `onnx_name`.onnx with the zeros in the weights, and return its name; the model stays as it is."""
        from gossamer.msbench.onnx import write

        return write(self, model, dummy_input, onnx_name)

    def compute_sparse_rate(self, model: nn.Module) -> float:
        """Measured: zeros over weights of the layers that are pruned."""
        owner = self._expect_names(model, "compute_sparse_rate")
        weights = [sparsers.effective(owner, name) for name in self.names]
        total = sum(weight.numel() for weight in weights)
        return sum(weight.numel() - int(weight.count_nonzero()) for weight in weights) / total

    def update_sparsity_per_layer(self, model: nn.Module, sparsity_rate: float | Mapping[str, float]) -> None:
        """Prune now, to one sparsity or to one for each layer by its name."""
        self._check_prepared(model, "update_sparsity_per_layer")
        attachment = self._attachment
        if attachment is None or not isinstance(attachment.modifier, LevelPruningModifier):
            raise GossamerError(f"update_sparsity_per_layer: {type(self).__name__} decides the sparsity itself here")
        attachment.modifier.prune(attachment, selection.by_weight(sparsity_rate, self.names))
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
        run = self._run.state_dict() if self._run is not None and self._begun else None
        name = type(self).__name__
        return {"format": STATE_FORMAT, "scheduler": name, "iteration": self.iteration, "run": run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; behind `prepare_sparse_model` and `set_lr_scheduler`."""
        if not isinstance(state, Mapping) or not {"format", "scheduler", "iteration", "run"} <= set(state):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError("load_state_dict: this is not what state_dict() of a sparse scheduler returned")
        if (state["scheduler"], state["format"]) != (type(self).__name__, STATE_FORMAT):
            raise GossamerError(
                f"load_state_dict: the state is of {state['scheduler']}, format {state['format']}, "
                f"and this is {type(self).__name__}, format {STATE_FORMAT}"
            )
        if self._reference is None:
            raise GossamerError("load_state_dict: call prepare_sparse_model(model) first")
        if not isinstance(state["iteration"], int | None):
            raise GossamerError(f"load_state_dict: the state's iteration is {state['iteration']!r}; save it anew")
        if state["run"] is not None:
            check_state(state["run"])
        self.iteration = state["iteration"]
        if state["run"] is not None and self._run is not None:
            for problem in self._run.load_state_dict(state["run"]):
                logger.warning("state: %s", problem)
            self._begun = True

    # What the config comes to

    @property
    def learns(self) -> bool:
        """Whether sparsers stand in the weights' places, and not just masks."""
        return self.sparser is not sparsers.FakeSparse

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        """The modifiers of the recipe that does the same; times are in epochs of so many iterations."""
        if issubclass(self.sparser, sparsers.STRFakeSparse):
            kwargs = self.config.kwargs["fake_sparse"]
            given = {"s_init": kwargs["sInit_value"]} if "sInit_value" in kwargs else {}
            return [STRPruningModifier(params=ALL_PRUNABLE, **self.excluding, **given)]
        return [self.levels([self.generator.sparsity or self.config.sparsity.get("target_sparsity", 0.0)], 1.0)]

    def levels(self, levels: Sequence[float], end_epoch: float, **more: Any) -> LevelPruningModifier:
        """A modifier with the pattern and the score of the mask generator."""
        fields: dict[str, Any] = {"params": ALL_PRUNABLE, **self.excluding, "levels": list(levels)}
        if self.generator.mask_type not in (None, "unstructured"):
            fields["mask_type"] = self.generator.mask_type
        if self.generator.score_type != "magnitude":
            fields["score_type"] = self.generator.score_type
        return made(LevelPruningModifier, {**fields, "end_epoch": end_epoch, **more}, LEVEL_ARGUMENTS)

    @property
    def excluding(self) -> dict[str, list[str]]:
        return {"exclude": self.exclude} if self.exclude else {}

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        """The same as a recipe: a manager that runs it comes to the same weights."""
        own = [kind.__name__ for kind in self.config.types.values() if not kind.__module__.startswith("gossamer.")]
        if own:
            raise GossamerError(f"recipe: {' and '.join(own)} cannot be written down: a recipe knows no code")
        metadata = {"source": f"MSBench {type(self).__name__}", "steps_per_epoch": steps_per_epoch}
        return Recipe.of(self.modifiers(steps_per_epoch), metadata=metadata, name="msbench")

    @property
    def layers(self) -> dict[str, str | None]:
        """Every layer that could be pruned: None when it is, else the reason why it stays dense."""
        self._check_prepared(None, "layers")
        return {selection.layer_of(n): r for n, r in {**dict.fromkeys(self.names), **self.skipped}.items()}

    # For schedulers of one's own

    def install(self, model: nn.Module) -> None:
        """Bind the recipe to the model, so that what is wrong is told now; put the sparsers in."""
        with told_of_config():
            run = TrainingRun(Recipe.of(self.modifiers(), name=NAME), model, None, 1.0, restart=self._restart)
        run.told_the_time = True
        self.names = [name for attachment in run.attachments for name in attachment.bound]
        self.skipped = {name: why for attachment in run.attachments for name, why in attachment.skipped.items()}
        self._run, self._begun, self.iteration = None if self.learns else run, False, None
        if self.generator.mask_type is None and self._attachment is not None:
            self._attachment.modifier = GeneratedLevels.of(self._attachment.modifier, self.generator)
        if self.learns:
            for name in self.names:
                sparsers.attach(unwrap(model), name, self.make_sparser(get_parameter(model, name)))

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

    # Behind the scenes

    @property
    def _attachment(self) -> Attachment | None:
        return self._run.attachments[0] if self._run is not None else None

    def _enter(self, iteration: int) -> None:
        if self._run is not None:
            with told_of_config():
                (self._run.advance if self._begun else self._run.begin)(iteration)
            self._begun = True
            self._run.apply_masks()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Gradients are looked at once in a round, which is over when an optimizer steps again."""
        if self._stepped and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return None
        self._stepped = weakref.WeakSet([optimizer])
        self.before_step()
        if self._run is None or not self._begun:
            return None
        if self._run.shared.optimizer is None:
            self._run.shared.optimizer = optimizer
        return self._run.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._reference() if self._reference is not None else None
        if model is None:
            return
        if self._run is not None and self._begun and optimizer is self._run.shared.optimizer:
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
        if missing := sorted(set(self.names) - {name for name, _ in owner.named_parameters(remove_duplicate=False)}):
            raise GossamerError(f"{call}: this is no copy of the prepared model: it has no parameter '{missing[0]}'")
        return owner


@contextmanager
def told_of_config() -> Generator[None]:
    """Errors in the words of a config, and without the lines of a recipe that nobody wrote."""
    try:
        yield
    except GossamerError as error:
        lines = [re.sub(rf"^({NAME}(:\d+)?: )?", f"{NAME}: ", line) for line in str(error).splitlines()]
        raise GossamerError("\n".join(line.replace(": exclude:", ": no_prune_layer:") for line in lines)) from error


def made(kind: type[M], fields: Mapping[str, Any], names: Mapping[str, str]) -> M:
    """A modifier of these fields; complaints are about the arguments that the fields came from, by `names`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        told: list[str] = []
        for details in error.errors(include_url=False):
            field = str(details["loc"][0]) if details["loc"] else ""
            place = f"{names.get(field, field)}: " if field else ""
            told.append(f"{NAME}: {place}{sentence([details], fields.get(field)) if field else complaint(details)}")
        raise GossamerError("\n".join(told)) from None


class GeneratedLevels(LevelPruningModifier):
    """Levels whose masks a mask generator of the user's own makes; it cannot be written into a recipe."""

    _generator: MaskGenerator

    @classmethod
    def of(cls, levels: Modifier, generator: MaskGenerator) -> GeneratedLevels:
        made = cls.model_validate(levels.model_dump(exclude_unset=True))
        made._generator = generator
        return made

    def masks(self, run: Any, scores: Mapping[str, Tensor], sparsity: Mapping[str, float] | float) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, score in scores.items():
            weight = run.parameter(name).detach()
            self._generator.sparsity = sparsity[name] if isinstance(sparsity, Mapping) else sparsity
            mask = cast(object, self._generator.generate_mask(weight))
            if not isinstance(mask, Tensor) or mask.shape != score.shape:
                what = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise GossamerError(
                    f"{type(self._generator).__name__}.generate_mask: expected a mask of shape {tuple(weight.shape)} "
                    f"for '{name}', found {what}"
                )
            found[name] = mask != 0
        return found
