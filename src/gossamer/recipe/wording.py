"""What pydantic found wrong with a modifier, in plain words and at the right place.

Each complaint is traced to the node of the field, list item or key it speaks
of. Complaints of the branches of a union become one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gossamer.errors import nearest
from gossamer.modifiers.base import Modifier
from gossamer.recipe.nodes import ListNode, MapNode, Node, Pair, pairs, target
from gossamer.recipe.source import MAX_PROBLEMS, Problems

_EXPECTED = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "none": "null",
    "finite": "a finite number",
}
_LIMITS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
_LIMIT_KEYS = ("gt", "ge", "lt", "le")


@dataclass(frozen=True, slots=True)
class _Complaint:
    field: str
    path: str
    index: int
    depth: int
    expected: str | None
    sentence: str
    found: str


def report(
    error: ValidationError,
    cls: type[Modifier],
    at: int,
    fields: Mapping[str, Pair],
    broken: Set[str],
    problems: Problems,
) -> None:
    """Add every complaint about one modifier to `problems`; fields in `broken` have theirs already."""
    by_field: dict[str, list[_Complaint]] = {}
    for details in error.errors(include_url=False)[:MAX_PROBLEMS]:
        location = details["loc"]
        if location[:1] and location[0] in broken:
            continue
        if not location:
            if not broken:
                message = _validator_words(details)
                joint = "." if message.partition(": ")[0] in cls.model_fields else ": "
                problems.add(_place_of_sentence(message, at, fields), f"{cls.__name__}{joint}{message}")
        elif details["type"] == "missing" and len(location) == 1:
            problems.add(at, f"{cls.__name__}: missing field '{location[0]}'")
        elif details["type"] == "extra_forbidden" and len(location) == 1:
            name = str(location[0])
            place = fields[name].key_node.start if name in fields else at
            problems.add(place, f"{cls.__name__}: unknown field '{name}'{nearest(name, field_names(cls))}")
        else:
            complaint = _complaint(details, at, fields, problems)
            by_field.setdefault(complaint.field, []).append(complaint)
    for complaints in by_field.values():
        _report_field(cls, complaints, problems)


def field_names(cls: type[Modifier]) -> list[str]:
    """The fields that a recipe may give, by name and by alias."""
    aliases = [field.alias for field in cls.model_fields.values() if field.alias]
    return [*cls.model_fields, *aliases]


def found_words(value: object) -> str:
    """A value as a message shows it: YAML's words, cut to a readable length."""
    if value is None:
        return "nothing"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _report_field(cls: type[Modifier], complaints: list[_Complaint], problems: Problems) -> None:
    deepest = max(complaint.depth for complaint in complaints)
    nearest_branch = [complaint for complaint in complaints if complaint.depth == deepest]
    for index in dict.fromkeys(complaint.index for complaint in nearest_branch):
        here = [complaint for complaint in nearest_branch if complaint.index == index]
        first = here[0]
        sentences = list(dict.fromkeys(complaint.sentence for complaint in here if complaint.expected is None))
        if expected := list(dict.fromkeys(complaint.expected for complaint in here if complaint.expected)):
            wanted = " or ".join(expected)
            suggestion = nearest(first.found.strip("'"), re.findall(r"'([^']*)'", wanted))
            sentences.insert(0, f"expected {wanted}, found {first.found}{suggestion}")
        problems.add(index, f"{cls.__name__}.{first.path}: {'; '.join(sentences)}")


def _complaint(details: ErrorDetails, at: int, fields: Mapping[str, Pair], problems: Problems) -> _Complaint:
    name, *rest = details["loc"]
    field = str(name)
    path, index, depth = field, at, 0
    if field in fields:
        node = fields[field].value
        index = node.start
        for part in rest:
            inner = _inside(node, part, problems)
            if inner is not None:
                node, depth = inner, depth + 1
                path += f"[{part}]" if isinstance(part, int) else f".{part}"
                index = node.start
    expected, sentence = complaint_words(details)
    return _Complaint(field, path, index, depth, expected, sentence, found_words(details["input"]))


def _inside(node: Node, part: int | str, problems: Problems) -> Node | None:
    """The item or value that a step of the location means; None when it names a branch of a union."""
    found = target(node)
    if isinstance(found, ListNode) and isinstance(part, int) and part < len(found.items):
        return found.items[part]
    if isinstance(found, MapNode):
        return next((pair.value for pair in pairs(found, problems) if str(pair.key) == str(part)), None)
    return None


def complaint_words(details: ErrorDetails) -> tuple[str | None, str]:
    """What was expected, or else a whole sentence."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _LIMITS:
        limit = next(context[key] for key in _LIMIT_KEYS if key in context)
        return f"a number {_LIMITS[kind]} {limit:g}", ""
    if kind in ("literal_error", "enum"):
        return str(context["expected"]), ""
    if kind in ("value_error", "assertion_error"):
        return None, _validator_words(details)
    if kind == "missing":
        return None, f"missing '{details['loc'][-1]}'"
    if kind == "extra_forbidden":
        return None, f"unknown key '{details['loc'][-1]}'"
    if kind == "int_from_float":
        return "a whole number", ""
    words = _EXPECTED.get(kind.split("_")[0])
    return (words, "") if words else (None, _decapitalised(details["msg"]))


def _validator_words(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    return str(context["error"]) if "error" in context else _decapitalised(details["msg"])


def _place_of_sentence(sentence: str, at: int, fields: Mapping[str, Pair]) -> int:
    """The field that a sentence about the whole modifier starts with, else the modifier."""
    words: Sequence[str] = re.findall(r"\w+", sentence)
    return next((fields[word].key_node.start for word in words if word in fields), at)


def _decapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
