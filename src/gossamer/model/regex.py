"""Which names a `re:` pattern matches.

Recipes come from others, and Python's `re` backtracks without bound and cannot be interrupted: `(a|a)*x` on one long
name runs for years. The package `regex` reads the same syntax and stops at a time limit.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

import regex

from gossamer.errors import ModifierError

PREFIX = "re:"
MAX_LENGTH = 1000
"""Characters of a pattern."""
_SECONDS = 1.0
"""The time limit of one pattern over all names."""


class PatternError(ModifierError):
    """A `re:` pattern that is not a regular expression, or takes too long to match."""


def matching(item: str, names: Sequence[str], *, field: str, whole: bool = False) -> list[str]:
    r"""Those of `names` that `item` (`re:` and a regular expression) matches from their start, or as a whole.

    >>> matching(r"re:(?!fc).*\.weight", ["fc.weight", "conv.weight", "conv.bias"], field="params")
    ['conv.weight']
    """
    if problem := problem_of(item):
        raise PatternError(problem, field)
    pattern: Any = regex.compile(item.removeprefix(PREFIX), regex.VERSION0)
    match, end = pattern.fullmatch if whole else pattern.match, time.monotonic() + _SECONDS
    try:
        return [name for name in names if match(name, timeout=max(end - time.monotonic(), 1e-3))]
    except (TimeoutError, MemoryError):
        problem = f"{_shown(item)} takes too long to match; write it without repetitions inside each other"
        raise PatternError(problem, field) from None


def problem_of(item: str) -> str | None:
    """What is wrong with `item` (`re:` and a regular expression) whatever the names are; None if it can be matched.

    >>> problem_of("re:layer[12"), problem_of("re:layer[12]")
    ("'re:layer[12' is not a regular expression: unterminated character set at position 5", None)
    """
    written = item.removeprefix(PREFIX)
    if len(written) > MAX_LENGTH:
        return f"{_shown(item)} has {len(written):,} characters; a pattern has at most {MAX_LENGTH:,}, list several"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "possible nested set": it means what `re` takes it for
            re.compile(written)
            regex.compile(written, regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        return f"{_shown(item)} is not a regular expression: {error}"
    return None


def _shown(item: str) -> str:
    return f"'{item if len(item) <= 80 else f'{item[:77]}...'}'"
