"""Build the modifiers of a recipe from its text.

`nodes` parses the text, `_outline` sorts the tree into modifiers, variables, stages and metadata, and `read` computes
the values and builds the modifiers. All problems are raised together.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from gossamer.errors import GossamerError, Key, Location, Problem, format_value
from gossamer.modifiers.base import NOT_OFFERED, Modifier, known_names, modifier_class
from gossamer.recipe.nodes import (
    ListNode,
    MapNode,
    Node,
    Pair,
    ScalarNode,
    check_tags,
    modifier_tag,
    pairs,
    parse,
    plain_value,
    scalar_of,
    unaliased,
    walk,
)
from gossamer.recipe.source import Source, SourceProblems
from gossamer.recipe.variables import BROKEN, Scope
from gossamer.validation import problems_of

MAX_MODIFIERS = 1000
_EXPECTED_ITEM = "expected a modifier such as '- !EpochRangeModifier' with its fields indented below"

Stages = tuple[tuple[str, tuple[Modifier, ...]], ...]
"""Name and modifiers of each stage."""
RunType = Literal["oneshot", "train"]
RunTypes = tuple[tuple[str, RunType], ...]
Locations = Mapping[str | None, Location]
"""Where the fields of a modifier are in the file, by name, and the modifier itself under None."""


@dataclass(frozen=True)
class Content:
    """The parts of a recipe."""

    modifiers: tuple[Modifier, ...]
    _variables: Mapping[str, Any]
    metadata: Any = None
    version: Any = None
    stages: Stages = ()
    """Name and modifiers of each stage; empty when the recipe has none."""
    locations: tuple[Locations, ...] = ()
    """The locations of each modifier; empty unless the recipe was read from text."""
    run_types: RunTypes = ()
    """Name of a stage and how it runs, for the stages that say so."""
    warnings: tuple[Problem, ...] = ()
    """Fields and keys without effect; `str(warning)` has the file and line."""

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the whole recipe, computed; those of stages are not included."""
        return MappingProxyType(self._variables)


@dataclass(frozen=True, slots=True)
class ModifierNode:
    """A modifier in the tree: its name, its list item and its fields."""

    name: str
    item: Node
    fields: Node


@dataclass(slots=True)
class Section:
    """A stage, or one list of modifiers outside of stages."""

    name: str
    is_stage: bool
    variables: dict[str, Pair] = field(default_factory=dict[str, Pair])
    modifiers: list[ModifierNode] = field(default_factory=list[ModifierNode])
    body: MapNode | None = None


@dataclass(slots=True)
class Outline:
    """The outline of a recipe file, before any value is computed."""

    root: ListNode | MapNode
    sections: list[Section] = field(default_factory=list[Section])
    variables: dict[str, Pair] = field(default_factory=dict[str, Pair])
    extra: dict[str, object] = field(default_factory=dict[str, object])
    """Metadata and version."""
    empty_lists: list[Pair] = field(default_factory=list[Pair])

    @property
    def is_staged(self) -> bool:
        return any(section.is_stage for section in self.sections)

    @property
    def modifiers(self) -> list[ModifierNode]:
        return [written for section in self.sections for written in section.modifiers]


def read(source: Source) -> Content:
    """Everything in a source; raises one `RecipeError` with all of its problems."""
    problems = SourceProblems(source)
    try:
        return _read(problems)
    except RecursionError:
        problems.fail("the recipe is nested too deeply", location=Location(source.name))


def outline_of(source: Source) -> Outline:
    """The outline of a source, for edits of its text."""
    problems = SourceProblems(source)
    outline = _outline(parse(source, problems), problems)
    problems.raise_if_any()
    return outline


def distinct_name(name: str, taken: Collection[str]) -> str:
    """The name, or the name with the first free number appended."""
    candidates = (name if count == 1 else f"{name}_{count}" for count in itertools.count(1))
    return next(candidate for candidate in candidates if candidate not in taken)


def _read(problems: SourceProblems) -> Content:
    source = problems.source
    outline = _outline(parse(source, problems), problems)
    scope = Scope(outline.variables, problems)
    variables = scope.variables()
    if (count := len(outline.modifiers)) > MAX_MODIFIERS:
        message = f"expected at most {MAX_MODIFIERS:,} modifiers, found {count:,}"
        problems.fail(message, location=Location(source.name))
    modifiers: list[tuple[Modifier, Locations]] = []
    stages: list[tuple[str, tuple[Modifier, ...]]] = []
    run_types: list[tuple[str, RunType]] = []
    for section in outline.sections:
        inner = Scope(section.variables, problems, scope) if section.is_stage else scope
        values = inner.variables()
        own = [modifier for written in section.modifiers if (modifier := _build(written, inner, problems)) is not None]
        name = distinct_name(section.name, [name for name, _ in stages])
        stages.append((name, tuple(modifier for modifier, _ in own)))
        if section.is_stage and (run_type := _run_type(section, values, problems)) is not None:
            run_types.append((name, run_type))
        modifiers += own
    problems.raise_if_any()
    empty = [Problem("the list is empty", (str(p.key),), problems.line(p.key_node.start)) for p in outline.empty_lists]
    ineffective = [
        problem.within(
            modifier.name, location=locations.get(str(problem.key[0]) if problem.key else None, locations[None])
        )
        for modifier, locations in modifiers
        for problem in warnings_of(modifier)
    ]
    return Content(
        tuple(modifier for modifier, _ in modifiers),
        variables,
        outline.extra.get("metadata"),
        outline.extra.get("version"),
        tuple(stages) if outline.is_staged else (),
        tuple(locations for _, locations in modifiers),
        tuple(run_types),
        (*problems.notes, *empty, *ineffective),
    )


def _run_type(stage: Section, values: Mapping[str, object], problems: SourceProblems) -> RunType | None:
    """How a stage runs, by its variable `run_type`."""
    value = values.get("run_type")
    if value in ("oneshot", "train"):
        return value
    if value is not None and value is not BROKEN:
        start = stage.variables["run_type"].value.start
        problems.at(start, f"expected oneshot or train, found {format_value(value)}", stage.name, "run_type")
    return None


def warnings_of(modifier: Modifier) -> list[Problem]:
    """What a modifier warns about; modifiers of users may return plain text."""
    warnings: Sequence[Problem | str] = modifier.warnings()
    return [Problem(warning) if isinstance(warning, str) else warning for warning in warnings]


def _build(written: ModifierNode, scope: Scope, problems: SourceProblems) -> tuple[Modifier, Locations] | None:
    """One modifier and the locations of its fields; None when a problem was reported."""
    start = written.item.start
    fields = _fields(written, problems)
    if fields is None:
        return None
    values = {name: scope.value(pair.value) for name, pair in fields.items()}
    broken = {name for name, value in values.items() if value is BROKEN}
    given = {name: value for name, value in values.items() if name not in broken}
    try:
        kind = modifier_class(written.name)
    except GossamerError as error:
        problems.extend(error.problems, location=problems.location(start))
        return None
    try:
        modifier = kind.model_validate(given)
    except ValidationError as error:
        for problem in problems_of(error, given, kind, reported=broken):
            problems.at(_position(problem.key, fields, start, problems), problem, written.name)
        return None
    except GossamerError as error:
        problems.extend(error.problems, written.name, location=problems.location(start))
        return None
    locations = {name: problems.line(pair.key_node.start) for name, pair in fields.items()}
    return modifier, {None: problems.line(start), **locations}


def _position(key: Key, fields: Mapping[str, Pair], start: int, problems: SourceProblems) -> int:
    """Where the field of a modifier is written, or the key or item inside it; else `start`."""
    if not key or key[0] not in fields:
        return start
    first = fields[str(key[0])]
    position, node = first.key_node.start, unaliased(first.value)
    for step in key[1:]:
        if isinstance(node, ListNode) and isinstance(step, int) and step < len(node.items):
            position, node = node.items[step].start, unaliased(node.items[step])
        elif isinstance(node, MapNode):
            inner = next((pair for pair in pairs(node, problems) if str(pair.key) == str(step)), None)
            if inner is not None:
                position, node = inner.key_node.start, unaliased(inner.value)
    return position


def _fields(written: ModifierNode, problems: SourceProblems) -> dict[str, Pair] | None:
    """The fields of a modifier as they are written, by name; None when there is something else."""
    body = unaliased(written.fields)
    if isinstance(body, MapNode):
        entries = pairs(body, problems)
        for pair in entries:
            check_tags(pair.value, problems, known=_known())
            if not isinstance(pair.key, str):
                message = f"expected the name of a field, found {pair.key!r}"
                problems.at(pair.key_node.start, message, written.name)
        return {pair.key: pair for pair in entries if isinstance(pair.key, str)}
    is_bare_name = written.fields is written.item and body.tag is None
    if is_bare_name or (isinstance(body, ScalarNode) and body.is_null):
        return {}
    instead = repr(body.text) if isinstance(body, ScalarNode) else "a list"
    problems.at(body.start, f"expected fields such as 'start_epoch: 0', found {instead}", written.name)
    return None


def _outline(body: ListNode | MapNode, problems: SourceProblems) -> Outline:
    """Sort everything at the top of the file, and everything inside each stage."""
    outline = Outline(body)
    if name := modifier_tag(body):
        message = f"the modifier '!{name}' is not in a list; expected '- !{name}' below 'modifiers:'"
        problems.at(body.start, message)
    elif isinstance(body, ListNode):
        outline.sections.append(Section("modifiers", False, modifiers=list(_items(body, problems))))
    else:
        for pair in pairs(body, problems):
            _sort(pair, outline, problems)
    if not outline.modifiers and not problems:
        message = "the recipe holds no modifiers; expected a list of them below a key such as 'modifiers:'"
        problems.fail_at(body.start, message)
    return outline


def _sort(pair: Pair, outline: Outline, problems: SourceProblems) -> None:
    """Sort one entry of the root."""
    value, name = unaliased(pair.value), pair.key
    if name in ("metadata", "version"):
        check_tags(pair.value, problems, known=_known())
        outline.extra[str(name)] = plain_value(pair.value, problems)
    elif isinstance(name, str) and isinstance(value, MapNode) and _holds_lists(value, problems):
        section = Section(name, True, body=value)
        for inner in pairs(value, problems):
            _sort_inside(inner, section, outline, problems)
        outline.sections.append(section)
    else:
        section = Section(str(name).replace("modifiers", "stage"), False)
        _sort_inside(pair, section, outline, problems)
        outline.variables.update(section.variables)
        if section.modifiers:
            outline.sections.append(section)


def _sort_inside(pair: Pair, section: Section, outline: Outline, problems: SourceProblems) -> None:
    """Sort a list of modifiers or a variable, of the root or of a stage."""
    value, name = unaliased(pair.value), pair.key
    if not isinstance(name, str):
        problems.at(pair.key_node.start, f"expected a name, found {name!r}")
    elif not _is_list_of_modifiers(name, value):
        _check_misplaced(pair, problems)
        section.variables[name] = pair
    else:
        if isinstance(value, ListNode):
            section.modifiers += _items(value, problems)
        elif isinstance(value, MapNode):
            section.modifiers += _grouped(value, problems)
        if value.size == 1:
            outline.empty_lists.append(pair)


def _is_list_of_modifiers(name: str, value: ScalarNode | ListNode | MapNode) -> bool:
    if "modifiers" not in name:
        return False
    return not isinstance(value, ScalarNode) or value.is_null


def _holds_lists(node: MapNode, problems: SourceProblems) -> bool:
    """A mapping is a stage when it holds lists of modifiers itself."""
    inner = pairs(node, problems)
    return any(isinstance(pair.key, str) and _is_list_of_modifiers(pair.key, unaliased(pair.value)) for pair in inner)


def _items(node: ListNode, problems: SourceProblems) -> Iterator[ModifierNode]:
    """The modifiers of a list: tagged, as a mapping of one key, or as a bare name."""
    if node.tag and modifier_tag(node):
        problems.at(node.start, f"expected a list, found the tag '{node.tag}'")
    for item in node.items:
        value = unaliased(item)
        if name := modifier_tag(value):
            yield ModifierNode(name, item, item)
            continue
        if isinstance(value, MapNode):
            entries = pairs(value, problems)
            if len(entries) == 1 and isinstance(name := entries[0].key, str):
                yield ModifierNode(name, item, entries[0].value)
                continue
            instead = f"a mapping of {len(entries)} keys"
        elif isinstance(value, ListNode):
            instead = "a list"
        elif isinstance(name := scalar_of(value, problems), str) and name in _known():
            yield ModifierNode(name, item, item)
            continue
        else:
            instead = repr(value.text)
        problems.at(item.start, f"{_EXPECTED_ITEM}, found {instead}")


def _grouped(node: MapNode, problems: SourceProblems) -> Iterator[ModifierNode]:
    """The modifiers of a mapping by name, which newer recipes use in place of a list."""
    if name := modifier_tag(node):
        problems.at(node.start, f"expected a list, '- !{name}', found the modifier without its dash")
        return
    for pair in pairs(node, problems):
        if isinstance(pair.key, str):
            yield ModifierNode(pair.key, pair.key_node, pair.value)
        else:
            problems.at(pair.key_node.start, f"expected the name of a modifier, found {pair.key!r}")


def _check_misplaced(pair: Pair, problems: SourceProblems) -> None:
    """Report modifiers below a key that is not a list of modifiers."""
    known = _known()
    check_tags(pair.value, problems, known=known)
    for node in walk(pair.value):
        for key, value in node.entries if isinstance(node, MapNode) else ():
            name = key.text if isinstance(key, ScalarNode) else ""
            if name in known and isinstance(unaliased(value), MapNode):
                message = f"the modifier '{name}' must be in a list whose key contains 'modifiers'"
                problems.at(key.start, message)


def _known() -> frozenset[str]:
    return frozenset(known_names()) | frozenset(NOT_OFFERED)
