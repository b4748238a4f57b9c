"""Tensors of which each rank holds a part (DTensors): which part that is, exact sums over ranks, exchanges of parts.

No function makes a tensor of the whole size, except `Regrouped.collect` on one rank, `full_like`, and `joined`, which
is for small vectors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed

from gossamer.errors import SparsityError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Interval = tuple[int, int]
"""The first position of a part along one dimension, and the one after its last."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, replicated ones included."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(is_sharded(tensor) for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, which shares memory with the tensor; a plain tensor is its own part."""
    return cast("DTensor", tensor)._local_tensor if is_sharded(tensor) else tensor  # pyright: ignore[reportPrivateUsage]


def like(values: Tensor, template: Tensor) -> Tensor:
    """A tensor whose part on this rank is `values`, distributed as `template` is."""
    if not is_sharded(template):
        return values
    from torch.distributed.tensor import DTensor

    found = cast(DTensor, template)
    stride = torch.empty(found.shape, device="meta").stride()
    return DTensor.from_local(
        values, found.device_mesh, found.placements, run_check=False, shape=found.shape, stride=stride
    )


def distributed_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether each rank holds the same part of both."""
    if not (is_sharded(tensor) and is_sharded(other)):
        return is_sharded(tensor) == is_sharded(other)
    one, two = cast("DTensor", tensor), cast("DTensor", other)
    return one.device_mesh == two.device_mesh and one.placements == two.placements


def apply_locally(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function without communication, on the parts of tensors that are distributed alike."""
    return like(function(*(local(tensor) for tensor in tensors)), tensors[0])


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor, a hyperrectangle."""

    values: Tensor
    """Plain and contiguous."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """The position of the first element in the whole tensor."""

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        shape = tuple(tensor.shape)
        values = local(tensor.detach()).contiguous()
        if not is_sharded(tensor):
            return cls(values, shape, (0,) * len(shape))
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        found = cast("DTensor", tensor)
        own, offset = compute_local_shape_and_global_offset(found.shape, found.device_mesh, found.placements)
        if tuple(own) != tuple(values.shape):
            raise SparsityError(f"a shard of shape {tuple(values.shape)} is not the one its placements mean: {own}")
        return cls(values, shape, tuple(offset))

    def along(self, dim: int) -> Interval:
        return self.offset[dim], self.offset[dim] + self.values.shape[dim]

    def with_values(self, values: Tensor) -> Part:
        return Part(values, self.shape, self.offset)

    def rows(self) -> tuple[Tensor, int]:
        """Runs of neighbouring elements of the whole tensor: the flat index at which each begins, and their length."""
        own = self.values.shape
        whole = [dim for dim in range(len(own)) if own[dim] != self.shape[dim]]
        last = max(whole, default=0)
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(own))]
        first = torch.zeros((), dtype=torch.int64)
        for dim in range(last):
            first = first.unsqueeze(-1) + (torch.arange(own[dim]) + self.offset[dim]) * strides[dim]
        first = first.reshape(-1)
        if len(own):
            first = first + self.offset[last] * strides[last]
        return first, math.prod(own[last:])


class Ranks:
    """The ranks that hold the parts of some tensors: every dimension of one device mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.groups: list[Any] = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self._members = [tuple(distributed.get_process_group_ranks(group)) for group in self.groups]
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise SparsityError("this rank is not in the device mesh of the model's parameters")
        self.coordinate = tuple(coordinate)

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Ranks | None:
        """The ranks of all these tensors together; None when none is distributed.

        One mesh has to contain the others, as the mesh of all ranks contains that of tensor parallelism.
        """
        meshes = {id(mesh): mesh for t in tensors if is_sharded(t) for mesh in [cast("DTensor", t).device_mesh]}
        if not meshes:
            return None
        widest = cls(max(meshes.values(), key=lambda mesh: mesh.ndim))
        for mesh in meshes.values():
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1 and widest.find(mesh, dim) is None:
                    raise SparsityError(
                        f"parameters are distributed over meshes of which none contains the others ({widest.mesh} and "
                        f"{mesh}); use slices of one device mesh"
                    )
        return widest

    def find(self, mesh: DeviceMesh, dim: int) -> int | None:
        """Which of the own dimensions a dimension of another mesh is."""
        members = tuple(distributed.get_process_group_ranks(mesh.get_group(dim)))
        return next((own for own, ranks in enumerate(self._members) if ranks == members), None)

    def counts(self, tensor: Tensor) -> bool:
        """Whether this rank stands for its part in a sum: of ranks with the same part, the first does."""
        split: set[int] = set()
        if is_sharded(tensor):
            found = cast("DTensor", tensor)
            for dim, placement in enumerate(found.placements):
                own = self.find(found.device_mesh, dim)
                if _is_shard(placement) and own is not None:
                    split.add(own)
        return all(dim in split or at == 0 for dim, at in enumerate(self.coordinate))

    @property
    def size(self) -> int:
        return self.mesh.size()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place; exact, and so in any order of ranks, for whole numbers."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduced(values, distributed.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        device = self.mesh.device_type
        moved = values if values.device.type == device else values.to(device)
        for group in self.groups:
            if distributed.get_world_size(group) > 1:
                distributed.all_reduce(moved, operation, group=group)
        if moved is not values:
            values.copy_(moved)
        return values


def _is_shard(placement: Any) -> bool:
    return hasattr(placement, "dim") and not placement.is_partial() and not placement.is_replicate()


def refuse_partial(tensor: Tensor) -> str | None:
    """Why a DTensor's parts are not parts of its values, or None."""
    placements = cast("DTensor", tensor).placements
    return "its placements hold partial sums" if any(placement.is_partial() for placement in placements) else None


def sharded_dims(tensor: Tensor) -> list[tuple[int, int]]:
    """`(mesh dimension, tensor dimension)` of each split over more than one rank, in the order in which they apply.

    FSDP splits what tensor parallelism has split already, although its mesh dimension comes first.
    """
    if not is_sharded(tensor):
        return []
    found = cast("DTensor", tensor)
    splits = [
        (hasattr(placement, "split_factor"), index, placement.dim)
        for index, placement in enumerate(cast(Sequence[Any], found.placements))
        if _is_shard(placement) and found.device_mesh.size(index) > 1
    ]
    return [(index, dim) for _, index, dim in sorted(splits, key=lambda split: (split[0], split[1]))]


def count(mask: Tensor) -> int:
    """How many elements are True or not zero, over all ranks."""
    if not is_sharded(mask):
        return int(mask.count_nonzero())
    ranks = Ranks.of([mask])
    assert ranks is not None
    here = local(mask).count_nonzero() if ranks.counts(mask) else torch.zeros((), dtype=torch.int64)
    return int(ranks.sum(here.reshape(1).to(torch.int64)))


def counts(masks: Sequence[Tensor]) -> list[int]:
    """How many elements of each are True or not zero, over all ranks, in one exchange."""
    ranks = Ranks.of(masks)
    if ranks is None:
        return [int(mask.count_nonzero()) for mask in masks]
    device = ranks.mesh.device_type
    here = torch.zeros(len(masks), dtype=torch.int64, device=device)
    for index, mask in enumerate(masks):
        if ranks.counts(mask):
            here[index] = local(mask).count_nonzero()
    return cast(list[int], ranks.sum(here).tolist())


def largest(tensor: Tensor) -> float:
    """The largest element over all ranks; −∞ without elements, NaN where one is."""
    values = local(tensor)
    found = float(values.max()) if values.numel() else -math.inf
    ranks = Ranks.of([tensor])
    if ranks is None:
        return found
    # NaN does not pass every backend's maximum.
    pair = torch.tensor([-math.inf if math.isnan(found) else found, float(math.isnan(found))], dtype=torch.float64)
    top, nan = cast(list[float], ranks.max(pair).tolist())
    return math.nan if nan else top


# Exchanges


def exchange(
    part: Part, group: Any, dim: int, to_dim: int, to: Callable[[Sequence[Interval]], Sequence[Interval]]
) -> Part:
    """Split over a group along `to_dim`, what was split along `dim`.

    `to` gives each rank's interval along `to_dim`, from the intervals along `dim` when both are the same, and else from
    one interval for each rank, which is everything that the ranks hold along `to_dim`.
    """
    own = part.along(dim)
    held = _intervals(own, group, part.values.device)
    new = list(to(held if dim == to_dim else [part.along(to_dim)] * len(held)))
    rank = distributed.get_rank(group)
    mine = new[rank]
    sent = [_cut(part, dim, to_dim, own, interval) for interval in new]
    received_shapes: list[list[int]] = []
    for first, last in held:
        shape = list(part.values.shape)
        shape[dim] = last - first
        if dim == to_dim:
            shape[dim] = max(0, min(last, mine[1]) - max(first, mine[0]))
        else:
            shape[to_dim] = mine[1] - mine[0]
        received_shapes.append(shape)
    received = _all_to_all(sent, received_shapes, group)
    order = sorted(range(len(held)), key=lambda index: held[index])
    values = torch.cat([received[index] for index in order], dim=dim)
    offset = list(part.offset)
    offset[dim] = mine[0] if dim == to_dim else min((first for first, last in held if last > first), default=0)
    if dim != to_dim:
        offset[to_dim] = mine[0]
    return Part(values.contiguous(), part.shape, tuple(offset))


def back(values: Tensor, now: Part, before: Part, group: Any, dim: int, to_dim: int) -> Tensor:
    """The values of `now`, which `exchange` made of `before`, as `before` is split."""
    moved = now.with_values(values)
    held = _intervals(before.along(dim), group, values.device)
    return exchange(moved, group, to_dim, dim, lambda _: held).values


def _intervals(own: Interval, group: Any, device: torch.device) -> list[Interval]:
    world = distributed.get_world_size(group)
    here = torch.tensor(own, dtype=torch.int64, device=device)
    found = [torch.empty_like(here) for _ in range(world)]
    distributed.all_gather(found, here, group=group)
    return [(int(first), int(last)) for first, last in found]


def _cut(part: Part, dim: int, to_dim: int, own: Interval, interval: Interval) -> Tensor:
    first, last = interval
    if dim == to_dim:
        first, last = max(first, own[0]), min(last, own[1])
    start = part.offset[to_dim]
    return part.values.narrow(to_dim, min(max(first - start, 0), part.values.shape[to_dim]), max(0, last - first))


def _all_to_all(sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Any) -> list[Tensor]:
    first = sent[0]
    bits = torch.uint8 if first.dtype == torch.bool else first.dtype
    out = torch.cat([tensor.reshape(-1) for tensor in sent]).view(bits)
    sizes = [math.prod(shape) for shape in shapes]
    into = torch.empty(sum(sizes), dtype=bits, device=first.device)
    distributed.all_to_all_single(into, out, sizes, [tensor.numel() for tensor in sent], group=group)
    parts = cast(Sequence[Tensor], into.view(first.dtype).split(sizes))
    return [part.reshape(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def aligned_to(multiple: int) -> Callable[[Sequence[Interval]], list[Interval]]:
    """Intervals whose borders are rounded up to a multiple, so that a rank holds the groups that begin on it."""

    def rounded(held: Sequence[Interval]) -> list[Interval]:
        return [(-(-first // multiple) * multiple, -(-last // multiple) * multiple) for first, last in held]

    return rounded


def evenly(multiple: int = 1) -> Callable[[Sequence[Interval]], list[Interval]]:
    """Intervals of about the same length, in multiples, of what all ranks hold."""

    def split(held: Sequence[Interval]) -> list[Interval]:
        first, last = held[0]
        units = (last - first) // multiple
        edges = [first + units * index // len(held) * multiple for index in range(len(held) + 1)]
        return list(pairwise(edges))

    return split


class Regrouped:
    """A part after exchanges that put whole units on one rank each, and the way back."""

    def __init__(self, tensor: Tensor) -> None:
        self.part = Part.of(tensor)
        self._template = tensor
        self._moves: list[tuple[Part, Part, Any, int, int]] = []

    def complete(self, dim: int, to_dim: int) -> None:
        """Hold all of a dimension, split along another one instead."""
        for index, split in reversed(sharded_dims(self._template)):
            if split == dim:
                group = cast("DTensor", self._template).device_mesh.get_group(index)
                self._move(group, dim, to_dim, evenly())

    def align(self, dim: int, multiple: int) -> None:
        """Hold whole groups of `multiple` neighbours along a dimension."""
        splits = [index for index, split in sharded_dims(self._template) if split == dim]
        if not splits or self._is_aligned(dim, multiple, splits):
            return
        if len(splits) > 1:
            raise SparsityError(
                f"dimension {dim} is split twice, and not in groups of {multiple}; choose other sizes for the mesh"
            )
        self._move(cast("DTensor", self._template).device_mesh.get_group(splits[0]), dim, dim, aligned_to(multiple))

    def collect(self, dim: int) -> None:
        """Hold all of a dimension on one rank, and nothing on the others."""
        for index, split in reversed(sharded_dims(self._template)):
            group = cast("DTensor", self._template).device_mesh.get_group(index)
            held = _intervals(self.part.along(dim), group, self.part.values.device)
            first, last = min(one for one, _ in held), max(one for _, one in held)
            if split == dim or len(set(held)) > 1:
                self._move(group, dim, dim, lambda held, f=first, e=last: [(f, e)] + [(e, e)] * (len(held) - 1))

    def back(self, values: Tensor) -> Tensor:
        """Values of the regrouped part, distributed as the tensor is."""
        for before, now, group, dim, to_dim in reversed(self._moves):
            values = back(values, now, before, group, dim, to_dim)
        return like(values, self._template)

    def follow(self, tensor: Tensor) -> Tensor:
        """The part of another tensor, distributed as the first, after the same exchanges."""
        part = Part.of(tensor)
        for before, now, group, dim, to_dim in self._moves:
            assert before.offset == part.offset
            held = _intervals(now.along(to_dim), group, part.values.device)
            part = exchange(part, group, dim, to_dim, lambda _, held=held: held)
        return part.values

    def _is_aligned(self, dim: int, multiple: int, splits: Sequence[int]) -> bool:
        first, last = self.part.along(dim)
        odd = torch.tensor([int(bool(first % multiple or last % multiple))])
        ranks = Ranks.of([self._template])
        assert ranks is not None
        return not int(ranks.max(odd))

    def _move(self, group: Any, dim: int, to_dim: int, to: Callable[[Sequence[Interval]], Sequence[Interval]]) -> None:
        before = self.part
        self.part = exchange(before, group, dim, to_dim, to)
        self._moves.append((before, self.part, group, dim, to_dim))


class Flat:
    """The part of a tensor as one row of neighbouring elements, in whole blocks."""

    def __init__(self, tensor: Tensor, block: int) -> None:
        if (problem := refuse_flat(tensor)) is not None:
            raise SparsityError(problem)
        self._rows = Regrouped(tensor)
        for dim in range(1, tensor.dim()):
            self._rows.complete(dim, 0)
        self._group = next(
            (cast("DTensor", tensor).device_mesh.get_group(index) for index, _ in sharded_dims(tensor)), None
        )
        self._block = block
        self._shape = tuple(self._rows.part.values.shape)
        row = math.prod(tensor.shape[1:])
        self._whole, self._first = (tensor.numel(),), (self._rows.part.offset[0] * row,)

    def of(self, tensor: Tensor) -> Tensor:
        """The own blocks of a tensor that is distributed as the first is."""
        flat = self._before(tensor)
        return flat.values if self._group is None else self._aligned(flat).values

    def back(self, values: Tensor) -> Tensor:
        """Values of the own blocks, distributed as the tensor is."""
        before = Part(values.new_empty(math.prod(self._shape)), self._whole, self._first)
        if self._group is not None:
            held = _intervals(before.along(0), self._group, values.device)
            now = aligned_to(self._block)(held)[distributed.get_rank(self._group)]
            values = exchange(Part(values, self._whole, (now[0],)), self._group, 0, 0, lambda _: held).values
        return self._rows.back(values.reshape(self._shape))

    def _before(self, tensor: Tensor) -> Part:
        return Part(self._rows.follow(tensor).reshape(-1), self._whole, self._first)

    def _aligned(self, flat: Part) -> Part:
        return exchange(flat, self._group, 0, 0, aligned_to(self._block))


def refuse_flat(tensor: Tensor) -> str | None:
    """Why a tensor cannot be taken as one row of neighbouring elements, or None."""
    if len(sharded_dims(tensor)) > 1:
        return "blocks of neighbouring weights need a weight that is split along one dimension of the mesh only"
    return None


def split_like(whole: Tensor, template: Tensor) -> Tensor:
    """A plain tensor that all ranks have, distributed as `template` is."""
    if not is_sharded(template):
        return whole
    part = Part.of(template)
    cut = tuple(slice(*part.along(dim)) for dim in range(whole.dim()))
    return like(whole.to(part.values.device)[cut].contiguous().clone(), template)


def full_like(part: Tensor, wanted: Tensor) -> Tensor:
    """A distributed tensor whole, if `wanted` is plain, as the weights of `fully_shard` are in a forward pass."""
    return cast("DTensor", part).full_tensor() if is_sharded(part) and not is_sharded(wanted) else part


def total(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over all ranks, a plain scalar."""
    ranks = Ranks.of([tensor])
    here = local(tensor).sum(dtype=dtype)
    if ranks is None:
        return here
    return ranks.sum(here if ranks.counts(tensor) else torch.zeros_like(here))


def joined(piece: Tensor, first: int, size: int, template: Tensor) -> Tensor:
    """A plain vector on all ranks, of which each rank that holds a part of `template` has a piece."""
    ranks = Ranks.of([template])
    if ranks is None:
        return piece
    whole = torch.zeros(size, dtype=piece.dtype, device=piece.device)
    if ranks.counts(template):
        whole[first : first + len(piece)] = piece
    return ranks.sum(whole)
