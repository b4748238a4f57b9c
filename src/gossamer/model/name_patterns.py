"""Which names a `re:` pattern matches, in time that grows with the pattern and the names and no faster.

Recipes come from others, and Python's `re` backtracks: `(.*)*x` on one long name runs for years and cannot be
interrupted. RE2 has no look-ahead, which real recipes use. Here a pattern becomes a nondeterministic automaton that
reads all names at once: a set of positions is one integer with a bit for each character. The syntax is that of `re`,
which also checks it and says what a single character matches; what an automaton cannot do is refused.
"""

from __future__ import annotations

import functools
import heapq
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.errors import ModifierError

PREFIX = "re:"
MAX_LENGTH = 1000
"""Characters of a pattern."""
MAX_DEPTH = 50
"""Groups inside each other."""
MAX_STATES = 5000
"""States of the automaton; `a{100}` takes a hundred."""

_TOKEN = re.compile(
    r"(?P<open>\((?:\?(?::|P<[^>]*>|<?[=!]))?(?!\?))"
    r"|(?P<repeat>(?:[*+?]|\{(?!\})[0-9]*(?:,[0-9]*)?\})\??)"
    r"|(?P<anchor>[$^]|\\[AZbB])"
    r"|(?P<reference>\\(?![1-3][0-7]{2})[1-9][0-9]?)"
    r"|(?P<atom>\[\^?\]?(?:\\.|[^\]\\])*\]|\\(?:x..|u.{4}|U.{8}|N\{[^}]*\}|[0-7]{1,3}|.)|[^()|])"
    r"|(?P<mark>[()|])",
    re.DOTALL,
)
_FLAGS = re.compile(r"\(\?([ais]+)\)")


class PatternError(ModifierError):
    """A `re:` pattern that is not a regular expression, or not one that can be matched in linear time."""


def matching(item: str, names: Sequence[str], *, field: str, whole: bool = False) -> list[str]:
    r"""Those of `names` that `item` (`re:` and a regular expression) matches from their start, or as a whole.

    >>> matching(r"re:(?!fc).*\.weight", ["fc.weight", "conv.weight", "conv.bias"], field="params")
    ['conv.weight']
    """
    text = _text(tuple(names))
    try:
        automaton, last = _built(item, text)
    except _UnusableError as error:
        raise PatternError(f"{error}", field) from None
    ends = f"{automaton.reached(0, last, text.starts):b}"[::-1]
    spans = zip(names, text.spans, strict=True)
    return [name for name, (start, end) in spans if ends.find("1", end if whole else start, end + 1) >= 0]


def problem_of(item: str) -> str | None:
    """What is wrong with `item` (`re:` and a regular expression) whatever the names are; None if it can be matched.

    >>> problem_of("re:layer[12"), problem_of("re:layer[12]")
    ("'re:layer[12' is not a regular expression: unterminated character set at position 5", None)
    """
    try:
        _built(item, _text(()))
    except _UnusableError as error:
        return str(error)
    return None


class _UnusableError(Exception):
    """What is wrong with a pattern: a message of `_built`, below it the end of one."""


def _built(item: str, text: _Text) -> tuple[_Automaton, int]:
    """The automaton of a pattern over the names of a text, and the state in which it has matched."""
    try:
        pattern, flags = _parsed(item.removeprefix(PREFIX))
        automaton = _Automaton(text, flags)
        return automaton, automaton.add(pattern, 0)
    except _UnusableError as error:
        shown = item if len(item) <= 80 else f"{item[:77]}..."
        raise _UnusableError(f"'{shown}' {error}") from None


# Parsing: the pattern as a tree.


@dataclass(frozen=True)
class _Atom:
    """Matches one character."""

    written: str


@dataclass(frozen=True)
class _Anchor:
    written: str


@dataclass(frozen=True)
class _Look:
    part: _Part
    ahead: bool
    negative: bool


@dataclass(frozen=True)
class _Series:
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Choice:
    options: tuple[_Part, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Part
    least: int
    most: int | None


_Part = _Atom | _Anchor | _Look | _Series | _Choice | _Repeat


@functools.lru_cache(256)
def _parsed(written: str) -> tuple[_Part, int]:
    if len(written) > MAX_LENGTH:
        raise _UnusableError(f"has {len(written):,} characters; a pattern has at most {MAX_LENGTH:,}, list several")
    given = _FLAGS.match(written)
    flags = functools.reduce(lambda old, letter: old | re.RegexFlag[letter.upper()], given[1] if given else "", 0)
    tokens = list(_TOKEN.finditer(written, given.end() if given else 0))
    deepest = depth = 0
    for token in tokens:
        depth += (token["open"] is not None) - (token["mark"] == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise _UnusableError(f"has groups more than {MAX_DEPTH} levels deep; write it without them, or list the names")
    try:
        _compiled(written, 0)
    except (re.error, OverflowError) as error:
        raise _UnusableError(f"is not a regular expression: {error}") from None
    return _Parser(tokens).choice(), flags


class _Parser:
    """Reads the tokens of a pattern that `re` accepts."""

    def __init__(self, tokens: list[re.Match[str]]) -> None:
        self._tokens = tokens
        self._at = 0

    def choice(self) -> _Part:
        options = [self._series()]
        while self._at < len(self._tokens) and self._tokens[self._at]["mark"] == "|":
            self._at += 1
            options.append(self._series())
        self._at += 1  # the closing parenthesis, or the end
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _series(self) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._tokens) and self._tokens[self._at]["mark"] not in ("|", ")"):
            token = self._tokens[self._at]
            self._at += 1
            if token["atom"]:
                parts.append(_Atom(token["atom"]))
            elif token["anchor"]:
                parts.append(_Anchor(token["anchor"]))
            elif token["open"]:
                inner = self.choice()
                look = token["open"][-1] in "=!"
                parts.append(_Look(inner, "<" not in token["open"], token["open"][-1] == "!") if look else inner)
            elif token["repeat"] and not self._possessive():
                parts.append(_Repeat(parts.pop(), *_counts(token["repeat"])))
            else:
                found = token["reference"] or f"{token[0]}{token.string[token.end() : token.end() + 2]}"
                raise _UnusableError(
                    f"has '{found}' at position {token.start()}; backreferences, conditions, comments, atomic groups, "
                    "possessive repetition and flags other than a leading (?i), (?s) or (?a) are not supported"
                )
        return _Series(tuple(parts))

    def _possessive(self) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at][0] == "+"


def _counts(written: str) -> tuple[int, int | None]:
    if written[0] in "*+?":
        return int(written[0] == "+"), 1 if written[0] == "?" else None
    least, comma, most = written.rstrip("?")[1:-1].partition(",")
    return int(least or 0), int(most) if most else None if comma else int(least)


def _compiled(written: str, flags: int) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "possible nested set": it means what `re` takes it for
        return re.compile(written, flags)


# Matching: sets of positions in all names, one behind the other with a position for the end of each.


@dataclass(frozen=True)
class _Text:
    spans: list[tuple[int, int]]
    """Where each name starts and ends."""
    starts: int
    ends: int
    everywhere: int
    characters: dict[str, int]
    """The positions of each character."""

    def of(self, written: str, flags: int) -> int:
        """The positions whose character an atom matches."""
        if not flags and len(written) == 1 and written != ".":
            return self.characters.get(written, 0)
        atom = _compiled(written, flags)
        found = 0
        for character, positions in self.characters.items():
            if atom.match(character):
                found |= positions
        return found

    def at(self, anchor: str, flags: int) -> int:
        """The positions where an anchor holds."""
        if anchor in ("^", r"\A"):
            return self.starts
        if anchor in ("$", r"\Z"):
            return self.ends | (self.ends >> 1 & self.characters.get("\n", 0)) if anchor == "$" else self.ends
        letters = self.of(r"\w", flags)
        boundaries = letters ^ letters << 1
        return boundaries if anchor == r"\b" else self.everywhere & ~boundaries


@functools.lru_cache(8)
def _text(names: tuple[str, ...]) -> _Text:
    spans: list[tuple[int, int]] = []
    characters: dict[str, list[int]] = {}
    size = 0
    for name in names:
        spans.append((size, size + len(name)))
        for position, character in enumerate(name, size):
            characters.setdefault(character, []).append(position)
        size += len(name) + 1
    return _Text(
        spans,
        _set([start for start, _ in spans], size),
        _set([end for _, end in spans], size),
        (1 << size) - 1,
        {character: _set(positions, size) for character, positions in characters.items()},
    )


def _set(positions: Sequence[int], size: int) -> int:
    bits = bytearray(size // 8 + 1)
    for position in positions:
        bits[position >> 3] |= 1 << (position & 7)
    return int.from_bytes(bits, "little")


class _Automaton:
    """States with edges between them: where an edge may be taken, and by how many characters it moves on (0 or 1)."""

    def __init__(self, text: _Text, flags: int) -> None:
        self._text = text
        self._flags = flags
        self._edges: list[list[tuple[int, int, int]]] = [[]]
        self._reversed: list[list[tuple[int, int, int]]] = [[]]

    def add(self, part: _Part, state: int) -> int:
        """Add what matches a part behind a state; the state behind it."""
        if isinstance(part, _Series):
            for inner in part.parts:
                state = self.add(inner, state)
            return state
        if isinstance(part, _Choice):
            return self._joined([self.add(option, self._after(state)) for option in part.options])
        if isinstance(part, _Repeat):
            return self._repeated(part, state)
        if isinstance(part, _Atom):
            return self._after(state, self._text.of(part.written, self._flags), 1)
        if isinstance(part, _Anchor):
            return self._after(state, self._text.at(part.written, self._flags))
        return self._after(state, self._looked(part))

    def reached(self, first: int, last: int, positions: int, *, back: bool = False) -> int:
        """The positions at which state `last` is reached when state `first` is entered at `positions`."""
        edges = self._reversed if back else self._edges
        seen: dict[int, int] = {last: 0}
        arriving = {first: positions}
        waiting = [first]
        while waiting:
            state = heapq.heappop(waiting)
            before = seen.get(state, 0)
            new = arriving.pop(state) & ~before
            seen[state] = before | new
            for taken, moves, other in edges[state]:
                moved = (new >> moves & taken) if back else (new & taken) << moves
                if not moved:
                    continue
                if other not in arriving:
                    heapq.heappush(waiting, other)
                arriving[other] = arriving.get(other, 0) | moved
        return seen[last]

    def _repeated(self, part: _Repeat, state: int) -> int:
        if part.part == _Series(()):
            return state
        for _ in range(part.least):
            state = self.add(part.part, state)
        if part.most is None:
            loop = self._after(state)
            self._connect(self.add(part.part, loop), loop, self._text.everywhere, 0)
            return loop
        ends = [state]
        for _ in range(part.most - part.least):
            ends.append(self.add(part.part, ends[-1]))
        return self._joined(ends)

    def _looked(self, part: _Look) -> int:
        """The positions where a look-around holds: where a match of its own can start, or end."""
        first = self._state()
        last = self.add(part.part, first)
        if part.ahead:
            found = self.reached(last, first, self._text.everywhere, back=True)
        else:
            found = self.reached(first, last, self._text.everywhere)
        return self._text.everywhere & ~found if part.negative else found

    def _state(self) -> int:
        if len(self._edges) >= MAX_STATES:
            raise _UnusableError(f"is too large with its repetitions written out ({MAX_STATES:,} parts); repeat less")
        self._edges.append([])
        self._reversed.append([])
        return len(self._edges) - 1

    def _after(self, state: int, taken: int | None = None, moves: int = 0) -> int:
        other = self._state()
        self._connect(state, other, self._text.everywhere if taken is None else taken, moves)
        return other

    def _joined(self, states: list[int]) -> int:
        end = self._after(states[0])
        for state in states[1:]:
            self._connect(state, end, self._text.everywhere, 0)
        return end

    def _connect(self, state: int, other: int, taken: int, moves: int) -> None:
        if taken:
            self._edges[state].append((taken, moves, other))
            self._reversed[other].append((taken, moves, state))
