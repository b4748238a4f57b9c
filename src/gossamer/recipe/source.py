"""Read the text of a recipe, and find the part of it that is YAML.

A source is a path, an open file, the text itself, or the name of a built-in recipe.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from bisect import bisect_right
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn, cast

from gossamer.errors import Location, Problem, Problems, RecipeError, nearest
from gossamer.io import open_regular

MAX_BYTES = 1024 * 1024
"""Maximum size of a recipe; 20,000 parameter names fit."""

UNNAMED = "<recipe>"

_ZOO_CLOSED = "SparseZoo is closed; `gossamer recipe list` lists the built-in recipes"
_FENCE = re.compile(r"^---[ \t]*(?:\n|\Z)", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_MORE_YAML = re.compile(r"^(?=\w*modifiers)\w+[ \t]*:|^[ \t]*- !\w", re.MULTILINE)
_LOOKS_LIKE_TEXT = re.compile(r"[\n\r{\[]|(?:^|\s)![A-Za-z]|:\s|:$|^\s*-\s|^\s*$")
_UNREADABLE = re.compile("[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Source:
    """A recipe's text, with line ends as `\\n`; the YAML is `text[start:end]`."""

    name: str
    text: str
    start: int
    end: int
    newline: str = "\n"

    @property
    def yaml(self) -> str:
        return self.text[self.start : self.end]

    @property
    def is_markdown(self) -> bool:
        return (self.start, self.end) != (0, len(self.text))

    def edited(self, yaml: str) -> Source:
        """The same source with another YAML part; what surrounds it stays."""
        if self.is_markdown and not yaml.endswith("\n"):
            yaml += "\n"
        text = self.text[: self.start] + yaml + self.text[self.end :]
        return replace(self, text=text, end=self.start + len(yaml))


class SourceProblems(Problems):
    """Problems of one source, located by character index, and notes, which are warnings."""

    def __init__(self, source: Source) -> None:
        super().__init__(RecipeError)
        self.source = source
        self.notes = Problems(None)
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", source.text))]

    def location(self, index: int) -> Location:
        line = bisect_right(self._line_starts, index)
        return Location(self.source.name, line, index - self._line_starts[line - 1] + 1)

    def line(self, index: int) -> Location:
        """The location without its column."""
        return replace(self.location(index), column=None)

    def at(self, index: int, problem: str | Problem, *key: str | int) -> None:
        """Add a problem of the character at `index`."""
        self.add(problem, *key, location=self.location(index))

    def note(self, index: int, message: str) -> None:
        """Add a warning."""
        self.notes.add(message, location=self.line(index))

    def fail_at(self, index: int, message: str) -> NoReturn:
        """Raise at once, because the rest cannot be read."""
        self.fail(message, location=self.location(index))


def open_source(given: str | os.PathLike[str] | IO[str] | IO[bytes]) -> Source:
    """Read a recipe from a path, a stream, `builtin:NAME` or its own text; every failure is a `RecipeError`."""
    if not isinstance(given, str | os.PathLike):
        if not hasattr(given, "read"):
            found = type(given).__name__
            raise recipe_error(UNNAMED, f"expected a path, an open file or the text of a recipe, found {found}")
        named: object = getattr(given, "name", None)
        name = named if isinstance(named, str) else UNNAMED
        with _read_errors(name):
            content = cast(object, given.read(MAX_BYTES + 1))
            if not isinstance(content, str | bytes):
                found = type(content).__name__
                raise recipe_error(name, f"expected text or bytes from the open file, found {found}")
            return _source(name, content)
    path = os.fsdecode(given)
    if path.startswith("zoo:"):
        raise recipe_error(path, _ZOO_CLOSED)
    if path.startswith("builtin:"):
        return _from_package(path)
    if not os.path.exists(path):
        if isinstance(given, str) and _LOOKS_LIKE_TEXT.search(given):
            return _source(UNNAMED, given)
        raise _no_such_file(path)
    if os.path.isdir(path):
        raise recipe_error(path, "expected a recipe file, found a folder")
    with _read_errors(path), open_regular(path) as file:
        return _source(path, file.read(MAX_BYTES + 1))


def recipe_error(file: str, message: str) -> RecipeError:
    """An error of a whole file."""
    return RecipeError(Problem(message, location=Location(file)))


def source_of_text(text: str, name: str = UNNAMED) -> Source:
    """A source for text that is YAML as a whole."""
    return Source(name, text, 0, len(text))


def _from_package(given: str) -> Source:
    name = given.removeprefix("builtin:").removesuffix(".yaml")
    folder = importlib.resources.files("gossamer") / "recipes"
    shipped = {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
    if name not in shipped:
        raise recipe_error(given, f"no built-in recipe has that name{nearest(name, shipped)}")
    return _source(given, shipped[name].read_bytes())


@contextmanager
def _read_errors(name: str) -> Generator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise recipe_error(name, f"expected UTF-8 text, found other bytes at offset {error.start}") from None
    except (OSError, ValueError) as error:  # ValueError: of a closed file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise recipe_error(name, f"cannot be read: {reason}") from None


def _source(name: str, content: str | bytes) -> Source:
    if len(content) > MAX_BYTES:
        message = (
            f"expected a recipe of at most {MAX_BYTES // 2**20} MB, found more; name parameters by patterns (re:…)"
        )
        raise recipe_error(name, message)
    text = (content if isinstance(content, str) else content.decode("utf-8")).removeprefix("\ufeff")
    newline = "\r\n" if "\r\n" in text else "\n"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    start, end = _front_matter(name, text)
    source = Source(name, text, start, end, newline)
    if unreadable := _UNREADABLE.search(text):
        character = f"U+{ord(unreadable[0]):04X}"
        SourceProblems(source).fail_at(unreadable.start(), f"expected text, found the control character {character}")
    return source


def _front_matter(name: str, text: str) -> tuple[int, int]:
    """The range of `text` that is YAML. The file's suffix decides whether it is Markdown."""
    suffix = Path(name).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return 0, len(text)
    end = text.rfind("-->") + 3  # the search for the end of a comment that is not closed would take quadratic time
    outside = _COMMENT.sub(lambda comment: re.sub(r"\S", " ", comment[0]), text[:end]) + text[end:]
    opening = _FENCE.search(outside)
    closing = _FENCE.search(text, opening.end()) if opening else None
    if suffix in (".md", ".markdown"):
        if opening is None:
            message = "expected YAML front matter between two lines '---', found none"
            raise RecipeError(Problem(message, location=Location(name, 1, 1)))
        if closing is None:
            location = Location(name, text.count("\n", 0, opening.start()) + 1, 1)
            message = "the front matter that starts here is not closed by a line '---'"
            raise RecipeError(Problem(message, location=location))
        return opening.end(), closing.start()
    if opening is None or closing is None or outside[: opening.start()].strip():
        return 0, len(text)
    more_follows = _MORE_YAML.search(_CODE_BLOCK.sub("", text[closing.end() :]))
    return (0, len(text)) if more_follows else (opening.end(), closing.start())


def _no_such_file(path: str) -> RecipeError:
    folder, name = os.path.split(path)
    try:
        neighbours = os.listdir(folder or ".")
    except (OSError, ValueError):
        neighbours = []
    return recipe_error(path, f"no such file{nearest(name, neighbours)}")
