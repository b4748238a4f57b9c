"""Inputs that resemble an example: the same shapes with other numbers, other batches, larger images, longer texts.

What looks like a constant on one input may come from its size, its sign or the words in it. Which of these inputs a
model takes is for the caller to try; nothing here knows models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gossamer.model.tracing.tracer import Arguments

Noise = Callable[[Tensor], Tensor]
"""From normal noise to the numbers of an input."""
BOUNDS = (1000, 100, 30, 10, 5, 3, 2)
"""Whole numbers are drawn below one of these; a table that is looked up in has at least two rows."""
_DOUBLED_BELOW, _SHRUNK_FROM = 64, 128


def plain(noise: Tensor) -> Tensor:
    """As it is."""
    return noise


def loud(noise: Tensor) -> Tensor:
    """Many times the usual size."""
    return 50 * noise


def negative(noise: Tensor) -> Tensor:
    """Nothing above zero."""
    return -noise.abs()


@dataclass(frozen=True)
class Example:
    """The arguments that a model was given, to make others from."""

    arguments: Arguments
    dtype: torch.dtype | None
    """Of real numbers; None: as they come."""
    bounds: Mapping[int, int] = field(default_factory=dict[int, int])
    """By place among the tensors: whole numbers vary, below this; all others are the example's."""

    def filled(
        self,
        seed: int,
        noise: Noise = plain,
        sizes: Mapping[tuple[int, int], int] | None = None,
        *,
        largest: bool = False,
    ) -> Arguments:
        """Arguments of random numbers that the example's own type can hold.

        `sizes`: other ones than the example's, by tensor and dimension;
        `largest`: among whole numbers is the largest that the bound allows.
        """
        source = torch.Generator().manual_seed(seed)
        place = iter(range(len(self.tensors())))

        def fill(tensor: Tensor) -> Tensor:
            number = next(place)
            shape = [(sizes or {}).get((number, dim), size) for dim, size in enumerate(tensor.shape)]
            if tensor.is_floating_point():
                values = noise(torch.randn(shape, generator=source, dtype=torch.float64))
                return values.to(tensor.device, tensor.dtype).to(self.dtype or tensor.dtype)
            if number in self.bounds:
                whole = torch.randint(self.bounds[number], shape, generator=source)
                whole.view(-1)[: int(largest)] = self.bounds[number] - 1
                return whole.to(tensor)
            found = tensor.detach().clone()
            for dim, size in enumerate(shape):  # more of the same
                found = found.index_select(dim, (torch.arange(size) % found.shape[dim]).to(found.device))
            return found

        return cast(Arguments, pytree.tree_map_only(Tensor, fill, self.arguments))

    def tensors(self) -> list[Tensor]:
        """All tensors of the arguments, in order."""
        return [leaf for leaf in pytree.tree_leaves(cast(Any, self.arguments)) if isinstance(leaf, Tensor)]

    def whole_numbers(self) -> Iterator[tuple[int, list[int]]]:
        """Places of tensors of whole numbers, each with the bounds that its type can hold."""
        for number, tensor in enumerate(self.tensors()):
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
                largest = torch.iinfo(tensor.dtype).max
                yield number, [bound for bound in BOUNDS if bound <= largest]

    def varying(self, number: int, bound: int) -> Example:
        """The same with whole numbers below a bound in one of the tensors."""
        return Example(self.arguments, self.dtype, {**self.bounds, number: bound})

    def another_batch(self) -> dict[tuple[int, int], int]:
        """One more example, or a few instead of many, in every tensor with as many as the first."""
        tensors = [(number, tensor) for number, tensor in enumerate(self.tensors()) if tensor.dim()]
        if not tensors:
            return {}
        batch = tensors[0][1].shape[0]
        return {(number, 0): 2 if batch > 3 else batch + 1 for number, tensor in tensors if tensor.shape[0] == batch}

    def other_sizes(self) -> Iterator[list[dict[tuple[int, int], int]]]:
        """Other sizes behind the batch, twice: lists of which those count that share nothing; likely ones first."""
        dims = [(number, dim) for number, tensor in enumerate(self.tensors()) for dim in range(1, tensor.dim())]
        shapes = [tensor.shape for tensor in self.tensors()]
        for grown in (_more, _double):
            new = {(number, dim): grown(shapes[number][dim]) for number, dim in dims}
            changed = {place: size for place, size in new.items() if size is not None}
            sizes = dict.fromkeys(shapes[number][dim] for number, dim in changed)
            groups = [
                [place for place in changed if place[1] >= 2],
                *([place for place in changed if shapes[place[0]][place[1]] == size] for size in sizes),
                *([place] for place in changed),
            ]
            distinct = dict.fromkeys(tuple(group) for group in groups if group)
            yield [{place: changed[place] for place in group} for group in distinct]


def _more(size: int) -> int | None:
    return size + 3 if size < _DOUBLED_BELOW else None


def _double(size: int) -> int | None:
    """Twice as much, of small ones; large ones are large enough for all borders, and less is cheaper."""
    return 2 * size if size < _SHRUNK_FROM else size * 3 // 4 // 32 * 32
