"""Gradient samplers: what a user hands to `modify` for second-order pruning.

Either a function that takes the model and yields losses, or the mapping that
SparseML's integrations pass: a builder of batches and a loss function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

from gossamer.errors import GossamerError

Sampler = Callable[[nn.Module], Iterable[Tensor]]


def as_sampler(given: object, kwargs: Mapping[str, Any]) -> Sampler | None:
    """The sampler for one modifier, whose `grad_sampler_kwargs` go to the builder of batches."""
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


def untaught(sampler: Sampler, pause: Callable[[], AbstractContextManager[None]]) -> Sampler:
    """The same sampler, whose losses are the user's own: no teacher adds to their gradients."""

    def sample(model: nn.Module) -> Iterator[Tensor]:
        losses = iter(sampler(model))
        while True:
            with pause():
                loss = next(losses, None)
            if loss is None:
                return
            yield loss

    return sample
