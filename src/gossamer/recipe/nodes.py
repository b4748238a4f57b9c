"""Parse YAML into a tree of nodes with positions, and read the values of its scalars.

The tree is built from ruamel's events. ruamel's own composer loses the position of an alias, reports repeated anchors
through Python's warnings, and expands aliases and nesting without a limit; the limits on hostile text are here. Nodes
hold text only: no object is ever constructed from a tag.

Scalars follow YAML 1.2 with the numbers that recipe authors write: `1e-5` and `1.e-3` are floats, `2:4` is text
whatever the `%YAML` line says. No resolver of ruamel reads them like that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from gossamer.errors import Location, RecipeError, nearest
from gossamer.recipe.source import MAX_BYTES, Source, SourceProblems, source_of_text

MAX_NODES = 50_000
"""Maximum number of values in a document, with aliases expanded."""

MAX_DEPTH = 100
MAX_TAG = 1000
"""ruamel takes quadratic time over a tag."""

_CORE = "tag:yaml.org,2002:"
_CORE_TAGS = {_CORE + name for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
_PROPERTIES = re.compile(r"(?:[&!]\S*(?:\s+|$)(?:#[^\n]*\n\s*)*)*")
_LONG_TAG = re.compile(rf"(?:^|[\s,\[{{])!\S{{{MAX_TAG}}}")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""What an escape such as "\\ud83d" gives, which cannot be encoded."""
_COLON = re.compile(r"\s*:")
_PARSER_FAULTS = (ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, RecursionError)
"""What ruamel raises on malformed input besides its own errors."""
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED = re.compile(r"[-+]?0(?:o[0-7]+|x[0-9a-fA-F]+|b[01]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NULLS = ("", "~", "null", "Null", "NULL")
_KEYWORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(NULLS, None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_EXPRESSION = re.compile(r"\s*eval\((.*)\)\s*", re.DOTALL)
_MAX_DIGITS = 1000
"""Python takes quadratic time over the digits of a whole number, and refuses more than 4,300."""


@dataclass(slots=True, eq=False)
class _Node:
    start: int
    end: int
    size: int = field(default=1, kw_only=True)
    """Values at and below it, with aliases expanded."""
    height: int = field(default=1, kw_only=True)


@dataclass(slots=True, eq=False)
class ScalarNode(_Node):
    tag: str | None
    anchor: str | None
    text: str
    plain: bool

    @property
    def is_empty(self) -> bool:
        return self.plain and self.text == ""

    @property
    def is_null(self) -> bool:
        return self.plain and self.text in NULLS


@dataclass(slots=True, eq=False)
class ListNode(_Node):
    tag: str | None
    anchor: str | None
    flow: bool
    items: list[Node] = field(default_factory=list["Node"])


@dataclass(slots=True, eq=False)
class MapNode(_Node):
    """`entries` are as written; `pairs` gives them with merge keys applied."""

    tag: str | None
    anchor: str | None
    flow: bool
    entries: list[tuple[Node, Node]] = field(default_factory=list[tuple["Node", "Node"]])


@dataclass(slots=True, eq=False)
class AliasNode(_Node):
    target: ScalarNode | ListNode | MapNode


Node = ScalarNode | ListNode | MapNode | AliasNode


@dataclass(frozen=True, slots=True)
class Pair:
    """One entry of a mapping; `merged` says that it came through `<<`."""

    key: object
    key_node: Node
    value: Node
    merged: bool = False


def unaliased(node: Node) -> ScalarNode | ListNode | MapNode:
    """The node itself, or what its alias refers to."""
    return node.target if isinstance(node, AliasNode) else node


def modifier_tag(node: Node) -> str | None:
    """`GMPruningModifier` for a node tagged `!GMPruningModifier`, else None."""
    tag = unaliased(node).tag
    return tag[1:] if tag and tag.startswith("!") and len(tag) > 1 else None


def content_start(text: str, node: Node) -> int:
    """Where a node's own text starts, after its anchor and tag."""
    properties = _PROPERTIES.match(text, node.start, node.end)
    return properties.end() if properties and not isinstance(node, AliasNode) else node.start


def parse(source: Source, problems: SourceProblems, *, what: str = "recipe") -> ListNode | MapNode:
    """The tree of the source's only YAML document; messages call the document `what`."""
    composer = _Composer(source, problems, what)
    if long_tag := _LONG_TAG.search(source.text, source.start, source.end):
        problems.fail_at(long_tag.end() - MAX_TAG - 1, f"expected a tag of at most {MAX_TAG} characters")
    try:
        library: Any = YAML(typ="safe", pure=True)
        for event in library.parse(source.yaml):
            composer.take(event)
    except RecipeError:
        raise
    except YAMLError as error:
        _fail_syntax(error, source, problems)
    except _PARSER_FAULTS as error:
        problems.fail_at(composer.reached, f"not valid YAML after this position: {error}")
    root = composer.root
    if not isinstance(root, ListNode | MapNode):
        expected = "a list of modifiers" if what == "recipe" else "a mapping"
        instead = "a single value" if isinstance(root, ScalarNode) and not root.is_empty else "nothing"
        problems.fail_at(source.start, f"expected {expected}, found {instead}; the {what} is empty or text")
    return root


def read_values(text: str, name: str, *, what: str) -> Any:
    """The values of a YAML text as dicts, lists and scalars, within the same limits; tags are ignored.

    Everything that reads YAML for its values alone calls this, because ruamel expands aliases without a limit.
    """
    source = source_of_text(text, name)
    problems = SourceProblems(source)
    if len(text) > MAX_BYTES:
        problems.fail(f"the {what} is larger than {MAX_BYTES // 2**20} MB", location=Location(name))
    values = plain_value(parse(source, problems, what=what), problems)
    problems.raise_if_any()
    return values


def plain_value(node: Node, problems: SourceProblems) -> object:
    """The value of a node as written; `eval(...)` stays text."""
    content = unaliased(node)
    if isinstance(content, ScalarNode):
        return scalar_of(content, problems)
    if isinstance(content, ListNode):
        return [plain_value(item, problems) for item in content.items]
    return {pair.key: plain_value(pair.value, problems) for pair in pairs(content, problems)}


def scalar_value(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar; raises ValueError for a whole number of more than a thousand digits.

    >>> [scalar_value(text) for text in ("1.e-3", "2:4", "True", "yes", "~")]
    [0.001, '2:4', True, 'yes', None]
    """
    if text in _KEYWORDS:
        return _KEYWORDS[text]
    if (decimal := _INTEGER.fullmatch(text)) or _BASED.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"more than {_MAX_DIGITS} digits")
        return int(text.replace("_", "")) if decimal else int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def expression_in(text: str) -> str | None:
    """The expression inside `eval(...)` when that is the whole text, else None.

    >>> expression_in("eval(a + 1)")
    'a + 1'
    """
    match = _EXPRESSION.fullmatch(text)
    return match[1] if match else None


def scalar_of(node: ScalarNode, problems: SourceProblems) -> object:
    """The value of a scalar by its quotes and its core tag; `check_tags` reports other tags."""
    if node.tag is None:
        return _checked_value(node, problems) if node.plain else node.text
    if node.tag.startswith("!"):
        return node.text
    kind = node.tag.removeprefix(_CORE)
    if kind in ("seq", "map", "merge"):
        problems.at(node.start, f"expected text or a number, found the tag '!!{kind}'")
        return node.text
    if kind == "str":
        return node.text
    value = _checked_value(node, problems)
    fits = {"int": type(value) is int, "float": type(value) in (int, float), "bool": type(value) is bool}
    if not fits.get(kind, value is None):
        problems.at(node.start, f"expected !!{kind}, found {node.text!r}")
        return value
    return float(value) if kind == "float" and isinstance(value, int) else value


def _checked_value(node: ScalarNode, problems: SourceProblems) -> object:
    try:
        return scalar_value(node.text)
    except ValueError:
        problems.at(node.start, f"expected a number, found one of {len(node.text)} digits")
        return 0


def pairs(node: MapNode, problems: SourceProblems) -> list[Pair]:
    """The entries of a mapping, own keys first, with merge keys applied; the last of a duplicate key."""
    own: dict[object, Pair] = {}
    merges: list[Node] = []
    for key_node, value in node.entries:
        key = unaliased(key_node)
        if not isinstance(key, ScalarNode):
            problems.at(key_node.start, "expected a name as key, found a list or mapping")
        elif (key.plain and key.text == "<<") or key.tag == _CORE + "merge":
            if merges:
                problems.at(key_node.start, "duplicate key '<<' in one mapping")
            merges.append(value)
        elif modifier_tag(key):
            problems.at(key_node.start, f"expected a name as key, found the tag '{key.tag}'")
        else:
            name = scalar_of(key, problems)
            if name in own:
                _report_duplicate(name, own[name], key_node, problems)
            own[name] = Pair(name, key_node, value)
    for value in merges:
        for pair in _merged(value, problems):
            own.setdefault(pair.key, pair)
    return list(own.values())


def _report_duplicate(name: object, first: Pair, again: Node, problems: SourceProblems) -> None:
    """Real recipes repeat keys and mean the last one; a repeated list of modifiers would lose modifiers."""
    line = problems.location(first.key_node.start).line
    if isinstance(name, str) and "modifiers" in name:
        problems.at(again.start, f"duplicate key '{name}', first in line {line}; give each list its own name")
    else:
        problems.note(again.start, f"duplicate key {name!r}, first in line {line}; the last one is used")


def check_tags(node: Node, problems: SourceProblems, *, known: frozenset[str]) -> None:
    """Report every tag below `node`: nothing outside a modifier list may carry one."""
    for inner in walk(node):
        name = modifier_tag(inner)
        if name and (name in known or name.endswith("Modifier")):
            problems.at(inner.start, f"the modifier '!{name}' must be in a list whose key contains 'modifiers'")
        elif name:
            problems.at(inner.start, f"unknown tag '!{name}'{nearest(name, known)}")


def walk(node: Node) -> Iterator[ScalarNode | ListNode | MapNode]:
    """Every node that is written at or below `node`; aliases are not followed."""
    waiting = [node]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, AliasNode):
            continue
        yield inner
        if isinstance(inner, ListNode):
            waiting.extend(inner.items)
        elif isinstance(inner, MapNode):
            waiting.extend(part for both in inner.entries for part in both)


def _merged(value: Node, problems: SourceProblems) -> Iterator[Pair]:
    content = unaliased(value)
    for part in content.items if isinstance(content, ListNode) else [value]:
        mapping = unaliased(part)
        if isinstance(mapping, MapNode):
            yield from (Pair(pair.key, pair.key_node, pair.value, True) for pair in pairs(mapping, problems))
        else:
            problems.at(part.start, "expected a mapping, or a list of mappings, after '<<'")


def _fail_syntax(error: YAMLError, source: Source, problems: SourceProblems) -> NoReturn:
    if not isinstance(error, MarkedYAMLError):
        problems.fail(f"not valid YAML: {error}", location=Location(source.name))
    marked: Any = error
    mark: Any = marked.problem_mark or marked.context_mark
    index: int = source.start + (mark.index if mark else 0)
    reason = ": ".join(str(part) for part in (marked.context, marked.problem) if part)
    if source.text[index : index + 1] == "\t":
        reason += "; YAML is indented by spaces, not by tabs"
    problems.fail_at(min(index, len(source.text)), f"not valid YAML: {reason}")


class _Composer:
    """Builds the tree from events, one by one; holds the collections that are still open."""

    def __init__(self, source: Source, problems: SourceProblems, what: str) -> None:
        self.root: Node | None = None
        self.reached = source.start
        self._what = what
        self._source = source
        self._problems = problems
        self._open: list[ListNode | MapNode] = []
        self._keys: list[Node | None] = []
        self._anchors: dict[str, ScalarNode | ListNode | MapNode] = {}
        self._documents = 0

    def take(self, event: Any) -> None:
        start, end = self._source.start + event.start_mark.index, self._source.start + event.end_mark.index
        self.reached = end
        match event:
            case AliasEvent():
                self._add(self._alias(str(cast(Any, event).anchor), start, end))
            case ScalarEvent():
                self._add(self._scalar(event, start, end))
            case SequenceStartEvent() | MappingStartEvent():
                kind = ListNode if isinstance(event, SequenceStartEvent) else MapNode
                flow = self._source.text[end - 1 : end] in ("[", "{")
                self._begin(kind(start, end, self._tag(event, start), cast(Any, event).anchor, flow))
            case SequenceEndEvent() | MappingEndEvent():
                self._finish(end)
            case DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    self._problems.fail_at(start, "expected one YAML document, found another")
            case _:
                pass

    def _scalar(self, event: Any, start: int, end: int) -> ScalarNode:
        if surrogate := _SURROGATE.search(event.value):
            code = f"U+{ord(surrogate[0]):04X}"
            self._problems.fail_at(
                start, f"expected text, found half of a character, {code}; write the whole character"
            )
        if event.style in ("|", ">"):
            end = start + len(self._source.text[start:end].rstrip())
        return ScalarNode(start, end, self._tag(event, start), event.anchor, event.value, event.style is None)

    def _tag(self, event: Any, start: int) -> str | None:
        tag: str | None = event.tag
        if tag is not None and tag not in _CORE_TAGS and not tag.startswith("!"):
            shown = tag.replace(_CORE, "!!")
            self._problems.fail_at(start, f"the tag '{shown}' is not allowed in a {self._what}")
        return tag

    def _alias(self, name: str, start: int, end: int) -> AliasNode:
        if any(node.anchor == name for node in self._open):
            self._problems.fail_at(start, f"the alias '*{name}' refers to a value that contains it")
        node = self._anchors.get(name)
        if node is None:
            self._problems.fail_at(start, f"no anchor '&{name}' before '*{name}'{nearest(name, self._anchors)}")
        return AliasNode(start, end, node, size=node.size, height=node.height)

    def _begin(self, node: ListNode | MapNode) -> None:
        self._open.append(node)
        self._keys.append(None)
        if len(self._open) > MAX_DEPTH:
            self._problems.fail_at(node.start, f"nested more than {MAX_DEPTH} levels deep")

    def _finish(self, end: int) -> None:
        node = self._open.pop()
        self._keys.pop()
        last = node.items[-1:] if isinstance(node, ListNode) else [value for _, value in node.entries[-1:]]
        node.end = last[0].end if last and not node.flow else end
        self._add(node)

    def _add(self, node: Node) -> None:
        """Add a complete node to the collection that is open."""
        if not isinstance(node, AliasNode) and node.anchor is not None:
            self._anchors[node.anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > MAX_NODES or parent.height > MAX_DEPTH:
            excess = f"more than {MAX_NODES:,} values" if parent.size > MAX_NODES else f"over {MAX_DEPTH} levels"
            self._problems.fail_at(node.start, f"the {self._what} has {excess} when its aliases are expanded")
        if isinstance(parent, ListNode):
            self._move_empty(node, max(self._source.text.rfind("-", 0, node.start) + 1, parent.start))
            parent.items.append(node)
            return
        key = self._keys[-1]
        self._keys[-1] = node if key is None else None
        if key is not None:
            colon = _COLON.match(self._source.text, key.end)
            self._move_empty(node, colon.end() if colon else key.end)
            parent.entries.append((key, node))

    @staticmethod
    def _move_empty(node: Node, position: int) -> None:
        """Put an empty value right after its dash or colon; ruamel reports the position of the next token."""
        if isinstance(node, ScalarNode) and node.is_empty and node.tag is None and node.anchor is None:
            node.start = node.end = position
