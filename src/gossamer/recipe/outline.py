"""Which parts of a recipe's tree are modifiers, variables, stages and metadata.

This is the grammar of a recipe file above YAML. It looks at keys and shapes
only: no value is computed here and no modifier is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gossamer.modifiers.base import NOT_OFFERED, registered
from gossamer.recipe.nodes import (
    ListNode,
    MapNode,
    Node,
    Pair,
    ScalarNode,
    check_tags,
    constructed,
    modifier_tag,
    pairs,
    target,
    walk,
)
from gossamer.recipe.source import SourceProblems

_EXPECTED_ITEM = "expected a modifier such as '- !EpochRangeModifier' with its fields indented below"


@dataclass(frozen=True, slots=True)
class Written:
    """A modifier as it stands in the file: its name, its list item and its fields."""

    name: str
    item: Node
    fields: Node


@dataclass(slots=True)
class Section:
    """A stage, or one list of modifiers outside of stages."""

    name: str
    is_stage: bool
    variables: dict[str, Pair] = field(default_factory=dict[str, Pair])
    modifiers: list[Written] = field(default_factory=list[Written])
    body: MapNode | None = None


@dataclass(slots=True)
class Outline:
    root: ListNode | MapNode
    sections: list[Section] = field(default_factory=list[Section])
    variables: dict[str, Pair] = field(default_factory=dict[str, Pair])
    metadata: Node | None = None
    version: Node | None = None
    empty_lists: list[Pair] = field(default_factory=list[Pair])

    @property
    def is_staged(self) -> bool:
        return any(section.is_stage for section in self.sections)

    @property
    def modifiers(self) -> list[Written]:
        return [written for section in self.sections for written in section.modifiers]


def outline(root: Node, problems: SourceProblems) -> Outline:
    """Sort everything at the top of the file, and everything inside each stage."""
    found = target(root)
    if isinstance(found, ScalarNode):
        problems.fail_at(found.start, "expected a list of modifiers, found a single value")
    result = Outline(found)
    if name := modifier_tag(found):
        problems.at(
            found.start, f"the modifier '!{name}' stands alone; expected it in a list, '- !{name}', below 'modifiers:'"
        )
    elif isinstance(found, ListNode):
        result.sections.append(Section("modifiers", False, modifiers=list(_items(found, problems))))
    else:
        for pair in pairs(found, problems):
            _sort_root(pair, result, problems)
    if not result.modifiers and not problems:
        message = "the recipe holds no modifiers; expected a list of them below a key such as 'modifiers:'"
        problems.fail_at(found.start, message)
    return result


def _sort_root(pair: Pair, result: Outline, problems: SourceProblems) -> None:
    value = target(pair.value)
    name = pair.key
    if not isinstance(name, str):
        problems.at(pair.key_node.start, f"expected a name, found {name!r}")
    elif name == "metadata":
        check_tags(pair.value, problems, known=_known())
        result.metadata = pair.value
    elif name == "version":
        check_tags(pair.value, problems, known=_known())
        result.version = pair.value
    elif isinstance(value, MapNode) and _holds_lists(value, problems):
        section = Section(name, True, body=value)
        for inner in pairs(value, problems):
            _sort_inside(inner, section, result, problems)
        result.sections.append(section)
    else:
        section = Section(_stage_name(name), False)
        _sort_inside(pair, section, result, problems)
        result.variables.update(section.variables)
        if section.modifiers:
            result.sections.append(section)


def _sort_inside(pair: Pair, section: Section, result: Outline, problems: SourceProblems) -> None:
    """Put one entry of the root or of a stage where it belongs."""
    value = target(pair.value)
    name = pair.key
    if not isinstance(name, str):
        problems.at(pair.key_node.start, f"expected a name, found {name!r}")
    elif not _is_list_of_modifiers(name, value):
        _check_misplaced(pair, problems)
        section.variables[name] = pair
    elif isinstance(value, ListNode):
        section.modifiers += _items(value, problems)
    elif isinstance(value, MapNode):
        section.modifiers += _grouped(value, problems)
    if isinstance(name, str) and _is_list_of_modifiers(name, value) and value.size == 1:
        result.empty_lists.append(pair)


def _is_list_of_modifiers(name: str, value: ScalarNode | ListNode | MapNode) -> bool:
    if "modifiers" not in name:
        return False
    return not isinstance(value, ScalarNode) or (value.plain and value.text in ("", "~", "null", "Null", "NULL"))


def _holds_lists(node: MapNode, problems: SourceProblems) -> bool:
    """A mapping is a stage when it holds lists of modifiers itself."""
    inner = pairs(node, problems)
    return any(isinstance(pair.key, str) and _is_list_of_modifiers(pair.key, target(pair.value)) for pair in inner)


def _stage_name(key: str) -> str:
    """The name under which a list outside of stages runs beside stages."""
    return key.replace("modifiers", "stage")


def _items(node: ListNode, problems: SourceProblems) -> Iterator[Written]:
    if node.tag and modifier_tag(node):
        problems.at(node.start, f"expected a list, found the tag '{node.tag}'")
    for item in node.items:
        value = target(item)
        if name := modifier_tag(value):
            yield Written(name, item, item)
        elif isinstance(value, MapNode):
            yield from _untagged(item, value, problems)
        elif (
            isinstance(value, ScalarNode) and isinstance(name := constructed(value, problems), str) and name in _known()
        ):
            yield Written(name, item, item)
        else:
            found = "a list" if isinstance(value, ListNode) else repr(value.text) if value.text else "an empty item"
            problems.at(item.start, f"{_EXPECTED_ITEM}, found {found}")


def _untagged(item: Node, node: MapNode, problems: SourceProblems) -> Iterator[Written]:
    found = pairs(node, problems)
    if len(found) != 1:
        problems.at(item.start, f"{_EXPECTED_ITEM}, found a mapping of {len(found)} keys")
        return
    if isinstance(found[0].key, str):
        yield Written(found[0].key, item, found[0].value)
    else:
        problems.at(item.start, f"{_EXPECTED_ITEM}, found {found[0].key!r}")


def _grouped(node: MapNode, problems: SourceProblems) -> Iterator[Written]:
    if name := modifier_tag(node):
        problems.at(node.start, f"expected a list, '- !{name}', found the modifier without its dash")
        return
    for pair in pairs(node, problems):
        if isinstance(pair.key, str):
            yield Written(pair.key, pair.key_node, pair.value)
        else:
            problems.at(pair.key_node.start, f"expected the name of a modifier, found {pair.key!r}")


def _check_misplaced(pair: Pair, problems: SourceProblems) -> None:
    """Report modifiers below a key that is not a list of modifiers."""
    known = _known()
    check_tags(pair.value, problems, known=known)
    for node in walk(pair.value):
        for key, value in node.entries if isinstance(node, MapNode) else ():
            name = key.text if isinstance(key, ScalarNode) else ""
            if name in known and isinstance(target(value), MapNode):
                message = f"the modifier '{name}' must stand in a list whose key contains 'modifiers'"
                problems.at(key.start, message)


def _known() -> frozenset[str]:
    return frozenset(registered()) | frozenset(NOT_OFFERED)
