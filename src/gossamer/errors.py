"""Errors as data: `Problem`, the exceptions that carry problems, and `Problems`, which collects them.

A caller that knows more about the key or the location of a problem adds it with `within`. Text is formatted here only.
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

MAX_PROBLEMS = 200
"""Problems collected from one document. The search stops there, so that a hostile file costs little time."""
MAX_MESSAGE = 400
"""Characters of a collected message."""
MAX_SUGGESTED = 20
"""Unknown names of one document for which the nearest known name is searched."""
MAX_NAME = 200
"""Longer names have no nearest name: the comparison takes quadratic time."""
MAX_COMPARED = 300
"""Known names that are compared: those whose beginning and end are most like the unknown name."""

Key = tuple[str | int, ...]
"""The path of a value in a document: names of fields and indices of list items."""


@dataclass(frozen=True, slots=True)
class Location:
    """A position in a file; lines and columns count from 1.

    >>> str(Location("a.yaml", 3, 5)), str(Location("a.yaml", 3)), str(Location("--set"))
    ('a.yaml:3:5', 'a.yaml:3', '--set')
    """

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error or warning: the message, the key it is about, its location and how to fix it.

    >>> problem = Problem("expected a whole number, found 'x'", ("batch_size",), fix="nearest: 8")
    >>> str(problem)
    "batch_size: expected a whole number, found 'x'; nearest: 8"
    >>> str(problem.within("data", 0, location=Location("a.yaml", 3, 5)))
    "a.yaml:3:5: data[0].batch_size: expected a whole number, found 'x'; nearest: 8"
    """

    message: str
    key: Key = ()
    location: Location | None = None
    fix: str = ""

    def within(self, *keys: str | int, location: Location | None = None) -> Problem:
        """The same problem below a key path; `location` is used if the problem has none."""
        return replace(self, key=(*keys, *self.key), location=self.location or location)

    def __str__(self) -> str:
        parts = [str(self.location) if self.location else "", format_key(self.key), self.message]
        text = ": ".join(part for part in parts if part)
        return f"{text}; {self.fix}" if self.fix else text


class GossamerError(Exception):
    """Base class of Gossamer's errors.

    `problems` has at least one entry, and `str(error)` is one line for each of them. `key` goes before their own keys.

    >>> error = GossamerError("expected a number", "trainer", "lr")
    >>> error.problems[0].key, str(error)
    (('trainer', 'lr'), 'trainer.lr: expected a number')
    """

    def __init__(self, problems: str | Problem | Iterable[str | Problem] = "", *key: str | int) -> None:
        given = [problems] if isinstance(problems, str | Problem) else problems
        self.problems: tuple[Problem, ...] = tuple(
            (Problem(problem) if isinstance(problem, str) else problem).within(*key) for problem in given
        )
        super().__init__(format_problems(self.problems))

    def __str__(self) -> str:
        return format_problems(self.problems)


class RecipeError(GossamerError):
    """An invalid recipe, with all of its problems in file order.

    >>> str(RecipeError(["a.yaml: not readable", Problem("unknown field", ("x",))]))
    'a.yaml: not readable\\nx: unknown field'
    """


class ModifierError(GossamerError):
    """A modifier that does not fit this model or this run.

    The key is the recipe field at fault. The manager adds the modifier's name, the file and the line.

    >>> str(ModifierError("nothing matches 'conv1'", "params"))
    "params: nothing matches 'conv1'"
    """


class FieldError(GossamerError, ValueError):
    """An invalid field, raised by validators of pydantic models.

    The key names the field, or the key below it. `gossamer.validation.problems_of` keeps it.

    >>> str(FieldError("2 is before start_epoch 5", "end_epoch"))
    'end_epoch: 2 is before start_epoch 5'
    """


class SparsityError(GossamerError, ValueError):
    """Invalid scores or sparsities: NaN, or outside [0, 1]."""


class Problems:
    """Collects problems of one document, each once, and raises all of them in file order.

    `error_class` is what `raise_if_any` raises; None makes it a collector of warnings, which never raises.

    >>> problems = Problems()
    >>> problems.add("expected a number", "lr", location=Location("a.yaml", 7, 1))
    >>> problems.add("unknown field", "x", location=Location("a.yaml", 2, 1))
    >>> problems.raise_if_any()
    Traceback (most recent call last):
    gossamer.errors.GossamerError: a.yaml:2:1: x: unknown field
    a.yaml:7:1: lr: expected a number
    """

    def __init__(self, error_class: type[GossamerError] | None = GossamerError) -> None:
        self._error_class = error_class
        self._problems: dict[Problem, None] = {}

    def add(self, problem: str | Problem, *key: str | int, location: Location | None = None, fix: str = "") -> None:
        """Add one problem, given as an object or by its parts; raises the error at once when there are too many."""
        if isinstance(problem, str):
            problem = Problem(problem, fix=fix)
        problem = problem.within(*key, location=location)
        if self._error_class is not None or len(self._problems) < MAX_PROBLEMS:
            self._problems[replace(problem, message=_shortened(problem.message))] = None
        if len(self._problems) >= MAX_PROBLEMS:
            self.raise_if_any()

    def extend(self, problems: Iterable[Problem], *key: str | int, location: Location | None = None) -> None:
        """Add several problems below `key`, such as the `problems` of another error."""
        for problem in problems:
            self.add(problem, *key, location=location)

    def fail(self, problem: str | Problem, *key: str | int, location: Location | None = None) -> NoReturn:
        """Raise this problem alone, at once, because the rest of the document cannot be read."""
        single = Problems(None)
        single.add(problem, *key, location=location)
        raise (self._error_class or GossamerError)(single) from None

    def raise_if_any(self) -> None:
        if self._problems and self._error_class is not None:
            raise self._error_class(self)

    def __iter__(self) -> Iterator[Problem]:
        files = list(dict.fromkeys(_position(problem)[0] for problem in self._problems))
        order = {file: index for index, file in enumerate(files)}
        return iter(sorted(self._problems, key=lambda problem: (order[_position(problem)[0]], _position(problem)[1:])))

    def __len__(self) -> int:
        return len(self._problems)

    def __str__(self) -> str:
        return format_problems(self)


@contextmanager
def within(*keys: str | int, location: Location | None = None) -> Generator[None]:
    """Errors raised inside get these keys before their own, and the location if they have none.

    >>> with within("GMPruningModifier", location=Location("a.yaml", 3)):
    ...     raise ModifierError("nothing matches 'conv1'", "params")
    Traceback (most recent call last):
    gossamer.errors.ModifierError: a.yaml:3: GMPruningModifier.params: nothing matches 'conv1'
    """
    try:
        yield
    except GossamerError as error:
        error.problems = tuple(problem.within(*keys, location=location) for problem in error.problems)
        raise


def file_error(path: object, message: str, line: int | None = None, column: int | None = None) -> GossamerError:
    """An error about a file.

    >>> str(file_error("a.npz", "cannot be read"))
    'a.npz: cannot be read'
    """
    return GossamerError(Problem(message, location=Location(str(path), line, column)))


def format_problems(problems: Iterable[Problem]) -> str:
    """One line for each problem."""
    return "\n".join(str(problem) for problem in problems)


def format_key(key: Key) -> str:
    """
    >>> format_key(("dataset", "train", "transforms", 0, "size"))
    'dataset.train.transforms[0].size'
    """
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key)
    return text.removeprefix(".")


def format_value(value: object) -> str:
    """A value as messages show it: spelled as in YAML, and not longer than 60 characters.

    >>> format_value(None), format_value(True), format_value("abc")
    ('nothing', 'true', "'abc'")
    """
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def first_line(error: BaseException) -> str:
    """The first line of another library's error, for a message of ours; the class if it has no text.

    >>> first_line(RuntimeError("\\n shapes differ\\n at line 3")), first_line(KeyError())
    ('shapes differ', 'KeyError')
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()  # torch's messages may be colored
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)


def short_error(error: BaseException) -> str:
    """The class and the message of another library's error on one line, at most 200 characters.

    >>> short_error(RuntimeError("shapes differ\\n  at line 3."))
    'RuntimeError: shapes differ at line 3'
    """
    return " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; nearest: 'a'`, ready to append to a message, or an empty string.

    >>> nearest("final_sparsty", ["final_sparsity", "params"])
    "; nearest: 'final_sparsity'"
    """
    if len(name) > MAX_NAME:
        return ""
    candidates = [other for other in known if len(other) <= MAX_NAME]
    if len(candidates) > MAX_COMPARED:
        candidates = heapq.nlargest(MAX_COMPARED, candidates, key=lambda other: _shared_ends(name, other))
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"; nearest: {matches[0]!r}" if matches else ""


def _position(problem: Problem) -> tuple[str | None, int, int]:
    location = problem.location
    return (location.file, location.line or 0, location.column or 0) if location else (None, 0, 0)


def _shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def _shared_ends(first: str, second: str) -> int:
    """How many characters two names share at their beginning and at their end."""
    start = _shared_start(first, second)
    return start + _shared_start(first[:start:-1], second[:start:-1])


def _shared_start(first: str, second: str) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
