"""The settings of a config as plain values with their locations, and how files and `--set` become one.

Reads YAML with `!include`, anchors and merge keys. No object is constructed from a tag.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError, Key, Location, Problem, Problems, RecipeError, format_value, within
from gossamer.recipe.nodes import MAX_DEPTH, MAX_NODES, ListNode, MapNode, Node, ScalarNode, parse, scalar_of, unaliased
from gossamer.recipe.source import SourceProblems, open_source, source_of_text

INCLUDE = "!include"
MAX_INCLUDED = 100
"""Files in one config; a file that is included twice counts twice."""
ANCHORS = "x-"
"""Top-level keys with this prefix hold anchors and are not settings."""
EXCLUSIVE = ({"max_epoch", "max_iter"}, {"warmup_epochs", "warmup_iter"})
"""Settings of which one replaces the other."""
ARGUMENTS = "kwargs"
"""Below this key are arguments of classes, for which null is an ordinary value."""

Values = dict[str, Any]
"""Scalars, lists and mappings, in mappings."""


class Settings:
    """The values of a config, and the locations of their keys."""

    def __init__(self, values: Mapping[str, Any], locations: Mapping[Key, Location]) -> None:
        self.values: Values = copy.deepcopy(dict(values))
        self._locations = dict(locations)
        """By key path, with one for (); a value without one is where the values around it are."""

    def copy(self) -> Settings:
        return Settings(self.values, self._locations)

    def get(self, *key: str | int) -> Any:
        """The value of a key path, or None."""
        value: Any = self.values
        for step in key:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def locate(self, *key: str | int) -> Location:
        """Where a key path is written; for a missing key, where the `type` beside it or the mapping is."""
        value: Any = self.values
        for index, step in enumerate(key):
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                key = (*key[:index], "type") if isinstance(value, dict) and "type" in value else key[:index]
                break
        while key not in self._locations:
            key = key[:-1]
        return self._locations[key]

    def remove(self, *key: str) -> None:
        around = self.get(*key[:-1])
        if isinstance(around, dict):
            cast(Values, around).pop(key[-1], None)

    def merge(self, above: Settings) -> None:
        """Put other settings above these, which they replace at every depth."""
        self.values = merged(self.values, above.values)
        self._locations |= above._locations | {(): self._locations[()]}

    def put(self, key: Sequence[str], value: Any, location: Location) -> None:
        """Set a value, in place of the whole one before; None removes it, except among arguments."""
        around: Any = self.values
        path: Key = ()
        for name in key[:-1]:
            path = (*path, _step(around, name, path))
            if self.get(*path) is None:
                around[path[-1]] = {}
                self._locations[path] = location
            around = around[path[-1]]
        path = (*path, _step(around, key[-1], path))
        self._locations = {old: at for old, at in self._locations.items() if old[: len(path)] != path}
        around[path[-1]] = value
        self._locations[path] = location
        if value is None and ARGUMENTS not in path[:-1]:
            del around[path[-1]]


def _step(around: Any, name: str, path: Key) -> str | int:
    """The key of a mapping or the index of a list that `name` is; raises if there is no such item."""
    if isinstance(around, list):
        count = len(cast("list[Any]", around))
        if name.isdecimal() and int(name) < count:
            return int(name)
        raise GossamerError(f"a list of {count} items has no index '{name}'", *path)
    if not isinstance(around, dict):
        raise GossamerError(f"{format_value(around)} has no key '{name}'", *path)
    return name


def merged(below: Any, above: Any, *, deep: bool = True, arguments: bool = False) -> Any:
    """Two mappings as one, in which `above` wins; anything else is replaced by `above`.

    Deep, nested mappings are merged too, except those of different types; null in `above` removes a setting, but not
    among `arguments`.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    below, above = cast(Values, below), cast(Values, above)
    if deep and below.get("type") != above.get("type") and None not in (below.get("type"), above.get("type")):
        return above
    entries = {name: value for name, value in below.items() if name in above or not rivals(name) & above.keys()}
    for name, value in above.items():
        if deep and value is None and not arguments:
            entries.pop(name, None)
        elif deep and name in entries:
            entries[name] = merged(entries[name], value, arguments=arguments or name == ARGUMENTS)
        else:
            entries[name] = value
    return entries


def rivals(name: str) -> set[str]:
    """
    >>> rivals("max_iter")
    {'max_epoch'}
    """
    return {rival for pair in EXCLUSIVE if name in pair for rival in pair - {name}}


# Files


def read_settings(path: Path, problems: Problems) -> Settings:
    """A file with everything that it includes; invalid YAML is raised at once."""
    reader = _Reader(problems)
    values = reader.read_file(path, (), None, (), 0)
    return Settings(values, reader.locations)


def at_reference(problem: Problem, location: Location) -> Problem:
    """A problem of a file that the config names: if it has no line, it is located where the config names the file."""
    if problem.location is not None and problem.location.line is not None:
        return problem
    return Problem(str(problem), location=location)


@dataclass(frozen=True)
class _Document:
    """A file, or a value of the command line."""

    problems: SourceProblems
    folder: Path
    including: tuple[Path, ...]
    """The files that lead to it, and itself."""
    location: Location | None = None
    """Of everything in it; None in a file, where each node has its line."""

    def locate(self, node: Node) -> Location:
        return self.location or self.problems.line(node.start)


class _Reader:
    """Reads the files of one config. Counts files and values: a short file can include a long one many times."""

    def __init__(self, problems: Problems) -> None:
        self.locations: dict[Key, Location] = {}
        self._problems = problems
        self._files = 0
        self._values = 0

    def read_file(
        self, path: Path, key: Key, included_at: Location | None, including: tuple[Path, ...], depth: int
    ) -> Any:
        """The values of a file; `key` is where they go, and `included_at` is the location of the `!include`."""
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
        document = _Document(SourceProblems(source), path.parent, (*including, real))
        root = parse(source, document.problems, what="config")
        if not isinstance(unaliased(root), MapNode) and included_at is None:
            message = "expected a mapping such as 'net: {type: resnet18}', found a list"
            raise GossamerError(Problem(message, location=Location(str(path), 1)))
        values = self._read(root, document, key, depth)
        if isinstance(values, dict):
            values = {name: value for name, value in cast(Values, values).items() if not name.startswith(ANCHORS)}
        return values

    def read_value(self, text: str, location: Location) -> Any:
        """A YAML value of the command line; all of it has one location."""
        source = source_of_text(f"- {text}", location.file)
        document = _Document(SourceProblems(source), Path(), (), location)
        try:
            root = parse(source, document.problems, what="value")
        except RecipeError as error:
            raise GossamerError(replace(problem, location=location) for problem in error.problems) from None
        if not isinstance(root, ListNode) or len(root.items) != 1:
            raise GossamerError(Problem("expected one value after '=', found several", location=location))
        return self._read(root.items[0], document, (), 0)

    def _read(self, node: Node, document: _Document, key: Key, depth: int, key_node: Node | None = None) -> Any:
        """The value of a node, with its alias or `!include` resolved; locations that are known already stay."""
        target = unaliased(node)
        location = document.locate(key_node or target)
        self.locations.setdefault(key, location)
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_NODES:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES:,} values"
            message = f"the config has more than {limit} with its aliases and included files"
            raise GossamerError(Problem(message, location=location))
        if target.tag == INCLUDE:
            if not isinstance(target, ScalarNode) or not target.text.strip():
                message = f"expected a file name, as in '{INCLUDE} base.yaml'"
                raise GossamerError(Problem(message, location=document.locate(target)))
            path = Path(os.path.normpath(document.folder / target.text.strip()))
            return self.read_file(path, key, document.locate(target), document.including, depth)
        if target.tag is not None and target.tag.startswith("!"):
            self._problems.add(f"unknown tag '{target.tag}'; only {INCLUDE} is known", location=location)
        if isinstance(target, ScalarNode):
            return self._read_scalar(target, document)
        if isinstance(target, ListNode):
            return [self._read(item, document, (*key, at), depth + 1) for at, item in enumerate(target.items)]
        return self._read_mapping(target, document, key, depth)

    def _read_mapping(self, node: MapNode, document: _Document, key: Key, depth: int) -> Values:
        values: Values = {}
        firsts: dict[str, Location] = {}
        bases: list[Node] = []
        for key_node, value in node.entries:
            name_node, at = unaliased(key_node), document.locate(key_node)
            name = self._read_scalar(name_node, document) if isinstance(name_node, ScalarNode) else None
            if not isinstance(name, str):
                self._problems.add("expected text as key; put it in quotes", location=at)
            elif name == "<<" and cast(ScalarNode, name_node).plain:
                parts = unaliased(value)
                bases += parts.items if isinstance(parts, ListNode) else [value]
            elif name in values:
                first = f", first in line {firsts[name].line}" if at.line else ""  # options have no lines
                self._problems.add(f"duplicate key{first}; keep one of them", name, location=at)
            else:
                firsts[name] = at
                values[name] = self._read(value, document, (*key, name), depth + 1, key_node)
        for part in bases:
            base = self._read(part, document, key, depth + 1)
            if isinstance(base, dict):
                values = merged(base, values, deep=unaliased(part).tag == INCLUDE)
            else:
                message = f"expected a mapping after '<<', as in '<<: {INCLUDE} base.yaml'"
                self._problems.add(message, location=document.locate(part))
        return values

    def _read_scalar(self, node: ScalarNode, document: _Document) -> Any:
        value = scalar_of(node, document.problems)
        if document.problems:
            raise GossamerError(replace(problem, location=document.locate(node)) for problem in document.problems)
        return value


# --set


@dataclass(frozen=True)
class Override:
    """A setting of `--set`."""

    key: tuple[str, ...]
    value: Any
    location: Location

    def dotted_keys(self) -> Iterator[str]:
        """The key that it sets, and those inside a mapping."""
        return (".".join((*self.key, *below)) for below in key_paths(self.value))


_INDEX = re.compile(r"\[(\d+)\]")
"""Errors render list items so."""


def key_paths(values: Any) -> Iterator[tuple[str, ...]]:
    """All key paths of nested mappings, those of mappings before those inside them; the first is ()."""
    yield ()
    for name, value in cast(Values, values).items() if isinstance(values, dict) else ():
        yield from ((name, *below) for below in key_paths(value))


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
        overrides.append(Override(key, _Reader(problems).read_value(value.strip(), location), location))
    return overrides


def apply_overrides(settings: Settings, overrides: Sequence[Override]) -> None:
    """Put overrides into the settings; one of max_epoch and max_iter removes the other."""
    given = {override.key for override in overrides if override.value is not None}
    for override in overrides:
        with within(location=override.location):
            settings.put(override.key, override.value, override.location)
        others = {(*override.key[:-1], rival) for rival in rivals(override.key[-1])}
        for other in others - given if override.key in given else ():
            settings.remove(*other)
