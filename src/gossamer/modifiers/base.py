"""The base class of modifiers, and their registry.

A modifier is a frozen pydantic model with behaviour and no memory: what it keeps between steps is in `run.state`, so
that one recipe can drive two models and a checkpoint holds the run's state alone. `run.py` declares `Run`, which the
engine implements.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.optim.sgd import sgd

from gossamer.errors import FieldError, GossamerError, ModifierError, Problem, nearest
from gossamer.model import ALL_PRUNABLE, expects_every_gradient
from gossamer.model.parameters import KEYWORDS, KEYWORDS_TO_EXCLUDE, problem_of_name
from gossamer.modifiers.run import Run
from gossamer.modifiers.state import Item, StateField, StateLayout
from gossamer.quantities import Epoch
from gossamer.sparse import Pattern

EXCLUDED = "excluded"
"""The reason with which parameters that the recipe excludes are skipped."""
SPARED_EMBEDDINGS = "spared_embeddings"
"""The key in `run.plan` of the weights that are left dense because an embedding shares them."""
_NEWER = {"start": "start_epoch", "end": "end_epoch", "targets": "params"}


def _check_names(*keywords: str) -> AfterValidator:
    """Reject unknown keywords and invalid patterns; items of a list are validated one by one, for their locations."""

    def check(value: str | list[str]) -> str | list[str]:
        if isinstance(value, str) and (problem := problem_of_name(value, keywords)) is not None:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def _require_end(epoch: float) -> float:
    if epoch == -1:
        raise ValueError("expected the epoch at which the modifier ends, found -1")
    return epoch


_OF_PARAMS, _OF_EXCLUDED, _OF_LAYERS = (
    _check_names(*KEYWORDS),
    _check_names(*KEYWORDS_TO_EXCLUDE),
    _check_names(ALL_PRUNABLE),
)
_LEFT_TO_RIGHT = Field(union_mode="left_to_right")

ParamName = Annotated[str, _OF_PARAMS]
ParamNames = Annotated[str | list[ParamName], _LEFT_TO_RIGHT, _OF_PARAMS]
"""`__ALL__`, `__ALL_PRUNABLE__`, a name, or a list of names and `re:` patterns."""
ExcludedNames = Annotated[str | list[Annotated[str, _OF_EXCLUDED]], _LEFT_TO_RIGHT, _OF_EXCLUDED]
"""The same, and `__DEPTHWISE__`."""
EndEpoch = Annotated[Epoch, AfterValidator(_require_end)]
"""The epoch at which a modifier ends, for those that cannot go on until the end of training."""
LayerNames = Annotated[str | list[Annotated[str, _OF_LAYERS]], _LEFT_TO_RIGHT, _OF_LAYERS]
"""`__ALL_PRUNABLE__`, the name of a module, or a list of names and `re:` patterns."""


Certainty = Literal["exact", "estimated", "learned", "held", "removed"]
"""How the number of zeros is known: `exact` by arithmetic; `estimated` from the current weights; `learned` only after
training; `held` because the zeros exist now; `removed` because the layer is taken out of the model."""


class Outlook(NamedTuple):
    """One weight as the recipe leaves it."""

    zeros: int | None
    """None when the method determines the number during training."""
    pattern: str
    """The recipe's `mask_type`, or `layer` when the layer is removed."""
    certainty: Certainty
    modifier: str


class Modifier(BaseModel):
    """One thing that a recipe does to a training run, between two epochs.

    A subclass overrides the hooks that it needs:

    | hook | called |
    |---|---|
    | `bind` | before anything changes |
    | `start`, `update`, `end` | at `start_epoch`, between, and at `end_epoch` |
    | `before_step`, `after_step` | around each optimizer step while active |
    | `restore` | while active, after a state was loaded |
    | `undo` | while active, before a state is loaded, and when a failed call is rolled back |
    | `finish` | when the run ends while active: `end` is not called then |
    | `discard` | in place of `finish` if nothing was trained: must not change weights |
    | `finalized` | last, when the run has ended, for every modifier that has started |

    Order within one optimizer step: `before_step` (with gradients), the step, `after_step`, and all masked weights are
    zeroed. Then time advances: `end`, `start` or `update` of the modifiers that are due, and after each of them the
    weights whose mask it changed are zeroed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    family: ClassVar[str] = "other"
    """`pruning`, `quantization`, `distillation`, `learning_rate`, `parameters`, `optimizer`, `epoch`, `logging`."""
    epoch_fields: ClassVar[tuple[str, ...]] = ("start_epoch", "end_epoch")
    """Fields that hold epochs, which shift when a recipe is composed after another."""
    periodic: ClassVar[bool] = False
    """True when `update` is called every `update_frequency` epochs between start and end."""
    structural: ClassVar[bool] = False
    """True when the modifier changes which modules the model has."""
    recalibrates: ClassVar[bool] = False
    """True when evaluation computes with other weights than training, so that batch norm must be recalibrated."""
    prunes: ClassVar[bool] = False
    """True when the modifier holds masks on its targets."""
    only_holds: ClassVar[bool] = False
    """True when its masks are the zeros that weights have at the start."""
    learns_sparsity: ClassVar[bool] = False
    """True when training determines which weights are zero, so that masks exist only at the end."""

    start_epoch: Epoch = -1.0
    end_epoch: Epoch = -1.0
    log_types: Any = None
    """Accepted without effect, as are the next three."""
    constant_logging: bool = False
    available_gpus: Any = None
    strict: bool = True
    update_frequency: Epoch = -1.0
    """Epochs between updates; no effect on modifiers without updates."""

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, fields: Any) -> Any:
        """Accept `start`, `end` and `targets` of later SparseML recipes."""
        if not isinstance(fields, dict):
            return fields
        given = cast(dict[str, Any], fields)
        return {_NEWER.get(key, key) if key not in cls.model_fields else key: given[key] for key in given}

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> Self:
        if self.end_epoch != -1 and self.end_epoch < self.start_epoch:
            raise FieldError(f"{self.end_epoch:g} is before start_epoch {self.start_epoch:g}", "end_epoch")
        return self

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def updates_every(self) -> float | None:
        """Epochs between updates, −1 for every step, None for no updates between start and end."""
        return self.update_frequency if self.periodic else None

    # What the modifier does to a model, for reports and plots.

    @property
    def pattern(self) -> Pattern | None:
        """The shape of its zeros; None when it does not prune."""
        return None

    @property
    def goal(self) -> float | None:
        """The final sparsity of all targets together; None if it sets none, or one per target."""
        return None

    @property
    def last_epoch(self) -> float:
        """The epoch at which the modifier is complete: its end, or its start when it has no end."""
        return self.start_epoch if self.end_epoch == -1 else self.end_epoch

    @property
    def released_epoch(self) -> float | None:
        """The epoch at which it undoes what it did to the model; None when that stays."""
        return None if self.end_epoch == -1 else self.end_epoch

    @property
    def removal_epochs(self) -> Sequence[float]:
        """The epochs at which it removes filters from the model."""
        return ()

    @property
    def learning_rate_groups(self) -> Sequence[int] | None:
        """The optimizer's parameter groups whose learning rate it sets; None for all."""
        return None

    def sparsity_at(self, epoch: float) -> float | None:
        """The scheduled sparsity at an epoch; None where this modifier sets none."""
        return None

    def sparsity_of(self, run: Run, name: str, epoch: float) -> float | None:
        """The same for one weight; None also if weights share one threshold, so that it depends on their values."""
        return self.sparsity_at(epoch)

    def learning_rate_at(self, epoch: float, steps_per_epoch: float, initial: float) -> float | None:
        """The learning rate at an epoch; None before the start, after the end and where it sets none."""
        return None

    def outlook(self, run: Run) -> dict[str, Outlook]:
        """By weight: its predicted zeros at the end, for a bound modifier before training."""
        return {}

    def sparsities(self, run: Run, sparsity: float) -> dict[str, float]:
        """By weight: its sparsity when all targets together have `sparsity`; empty if that is unknown."""
        return {}

    def prune_to(self, run: Run, sparsity: Mapping[str, float] | float) -> bool:
        """Prune to a sparsity now, outside of the schedule; returns False if the modifier does not support this."""
        return False

    def warnings(self) -> list[Problem]:
        """Fields that are accepted but have no effect; the first key of each is the field."""
        ignored = [f for f in ("log_types", "available_gpus") if getattr(self, f) not in (None, "__ALL__")]
        return [Problem("has no effect in Gossamer", (field,)) for field in ignored]

    def shifted(self, epochs: float) -> Self:
        """The same modifier, `epochs` later; a start of −1 becomes the shift itself."""
        moved: dict[str, Any] = {}
        for field in self.epoch_fields:
            value = getattr(self, field)
            if field == "start_epoch":
                moved[field] = max(value, 0.0) + epochs
            elif value is not None and value != -1:
                moved[field] = value + epochs
        return self.with_fields(**moved)

    def with_fields(self, **fields: Any) -> Self:
        """A copy with other values for some fields, which are validated; private attributes are kept."""
        changed = type(self).model_validate({**self.model_dump(exclude_unset=True), **fields})
        for name, value in (self.__pydantic_private__ or {}).items():
            setattr(changed, name, value)
        return changed

    # Hooks. A subclass overrides those that it needs.

    def bind(self, run: Run) -> list[str]:
        """The names that this modifier acts on; raises `ModifierError`, and changes nothing."""
        return []

    def start(self, run: Run) -> None: ...

    def update(self, run: Run) -> None: ...

    def end(self, run: Run) -> None: ...

    def before_step(self, run: Run) -> None: ...

    def after_step(self, run: Run) -> None: ...

    def loss(self, run: Run, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """The loss to train on, for `manager.loss`; `inputs` are those of the model, or None."""
        return loss

    # State. A saved state is parsed completely before anything changes.

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        """By key of `run.state`: how it is parsed when a checkpoint is loaded; empty by default.

        `modifiers/state.py` has declarations for numbers, tensors and masks. The keys must not depend on fields of
        the recipe, which may be edited between saving and loading.
        """
        return {}

    def check_state(self, item: Item, state: Mapping[str, Any]) -> None:
        """Raise `GossamerError` if parsed fields contradict each other; `item` has their path for the message."""

    def parse_state(self, run: Run, item: Item, layout: StateLayout, *, active: bool) -> dict[str, Any]:
        """The new `run.state`; changes nothing, and raises `GossamerError` for values that do not fit."""
        fields = self.state_fields(run)
        required = [key for key, declared in fields.items() if declared.required and active]
        entries = item.fields(required, fields)
        state = {key: fields[key].parse(entry, layout) for key, entry in entries.items()}
        self.check_state(item, state)
        return state

    def restore(self, run: Run) -> None:
        """Apply `run.state` to the model, after a checkpoint was loaded."""

    def undo(self, run: Run) -> None:
        """Undo what `start` changed in the model besides weights, masks and learning rates."""

    def replaced_layers(self, run: Run) -> Mapping[str, nn.Module]:
        """By name: the original layers that the modifier has replaced in the model."""
        return {}

    def finish(self, run: Run) -> None:
        """The run ends while the modifier is active: write the values that the model computes with to the weights."""

    def discard(self, run: Run) -> None:
        """The run ends while the modifier is active and without a training step: leave the weights unchanged."""
        self.finish(run)

    def finalized(self, run: Run) -> None:
        """The run has ended, whether or not the modifier had ended before."""


@contextmanager
def locating_errors(run: Run) -> Generator[None]:
    """Add the location in the recipe to errors of a modifier that are raised inside."""
    try:
        yield
    except ModifierError as error:
        raise run.log.locate(error) from error


def check_gradients_may_vanish(run: Run) -> None:
    """Raise if DDP expects a gradient of every parameter, so that parameters must not drop out of the backward pass."""
    if expects_every_gradient(run.distributed.module):
        raise ModifierError("needs DistributedDataParallel(model, find_unused_parameters=True) around the model")


def to_step(epoch: float, steps_per_epoch: float) -> int:
    """The integer step of an epoch; time is converted once and never accumulated.

    >>> to_step(2.5, 10), to_step(-1, 10)
    (25, 0)
    """
    return round(max(epoch, 0.0) * steps_per_epoch)


def sgd_options(run: Run) -> dict[Tensor, tuple[float, float]]:
    """By parameter: the optimizer's learning rate and momentum (Adam: first beta), for `sgd_step`."""
    result: dict[Tensor, tuple[float, float]] = {}
    for group in run.optimizer.param_groups:
        options = float(group["lr"]), float(group.get("momentum", group.get("betas", (0.0,))[0]))
        result.update(dict.fromkeys(group["params"], options))
    return result


def sgd_step(
    value: Tensor, gradient: Tensor, momenta: dict[str, Tensor], key: str, options: tuple[float, float], decay: float
) -> None:
    """One step of `torch.optim.SGD` on a tensor in place; its momentum is in `momenta` under `key`."""
    buffers = [momenta[key].to(value) if key in momenta else None]
    sgd(
        *([value], [gradient], buffers),
        lr=options[0],
        momentum=options[1],
        weight_decay=decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    if buffers[0] is not None:
        momenta[key] = buffers[0]


# The registry

_FILES = {
    "distillation": ("DistillationModifier", "PerLayerDistillationModifier"),
    "dynamic": ("ACDCPruningModifier", "ADMMPruningModifier", "RigLPruningModifier", "TopKASTPruningModifier"),
    "gradual": (
        "GMPruningModifier",
        "GlobalMagnitudePruningModifier",
        "LevelPruningModifier",
        "MFACPruningModifier",
        "MagnitudePruningModifier",
        "MovementPruningModifier",
        "OBSPruningModifier",
    ),
    "learned": ("ProbMaskPruningModifier", "STRPruningModifier"),
    "oneshot": (
        "ALPSPruningModifier",
        "GPTQModifier",
        "SmoothQuantModifier",
        "SparseGPTModifier",
        "WandaPruningModifier",
    ),
    "pruning": ("ConstantPruningModifier",),
    "quantization": ("QuantizationModifier",),
    "structure": ("LayerPruningModifier", "LayerThinningModifier", "StructuredPruningModifier"),
    "training": (
        "EpochRangeModifier",
        "GradualParamModifier",
        "LearningRateFunctionModifier",
        "LearningRateModifier",
        "SetLearningRateModifier",
        "SetParamModifier",
        "SetWeightDecayModifier",
        "SparsificationLoggingModifier",
        "TrainableParamsModifier",
    ),
}
BUILT_IN: Mapping[str, str] = {name: file for file, names in _FILES.items() for name in names}
"""By name of a modifier that recipes may use: the module of this package that defines it, imported on first use."""

_registry: dict[str, type[Modifier]] = {}
"""The modifiers of users, which come before those of this package."""
M = TypeVar("M", bound=type[Modifier])


def register(cls: M) -> M:
    """Class decorator: recipes may use this modifier by its class name.

    Registering a name again replaces it, so that a notebook cell can be run twice.
    """
    if Modifier not in getattr(cls, "__mro__", ()):
        raise GossamerError(f"register: {cls!r} is not a subclass of gossamer.Modifier")
    _registry[cls.__name__] = cls
    return cls


def registered() -> Mapping[str, type[Modifier]]:
    """Every modifier that recipes may use, by name."""
    return {name: modifier_class(name) for name in known_names()}


def known_names() -> Collection[str]:
    """The names of all modifiers that recipes may use."""
    return dict.fromkeys([*BUILT_IN, *_registry]).keys()


def modifier_class(name: str) -> type[Modifier]:
    """The modifier class of that name; raises `GossamerError` with what to use instead."""
    if name in _registry:
        return _registry[name]
    if name in BUILT_IN:
        return getattr(import_module(f"gossamer.modifiers.{BUILT_IN[name]}"), name)
    if name in NOT_OFFERED:
        raise GossamerError(f"'{name}' is not supported: {NOT_OFFERED[name]}")
    close = nearest(name, known_names()) or "; register your own modifiers first (gossamer.register, or --import)"
    raise GossamerError(f"unknown modifier '{name}'{close}")


NOT_OFFERED: Mapping[str, str] = {
    "LogarithmicEqualizationModifier": "use SmoothQuantModifier instead",
    "ASRegModifier": "activation regularization is not part of Gossamer; remove it from the recipe",
    "PowerpropagationModifier": "power propagation is not part of Gossamer; use GMPruningModifier instead",
}
"""Names that SparseML recipes use and Gossamer does not offer, with what to use instead."""
