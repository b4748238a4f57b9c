"""A recipe: modifiers together with the text they came from.

Recipes are values. Every change gives a new recipe whose text has the change
in it; comments and layout stay where the text allows it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from gossamer.errors import Location, Problem, RecipeError
from gossamer.io import atomic_write
from gossamer.modifiers.base import Modifier
from gossamer.recipe.editing import add_modifiers, override_variables, set_field, set_metadata
from gossamer.recipe.loading import Content, Stages, distinct_name, read
from gossamer.recipe.overrides import parse_overrides
from gossamer.recipe.scalars import plain_data
from gossamer.recipe.source import UNNAMED, Source, open_source, source_of_text
from gossamer.recipe.writing import recipe_text


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
    found = open_source(source)
    return _recipe(override_variables(found, parse_overrides(variables)))


def compose(first: Recipe, second: Recipe) -> Recipe:
    """Both recipes one behind the other, as stages; the second starts where the first ends.

    The values are written out: variables of the two could have the same names.
    """
    shift = max(first.max_epochs, 0)
    stages: list[tuple[str, tuple[Modifier, ...]]] = []
    starts: list[str] = []
    for recipe, epochs in ((first, 0), (second, shift)):
        parts = recipe.stages or ((f"stage_{len(stages) + 1}", recipe.modifiers),)
        for name, modifiers in parts:
            moved = tuple(modifier.shifted(epochs) if epochs else modifier for modifier in modifiers)
            stages.append((distinct_name(name, [taken for taken, _ in stages]), moved))
        starts.append(stages[-len(parts)][0])
    metadata = _both(first.metadata, second.metadata, starts)
    version = first.version if first.version is not None else second.version
    return _written(stages=tuple(stages), metadata=metadata, version=version)


@dataclass(frozen=True, eq=False, repr=False)
class Recipe:
    """What `load` returns; see there. Make one from objects with `Recipe.of`."""

    _source: Source
    _content: Content

    @classmethod
    def of(
        cls,
        modifiers: Iterable[Modifier],
        variables: Mapping[str, Any] | None = None,
        metadata: Any = None,
        version: Any = None,
        name: str = UNNAMED,
    ) -> Recipe:
        """A recipe made of objects; its text is generated."""
        return _written(tuple(modifiers), variables or {}, metadata, version, name=name)

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        return self._content.modifiers

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the whole recipe, computed; those of stages are not among them."""
        return MappingProxyType(self._content.variables)

    @property
    def metadata(self) -> Any:
        return self._content.metadata

    @property
    def version(self) -> Any:
        return self._content.version

    @property
    def name(self) -> str:
        """The file's name as it was given."""
        return self._source.name

    @property
    def stages(self) -> Stages:
        """Name and modifiers of each stage; empty when the recipe has none."""
        return self._content.stages

    @property
    def text(self) -> str:
        """The recipe's YAML, overrides and edits included; it loads to an equal recipe."""
        return self._source.yaml

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is accepted without effect; `str(warning)` has the file and line."""
        return self._content.warnings

    @property
    def max_epochs(self) -> int:
        """The epoch at which the last modifier starts or ends, rounded up; −1 when none says."""
        points = [e for modifier in self.modifiers for e in (modifier.start_epoch, modifier.end_epoch) if e >= 0]
        return math.ceil(max(points)) if points else -1

    @property
    def min_epochs(self) -> int:
        """The epoch at which the first modifier starts, rounded down; −1 when none says."""
        starts = [modifier.start_epoch for modifier in self.modifiers if modifier.start_epoch >= 0]
        return math.floor(min(starts)) if starts else -1

    def where(self, index: int, field: str | None = None) -> str:
        """`recipe.yaml:12`: the line of a modifier's field, or else of the modifier."""
        if not -len(self._content.locations) <= index < len(self._content.locations):
            return self.name
        locations = self._content.locations[index]
        return str(locations.get(field, locations[None]))

    def location(self, index: int, *key: str | int) -> Location | None:
        """Where a modifier's field stands in the file, or else the modifier."""
        locations = self._content.locations[index]
        return locations.get(str(key[0]) if key else None, locations[None])

    def with_variables(self, **variables: Any) -> Recipe:
        """The recipe with other values for its variables."""
        return _recipe(override_variables(self._source, parse_overrides(variables)))

    def with_field(self, index: int, field: str, value: Any) -> Recipe:
        """The recipe with one field of one modifier changed; `eval(...)` as a value is computed."""
        position = range(len(self.modifiers))[index]
        edited = _recipe(set_field(self._source, position, field, value))
        others = [i for i in range(len(self.modifiers)) if i != position]
        if any(self.modifiers[i] != edited.modifiers[i] for i in others):
            raise RecipeError(
                f"{self.where(position)}: the fields of {self.modifiers[position].name} are shared by an alias"
            )
        return edited

    def with_modifiers(self, modifiers: Iterable[Modifier]) -> Recipe:
        """The recipe with more modifiers behind its own; a stage of their own when it is staged."""
        added = tuple(modifiers)
        if not added:
            return self
        with contextlib.suppress(RecipeError):
            edited = _recipe(add_modifiers(self._source, added))
            if edited.modifiers == (*self.modifiers, *added) and edited.variables == self.variables:
                return edited
        stages = (*self.stages, (distinct_name("added_stage", [name for name, _ in self.stages]), added))
        return self._rewritten(modifiers=(*self.modifiers, *added), stages=stages if self.stages else ())

    def with_metadata(self, metadata: Any) -> Recipe:
        """The recipe with other metadata."""
        metadata = plain_data(metadata)
        with contextlib.suppress(RecipeError):
            edited = _recipe(set_metadata(self._source, metadata))
            if (edited.modifiers, edited.variables, edited.metadata) == (self.modifiers, self.variables, metadata):
                return edited
        return self._rewritten(metadata=metadata)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe; a `.md` file keeps the Markdown around the recipe."""
        target = Path(path)
        if target.suffix.lower() in (".md", ".markdown"):
            text = self._source.text if self._source.is_markdown else f"---\n{self.text.rstrip()}\n---\n"
        else:
            text = self.text
        _write(target, text.replace("\n", self._source.newline))

    def _rewritten(self, **changed: Any) -> Recipe:
        """The recipe written anew from its objects, for layouts that cannot be edited."""
        parts: dict[str, Any] = {
            "modifiers": self.modifiers,
            "variables": self.variables,
            "metadata": self.metadata,
            "version": self.version,
            "stages": self.stages,
            "name": self.name,
        }
        return _written(**(parts | changed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._compared() == other._compared()

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def _compared(self) -> tuple[object, ...]:
        return (self.modifiers, self._content.variables, self.metadata, self.version, self.stages)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Recipe {self.name}: {len(self.modifiers)} modifiers, epochs {self.min_epochs} to {self.max_epochs}>"


def _recipe(source: Source) -> Recipe:
    return Recipe(source, read(source))


def _written(
    modifiers: tuple[Modifier, ...] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
    metadata: Any = None,
    version: Any = None,
    stages: Stages = (),
    name: str = UNNAMED,
) -> Recipe:
    return _recipe(source_of_text(recipe_text(modifiers, variables, metadata, version, stages), name))


def _both(first: Any, second: Any, stages: list[str]) -> Any:
    """The metadata of two recipes: the one there is, or each under the name of its stage."""
    if first is None or second is None or first == second:
        return second if first is None else first
    return dict(zip(stages, (first, second), strict=True))


def _write(path: Path, text: str) -> None:
    try:
        with atomic_write(path, follow=True) as scratch:
            scratch.write_text(text, encoding="utf-8", newline="")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be written: {error}") from None
