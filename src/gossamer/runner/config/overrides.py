"""`--set a.b.c=value`: settings from the command line, laid over a config's tree.

Knows nothing of what the settings mean; the schema is applied afterwards, and what it finds wrong has the `--set`
as its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gossamer.errors import GossamerError
from gossamer.recipe.wording import found_words
from gossamer.runner.config.includes import read_value
from gossamer.runner.config.tree import ARGUMENTS, EITHER_OR, Problems, Tree


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
