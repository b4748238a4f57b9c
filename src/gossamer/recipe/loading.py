"""From a source to the objects that a recipe consists of.

Three phases: parse (`nodes`), resolve (`outline`, `values`) and build (here).
Each phase reports to one list of problems, which is raised as one error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

import gossamer.modifiers  # noqa: F401  # pyright: ignore[reportUnusedImport]
from gossamer.errors import GossamerError, RecipeError
from gossamer.modifiers.base import NOT_OFFERED, Modifier, find, registered
from gossamer.recipe.nodes import MapNode, Pair, ScalarNode, check_tags, compose, pairs, target
from gossamer.recipe.outline import Outline, Written, outline
from gossamer.recipe.source import Problems, Source
from gossamer.recipe.values import BROKEN, Scope, unevaluated
from gossamer.recipe.wording import report

Stages = tuple[tuple[str, tuple[Modifier, ...]], ...]


MAX_MODIFIERS = 1000


@dataclass(frozen=True)
class Content:
    """What a source holds. `lines` gives for each modifier the line of its fields, and its own under None."""

    modifiers: tuple[Modifier, ...]
    variables: dict[str, Any]
    metadata: Any
    version: Any
    stages: Stages
    lines: tuple[Mapping[str | None, int], ...]
    warnings: tuple[str, ...]


def read(source: Source) -> Content:
    """Everything in a source, or one `RecipeError` with all of its problems."""
    problems = Problems(source)
    try:
        return _read(source, problems)
    except RecursionError:
        raise RecipeError(f"{source.name}: the recipe is nested too deeply") from None


def outline_of(source: Source) -> Outline:
    """The parts of a source that can be edited."""
    problems = Problems(source)
    found = outline(compose(source, problems), problems)
    problems.raise_if_any()
    return found


def _read(source: Source, problems: Problems) -> Content:
    parts = outline(compose(source, problems), problems)
    scope = Scope(parts.variables, problems)
    variables = scope.variables()
    modifiers: list[Modifier] = []
    lines: list[Mapping[str | None, int]] = []
    stages: list[tuple[str, tuple[Modifier, ...]]] = []
    if (count := sum(len(section.modifiers) for section in parts.sections)) > MAX_MODIFIERS:
        raise RecipeError(f"{source.name}: expected at most {MAX_MODIFIERS:,} modifiers, found {count:,}")
    for section in parts.sections:
        inner = Scope(section.variables, problems, scope) if section.is_stage else scope
        inner.variables()
        built = [_build(written, inner, problems) for written in section.modifiers]
        section_modifiers = [modifier for modifier, _ in built if modifier is not None]
        modifiers += section_modifiers
        lines += [place for modifier, place in built if modifier is not None]
        stages.append((section.name, tuple(section_modifiers)))
    metadata = unevaluated(parts.metadata, problems) if parts.metadata else None
    version = unevaluated(parts.version, problems) if parts.version else None
    problems.raise_if_any()
    return Content(
        tuple(modifiers),
        variables,
        metadata,
        version,
        _distinct(stages) if parts.is_staged else (),
        tuple(lines),
        (*problems.notes, *_list_warnings(parts, problems), *_modifier_warnings(modifiers, lines, source.name)),
    )


def _build(written: Written, scope: Scope, problems: Problems) -> tuple[Modifier | None, Mapping[str | None, int]]:
    """One modifier and the lines of its fields; None when a problem was reported."""
    at = written.item.start
    fields = _fields(written, problems)
    if fields is None:
        return None, {}
    values = {name: scope.value(pair.value) for name, pair in fields.items()}
    lines = {None: problems.line(at), **{name: problems.line(pair.key_node.start) for name, pair in fields.items()}}
    try:
        cls = find(written.name)
    except GossamerError as error:
        problems.add(at, str(error))
        return None, lines
    broken = {name for name, value in values.items() if value is BROKEN}
    try:
        modifier = cls.model_validate({name: value for name, value in values.items() if name not in broken})
    except ValidationError as error:
        report(error, cls, at, fields, broken, problems)
        return None, lines
    except GossamerError as error:
        problems.add(at, f"{cls.__name__}: {error}")
        return None, lines
    return modifier, lines


def _fields(written: Written, problems: Problems) -> dict[str, Pair] | None:
    """The fields of a modifier as they are written, by name; None when something else stands there."""
    body = target(written.fields)
    if isinstance(body, MapNode):
        found = pairs(body, problems)
        for pair in found:
            check_tags(pair.value, problems, known=frozenset(registered()) | frozenset(NOT_OFFERED))
            if not isinstance(pair.key, str):
                problems.add(pair.key_node.start, f"{written.name}: expected the name of a field, found {pair.key!r}")
        return {pair.key: pair for pair in found if isinstance(pair.key, str)}
    is_bare_name = written.fields is written.item and body.tag is None
    is_empty = isinstance(body, ScalarNode) and body.plain and body.text in ("", "null", "~")
    if not is_bare_name and not is_empty:
        found_instead = repr(body.text) if isinstance(body, ScalarNode) else "a list"
        problems.add(body.start, f"{written.name}: expected fields such as 'start_epoch: 0', found {found_instead}")
        return None
    return {}


def _distinct(stages: list[tuple[str, tuple[Modifier, ...]]]) -> Stages:
    """Stages with a number behind a name that two of them would share."""
    names: list[str] = []
    for name, _ in stages:
        names.append(distinct_name(name, names))
    return tuple((name, modifiers) for name, (_, modifiers) in zip(names, stages, strict=True))


def distinct_name(name: str, taken: Collection[str]) -> str:
    """The name, or the name with the first number behind it that is free."""
    tries = (name if count == 1 else f"{name}_{count}" for count in itertools.count(1))
    return next(candidate for candidate in tries if candidate not in taken)


def _list_warnings(parts: Outline, problems: Problems) -> list[str]:
    name = problems.source.name
    places = [(problems.line(pair.key_node.start), pair.key) for pair in parts.empty_lists]
    return [f"{name}:{line}: the list '{key}' is empty" for line, key in places]


def _modifier_warnings(modifiers: list[Modifier], lines: list[Mapping[str | None, int]], name: str) -> list[str]:
    """What modifiers say of themselves; the first field that a sentence names gives the line."""
    found: list[str] = []
    for modifier, places in zip(modifiers, lines, strict=True):
        for sentence in modifier.warnings():
            line = next((places[word] for word in re.findall(r"\w+", sentence) if word in places), places[None])
            found.append(f"{name}:{line}: {modifier.name}: {sentence}")
    return found
