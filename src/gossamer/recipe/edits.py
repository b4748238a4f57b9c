"""Edits to the text of a recipe that keep the rest of it.

An edit replaces the characters of one value or adds lines after the last one, so comments, quotes and layout elsewhere
stay as they are. ruamel's round-trip mode reformats what it writes, hence this module. The caller reads every edited
text again, which checks it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.errors import MAX_SUGGESTED, Location, Problem, RecipeError, nearest
from gossamer.modifiers.base import Modifier
from gossamer.recipe.nodes import (
    AliasNode,
    ListNode,
    MapNode,
    Node,
    Pair,
    content_start,
    pairs,
    unaliased,
)
from gossamer.recipe.reader import distinct_name, outline_of
from gossamer.recipe.source import Source, SourceProblems, recipe_error
from gossamer.recipe.variables import names_in
from gossamer.recipe.writer import entry, inline, item_lines, list_lines, plain_data, stage_lines

_REST_OF_LINE = re.compile(r"[ \t]*(?:#[^\n]*)?(?=\n|\Z)")


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


def override_variables(source: Source, overrides: Mapping[str, object]) -> Source:
    """The source with other values for its variables, also those of stages and those it uses but does not define."""
    if not overrides:
        return source
    outline = outline_of(source)
    scopes = [(outline.root, outline.variables), *((section.body, section.variables) for section in outline.sections)]
    known = {name for _, variables in scopes for name in variables}
    used = names_in(outline.root)
    missing = [name for name in overrides if name not in known]
    if unknown := [name for name in missing if name not in used]:
        known |= used
        messages = (f"unknown variable '{name}'{nearest(name, known)}" for name in unknown[:MAX_SUGGESTED])
        raise RecipeError(Problem(message, location=Location(source.name)) for message in messages)
    if missing and isinstance(outline.root, ListNode):
        message = f"a list has no variables, so '{missing[0]}' cannot be set; put the list below 'modifiers:'"
        raise recipe_error(source.name, message)
    edits = [
        _appended(source.text, outline.root, name, overrides[name])
        for name in missing
        if isinstance(outline.root, MapNode)
    ]
    for body, variables in scopes:
        for name, value in overrides.items():
            if name in variables:
                edits.append(_set_entry(source.text, body, variables[name], value))
    return _applied(source, edits)


def set_field(source: Source, index: int, field: str, value: object) -> Source:
    """The source with one field of one modifier changed or added."""
    written = outline_of(source).modifiers[index]
    body = unaliased(written.fields)
    value = plain_data(value)
    if not isinstance(body, MapNode):  # a modifier without fields: '- !Name', '- Name:' or '- Name'
        is_bare_name = written.fields is written.item and body.tag is None
        shown = f"{':' if is_bare_name else ''} {inline({field: value}, literal=False)}"
        return _applied(source, [_Edit(written.fields.end, written.fields.end, shown)])
    problems = SourceProblems(source)
    own = {pair.key: pair for pair in pairs(body, problems)}
    if field in own:
        return _applied(source, [_set_entry(source.text, body, own[field], value)])
    return _applied(source, [_appended(source.text, body, field, value)])


def set_metadata(source: Source, metadata: object) -> Source:
    """The source with its `metadata` replaced or added."""
    root = outline_of(source).root
    value = plain_data(metadata)
    if isinstance(root, ListNode):
        start, end = source.text.rfind("\n", 0, root.start) + 1, _end_of_line(source.text, root.end)
        if root.flow or root.anchor or source.text[start : root.start].strip():
            raise recipe_error(source.name, "metadata cannot be added to this layout")
        lines = "\n".join(entry("metadata", value, 0))
        return _applied(source, [_Edit(start, start, "modifiers:\n"), _Edit(end, end, f"\n\n{lines}")])
    own = {pair.key: pair for pair in pairs(root, SourceProblems(source))}
    if "metadata" in own:
        return _applied(source, [_set_entry(source.text, root, own["metadata"], value)])
    return _applied(source, [_appended(source.text, root, "metadata", value)])


def add_modifiers(source: Source, modifiers: Sequence[Modifier]) -> Source:
    """The source with modifiers after its own: a list of their own, or a stage in a staged recipe."""
    outline = outline_of(source)
    root, text = outline.root, source.text
    if root.flow:
        raise recipe_error(source.name, "modifiers cannot be added to this layout")
    end = _end_of_line(text, root.end)
    if isinstance(root, ListNode):
        lines = item_lines(modifiers, _column(text, content_start(text, root)))
        return _applied(source, [_Edit(end, end, "\n" + "\n".join(lines))])
    keys = {str(pair.key) for pair in pairs(root, SourceProblems(source))}
    indent = _column(text, root.entries[0][0].start)
    if outline.is_staged:
        lines = stage_lines(distinct_name("added_stage", keys), modifiers, indent)
    else:
        lines = list_lines(distinct_name("added_modifiers", keys), modifiers, indent)
    return _applied(source, [_Edit(end, end, "\n\n" + "\n".join(lines))])


def _set_entry(text: str, body: Node | None, pair: Pair, value: object) -> _Edit:
    """Write an entry again, on one line; an anchor stays, and an entry that was merged in gets its own line."""
    if pair.merged and isinstance(body, MapNode):
        return _appended(text, body, pair.key, value)
    key, node = pair.key_node, pair.value
    anchor = "" if isinstance(node, AliasNode) or node.anchor is None else f"&{node.anchor} "
    return _Edit(key.start, node.end, f"{text[key.start : key.end]}: {anchor}{inline(value, literal=False)}")


def _appended(text: str, body: MapNode, key: object, value: object) -> _Edit:
    """Add an entry at the end of a mapping."""
    if body.flow:
        at = text.index("{", content_start(text, body)) + 1
        return _Edit(at, at, f"{inline({key: value}, literal=False)[1:-1]}{', ' if body.entries else ''}")
    end = _end_of_line(text, body.end)
    lines = entry(key, value, _column(text, body.entries[0][0].start), literal=False)
    return _Edit(end, end, "\n" + "\n".join(lines))


def _end_of_line(text: str, index: int) -> int:
    """The end of the line that `index` is in, when only a comment follows on it."""
    rest = _REST_OF_LINE.match(text, index)
    if rest is None:
        raise RecipeError("nothing can be added to this layout")
    return rest.end()


def _column(text: str, index: int) -> int:
    return index - text.rfind("\n", 0, index) - 1


def _applied(source: Source, edits: Sequence[_Edit]) -> Source:
    text = source.text
    for edit in sorted(set(edits), key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return source.edited(text[source.start : source.end + len(text) - len(source.text)])
