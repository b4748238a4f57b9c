"""One modifier at work in one run: the `Run` that the modifier sees.

Holds the modifier's state, status and timing, and passes everything else on
to the run's shared parts: model, optimizer, masks, clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy

from gossamer.engine.clock import Timing
from gossamer.engine.masks import Masks
from gossamer.engine.processes import average, average_named
from gossamer.engine.restart import Restart
from gossamer.engine.sampling import Sampler, as_sampler, untaught
from gossamer.errors import GossamerError, ModifierError
from gossamer.model import get_parameter, has_parameter
from gossamer.model.additions import Substitution
from gossamer.model.parameters import empties_a_norm, named_state
from gossamer.modifiers.base import Modifier

if TYPE_CHECKING:
    from gossamer.model.permute import Permutation
    from gossamer.model.thin.cuts import Cuts
    from gossamer.model.tracing.filter_groups import FilterGraph
    from gossamer.modifiers.distillation.lessons import Lessons
    from gossamer.modifiers.filters import FilterPlan

logger = logging.getLogger("gossamer")

Logger = Callable[[str, float, int], None]

FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
"""Without its second moment, which stays, Adam would take a leap after a reset."""


@dataclass
class Shared:
    """What all modifiers of a run have in common."""

    forward: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    steps_per_epoch: float
    grad_sampler: object = None
    loggers: Sequence[Logger] = ()
    example_inputs: Any = None
    calibration_data: Iterable[Any] | None = None
    lessons: Lessons | None = None
    """Of the teacher, when there is one."""
    scaler: GradScaler | None = None
    accumulation_steps: int = 1
    step: int = 0
    masks: Masks = field(default_factory=Masks)
    ended: set[int] = field(default_factory=set[int])
    loss_scale: float = 1.0
    scaled: bool = True
    """Whether the step that is about to be made goes through the scaler, when there is one."""
    loss_scaled: bool | None = None
    """Whether the scaler that `modify` returned has scaled a loss since the last step; None: never yet."""
    overflowed: bool = False
    before_write: Callable[[str], None] | None = None
    """Told of each weight just before a modifier overwrites it."""
    reorder: Callable[[Permutation], None] | None = None
    """Puts channels of the whole run into another order."""
    cut: Callable[[Cuts, Mapping[str, tuple[int, ...]]], None] | None = None
    """Cuts what belongs to the model's weights, which had these shapes, after the weights themselves."""
    removed: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The tensors as they were before the last cut, until they are noted."""
    located: Callable[[Attachment, ModifierError], GossamerError] | None = None
    """Puts the place in the recipe before an error."""
    restart: Restart | None = None
    """The user's learning-rate scheduler, when the run was told of one."""
    filters: tuple[tuple[tuple[str, tuple[int, ...]], ...], FilterGraph | str] | None = None
    """The shapes that the model had when it was last followed, and what was found."""
    stepping: set[int] | None = None
    """While one of several optimizers is about to step: the ids of its parameters."""
    held_with_filters: set[str] = field(default_factory=set[str])
    """Parameters that no pruning modifier is bound to and that may be held at zero with filters."""
    attachments: Sequence[Attachment] = ()
    """All modifiers of the run."""

    def pruned(self) -> list[str]:
        """Masked parameters, without those that are held at zero with filters."""
        return [name for name in self.masks.names() if name not in self.held_with_filters]


class Attachment:
    """A modifier and its place in the run; implements `modifiers.base.Run`."""

    def __init__(self, index: int, key: str, modifier: Modifier, shared: Shared) -> None:
        self.index = index
        self.key = key
        self.modifier = modifier
        self.timing = Timing.of(modifier, shared.steps_per_epoch)
        self.status: Literal["pending", "active", "ended"] = "pending"
        self.bound: Sequence[str] = ()
        self.state: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.scratch: dict[str, Any] = {}
        self.skipped: dict[str, str] = {}
        self._substitutions: dict[str, Substitution] = {}
        self._shared = shared

    @property
    def targets(self) -> list[str]:
        """The bound names, without parameters of layers that are taken out at the moment."""
        if self.modifier.structural:
            return list(self.bound)
        names = [name for name in self.bound if has_parameter(self._shared.module, name)]
        stepping = self._shared.stepping
        return names if stepping is None else [name for name in names if id(self.parameter(name)) in stepping]

    @property
    def held_with_filters(self) -> Collection[str]:
        """Parameters beside the targets that may be held at zero with filters."""
        filters: FilterPlan | None = self.plan.get("filters")
        return () if filters is None else filters.vectors.keys()

    @property
    def step(self) -> int:
        return self._shared.step

    @property
    def steps_per_epoch(self) -> float:
        return self._shared.steps_per_epoch

    @property
    def start_step(self) -> int:
        return self.timing.start

    @property
    def end_step(self) -> int | None:
        return self.timing.end

    @property
    def updates_done(self) -> int:
        return self.timing.updates_until(self.step)

    @property
    def next_update(self) -> int | None:
        return self.timing.next_after(self.step)

    @property
    def module(self) -> nn.Module:
        return self._shared.module

    @property
    def forward(self) -> nn.Module:
        return self._shared.forward

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._shared.optimizer

    @property
    def grad_sampler(self) -> Sampler | None:
        kwargs: Mapping[str, Any] = getattr(self.modifier, "grad_sampler_kwargs", {})
        sampler = as_sampler(self._shared.grad_sampler, kwargs)
        lessons = self._shared.lessons
        return sampler if sampler is None or lessons is None else untaught(sampler, lessons.pause)

    @property
    def calibration_data(self) -> Iterable[Any] | None:
        return self._shared.calibration_data

    @property
    def lessons(self) -> Lessons | None:
        return self._shared.lessons

    @property
    def accumulation_steps(self) -> int:
        return self._shared.accumulation_steps

    @property
    def loss_scale(self) -> float:
        return self._shared.loss_scale

    @property
    def backward_scale(self) -> float:
        scaler = self._shared.scaler
        # Who used the scaler and has stopped, as when quantization begins, trains on plain losses.
        return 1.0 if scaler is None or self._shared.loss_scaled is False else scaler.get_scale()

    @property
    def scaled(self) -> bool:
        return self._shared.scaled

    def average(self, tensors: Sequence[Tensor]) -> None:
        average(self._shared.forward, tensors)

    def average_named(self, values: dict[str, Tensor]) -> None:
        average_named(self._shared.forward, values)

    def parameter(self, name: str) -> nn.Parameter:
        return get_parameter(self._shared.module, name)

    def gradient(self, name: str) -> Tensor | None:
        gradient = self.parameter(name).grad
        if gradient is None or self._shared.overflowed:
            return None
        return gradient if self._shared.loss_scale == 1.0 else gradient / self._shared.loss_scale

    def mask(self, name: str) -> Tensor | None:
        return self._shared.masks.kept_by(self.index, name)

    def set_mask(self, name: str, keep: Tensor) -> None:
        if empties_a_norm(self._shared.module, name, keep):
            raise ModifierError(
                f"'{name}' cannot be pruned at step {self.step}: the layer divides by a norm, and the mask leaves "
                "nothing of a row of the weight; lower the sparsity, or remove the norm from the layer first"
            )
        ended = self._shared.ended - {self.index}
        self._shared.masks.hold(self.index, name, keep, self.parameter(name), ended)

    def inherited(self, name: str, key: str) -> tuple[Tensor, Tensor] | None:
        for other in self._shared.attachments:
            keep, values = other.mask(name), other.state.get(key, {}).get(name)
            if other.index in self._shared.ended - {self.index} and keep is not None and values is not None:
                return keep, values
        return None

    def release_mask(self, name: str) -> None:
        self._shared.masks.apply_changes(self._shared.module)
        self._shared.masks.release(self.index, name)

    def write(self, name: str, values: Tensor) -> None:
        parameter = self.parameter(name)
        if self._shared.before_write is not None:
            self._shared.before_write(name)
        with torch.no_grad():
            parameter.copy_(values)
        self._shared.masks.touched(name)

    def substitute(self, name: str, value: Callable[[Tensor, bool], Tensor]) -> None:
        self.withdraw(name)
        self._substitutions[name] = Substitution(
            self._shared.module, name, lambda layer, weight: value(weight, layer.training)
        )

    def withdraw(self, name: str) -> None:
        if name in self._substitutions:
            self._substitutions.pop(name).remove()

    def substitutes(self, name: str) -> bool:
        """Whether layers compute with something else than this weight."""
        return name in self._substitutions

    def restart_learning_rate(self) -> None:
        if self._shared.restart is not None:
            self._shared.restart.due = True

    def permute(self, names: Sequence[str], n: int, m: int) -> None:
        from gossamer.model.permute import find

        shared = self._shared
        found = find(shared.module, names, n, m, example_inputs=shared.example_inputs, optimizer=shared.optimizer)
        if told := found.untraceable or found.note:
            share = "permutes in part" if found.moves else "goes on without permutation"
            logger.warning("%s %s: %s", self.modifier.name, share, told)
        for layer in found.layers:
            told = layer.reason or f"{layer.kept_before:.1%} of the magnitude kept, {layer.kept:.1%} after permutation"
            logger.info("%s: '%s': %s", self.modifier.name, layer.name, told)
        if found.moves and shared.step > 0:
            logger.warning(
                "%s reorders channels at step %d: copies of the model that were made before, such as an average, "
                "keep the old order; make them anew",
                self.modifier.name,
                shared.step,
            )
        if shared.reorder is not None:
            shared.reorder(found)

    def filter_graph(self) -> FilterGraph | str:
        from gossamer.model.tracing.coupling import Untraceable, couple
        from gossamer.model.tracing.filter_groups import FilterGraph

        shared = self._shared
        state = [(name, tensor) for name, tensor in named_state(shared.module) if not is_lazy(tensor)]
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in state)
        if shared.filters is None or shared.filters[0] != shapes:
            try:
                graph = FilterGraph(shared.module, couple(shared.module, shared.example_inputs, parts=True))
            except Untraceable as error:
                graph = str(error)
            shared.filters = (shapes, graph)
        return shared.filters[1]

    def thin(self, names: Sequence[str]) -> None:
        from gossamer.engine.thinning import thin_run

        if self._shared.cut is None:
            raise ModifierError("filters cannot be removed outside a run; attach the recipe to a model first")
        thin_run(self, names, self._shared, self._shared.cut)

    def reset_moments(self, name: str, where: Tensor | None = None) -> None:
        if self._shared.optimizer is None:
            return
        parameter = self.parameter(name)
        state: Mapping[str, Any] = self._shared.optimizer.state.get(parameter, {})
        for value in (state.get(key) for key in FIRST_MOMENTS):
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value.zero_() if where is None else value.masked_fill_(where, 0)

    def zeros(self, name: str) -> tuple[int, int]:
        weight = self.parameter(name)
        return weight.numel() - int(weight.detach().count_nonzero()), weight.numel()

    def masked_names(self) -> list[str]:
        return [name for name in self._shared.pruned() if has_parameter(self._shared.module, name)]

    def skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason

    def log(self, tag: str, value: float) -> None:
        logger.info("%s at step %d: %.6g", tag, self.step, value)
        for log in self._shared.loggers:
            log(tag, value, self.step)

    def located(self, error: ModifierError) -> GossamerError:
        return error if self._shared.located is None else self._shared.located(self, error)


def due(attachments: Sequence[Attachment], step: int) -> list[tuple[Attachment, str]]:
    """What falls due at or before `step`, in order; a modifier of no length starts and ends at once."""
    events: list[tuple[tuple[int, int, int, int, int], Attachment, str]] = []
    for attachment in attachments:
        if attachment.modifier.family == "logging":
            continue
        index, timing = attachment.index, attachment.timing
        brief = int(timing.end != timing.start)
        ends = attachment.status != "ended" and timing.end is not None and timing.end <= step
        if attachment.status == "pending" and timing.start <= step:
            events.append(((timing.start, brief, timing.start, index, 0), attachment, "start"))
        elif attachment.status == "active" and not ends and timing.updates_at(step):
            events.append(((step, 1, timing.start, index, 0), attachment, "update"))
        if ends and timing.end is not None:
            events.append(((timing.end, 0, timing.start, index, 1), attachment, "end"))
    return [(attachment, action) for _, attachment, action in sorted(events, key=lambda event: event[0])]
