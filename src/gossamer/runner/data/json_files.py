"""Objects of JSON and their fields, with the place of what is wrong. Knows no annotation format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from gossamer.errors import GossamerError
from gossamer.io import read_regular


def read_text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as problem:
        raise GossamerError(f"{path}: cannot read the annotations ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise GossamerError(f"{path}: the text is not UTF-8 at byte {problem.start}") from None


def parsed(text: str, path: Path, line: int = 1) -> Any:
    """The value that JSON text holds; `line` is where the text starts in its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        place = f"{path}:{line + problem.lineno - 1}:{problem.colno}"
        raise GossamerError(f"{place}: this is not JSON: {problem.msg[:1].lower()}{problem.msg[1:]}") from None
    except (RecursionError, ValueError) as problem:  # too deep, or an integer of too many digits
        raise GossamerError(f"{path}:{line}: this JSON cannot be read: {problem}") from None


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def declared_size(record: dict[str, Any], height: str, width: str) -> tuple[int, int] | None:
    """Height and width if both stand there as positive integers, (−1, −1) if neither does; None if they are wrong."""
    sides = record.get(height), record.get(width)
    if sides == (None, None):
        return -1, -1
    if all(isinstance(side, int) and not isinstance(side, bool) and 0 < side < 2**31 for side in sides):
        return int(sides[0] or 0), int(sides[1] or 0)
    return None
