"""A plan for one set of sizes: where each activation lies in one arena of memory, and the programs that use it.

Images of a batch are computed one after the other where a step allows it, each in a part of the arena of its own: what
a layer writes is then still in a cache when the next one reads it, and threads take images without waiting for each
other. Otherwise threads share the work of every operator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.runtime.graph import Ref
from gossamer.runtime.operators import Operator, Place
from gossamer.runtime.plan import NativeStep, Plan, size_of
from gossamer.runtime.program import PARTS, SLOT, Program

_PAGE = 4096


@dataclass(frozen=True)
class Part:
    """A part of the arena: its start, the bytes at its start that must be zero before a call, and its size."""

    start: int
    header: int
    size: int
    images: int = 0
    """How many parts of this size follow each other, one per image; 0 if all images are in one."""

    def clear(self, arena: np.ndarray) -> None:
        """Set the counters of all operators to zero."""
        count = max(1, self.images)
        arena[self.start : self.start + count * self.size].reshape(count, self.size)[:, : self.header] = 0

    @property
    def end(self) -> int:
        return self.start + max(1, self.images) * self.size


@dataclass
class Binding:
    """A plan for one set of sizes."""

    places: dict[str, Place]
    parts: list[Part]
    programs: list[tuple[Part, Program] | None]
    """By step: its part of the arena and its program; None for a step of torch."""
    known: dict[str, Any] | None = None
    """Values that depend on these sizes only, and that other steps read, once they are computed."""

    @property
    def arena_bytes(self) -> int:
        return self.parts[-1].end

    def clear(self, arena: np.ndarray) -> None:
        """Prepare the arena for a call."""
        for part in self.parts:
            part.clear(arena)

    def run(self, step: int, arena: int, threads: int) -> None:
        """Run a native step on the arena at this address."""
        found = self.programs[step]
        assert found is not None
        part, program = found
        program.run(arena + part.start, threads, part.images, part.size)


def bind(plan: Plan, sizes: Mapping[str, int], threads: int) -> Binding:
    """Lay out the arena for these sizes, and write the tables of all operators."""
    layouts = plan.layouts(sizes)
    images, apart = _image_by_image(plan, sizes, threads)
    names = {name for step in apart for name in _names(plan, step)}
    together = [k for k, step in enumerate(plan.steps) if isinstance(step, NativeStep) and k not in apart]
    binding = Binding({}, [], [None] * len(plan.steps))
    slack = 4 * max((layout.plane for layout in layouts.values()), default=0) + 2 * _PAGE
    start = 0
    for steps, count, chosen, used in (
        (together, 0, layouts.keys() - names, threads),
        (apart, images, layouts.keys() & names, 1),
    ):
        own = {
            name: Place.dense(layouts[name], 1 if count else size_of(plan.activations[name].images, sizes))
            for name in chosen
        }
        operators = [operator for step in steps for operator in _operators(plan, step)]
        header = _up(len(operators) * SLOT)
        first = header + _up(used * max((operator.scratch(own) for operator in operators), default=0))
        offsets, end = _offsets(plan, own)
        part = Part(start, header, _up(first + end + slack), count)
        own = {name: Place.dense(place.layout, place.images, first + offsets[name]) for name, place in own.items()}
        slot = 0
        for step in steps:
            calls = [operator.call(own, used, header) for operator in _operators(plan, step)]
            for call in calls:
                call.table[0], call.table[2] = slot, min(used, PARTS)
                slot += SLOT
            program = Program([(call.address, call.table) for call in calls], [call.keep for call in calls])
            binding.programs[step] = (part, program)
        for name, place in own.items():
            offset = start + place.offset
            seen = Place(place.layout, count, offset, part.size) if count else None
            binding.places[name] = seen or Place.dense(place.layout, place.images, offset)
        binding.parts.append(part)
        start = part.end
    return binding


def _image_by_image(plan: Plan, sizes: Mapping[str, int], threads: int) -> tuple[int, list[int]]:
    """The number of images, and the steps that can compute one after the other."""
    native = [k for k, step in enumerate(plan.steps) if isinstance(step, NativeStep)]
    batches = {k: {plan.activations[name].images for name in _names(plan, k)} for k in native}
    for size in sizes:
        apart = [k for k in native if batches[k] == {size}]
        inside = {name for k in apart for name in _names(plan, k)}
        outside = {name for k in native if k not in apart for name in _names(plan, k)}
        even = threads == 1 or sizes[size] % threads == 0 or sizes[size] >= 4 * threads
        if apart and not inside & outside and sizes[size] > 1 and even:
            return sizes[size], apart
    return 0, []


def _operators(plan: Plan, step: int) -> list[Operator]:
    found = plan.steps[step]
    return found.operators if isinstance(found, NativeStep) else []


def _names(plan: Plan, step: int) -> Collection[str]:
    return {name for operator in _operators(plan, step) for name in (*operator.inputs, operator.output)}


def _offsets(plan: Plan, places: Mapping[str, Place]) -> tuple[dict[str, int], int]:
    """Offsets such that activations which are alive together do not overlap; the largest are placed first.

    A result takes the place of an input that its operator overwrites, if nothing else uses that input afterwards.
    """
    first, last = dict.fromkeys(plan.packed, 0), dict[str, int]()
    uses: list[tuple[Operator | None, list[str]]] = []
    for step in plan.steps:
        if isinstance(step, NativeStep):
            uses += [(operator, [*operator.inputs, operator.output]) for operator in step.operators]
        else:
            uses.append((None, step.node.inputs))
    for time, (_, names) in enumerate(uses, 1):
        for name in names:
            if name in places:
                first.setdefault(name, time)
                last[name] = time
    for value in plan.graph.outputs:
        if isinstance(value, Ref) and value.name in places:
            last[value.name] = len(uses) + 1
    shared: dict[str, str] = {}
    """By result: the input whose place it takes."""
    for time, (operator, _) in enumerate(uses, 1):
        if operator is None or operator.output not in places:
            continue
        layout = places[operator.output].layout
        name = operator.overwrites(layout)
        if name is None or name not in places or last[name] != time or first[operator.output] != time:
            continue
        if places[name].layout == layout:
            root = shared[operator.output] = shared.get(name, name)
            last[root] = last[operator.output]
    sizes = {name: place.bytes for name, place in places.items() if name not in shared}
    offsets: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        together = (n for n in offsets if first[n] <= last[name] and first[name] <= last[n])
        start = 0
        for begin, end in sorted((offsets[other], offsets[other] + sizes[other]) for other in together):
            if start + sizes[name] <= begin:
                break
            start = max(start, end)
        offsets[name] = start
    end = max((offsets[name] + size for name, size in sizes.items()), default=0)
    return offsets | {name: offsets[root] for name, root in shared.items()}, end


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
