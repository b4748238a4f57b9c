"""`Recipe`: modifier objects and, for a recipe that was read, its text.

Recipes are immutable: every change returns a new one. A change of a recipe that was read edits its text and keeps
comments and layout. The text of a recipe made from objects is written on demand.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

from gossamer.errors import Location, Problem, RecipeError
from gossamer.io import atomic_write
from gossamer.modifiers.base import Modifier
from gossamer.recipe.edits import add_modifiers, override_variables, set_field, set_metadata
from gossamer.recipe.reader import Content, RunType, distinct_name, read, warnings_of
from gossamer.recipe.source import UNNAMED, Source, open_source, recipe_error, source_of_text
from gossamer.recipe.variables import parse_overrides
from gossamer.recipe.writer import plain_data, recipe_text


def load(
    source: str | os.PathLike[str] | IO[str] | IO[bytes], *, variables: Mapping[str, Any] | str | None = None
) -> Recipe:
    """Read a recipe from a path, an open file, a string that holds it, or `builtin:NAME`.

    `variables` replace those of the recipe: a mapping, JSON text or `k=v,k=v`.
    Everything wrong with a recipe is raised as one `RecipeError`.

    >>> recipe = load("epochs: 3\\nmodifiers: [!EpochRangeModifier {start_epoch: 0, end_epoch: eval(epochs)}]")
    >>> recipe.max_epochs
    3
    """
    return _from_source(override_variables(open_source(source), parse_overrides(variables)))


def compose(first: Recipe, second: Recipe) -> Recipe:
    """Run two recipes one after the other, as stages; the second starts at the end of the first.

    The variables are not kept, because the two recipes may use one name for different values.
    """
    shift = max(first.max_epochs, 0)
    stages: list[tuple[str, tuple[Modifier, ...]]] = []
    run_types: list[tuple[str, RunType]] = []
    starts: list[str] = []
    for recipe, epochs in ((first, 0), (second, shift)):
        parts = recipe.stages or ((f"stage_{len(stages) + 1}", recipe.modifiers),)
        for name, modifiers in parts:
            moved = tuple(modifier.shifted(epochs) if epochs else modifier for modifier in modifiers)
            stages.append((distinct_name(name, [taken for taken, _ in stages]), moved))
            if name in (kinds := dict(recipe.run_types)):
                run_types.append((stages[-1][0], kinds[name]))
        starts.append(stages[-len(parts)][0])
    metadata = _joined_metadata(first.metadata, second.metadata, starts)
    version = first.version if first.version is not None else second.version
    modifiers = tuple(modifier for _, members in stages for modifier in members)
    content = Content(modifiers, {}, metadata, version, tuple(stages), run_types=tuple(run_types))
    return _from_objects(content, UNNAMED)


@dataclass(frozen=True, eq=False, repr=False)
class Recipe(Content):
    """A recipe, as `load` returns it and `Recipe.of` makes it from modifiers."""

    name: str = UNNAMED
    """The file's name as it was given."""
    _read_from: Source | None = None
    _write: Callable[[], str] | None = None

    @classmethod
    def of(
        cls,
        modifiers: Iterable[Modifier],
        variables: Mapping[str, Any] | None = None,
        metadata: Any = None,
        version: Any = None,
        name: str = UNNAMED,
        write: Callable[[], str] | None = None,
    ) -> Recipe:
        """A recipe of modifier objects, which need not be registered or writable as text.

        `write` returns its text, for one with comments and expressions; it is called when the text is needed.

        >>> from gossamer.modifiers import EpochRangeModifier
        >>> print(Recipe.of([EpochRangeModifier(start_epoch=0, end_epoch=3)]).text)
        modifiers:
          - !EpochRangeModifier
            start_epoch: 0.0
            end_epoch: 3.0
        <BLANKLINE>
        """
        given = tuple(modifiers)
        if not given:
            raise recipe_error(name, "the recipe holds no modifiers")
        if reserved := [key for key in variables or {} if key in ("version", "metadata") or "modifiers" in key]:
            raise recipe_error(name, f"a variable cannot be called '{reserved[0]}'")
        values = cast("dict[str, Any]", plain_data(variables or {}))
        return _from_objects(Content(given, values, plain_data(metadata), plain_data(version)), name, write)

    @cached_property
    def text(self) -> str:
        """The recipe's YAML, overrides and edits included; it loads to an equal recipe.

        Raises `RecipeError` when a modifier holds an object that no text can express.
        """
        if self._source is not None:
            return self._source.yaml
        return recipe_text(
            self.modifiers, self.variables, self.metadata, self.version, self.stages, dict(self.run_types)
        )

    @cached_property
    def _source(self) -> Source | None:
        """The text that the recipe was read from, or that it writes itself."""
        if self._write is not None:
            return source_of_text(self._write(), self.name)
        return self._read_from

    @property
    def max_epochs(self) -> int:
        """The epoch at which the last modifier starts or ends, rounded up; −1 if no modifier has one."""
        points = [e for modifier in self.modifiers for e in (modifier.start_epoch, modifier.end_epoch) if e >= 0]
        return math.ceil(max(points)) if points else -1

    @property
    def min_epochs(self) -> int:
        """The epoch at which the first modifier starts, rounded down; −1 if no modifier has one."""
        starts = [modifier.start_epoch for modifier in self.modifiers if modifier.start_epoch >= 0]
        return math.floor(min(starts)) if starts else -1

    def location(self, index: int, *key: str | int) -> Location | None:
        """Where a modifier's field is in the file, or else the modifier; None for a recipe of objects."""
        if not self.locations:
            return None
        locations = self.locations[index]
        return locations.get(str(key[0]) if key else None, locations[None])

    def where(self, index: int, field: str | None = None) -> str:
        """`recipe.yaml:12`: the same as text; the name alone for a recipe of objects."""
        return str(self.location(index, *([] if field is None else [field])) or self.name)

    def with_variables(self, **variables: Any) -> Recipe:
        """The recipe with other values for its variables."""
        return _from_source(override_variables(self._editable(), parse_overrides(variables)))

    def with_field(self, index: int, field: str, value: Any) -> Recipe:
        """The recipe with one field of one modifier changed; `eval(...)` as a value is computed."""
        position = range(len(self.modifiers))[index]
        edited = _from_source(set_field(self._editable(), position, field, value))
        others = [i for i in range(len(self.modifiers)) if i != position]
        if any(self.modifiers[i] != edited.modifiers[i] for i in others):
            name = self.modifiers[position].name
            raise RecipeError(Problem("its fields are shared by an alias", (name,), self.location(position)))
        return edited

    def with_modifiers(self, modifiers: Iterable[Modifier]) -> Recipe:
        """The recipe with more modifiers after its own; as a stage when it is staged."""
        added = tuple(modifiers)
        if not added:
            return self
        stages = self.stages
        if stages:
            stages = (*stages, (distinct_name("added_stage", [name for name, _ in stages]), added))
        longer = replace(self, modifiers=(*self.modifiers, *added), stages=stages)
        return longer._edited(lambda source: add_modifiers(source, added))

    def with_metadata(self, metadata: Any) -> Recipe:
        """The recipe with other metadata."""
        changed = replace(self, metadata=plain_data(metadata))
        return changed._edited(lambda source: set_metadata(source, changed.metadata))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe; a `.md` file keeps the Markdown around the recipe."""
        target, text = Path(path), self.text
        if target.suffix.lower() in (".md", ".markdown"):
            is_markdown = self._source is not None and self._source.is_markdown
            text = self._source.text if self._source and is_markdown else f"---\n{text.rstrip()}\n---\n"
        newline = self._source.newline if self._source else "\n"
        _write_file(target, text.replace("\n", newline))

    def _editable(self) -> Source:
        """The text to edit; that of a recipe of objects is generated."""
        return self._source or source_of_text(self.text, self.name)

    def _edited(self, edit: Callable[[Source], Source]) -> Recipe:
        """The recipe with its old text edited to what it is now, where the layout allows, or without a text."""
        if self._source is not None:
            with contextlib.suppress(RecipeError):
                edited = _from_source(edit(self._source))
                if edited._compared()[:4] == self._compared()[:4]:  # the stage may be renamed
                    return edited
        return _from_objects(self, self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._compared() == other._compared()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _compared(self) -> tuple[object, ...]:
        return (self.modifiers, self._variables, self.metadata, self.version, self.stages, self.run_types)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Recipe {self.name}: {len(self.modifiers)} modifiers, epochs {self.min_epochs} to {self.max_epochs}>"


def _from_source(source: Source) -> Recipe:
    return Recipe(**vars(read(source)), name=source.name, _read_from=source)


def _from_objects(content: Content, name: str, write: Callable[[], str] | None = None) -> Recipe:
    warnings = [problem.within(modifier.name) for modifier in content.modifiers for problem in warnings_of(modifier)]
    parts = content.modifiers, dict(content.variables), content.metadata, content.version, content.stages
    return Recipe(*parts, run_types=content.run_types, warnings=tuple(warnings), name=name, _write=write)


def _joined_metadata(first: Any, second: Any, stages: list[str]) -> Any:
    """The metadata of two recipes: that of the one that has any, or each under the name of its stage."""
    if first is None or second is None or first == second:
        return second if first is None else first
    return dict(zip(stages, (first, second), strict=True))


def _write_file(path: Path, text: str) -> None:
    try:
        with atomic_write(path, follow=True) as scratch:
            scratch.write_text(text, encoding="utf-8", newline="")
    except (OSError, ValueError) as error:
        raise recipe_error(str(path), f"cannot be written: {error}") from None
