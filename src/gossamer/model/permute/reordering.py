"""New orders for the channels of a network, and putting them into effect.

A `Permutation` says which positions of which tensor are filled from where; it
reorders parameters, buffers, gradients, masks and an optimizer's state alike.
It does not know how the orders were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.model.parameters import get_tensor

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class Layer:
    """What a permutation does for one weight."""

    name: str
    weights: int
    kept_before: float
    """The magnitude that N:M keeps, as a share of all."""
    kept: float
    bound: float
    """What the largest weights of each row would keep, without a pattern."""
    reason: str | None = None
    """Why its input channels stay where they are; None when they could move."""

    @property
    def efficacy(self) -> float:
        """How much of the way from no permutation to the bound the permutation goes."""
        room = self.bound - self.kept_before
        return (self.kept - self.kept_before) / room if room > 0 else 0.0


@dataclass(frozen=True)
class Move:
    """Positions along `dims` of a tensor are filled from elsewhere: position i takes `source[i]`, counted flat."""

    dims: tuple[int, ...]
    source: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        front = tensor.movedim(self.dims, tuple(range(len(self.dims))))
        flat = front.reshape(-1, *front.shape[len(self.dims) :])
        taken = flat.index_select(0, self.source.to(tensor.device)).reshape(front.shape)
        return taken.movedim(tuple(range(len(self.dims))), self.dims)

    @property
    def inverse(self) -> Move:
        return Move(self.dims, torch.argsort(self.source))


@dataclass(frozen=True)
class Permutation:
    """Orders of channels for one model: what moves, and what each layer gains."""

    moves: Mapping[str, Sequence[Move]] = field(repr=False)
    """By clean name of a parameter or buffer; applied one after the other."""
    layers: Sequence[Layer]
    untraceable: str | None = None
    """Why nothing could move at all."""
    groups: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]], repr=False)
    """Which layers share channels, for whoever wants to look at it."""
    note: str | None = None
    """What was done when the model could be followed only in parts."""

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor shaped like the named one, in the new order."""
        for move in self.moves.get(name, ()):
            tensor = move.of(tensor)
        return tensor

    @property
    def inverse(self) -> Permutation:
        back = {name: [move.inverse for move in reversed(moves)] for name, moves in self.moves.items()}
        return replace(self, moves=back)

    @torch.no_grad()
    def apply(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        companions: Mapping[str, Iterable[Tensor]] | None = None,
    ) -> None:
        """Reorder the model in place, gradients, optimizer state and `companions` (tensors by weight name) with it.

        All of it or, when something interrupts, nothing.
        """
        followers = [
            (name, follower)
            for name in self.moves
            for follower in _followers(get_tensor(model, name), optimizer, (companions or {}).get(name, ()))
        ]
        at, before = 0, None
        try:
            for number, (name, follower) in enumerate(followers):
                at, before = number, follower.clone()
                follower.copy_(self.of(name, before))
        except BaseException:
            if before is not None:
                followers[at][1].copy_(before)
            back = self.inverse
            for name, follower in followers[:at]:
                follower.copy_(back.of(name, follower))
            raise


def _followers(tensor: Tensor, optimizer: Optimizers, companions: Iterable[Tensor]) -> list[Tensor]:
    """A parameter or buffer, and what is in the same order."""
    states = [value for _, value in state_of(optimizer, tensor) if value.shape == tensor.shape]
    return [tensor, *(() if tensor.grad is None else (tensor.grad,)), *companions, *states]


def state_of(optimizer: Optimizers, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What optimizers keep for a parameter, tensors with more than one number only; lists and dicts opened."""
    several = [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    return [
        (key, value)
        for one in several
        if tensor in one.state
        for key, held in cast(Mapping[str, Any], one.state[tensor]).items()
        for value in _tensors_in(held)
        if value.numel() > 1
    ]


def odd_state(optimizer: Optimizers, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Parameters whose optimizer state cannot be reordered with them, and the key of that state.

    State in another shape cannot; nor can state of the same shape whose key has another shape elsewhere, such as the
    preconditioner of a square weight. State larger than its parameter belongs to all of them.
    """
    states = {name: state_of(optimizer, tensor) for name, tensor in parameters.items()}
    odd = {key for name, kept in states.items() for key, value in kept if value.shape != parameters[name].shape}
    common = {key for name, kept in states.items() for key, value in kept if value.numel() > parameters[name].numel()}
    found = {name: [key for key, _ in kept if key in odd] for name, kept in states.items()}
    return dict.fromkeys(parameters, min(common)) if common else {name: keys[0] for name, keys in found.items() if keys}


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return _tensors_in(list(cast(Mapping[Any, Any], value).values()))
    if isinstance(value, list | tuple | set):
        return [tensor for item in cast(Iterable[Any], value) for tensor in _tensors_in(item)]
    return []
