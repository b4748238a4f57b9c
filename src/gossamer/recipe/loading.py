"""From a source to the objects that a recipe consists of.

Three phases: parse (`nodes`), resolve (`outline`, `values`) and build (here).
Each phase reports to one list of problems, which is raised as one error.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

import gossamer.modifiers  # noqa: F401  # pyright: ignore[reportUnusedImport]
from gossamer.errors import GossamerError, Key, Location, Problem, RecipeError
from gossamer.modifiers.base import NOT_OFFERED, Modifier, find, registered
from gossamer.recipe.nodes import ListNode, MapNode, Pair, ScalarNode, check_tags, compose, pairs, target
from gossamer.recipe.outline import Outline, Written, outline
from gossamer.recipe.source import Source, SourceProblems
from gossamer.recipe.values import BROKEN, Scope, unevaluated
from gossamer.validation import problems_of

Stages = tuple[tuple[str, tuple[Modifier, ...]], ...]


Locations = dict[str | None, Location]

MAX_MODIFIERS = 1000


@dataclass(frozen=True)
class Content:
    """What a source holds. `locations` has for each modifier those of its fields, and its own under None."""

    modifiers: tuple[Modifier, ...]
    variables: dict[str, Any]
    metadata: Any
    version: Any
    stages: Stages
    locations: tuple[Mapping[str | None, Location], ...]
    warnings: tuple[Problem, ...]


def read(source: Source) -> Content:
    """Everything in a source, or one `RecipeError` with all of its problems."""
    problems = SourceProblems(source)
    try:
        return _read(source, problems)
    except RecursionError:
        raise RecipeError(f"{source.name}: the recipe is nested too deeply") from None


def outline_of(source: Source) -> Outline:
    """The parts of a source that can be edited."""
    problems = SourceProblems(source)
    found = outline(compose(source, problems), problems)
    problems.raise_if_any()
    return found


def _read(source: Source, problems: SourceProblems) -> Content:
    parts = outline(compose(source, problems), problems)
    scope = Scope(parts.variables, problems)
    variables = scope.variables()
    modifiers: list[Modifier] = []
    locations: list[Locations] = []
    stages: list[tuple[str, tuple[Modifier, ...]]] = []
    if (count := sum(len(section.modifiers) for section in parts.sections)) > MAX_MODIFIERS:
        raise RecipeError(f"{source.name}: expected at most {MAX_MODIFIERS:,} modifiers, found {count:,}")
    for section in parts.sections:
        inner = Scope(section.variables, problems, scope) if section.is_stage else scope
        inner.variables()
        built = [_build(written, inner, problems) for written in section.modifiers]
        section_modifiers = [modifier for modifier, _ in built if modifier is not None]
        modifiers += section_modifiers
        locations += [own for modifier, own in built if modifier is not None]
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
        tuple(locations),
        (*problems.notes, *_list_warnings(parts, problems), *_modifier_warnings(modifiers, locations)),
    )


def _build(written: Written, scope: Scope, problems: SourceProblems) -> tuple[Modifier | None, Locations]:
    """One modifier and the locations of its fields; None when a problem was reported."""
    at = written.item.start
    fields = _fields(written, problems)
    if fields is None:
        return None, {}
    values = {name: scope.value(pair.value) for name, pair in fields.items()}
    locations: Locations = {None: problems.line(at)}
    locations |= {name: problems.line(pair.key_node.start) for name, pair in fields.items()}
    try:
        cls = find(written.name)
    except GossamerError as error:
        problems.at(at, str(error))
        return None, locations
    broken = {name for name, value in values.items() if value is BROKEN}
    try:
        modifier = cls.model_validate({name: value for name, value in values.items() if name not in broken})
    except ValidationError as error:
        for problem in problems_of(error, values, cls, reported=broken):
            problems.at(_position(problem.key, fields, at, problems), problem, cls.__name__)
        return None, locations
    except GossamerError as error:
        problems.at(at, f"{cls.__name__}: {error}")
        return None, locations
    return modifier, locations


def _position(key: Key, fields: Mapping[str, Pair], at: int, problems: SourceProblems) -> int:
    """Where the field of a modifier, or the item or key inside it, stands."""
    if not key or key[0] not in fields:
        return at
    position, node = fields[str(key[0])].key_node.start, target(fields[str(key[0])].value)
    for step in key[1:]:
        if isinstance(node, ListNode) and isinstance(step, int):
            position, node = node.items[step].start, target(node.items[step])
        elif isinstance(node, MapNode):
            inner = next((pair for pair in pairs(node, problems) if str(pair.key) == str(step)), None)
            if inner is not None:
                position, node = inner.key_node.start, target(inner.value)
    return position


def _fields(written: Written, problems: SourceProblems) -> dict[str, Pair] | None:
    """The fields of a modifier as they are written, by name; None when something else stands there."""
    body = target(written.fields)
    if isinstance(body, MapNode):
        found = pairs(body, problems)
        for pair in found:
            check_tags(pair.value, problems, known=frozenset(registered()) | frozenset(NOT_OFFERED))
            if not isinstance(pair.key, str):
                problems.at(pair.key_node.start, f"{written.name}: expected the name of a field, found {pair.key!r}")
        return {pair.key: pair for pair in found if isinstance(pair.key, str)}
    is_bare_name = written.fields is written.item and body.tag is None
    is_empty = isinstance(body, ScalarNode) and body.plain and body.text in ("", "null", "~")
    if not is_bare_name and not is_empty:
        found_instead = repr(body.text) if isinstance(body, ScalarNode) else "a list"
        problems.at(body.start, f"{written.name}: expected fields such as 'start_epoch: 0', found {found_instead}")
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


def _list_warnings(parts: Outline, problems: SourceProblems) -> list[Problem]:
    lists = [(str(pair.key), problems.line(pair.key_node.start)) for pair in parts.empty_lists]
    return [Problem("the list is empty", (name,), location) for name, location in lists]


def _modifier_warnings(modifiers: list[Modifier], locations: list[Locations]) -> list[Problem]:
    """What modifiers report about their own fields."""
    return [
        problem.within(modifier.name, location=own.get(str(problem.key[0]), own[None]))
        for modifier, own in zip(modifiers, locations, strict=True)
        for problem in modifier.warnings()
    ]
