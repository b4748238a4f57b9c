"""From YAML text to a tree in which every value knows its place, with `!include`, anchors and merge keys applied.

No object is constructed from a tag, and nothing here knows which settings there are.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from gossamer.errors import GossamerError, RecipeError
from gossamer.recipe import source as sources
from gossamer.recipe.nodes import MAX_DEPTH, MAX_NODES, AliasNode, ListNode, MapNode, Node, ScalarNode, compose
from gossamer.recipe.nodes import constructed as scalar_of
from gossamer.recipe.nodes import target as aliased
from gossamer.recipe.source import Source, open_source, source_of_text
from gossamer.runner.config.tree import Place, Problems, Scalar, Tree, merged

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
        root = compose(source, sources.Problems(source), what="config")
        if not isinstance(aliased(root), MapNode) and is_top:
            raise GossamerError(f"{path}:1: expected a mapping such as 'net: {{type: resnet18}}', found a list")
        tree = _FileReader(self, source, path.parent, (*including, real)).tree(root, depth)
        if isinstance(tree.content, dict):
            entries = {name: value for name, value in tree.content.items() if not name.startswith(ANCHORS)}
            tree = replace(tree, content=entries)
        return tree

    def value(self, text: str, shown: str) -> Tree:
        source = source_of_text(f"- {text}", "--set")
        try:
            root = compose(source, sources.Problems(source), what="value")
        except RecipeError as error:
            raise GossamerError(f"{shown}: {error.problems[0].partition(': ')[2]}") from None
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
        self.lines = sources.Problems(source)

    def tree(self, node: Node, depth: int, key: Place | None = None) -> Tree:
        """A node with what its alias or `!include` stands for."""
        self.reading.values += 1
        if depth > MAX_DEPTH or self.reading.values > MAX_NODES:
            what = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_NODES:,} values"
            raise GossamerError(f"{self.place(node)}: the config comes to more than {what}, aliases and files put in")
        found = aliased(node)
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
            name = aliased(key_node)
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
            parts = aliased(value)
            for part in parts.items if isinstance(parts, ListNode) else [value]:
                base = self.tree(part, depth + 1)
                if isinstance(base.content, dict):
                    tree = replace(merged(base, tree, deep=aliased(part).tag == INCLUDE), place=place, key=key)
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
        noted = sources.Problems(self.source)
        value = scalar_of(node, noted)
        try:
            noted.raise_if_any()
        except RecipeError as error:
            raise GossamerError(f"{self.place(node)}: {error.problems[0].partition(': ')[2]}") from None
        return value if isinstance(value, str | int | float | bool) else None

    def place(self, node: Node) -> Place:
        if self.shown is not None:
            return Place(self.shown)
        at = node.start if not isinstance(node, AliasNode) else node.target.start
        return Place(self.source.name, self.lines.line(at))

    def problem(self, node: Node, message: str) -> None:
        at = Place(self.shown) if self.shown is not None else Place(self.source.name, self.lines.line(node.start))
        self.reading.problems.add(at, message)
