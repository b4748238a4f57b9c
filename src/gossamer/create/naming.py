"""Many parameter names in few words: `re:` patterns where they say exactly the same as a list of names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from gossamer.errors import ModifierError
from gossamer.model import match
from gossamer.model.regex import MAX_LENGTH

_FEW = 3
"""From this many names on a pattern is easier to read."""
_NUMBER = re.compile(r"\d+")


def tidy(names: Sequence[str], model: nn.Module) -> list[str]:
    r"""The same parameters, those that differ by numbers alone in one pattern.

    >>> layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    >>> print(*tidy(["0.weight", "1.weight", "2.weight", "3.weight", "4.weight"], layers))
    re:\d+\.weight$
    >>> print(*tidy(["0.weight", "1.weight", "3.weight", "4.weight"], layers))
    re:(0|1|3|4)\.weight$
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), []).append(name)
    found = [item for group in groups.values() for item in _shortened(group, model)]
    return [_pattern(item, {}) if item.startswith("re:") and item in names else item for item in found]


def _shortened(group: list[str], model: nn.Module) -> list[str]:
    """Names that are alike but for numbers, as one pattern or as one for each set of the other numbers."""
    if len(group) < _FEW:
        return group
    numbers = [_NUMBER.findall(name) for name in group]
    varying = [place for place, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    anything = _pattern(group[0], dict.fromkeys(varying, r"\d+"))
    if _matched(model, anything) == set(group):
        return [anything]
    return min((_by_place(group, numbers, place) for place in varying), key=len, default=group)


def _by_place(group: list[str], numbers: list[list[str]], place: int) -> list[str]:
    """The numbers at one place listed, all others as they are."""
    parts: dict[tuple[str, ...], list[str]] = {}
    for name, found in zip(group, numbers, strict=True):
        parts.setdefault((*found[:place], *found[place + 1 :]), []).append(name)
    items: list[str] = []
    for part in parts.values():
        listed = "|".join(dict.fromkeys(_NUMBER.findall(name)[place] for name in part))
        pattern = _pattern(part[0], {place: f"({listed})"})
        items += part if len(part) < _FEW or len(pattern) > MAX_LENGTH else [pattern]
    return items


def _pattern(name: str, written: dict[int, str]) -> str:
    """The name as a pattern, with something else for some of its numbers."""
    literal: list[str] = re.split(r"\d+", name)
    numbers: list[str] = _NUMBER.findall(name)
    text = re.escape(literal[0])
    for place, (number, after) in enumerate(zip(numbers, literal[1:], strict=True)):
        text += written.get(place, number) + re.escape(after)
    return f"re:{text}$"


def _matched(model: nn.Module, pattern: str) -> set[str]:
    try:
        return set(match(model, pattern))
    except ModifierError:
        return set()
