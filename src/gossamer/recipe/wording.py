"""Texts for pydantic's errors; being replaced by `gossamer.validation`."""

from __future__ import annotations

from pydantic_core import ErrorDetails

from gossamer.errors import format_value as found_words

__all__ = ["complaint_words", "found_words"]

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


def _decapitalised(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
