"""The interface of a training run for modifiers: protocols that `engine/binding.py` implements, and `Data`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, ModifierError
from gossamer.modifiers.distributed import Distributed

if TYPE_CHECKING:
    from gossamer.model.tracing.filter_groups import FilterGraph


class Clock(Protocol):
    """Time in optimizer steps, and the modifier's own schedule."""

    @property
    def step(self) -> int: ...
    @property
    def steps_per_epoch(self) -> float: ...
    @property
    def start(self) -> int:
        """The step at which the modifier starts."""
        ...

    @property
    def end(self) -> int | None: ...
    @property
    def updates_done(self) -> int:
        """How many updates have been due by this step, one on the end included and the start not counted."""
        ...

    @property
    def next_update(self) -> int | None:
        """The step at which the modifier next starts, updates or ends; None after its end, or if nothing follows."""
        ...


class Weights(Protocol):
    """The model's parameters, by name, and changes to the model as a whole."""

    def parameter(self, name: str) -> nn.Parameter: ...
    def gradient(self, name: str) -> Tensor | None:
        """The gradient of this step without the loss scale; None without a gradient or after an overflow."""
        ...

    def zeros(self, name: str) -> tuple[int, int]:
        """The number of zeros in a parameter, and its size."""
        ...

    def write(self, name: str, values: Tensor) -> None:
        """Overwrite a parameter."""
        ...

    def substitute(self, name: str, value: Callable[[Tensor, bool], Tensor]) -> None:
        """Let layers compute with `value(weight, training)` in place of a weight; replaces an earlier function."""
        ...

    def withdraw(self, name: str) -> None:
        """Let layers compute with the weight itself again."""
        ...

    def permute(self, names: Sequence[str], n: int, m: int) -> None:
        """Reorder channels, without changing what the model computes, so that n:m keeps more of these weights."""
        ...

    def filter_graph(self) -> FilterGraph | None:
        """Which filters depend on each other; None if the model cannot be traced."""
        ...

    def untraceable_reason(self) -> str:
        """Why `filter_graph` is None; empty if the model can be traced."""
        ...

    def thin(self, names: Sequence[str]) -> None:
        """Remove filters of these weights that are entirely zero, without changing what the model computes."""
        ...


class Masks(Protocol):
    """The modifier's masks, by parameter name; True keeps a weight."""

    def get(self, name: str) -> Tensor | None:
        """This modifier's mask on a parameter."""
        ...

    def set(self, name: str, keep: Tensor) -> None:
        """Hold a mask: the other weights are zero from now on."""
        ...

    def release(self, name: str) -> None: ...
    def inherited(self, name: str, key: str) -> tuple[Tensor, Tensor] | None:
        """The mask that an ended modifier still holds on a parameter, and its values under a key of its state.

        The next `set` on that parameter replaces this mask.
        """
        ...

    def names(self) -> list[str]:
        """The parameters on which any modifier holds a mask."""
        ...


class Optimizer(Protocol):
    """The user's optimizer, its GradScaler and its learning-rate scheduler."""

    @property
    def instance(self) -> torch.optim.Optimizer | None:
        """None when the recipe is applied without training."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Empty without an optimizer."""
        ...

    @property
    def accumulation_steps(self) -> int:
        """The number of batches whose gradients are added up, by which the user divides each loss."""
        ...

    @property
    def loss_scale(self) -> float:
        """The scale of the gradients that the parameters hold now; 1 unless the optimizer unscales them itself."""
        ...

    @property
    def backward_scale(self) -> float:
        """The scale of a loss whose backward pass runs now."""
        ...

    @property
    def uses_scaler(self) -> bool:
        """Before a step: False when a GradScaler was given and this step bypasses it."""
        ...

    def reset_moments(self, name: str, where: Tensor | None = None) -> None:
        """Zero the momentum of a parameter, at `where` or everywhere."""
        ...

    def restart_learning_rate(self) -> None:
        """Restart the learning-rate scheduler that the user gave, if any."""
        ...


class Data(NamedTuple):
    """Data that the user gave to `modify` or `apply`."""

    grad_sampler: Callable[[nn.Module], Iterable[Tensor]] | None
    """Yields losses of single batches."""
    calibration: Iterable[Any] | None
    """Batches to calibrate activation ranges and batch norm with."""


class Log(Protocol):
    """What the modifier reports."""

    def value(self, tag: str, value: float) -> None:
        """Log a number at this step."""
        ...

    def skip(self, name: str, reason: str) -> None:
        """Report that a parameter is left alone, and why."""
        ...

    def locate(self, error: ModifierError) -> GossamerError:
        """The error with its location in the recipe, for code that runs outside a modifier's hooks."""
        ...


class Run(Protocol):
    """A training run as one modifier sees it."""

    @property
    def module(self) -> nn.Module:
        """The user's model, without DDP or torch.compile around it."""
        ...

    @property
    def targets(self) -> Sequence[str]:
        """The names that this modifier acts on: those that `bind` returned and that are in the model now.

        While one of several optimizers steps, only those that it steps.
        """
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What checkpoints save: tensors, numbers, strings, lists and dicts of them, as `state_fields` declares."""
        ...

    @property
    def plan(self) -> dict[str, Any]:
        """Results of `bind`; not saved, because `bind` computes them again."""
        ...

    @property
    def scratch(self) -> dict[str, Any]:
        """Values passed between hooks; not saved, and cleared when a state is loaded."""
        ...

    @property
    def clock(self) -> Clock: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def masks(self) -> Masks: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def distributed(self) -> Distributed: ...
    @property
    def data(self) -> Data: ...
    @property
    def log(self) -> Log: ...
    @property
    def distillation(self) -> Any:
        """The teacher and its hooks (`distillation.Distillation`); None without a teacher."""
        ...
