"""Convert errors of pydantic to problems with plain messages.

The branches of a union become one message, an unknown name gets the nearest known one, and keys are paths in the
document, without pydantic's branches and tags of unions.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gossamer.errors import MAX_PROBLEMS, GossamerError, Key, Problem, format_value, nearest

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
    "path": "a path",
}
"""What is expected, by the first part of pydantic's error type."""
_LIMITS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


def problems_of(
    error: ValidationError,
    value: object,
    schema: type[BaseModel] | None = None,
    *,
    noun: str = "field",
    reported: Collection[str] = (),
) -> list[Problem]:
    """The problems of `value`, which failed validation; the keys are paths in `value`.

    `schema` is the model it was checked against and gives the known names. A key of the document is called `noun`.
    `value` may lack the fields in `reported`, whose problems are known already: there are no problems about them, nor
    any that compare fields.

    >>> class Loader(BaseModel, extra="forbid"):
    ...     batch_size: int | None = None
    >>> try:
    ...     Loader.model_validate({"batch_size": "x", "worker": 3})
    ... except ValidationError as error:
    ...     for problem in problems_of(error, {"batch_size": "x", "worker": 3}, Loader):
    ...         print(problem.within("data"))
    data.batch_size: expected a whole number, found 'x'
    data.worker: unknown field
    """
    details = error.errors(include_url=False)[:MAX_PROBLEMS]
    if reported:
        details = [one for one in details if one["loc"] and one["loc"][0] not in reported]
    by_key: dict[Key, list[ErrorDetails]] = {}
    for one in details:
        by_key.setdefault(_key(one, value, schema), []).append(one)
    problems: list[Problem] = []
    for key, group in by_key.items():
        if not any(len(other) > len(key) and other[: len(key)] == key for other in by_key):  # a branch that went deeper
            problems += _problems(key, group, schema, noun)
    return problems


def field_names(schema: type[BaseModel]) -> list[str]:
    """The names that a document may use for the fields of a model, aliases included."""
    return [*schema.model_fields, *(field.alias for field in schema.model_fields.values() if field.alias)]


def _problems(key: Key, group: Sequence[ErrorDetails], schema: type[BaseModel] | None, noun: str) -> Iterator[Problem]:
    """The problems at one key: what the branches of a union expect becomes one of them."""
    expected: dict[str, None] = {}
    messages: dict[str, None] = {}
    for details in group:
        kind, context = details["type"], details.get("ctx", {})
        if isinstance(cause := context.get("error"), GossamerError):
            yield from (problem.within(*key) for problem in cause.problems)
        elif kind == "missing":
            messages[f"missing {noun}"] = None
        elif kind == "extra_forbidden":
            known = [name for model in _models(schema, details["loc"][:-1]) for name in field_names(model)]
            messages[f"unknown {noun}{nearest(str(key[-1]), known)}"] = None
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            yield _tag_problem(key, details, schema, noun)
        elif (phrase := _expected(details)) is not None:
            expected[phrase] = None
        else:
            messages[str(cause) if cause is not None else details["msg"][:1].lower() + details["msg"][1:]] = None
    if expected:
        choices = " or ".join(expected)
        given = group[0]["input"]
        close = nearest(given, re.findall(r"'([^']*)'", choices)) if isinstance(given, str) else ""
        messages = {f"expected {choices}, found {format_value(given)}{close}": None, **messages}
    if messages:
        yield Problem("; ".join(messages), key)


def _expected(details: ErrorDetails) -> str | None:
    """What completes "expected …", or None when pydantic's own message is used."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _LIMITS:
        name, sign = _LIMITS[kind]
        return f"a number {sign} {context[name]:g}"
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    if kind == "int_from_float":
        return "a whole number"
    return None if kind in ("value_error", "assertion_error") else _EXPECTED.get(kind.split("_")[0])


def _tag_problem(key: Key, details: ErrorDetails, schema: type[BaseModel] | None, noun: str) -> Problem:
    """The key that chooses between models is missing or unknown."""
    context = details.get("ctx", {})
    name = str(context["discriminator"]).strip("'")
    choices = [str(tag) for model in _models(schema, details["loc"]) for tag in _tags(model)]
    fix = f"choose one of {', '.join(choices)}" if choices else ""
    if "tag" not in context:
        return Problem(f"missing {noun}", (*key, name), fix=fix)
    tag = str(context["tag"])
    return Problem(f"unknown {name} {format_value(tag)}{nearest(tag, choices)}", (*key, name), fix=fix)


def _key(details: ErrorDetails, value: object, schema: type[BaseModel] | None) -> Key:
    """The steps of a location that lead through the document, and a field that it lacks or names otherwise."""
    location = details["loc"]
    key: Key = ()
    for index, step in enumerate(location):
        if (inner := _inside(value, step)) is not None:
            key, value = (*key, step), inner[0]
        elif (index == 0 and schema is not None) or (details["type"] == "missing" and index == len(location) - 1):
            key, value = (*key, step), None
    return key


def _inside(value: object, step: str | int) -> tuple[object] | None:
    """The item or entry that a step leads to; None when it names a branch of a union."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return next(((inner,) for name, inner in entries.items() if str(name) == str(step)), None)
    if isinstance(value, Sequence) and not isinstance(value, str) and isinstance(step, int):
        items = cast("Sequence[object]", value)
        return (items[step],) if step < len(items) else None
    return None


def _models(schema: type[BaseModel] | None, location: Sequence[str | int]) -> list[type[BaseModel]]:
    """The models that a location of pydantic's leads to; several where none of a union was chosen."""
    models = [schema] if schema is not None else []
    for step in location:
        inner = [model.model_fields[step] for model in models if isinstance(step, str) and step in model.model_fields]
        if inner:
            models = [model for field in inner for model in _models_in(field.annotation)]
        elif chosen := [model for model in models if step in _tags(model) or step == model.__name__]:
            models = chosen
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)


def _tags(model: type[BaseModel]) -> tuple[object, ...]:
    """What `type` may be, where it tells one model from others."""
    annotation = model.model_fields["type"].annotation if "type" in model.model_fields else None
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()
