"""A config as a tree of values, each with the location of its key, and how files and `--set` become one.

Reads YAML with `!include`, anchors and merge keys. No object is constructed from a tag.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from gossamer.errors import GossamerError, Location, Problem, Problems, RecipeError, format_value, within
from gossamer.recipe.nodes import MAX_DEPTH, MAX_NODES, ListNode, MapNode, Node, ScalarNode, parse, scalar_of, unaliased
from gossamer.recipe.source import Source, SourceProblems, open_source, source_of_text

INCLUDE = "!include"
MAX_INCLUDED = 100
"""Files in one config; a file that is included twice counts twice."""
ANCHORS = "x-"
"""Top-level keys with this prefix hold anchors and are not settings."""
EXCLUSIVE = ({"max_epoch", "max_iter"}, {"warmup_epochs", "warmup_iter"})
"""Settings of which one replaces the other."""
ARGUMENTS = "kwargs"
"""Below this key are arguments of classes, for which null is an ordinary value."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Tree:
    """A scalar, a list or a mapping; `location` is that of its key, or its own if it has none."""

    content: Scalar | list[Tree] | dict[str, Tree]
    location: Location

    @staticmethod
    def of(value: object, location: Location) -> Tree:
        """Plain values as a tree with one location."""
        if isinstance(value, dict):
            entries = cast("dict[str, object]", value)
            return Tree({name: Tree.of(inner, location) for name, inner in entries.items()}, location)
        if isinstance(value, list):
            return Tree([Tree.of(inner, location) for inner in cast("list[object]", value)], location)
        return Tree(cast(Scalar, value), location)

    def to_plain(self) -> object:
        """The values without their locations."""
        if isinstance(self.content, dict):
            return {name: value.to_plain() for name, value in self.content.items()}
        if isinstance(self.content, list):
            return [item.to_plain() for item in self.content]
        return self.content

    def at(self, *key: str | int) -> Tree | None:
        """The value of a key path, or None."""
        tree: Tree | None = self
        for step in key:
            tree = None if tree is None else tree.child(step)
        return tree

    def child(self, step: str | int) -> Tree | None:
        if isinstance(self.content, dict) and isinstance(step, str):
            return self.content.get(step)
        if isinstance(self.content, list) and isinstance(step, int) and 0 <= step < len(self.content):
            return self.content[step]
        return None

    def locate(self, *key: str | int) -> Location:
        """Where a key path is written; for a missing key, where the mapping or its `type` is."""
        tree = self
        for step in key:
            child = tree.child(step)
            if child is None:
                return (tree.child("type") or tree).location
            tree = child
        return tree.location

    def without(self, *key: str) -> Tree:
        """The same tree without the value of a key path."""
        if not key or not isinstance(self.content, dict) or key[0] not in self.content:
            return self
        entries = dict(self.content)
        if len(key) == 1:
            del entries[key[0]]
        else:
            entries[key[0]] = entries[key[0]].without(*key[1:])
        return replace(self, content=entries)

    def key_paths(self, *above: str) -> Iterator[tuple[str, ...]]:
        """All key paths, those of mappings before those inside them."""
        if isinstance(self.content, dict):
            for name, value in self.content.items():
                yield (*above, name)
                yield from value.key_paths(*above, name)


def merged(below: Tree, above: Tree, *, deep: bool = True, arguments: bool = False) -> Tree:
    """Two mappings as one, in which `above` wins; anything else is replaced by `above`.

    Deep, nested mappings are merged too, except those of different types; null in `above` removes a setting, but not
    among `arguments`.
    """
    if not isinstance(below.content, dict) or not isinstance(above.content, dict):
        return above
    if deep and _type(below) != _type(above) and None not in (_type(below), _type(above)):
        return above
    entries = {name: value for name, value in below.content.items() if not _is_replaced(name, above.content)}
    for name, value in above.content.items():
        if deep and value.content is None and not arguments:
            entries.pop(name, None)
        elif deep and name in entries:
            entries[name] = merged(entries[name], value, arguments=arguments or name == ARGUMENTS)
        else:
            entries[name] = value
    return replace(above, content=entries)


def _is_replaced(name: str, above: dict[str, Tree]) -> bool:
    return name not in above and any(name in pair and not pair.isdisjoint(above) for pair in EXCLUSIVE)


def _type(tree: Tree) -> object:
    child = tree.child("type")
    return None if child is None else child.content


# Files


def read_tree(path: Path, problems: Problems) -> Tree:
    """A file with everything that it includes; invalid YAML is raised at once."""
    return _ConfigReader(problems).read_file(path, None, (), 0)


def at_reference(problem: Problem, location: Location) -> Problem:
    """A problem of a file that the config names: if it has no line, it is located where the config names the file."""
    if problem.location is not None and problem.location.line is not None:
        return problem
    return Problem(str(problem), location=location)


class _ConfigReader:
    """Reads the files of one config. Counts files and values: a short file can include a long one many times."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self._files = 0
        self._values = 0

    def read_file(self, path: Path, included_at: Location | None, including: tuple[Path, ...], depth: int) -> Tree:
        """`included_at` is the location of the `!include`, `including` are the files that lead to it."""
        with within(location=included_at or Location(str(path))):
            self._files += 1
            if self._files > MAX_INCLUDED:
                raise GossamerError(f"expected at most {MAX_INCLUDED} included files, found more")
            if os.path.isdir(path):
                raise GossamerError(f"expected a config file, found the folder {path}")
            real = path.resolve()
            if real in including:
                chain = " includes ".join(file.name for file in (*including[including.index(real) :], real))
                raise GossamerError(f"the config includes itself: {chain}")
        try:
            source = open_source(path)
        except RecipeError as error:
            if included_at is None:
                raise GossamerError(error.problems) from None
            problems = (at_reference(problem, included_at) for problem in error.problems)
            raise GossamerError(problem.within(INCLUDE) for problem in problems) from None
        root = parse(source, SourceProblems(source), what="config")
        if not isinstance(unaliased(root), MapNode) and included_at is None:
            message = "expected a mapping such as 'net: {type: resnet18}', found a list"
            raise GossamerError(Problem(message, location=Location(str(path), 1)))
        tree = _NodeReader(self, source, path.parent, (*including, real)).tree(root, depth)
        if isinstance(tree.content, dict):
            entries = {name: value for name, value in tree.content.items() if not name.startswith(ANCHORS)}
            tree = replace(tree, content=entries)
        return tree

    def read_value(self, text: str, location: Location) -> Tree:
        """A YAML value of the command line; all of it has one location."""
        source = source_of_text(f"- {text}", location.file)
        try:
            root = parse(source, SourceProblems(source), what="value")
        except RecipeError as error:
            raise GossamerError(replace(problem, location=location) for problem in error.problems) from None
        if not isinstance(root, ListNode) or len(root.items) != 1:
            raise GossamerError(Problem("expected one value after '=', found several", location=location))
        return _NodeReader(self, source, Path(), (), location).tree(root.items[0], 0)

    def count_value(self, depth: int, location: Location) -> None:
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES:,} values"
            message = f"the config has more than {limit} with its aliases and included files"
            raise GossamerError(Problem(message, location=location))


class _NodeReader:
    """Turns the YAML nodes of one file into trees."""

    def __init__(
        self,
        config: _ConfigReader,
        source: Source,
        folder: Path,
        including: tuple[Path, ...],
        location: Location | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._including = including
        self._location = location
        """Of everything; None in a file, where each node has its line."""
        self._problems = SourceProblems(source)

    def tree(self, node: Node, depth: int, key: Node | None = None) -> Tree:
        """A node, with its alias or `!include` resolved."""
        target = unaliased(node)
        location = self._locate(key or target)
        self._config.count_value(depth, location)
        if target.tag == INCLUDE:
            return replace(self._included(target, depth), location=location)
        if target.tag is not None and target.tag.startswith("!"):
            self._config.problems.add(f"unknown tag '{target.tag}'; only {INCLUDE} is known", location=location)
        if isinstance(target, ScalarNode):
            return Tree(self._scalar(target), location)
        if isinstance(target, ListNode):
            return Tree([self.tree(item, depth + 1) for item in target.items], location)
        return self._mapping(target, depth, location)

    def _mapping(self, node: MapNode, depth: int, location: Location) -> Tree:
        own: dict[str, Tree] = {}
        bases: list[Node] = []
        problems = self._config.problems
        for key_node, value in node.entries:
            key = unaliased(key_node)
            at = self._locate(key_node)
            if not isinstance(key, ScalarNode) or not isinstance(name := self._scalar(key), str):
                problems.add("expected text as key; put it in quotes", location=at)
            elif key.plain and name == "<<":
                bases.append(value)
            elif name in own:
                problems.add(
                    f"duplicate key, first in line {own[name].location.line}; keep one of them", name, location=at
                )
            else:
                own[name] = self.tree(value, depth + 1, key_node)
        tree = Tree(own, location)
        for value in bases:
            parts = unaliased(value)
            for part in parts.items if isinstance(parts, ListNode) else [value]:
                base = self.tree(part, depth + 1)
                if isinstance(base.content, dict):
                    tree = replace(merged(base, tree, deep=unaliased(part).tag == INCLUDE), location=location)
                else:
                    message = f"expected a mapping after '<<', as in '<<: {INCLUDE} base.yaml'"
                    problems.add(message, location=self._locate(part))
        return tree

    def _included(self, node: ScalarNode | ListNode | MapNode, depth: int) -> Tree:
        location = self._locate(node)
        if not isinstance(node, ScalarNode) or not node.text.strip():
            message = f"expected a file name, as in '{INCLUDE} base.yaml'"
            raise GossamerError(Problem(message, location=location))
        path = self._folder / node.text.strip()
        normalized = Path(os.path.normpath(path))
        exists = os.path.exists(path)  # False for a name that is too long
        is_same = exists and os.path.exists(normalized) and normalized.samefile(path)
        path = normalized if is_same or not exists else path
        return self._config.read_file(path, location, self._including, depth)

    def _scalar(self, node: ScalarNode) -> Scalar:
        value = scalar_of(node, self._problems)
        if self._problems:
            raise GossamerError(replace(problem, location=self._locate(node)) for problem in self._problems)
        return value if isinstance(value, str | int | float | bool) else None

    def _locate(self, node: Node) -> Location:
        return self._location or self._problems.line(node.start)


# --set


@dataclass(frozen=True)
class Override:
    """A setting of `--set`."""

    key: tuple[str, ...]
    value: Tree

    @property
    def dotted_keys(self) -> frozenset[str]:
        """The keys that it sets, with those inside a mapping."""
        inner = (self.key + below for below in self.value.key_paths())
        return frozenset(".".join(key) for key in itertools.chain([self.key], inner))

    @property
    def removes(self) -> bool:
        return self.value.content is None and ARGUMENTS not in self.key[:-1]


_INDEX = re.compile(r"\[(\d+)\]")
"""Errors render list items so."""


def read_overrides(sets: Sequence[str], problems: Problems) -> list[Override]:
    """Overrides such as `trainer.max_epoch=3` or `hooks[0].type=log`, in order; `hooks.0.type` means the same."""
    overrides: list[Override] = []
    for text in sets:
        location = Location(f"--set {text}")
        name, equals, value = text.partition("=")
        key = tuple(step.strip() for step in _INDEX.sub(r".\1", name).split("."))
        if not equals or not all(key):
            message = "expected a setting and its value, as in --set trainer.max_epoch=3"
            raise GossamerError(Problem(message, location=location))
        overrides.append(Override(key, _ConfigReader(problems).read_value(value.strip(), location)))
    return overrides


def overridden(tree: Tree, overrides: Sequence[Override]) -> Tree:
    """The tree with the overrides; one of max_epoch and max_iter removes the other."""
    given = frozenset(key for override in overrides for key in override.dotted_keys if not override.removes)
    for override in overrides:
        with within(location=override.value.location):
            tree = _override(tree, override.key, override)
        for rival in (rival for key in override.dotted_keys & given for rival in _rivals(key)):
            if rival not in given:
                tree = tree.without(*rival.split("."))
    return tree


def _override(tree: Tree, key: tuple[str, ...], override: Override) -> Tree:
    """The tree with the value of an override at `key`, the end of its key path."""
    step, rest = key[0], key[1:]
    above = override.key[: len(override.key) - len(key)]
    content = {} if tree.content is None else tree.content
    if isinstance(content, dict):
        inner = content.get(step, Tree({}, override.value.location))
        entries = {**content, step: _override(inner, rest, override) if rest else override.value}
        if not rest and override.removes:
            del entries[step]
        return replace(tree, content=entries)
    if isinstance(content, list):
        if not step.isdecimal() or int(step) >= len(content):
            raise GossamerError(f"a list of {len(content)} items has no index '{step}'", *above)
        items = list(content)
        items[int(step)] = _override(items[int(step)], rest, override) if rest else override.value
        if not rest and override.removes:
            del items[int(step)]
        return replace(tree, content=items)
    raise GossamerError(f"{format_value(content)} has no key '{step}'", *above)


def _rivals(key: str) -> list[str]:
    """
    >>> _rivals("trainer.max_iter")
    ['trainer.max_epoch']
    """
    above, _, name = key.rpartition(".")
    rivals = (rival for pair in EXCLUSIVE if name in pair for rival in sorted(pair - {name}))
    return [f"{above}.{rival}" if above else rival for rival in rivals]
