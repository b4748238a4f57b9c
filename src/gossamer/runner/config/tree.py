"""A config as a tree of values, each with the place where it was written, and how two such trees become one.

Knows nothing of YAML, of files or of what the settings mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from gossamer.errors import GossamerError

EITHER_OR = ({"max_epoch", "max_iter"}, {"warmup_epochs", "warmup_iter"})
"""Settings of which one takes the place of the other."""


ARGUMENTS = "kwargs"
"""Below this key stand arguments of classes from elsewhere, for which null is a value like others."""


class Place(NamedTuple):
    """A file and a line, or what stands on the command line (line 0)."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Tree:
    """A scalar, a list or a mapping; `place` is its own, `key` that of its key, or of itself where it has none."""

    content: Scalar | list[Tree] | dict[str, Tree]
    place: Place
    key: Place

    @property
    def told_at(self) -> Place:
        """Where a reader looks for it: a mapping or list starts behind its key."""
        return self.key if isinstance(self.content, list | dict) else self.place

    def at(self, *path: str | int) -> Tree | None:
        """What a path leads to, if it is there."""
        tree: Tree | None = self
        for step in path:
            tree = None if tree is None else tree.child(step)
        return tree

    def child(self, step: str | int) -> Tree | None:
        if isinstance(self.content, dict) and isinstance(step, str):
            return self.content.get(step)
        if isinstance(self.content, list) and isinstance(step, int) and 0 <= step < len(self.content):
            return self.content[step]
        return None

    def without(self, *path: str) -> Tree:
        """The same tree with what a path leads to left out."""
        if not path or not isinstance(self.content, dict) or path[0] not in self.content:
            return self
        entries = dict(self.content)
        if len(path) == 1:
            del entries[path[0]]
        else:
            entries[path[0]] = entries[path[0]].without(*path[1:])
        return replace(self, content=entries)

    def paths(self, *above: str) -> Iterator[tuple[str, ...]]:
        """The paths of all keys, those of mappings before those inside them."""
        if isinstance(self.content, dict):
            for name, value in self.content.items():
                yield (*above, name)
                yield from value.paths(*above, name)


@dataclass
class Problems:
    """What is wrong with a config, to be raised together in the order of files and lines."""

    found: dict[tuple[Place, str], None] = field(default_factory=dict[tuple[Place, str], None])

    def add(self, place: Place, message: str) -> None:
        self.found[place, " ".join(message.split())] = None

    def raise_if_any(self) -> None:
        if self.found:
            sources = list(dict.fromkeys(place.source for place, _ in self.found))
            ordered = sorted(self.found, key=lambda problem: (sources.index(problem[0].source), problem[0].line))
            raise GossamerError("\n".join(f"{place}: {message}" for place, message in ordered))


def plain(tree: Tree) -> object:
    """The values alone."""
    if isinstance(tree.content, dict):
        return {name: plain(value) for name, value in tree.content.items()}
    if isinstance(tree.content, list):
        return [plain(item) for item in tree.content]
    return tree.content


def planted(value: object, place: Place) -> Tree:
    """Values as a tree that all of stands in one place."""
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        return Tree({name: planted(inner, place) for name, inner in entries.items()}, place, place)
    if isinstance(value, list):
        return Tree([planted(inner, place) for inner in cast("list[object]", value)], place, place)
    return Tree(cast(Scalar, value), place, place)


def merged(below: Tree, above: Tree, *, deep: bool = True, arguments: bool = False) -> Tree:
    """Two mappings as one, in which what is above counts; anything else above takes the place of what is below.

    Deep, mappings inside are merged too, save where they name different types, whose settings do not mix; and null
    above takes a setting away, though not among `arguments`.
    """
    if not isinstance(below.content, dict) or not isinstance(above.content, dict):
        return above
    if deep and _type(below) != _type(above) and None not in (_type(below), _type(above)):
        return above
    entries = {name: value for name, value in below.content.items() if not _displaced(name, above.content)}
    for name, value in above.content.items():
        if deep and value.content is None and not arguments:
            entries.pop(name, None)
        elif deep and name in entries:
            entries[name] = merged(entries[name], value, arguments=arguments or name == ARGUMENTS)
        else:
            entries[name] = value
    return replace(above, content=entries)


def _displaced(name: str, above: dict[str, Tree]) -> bool:
    return name not in above and any(name in pair and not pair.isdisjoint(above) for pair in EITHER_OR)


def _type(tree: Tree) -> object:
    found = tree.child("type")
    return None if found is None else found.content
