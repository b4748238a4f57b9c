"""YAML text as a tree of nodes in which every node knows its position, and what its scalars mean.

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
"""A recipe is refused when it has more values than this, aliases written out."""

MAX_DEPTH = 100
MAX_TAG = 1000
"""The YAML library takes quadratic time over a tag."""

_CORE = "tag:yaml.org,2002:"
_CORE_TAGS = {_CORE + name for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")}
_PROPERTIES = re.compile(r"(?:[&!]\S*(?:\s+|$)(?:#[^\n]*\n\s*)*)*")
_LONG_TAG = re.compile(rf"(?:^|[\s,\[{{])!\S{{{MAX_TAG}}}")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""What an escape such as "\\ud83d" leaves, which no file and no library takes."""
_COLON = re.compile(r"\s*:")
_PARSER_FAULTS = (ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, RecursionError)
"""What the YAML library raises by mistake on broken input, besides its own errors."""
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED = re.compile(r"[-+]?0(?:o[0-7]+|x[0-9a-fA-F]+|b[01]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_EXPRESSION = re.compile(r"\s*eval\((.*)\)\s*", re.DOTALL)
_MAX_DIGITS = 1000
"""Python takes quadratic time over the decimal digits of a whole number, and stops at 4,300 of them."""


@dataclass(slots=True, eq=False)
class ScalarNode:
    text: str
    plain: bool
    tag: str | None
    anchor: str | None
    start: int
    end: int
    size: int = 1
    height: int = 1

    @property
    def is_empty(self) -> bool:
        return self.plain and self.text == ""


@dataclass(slots=True, eq=False)
class ListNode:
    tag: str | None
    anchor: str | None
    start: int
    end: int
    flow: bool
    items: list[Node] = field(default_factory=list["Node"])
    size: int = 1
    height: int = 1


@dataclass(slots=True, eq=False)
class MapNode:
    """`entries` are as written; `pairs` gives them with merge keys applied."""

    tag: str | None
    anchor: str | None
    start: int
    end: int
    flow: bool
    entries: list[tuple[Node, Node]] = field(default_factory=list[tuple["Node", "Node"]])
    size: int = 1
    height: int = 1


@dataclass(slots=True, eq=False)
class AliasNode:
    name: str
    target: ScalarNode | ListNode | MapNode
    start: int
    end: int
    size: int
    height: int


Node = ScalarNode | ListNode | MapNode | AliasNode


@dataclass(frozen=True, slots=True)
class Pair:
    """One entry of a mapping; `merged` says that it came through `<<`."""

    key: object
    key_node: ScalarNode
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
    """Where a node's own text starts, behind its anchor and tag."""
    properties = _PROPERTIES.match(text, node.start, node.end)
    return properties.end() if properties and not isinstance(node, AliasNode) else node.start


def parse(source: Source, problems: SourceProblems, *, what: str = "recipe") -> Node:
    """The tree of the source's only YAML document; `what` it is called in messages."""
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
        problems.fail_at(composer.reached, f"not valid YAML behind this place: {error}")
    if composer.root is None or isinstance(composer.root, ScalarNode):
        found = "nothing" if composer.root is None or composer.root.is_empty else "a single value"
        wanted = "a list of modifiers" if what == "recipe" else "a mapping"
        problems.fail_at(source.start, f"expected {wanted}, found {found}; the {what} is empty or text")
    return composer.root


def read_values(text: str, name: str, *, what: str) -> Any:
    """The values of a YAML text as dicts, lists and scalars, within the same limits; a tag has no meaning.

    Whatever reads YAML for its values alone calls this: the library itself expands aliases without bound.
    """
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{name}: the {what} is larger than {MAX_BYTES // 2**20} MB")
    source = source_of_text(text, name)
    problems = SourceProblems(source)
    found = plain_value(parse(source, problems, what=what), problems)
    problems.raise_if_any()
    return found


def plain_value(node: Node, problems: SourceProblems) -> object:
    """The value of a node as written, `eval(...)` being text."""
    found = unaliased(node)
    if isinstance(found, ScalarNode):
        return scalar_of(found, problems)
    if isinstance(found, ListNode):
        return [plain_value(item, problems) for item in found.items]
    return {pair.key: plain_value(pair.value, problems) for pair in pairs(found, problems)}


def scalar_value(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar; raises ValueError for a whole number of more than a thousand digits.

    >>> [scalar_value(text) for text in ("1.e-3", "2:4", "True", "yes", "~")]
    [0.001, '2:4', True, 'yes', None]
    """
    if text in _WORDS:
        return _WORDS[text]
    if (decimal := _INTEGER.fullmatch(text)) or _BASED.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"more than {_MAX_DIGITS} digits")
        return int(text.replace("_", "")) if decimal else int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def expression_in(text: str) -> str | None:
    """What stands inside `eval(...)` when that is the whole text.

    >>> expression_in("eval(a + 1)")
    'a + 1'
    """
    match = _EXPRESSION.fullmatch(text)
    return match[1] if match else None


def scalar_of(node: ScalarNode, problems: SourceProblems) -> object:
    """The value of a scalar, after its quotes and its core tag; other tags are reported elsewhere."""
    if node.tag is None:
        return _number_checked(node, problems) if node.plain else node.text
    if node.tag.startswith("!"):
        return node.text
    kind = node.tag.removeprefix(_CORE)
    if kind in ("seq", "map", "merge"):
        problems.at(node.start, f"expected text or a number, found the tag '!!{kind}'")
        return node.text
    if kind == "str":
        return node.text
    value = _number_checked(node, problems)
    fits = {"int": type(value) is int, "float": type(value) in (int, float), "bool": type(value) is bool}
    if not fits.get(kind, value is None):
        problems.at(node.start, f"expected !!{kind}, found {node.text!r}")
        return value
    return float(value) if kind == "float" and isinstance(value, int) else value


def _number_checked(node: ScalarNode, problems: SourceProblems) -> object:
    try:
        return scalar_value(node.text)
    except ValueError:
        problems.at(node.start, f"expected a number, found one of {len(node.text)} digits")
        return 0


def pairs(node: MapNode, problems: SourceProblems) -> list[Pair]:
    """The entries of a mapping, of a repeated key the last; merge keys applied, own keys first."""
    own: dict[object, Pair] = {}
    merges: list[Node] = []
    for key_node, value in node.entries:
        key = unaliased(key_node)
        if not isinstance(key, ScalarNode):
            problems.at(key_node.start, "expected a name as key, found a list or mapping")
        elif (key.plain and key.text == "<<") or key.tag == _CORE + "merge":
            if merges:
                problems.at(key_node.start, "the key '<<' stands twice in one mapping")
            merges.append(value)
        elif modifier_tag(key):
            problems.at(key_node.start, f"expected a name as key, found the tag '{key.tag}'")
        else:
            name = scalar_of(key, problems)
            if name in own:
                _repeated(name, own[name], key_node, problems)
            own[name] = Pair(name, _placed(key, key_node), value)
    for value in merges:
        for pair in _merged(value, problems):
            own.setdefault(pair.key, pair)
    return list(own.values())


def _repeated(name: object, first: Pair, again: Node, problems: SourceProblems) -> None:
    """Real recipes repeat keys, and the last one counts; but modifiers must not get lost like that."""
    line = problems.location(first.key_node.start).line
    if isinstance(name, str) and "modifiers" in name:
        problems.at(again.start, f"the key '{name}' stands in line {line} already; give each list its own name")
    else:
        problems.note(again.start, f"the key {name!r} stands in line {line} already; this one counts")


def check_tags(node: Node, problems: SourceProblems, *, known: frozenset[str]) -> None:
    """Report every tag below `node`: nothing outside a modifier list may carry one."""
    for inner in walk(node):
        name = modifier_tag(inner)
        if name and (name in known or name.endswith("Modifier")):
            problems.at(inner.start, f"the modifier '!{name}' must stand in a list whose key contains 'modifiers'")
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
    found = unaliased(value)
    for part in found.items if isinstance(found, ListNode) else [value]:
        mapping = unaliased(part)
        if isinstance(mapping, MapNode):
            yield from (Pair(pair.key, pair.key_node, pair.value, True) for pair in pairs(mapping, problems))
        else:
            problems.at(part.start, "expected a mapping, or a list of mappings, behind '<<'")


def _placed(key: ScalarNode, written: Node) -> ScalarNode:
    """The key with the place where it was written, also when it is an alias."""
    if key is written:
        return key
    return ScalarNode(key.text, key.plain, key.tag, None, written.start, written.end)


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
    """Takes events one by one; holds the collections that are still open."""

    def __init__(self, source: Source, problems: SourceProblems, what: str) -> None:
        self.root: Node | None = None
        self._what = what
        self.reached = source.start
        self._source = source
        self._problems = problems
        self._open: list[ListNode | MapNode] = []
        self._keys: list[Node | None] = []
        self._anchors: dict[str, ScalarNode | ListNode | MapNode] = {}
        self._documents = 0

    def take(self, event: Any) -> None:
        start, end = self._source.start + event.start_mark.index, self._source.start + event.end_mark.index
        kind = cast("type[object]", type(event))
        self.reached = end
        if kind is AliasEvent:
            self._place(self._alias(str(event.anchor), start, end))
        elif kind is ScalarEvent:
            if surrogate := _SURROGATE.search(event.value):
                found = f"half of a character, U+{ord(surrogate[0]):04X}"
                self._problems.fail_at(start, f"expected text, found {found}; write the character itself")
            node = ScalarNode(event.value, event.style is None, self._tag(event, start), event.anchor, start, end)
            if event.style in ("|", ">"):
                node.end = start + len(self._source.text[start:end].rstrip())
            self._place(node)
        elif kind in (SequenceStartEvent, MappingStartEvent):
            collection = ListNode if kind is SequenceStartEvent else MapNode
            flow = self._source.text[end - 1 : end] in ("[", "{")
            self._begin(collection(self._tag(event, start), event.anchor, start, end, flow))
        elif kind in (SequenceEndEvent, MappingEndEvent):
            self._finish(end)
        elif kind is DocumentStartEvent:
            self._documents += 1
            if self._documents > 1:
                self._problems.fail_at(start, "expected one YAML document, found another behind it")

    def _tag(self, event: Any, start: int) -> str | None:
        tag: str | None = event.tag
        if tag is not None and tag not in _CORE_TAGS and not tag.startswith("!"):
            shown = tag.replace(_CORE, "!!")
            self._problems.fail_at(start, f"the tag '{shown}' is not allowed in a {self._what}")
        return tag

    def _alias(self, name: str, start: int, end: int) -> AliasNode:
        if any(node.anchor == name for node in self._open):
            self._problems.fail_at(start, f"the alias '*{name}' refers to the value it stands in")
        found = self._anchors.get(name)
        if found is None:
            self._problems.fail_at(start, f"no anchor '&{name}' stands before '*{name}'{nearest(name, self._anchors)}")
        return AliasNode(name, found, start, end, found.size, found.height)

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
        self._place(node)

    def _place(self, node: Node) -> None:
        if not isinstance(node, AliasNode) and node.anchor is not None:
            self._anchors[node.anchor] = node
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > MAX_NODES or parent.height > MAX_DEPTH:
            what = f"more than {MAX_NODES:,} values" if parent.size > MAX_NODES else f"over {MAX_DEPTH} levels"
            self._problems.fail_at(node.start, f"the {self._what} has {what} when its aliases are written out")
        if isinstance(parent, ListNode):
            if isinstance(node, ScalarNode) and node.is_empty and node.tag is None and node.anchor is None:
                node.start = node.end = max(self._source.text.rfind("-", 0, node.start) + 1, parent.start)
            parent.items.append(node)
            return
        key = self._keys[-1]
        self._keys[-1] = node if key is None else None
        if key is not None:
            self._settle_empty(key, node)
            parent.entries.append((key, node))

    def _settle_empty(self, key: Node, node: Node) -> None:
        """Put an empty value right behind its colon; the library reports the next token's place."""
        if isinstance(node, ScalarNode) and node.is_empty and node.tag is None and node.anchor is None:
            colon = _COLON.match(self._source.text, key.end)
            node.start = node.end = colon.end() if colon else key.end
