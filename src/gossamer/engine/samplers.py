"""Gradient samplers, for second-order pruning: functions that take the model and yield losses of single batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

from gossamer.errors import GossamerError

Sampler = Callable[[nn.Module], Iterable[Tensor]]


def as_sampler(given: object, kwargs: Mapping[str, Any]) -> Sampler | None:
    """What the user gave to `modify`: a function that takes the model and yields losses, or SparseML's mapping.

    `kwargs` are the modifier's `grad_sampler_kwargs`, for the builder of batches in the mapping.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        return _from_mapping(cast(Mapping[str, Any], given), kwargs)
    if callable(given):
        return cast(Sampler, given)
    raise GossamerError(
        f"grad_sampler: expected a function of the model that yields losses, or a mapping with "
        f"'data_loader_builder' and 'loss_function', found {type(given).__name__}"
    )


def _from_mapping(given: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Sampler:
    builder: Any = given.get("data_loader_builder")
    loss_function: Any = given.get("loss_function", given.get("loss_fn"))
    if builder is None or loss_function is None:
        raise GossamerError(
            "grad_sampler: the mapping needs 'data_loader_builder' (yields forward arguments, "
            "forward keywords and targets) and 'loss_function' (outputs, targets)"
        )

    def sample(model: nn.Module) -> Iterator[Tensor]:
        batches: Any = builder(dict(kwargs))
        for args, keywords, target in batches:
            loss: Tensor = loss_function(model(*args, **keywords), target)
            yield loss

    return sample


def without_distillation(sampler: Sampler, pause: Callable[[], AbstractContextManager[None]]) -> Sampler:
    """The same sampler without distillation: its gradients are those of the user's loss."""

    def sample(model: nn.Module) -> Iterator[Tensor]:
        losses = iter(sampler(model))
        while True:
            with pause():
                loss = next(losses, None)
            if loss is None:
                return
            yield loss

    return sample


def no_losses(_: nn.Module) -> Iterable[Tensor]:
    """A gradient sampler for second-order methods, which need one to be bound and do not call it before they start."""
    return ()
