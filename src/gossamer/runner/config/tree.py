"""A config as a tree of values, each with the place where it was written, and how two such trees become one.

Knows nothing of YAML, of files or of what the settings mean.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

from gossamer.errors import GossamerError, RecipeError
from gossamer.recipe import source as sources
from gossamer.recipe.nodes import (
    MAX_DEPTH,
    MAX_NODES,
    AliasNode,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    parse,
    scalar_of,
    unaliased,
)
from gossamer.recipe.source import Source, open_source, source_of_text
from gossamer.recipe.wording import found_words

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


INCLUDE = "!include"
MAX_INCLUDED = 100
"""Files in one config, counted as often as they are included."""

ANCHORS = "x-"
"""Keys at the top of a file that start like this hold anchors, and are no settings."""


def read_tree(path: Path, problems: Problems) -> Tree:
    """The file with everything that it includes; a file that is no YAML is an error at once."""
    return _Reading(problems).file(path, Place(str(path)), ())


def read_value(text: str, shown: str, problems: Problems) -> Tree:
    """A value as YAML, from the command line, where all of it stands in one place: `shown`."""
    return _Reading(problems).value(text, shown)


class _Reading:
    """One config's files; counts what they come to, for a short file can include a long one often."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.files = 0
        self.values = 0

    def file(self, path: Path, wanted_at: Place, including: tuple[Path, ...], depth: int = 0) -> Tree:
        is_top = wanted_at == Place(str(path))
        self.files += 1
        if self.files > MAX_INCLUDED:
            raise GossamerError(f"{wanted_at}: expected at most {MAX_INCLUDED} included files, found more")
        if os.path.isdir(path):
            raise GossamerError(f"{wanted_at}: expected a config file, found the folder {path}")
        real = path.resolve()
        if real in including:
            chain = " includes ".join(file.name for file in (*including[including.index(real) :], real))
            raise GossamerError(f"{wanted_at}: the config includes itself: {chain}")
        try:
            source = open_source(path)
        except RecipeError as error:
            raise GossamerError(str(error) if is_top else f"{wanted_at}: {INCLUDE} {error}") from None
        root = parse(source, sources.SourceProblems(source), what="config")
        if not isinstance(unaliased(root), MapNode) and is_top:
            raise GossamerError(f"{path}:1: expected a mapping such as 'net: {{type: resnet18}}', found a list")
        tree = _FileReader(self, source, path.parent, (*including, real)).tree(root, depth)
        if isinstance(tree.content, dict):
            entries = {name: value for name, value in tree.content.items() if not name.startswith(ANCHORS)}
            tree = replace(tree, content=entries)
        return tree

    def value(self, text: str, shown: str) -> Tree:
        source = source_of_text(f"- {text}", "--set")
        try:
            root = parse(source, sources.SourceProblems(source), what="value")
        except RecipeError as error:
            raise GossamerError(f"{shown}: {error.problems[0].message}") from None
        if not isinstance(root, ListNode) or len(root.items) != 1:
            raise GossamerError(f"{shown}: expected one value behind '=', found several")
        return _FileReader(self, source, Path(), (), shown).tree(root.items[0], 0)


class _FileReader:
    """Turns the nodes of one file into trees."""

    def __init__(
        self, reading: _Reading, source: Source, folder: Path, including: tuple[Path, ...], shown: str | None = None
    ) -> None:
        self.reading = reading
        self.source = source
        self.folder = folder
        self.including = including
        self.shown = shown
        self.lines = sources.SourceProblems(source)

    def tree(self, node: Node, depth: int, key: Place | None = None) -> Tree:
        """A node with what its alias or `!include` stands for."""
        self.reading.values += 1
        if depth > MAX_DEPTH or self.reading.values > MAX_NODES:
            what = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES:,} values"
            raise GossamerError(f"{self.place(node)}: the config comes to more than {what}, aliases and files put in")
        found = unaliased(node)
        place = self.place(found)
        key = key or place
        if found.tag == INCLUDE:
            return replace(self.included(found, depth), key=key)
        if found.tag is not None and found.tag.startswith("!"):
            self.problem(found, f"unknown tag '{found.tag}'; there is {INCLUDE}")
        if isinstance(found, ScalarNode):
            return Tree(self.scalar(found), place, key)
        if isinstance(found, ListNode):
            return Tree([self.tree(item, depth + 1) for item in found.items], place, key)
        return self.mapping(found, depth, place, key)

    def mapping(self, node: MapNode, depth: int, place: Place, key: Place) -> Tree:
        own: dict[str, Tree] = {}
        below: list[Node] = []
        for key_node, value in node.entries:
            name = unaliased(key_node)
            if not isinstance(name, ScalarNode) or not isinstance(text := self.scalar(name), str):
                self.problem(key_node, "expected a name as key; put it in quotes if it is one")
            elif name.plain and text == "<<":
                below.append(value)
            elif text in own:
                self.problem(
                    key_node, f"the key '{text}' stands in line {own[text].key.line} already; keep one of them"
                )
            else:
                own[text] = self.tree(value, depth + 1, self.place(key_node))
        tree = Tree(own, place, key)
        for value in below:
            parts = unaliased(value)
            for part in parts.items if isinstance(parts, ListNode) else [value]:
                base = self.tree(part, depth + 1)
                if isinstance(base.content, dict):
                    tree = replace(merged(base, tree, deep=unaliased(part).tag == INCLUDE), place=place, key=key)
                else:
                    self.problem(part, f"expected a mapping behind '<<', as in '<<: {INCLUDE} base.yaml'")
        return tree

    def included(self, node: ScalarNode | ListNode | MapNode, depth: int) -> Tree:
        """What a file holds; a file that cannot be read is told with the line that names it."""
        if not isinstance(node, ScalarNode) or not node.text.strip():
            raise GossamerError(f"{self.place(node)}: expected the name of a file, as in '{INCLUDE} base.yaml'")
        path = self.folder / node.text.strip()
        tidy = Path(os.path.normpath(path))
        exists = os.path.exists(path)  # of a name that is too long, this is False
        same = exists and os.path.exists(tidy) and tidy.samefile(path)
        path = tidy if same or not exists else path
        return self.reading.file(path, self.place(node), self.including, depth)

    def scalar(self, node: ScalarNode) -> Scalar:
        noted = sources.SourceProblems(self.source)
        value = scalar_of(node, noted)
        try:
            noted.raise_if_any()
        except RecipeError as error:
            raise GossamerError(f"{self.place(node)}: {error.problems[0].message}") from None
        return value if isinstance(value, str | int | float | bool) else None

    def place(self, node: Node) -> Place:
        if self.shown is not None:
            return Place(self.shown)
        at = node.start if not isinstance(node, AliasNode) else node.target.start
        return Place(self.source.name, self.lines.location(at).line or 1)

    def problem(self, node: Node, message: str) -> None:
        line = self.lines.location(node.start).line or 1
        at = Place(self.shown) if self.shown is not None else Place(self.source.name, line)
        self.reading.problems.add(at, message)


@dataclass(frozen=True)
class Override:
    """A setting that was given on the command line."""

    path: tuple[str, ...]
    value: Tree

    @property
    def keys(self) -> frozenset[str]:
        """The dotted keys that it gives, those inside a mapping among them."""
        inner = (self.path + below for below in self.value.paths())
        return frozenset(".".join(path) for path in itertools.chain([self.path], inner))

    @property
    def removes(self) -> bool:
        return self.value.content is None and ARGUMENTS not in self.path[:-1]


def read_overrides(sets: Sequence[str], problems: Problems) -> list[Override]:
    """The overrides in the order in which they were given."""
    found: list[Override] = []
    for text in sets:
        shown = f"--set {text}"
        name, equals, value = text.partition("=")
        path = tuple(step.strip() for step in name.split("."))
        if not equals or not all(path):
            raise GossamerError(f"{shown}: expected a setting and its value, as in --set trainer.max_epoch=3")
        found.append(Override(path, read_value(value.strip(), shown, problems)))
    return found


def overridden(tree: Tree, overrides: Sequence[Override]) -> Tree:
    """The tree with each override in its place; of max_epoch and max_iter, the one that was given stays."""
    given = frozenset(key for override in overrides for key in override.keys if not override.removes)
    for override in overrides:
        tree = _placed(tree, override.path, override)
        for rival in (rival for key in override.keys & given for rival in _rivals(key)):
            if rival not in given:
                tree = tree.without(*rival.split("."))
    return tree


def _placed(tree: Tree, path: tuple[str, ...], override: Override) -> Tree:
    step, rest = path[0], path[1:]
    above = override.path[: len(override.path) - len(path)]
    content = {} if tree.content is None else tree.content
    if isinstance(content, dict):
        inner = content.get(step, Tree({}, override.value.place, override.value.place))
        entries = {**content, step: _placed(inner, rest, override) if rest else override.value}
        if not rest and override.removes:
            del entries[step]
        return replace(tree, content=entries)
    if isinstance(content, list):
        if not step.isdecimal() or int(step) >= len(content):
            raise _fault(override, f"{'.'.join(above)} is a list of {len(content)}; '{step}' is no index into it")
        items = list(content)
        items[int(step)] = _placed(items[int(step)], rest, override) if rest else override.value
        if not rest and override.removes:
            del items[int(step)]
        return replace(tree, content=items)
    raise _fault(override, f"{'.'.join(above)} is {found_words(content)}, which has no '{step}' inside")


def _rivals(key: str) -> list[str]:
    """
    >>> _rivals("trainer.max_iter")
    ['trainer.max_epoch']
    """
    above, _, name = key.rpartition(".")
    rivals = (rival for pair in EITHER_OR if name in pair for rival in sorted(pair - {name}))
    return [f"{above}.{rival}" if above else rival for rival in rivals]


def _fault(override: Override, message: str) -> GossamerError:
    return GossamerError(f"{override.value.place}: {message}")
