"""SparseML's manager by its own name and arguments, for existing training scripts.

`gossamer.engine.Manager` does the work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import IO, Any, Self

from gossamer.engine import Manager
from gossamer.export import quantize_qat_export
from gossamer.modifiers import Modifier
from gossamer.recipe import Recipe, compose, load

__all__ = ["ScheduledModifierManager", "quantize_qat_export", "quantize_torch_qat_export"]

quantize_torch_qat_export = quantize_qat_export
"""The name that later versions of SparseML use."""


class ScheduledModifierManager(Manager):
    """SparseML's manager with Gossamer's engine."""

    @classmethod
    def from_yaml(
        cls,
        file_path: str | os.PathLike[str] | IO[str],
        add_modifiers: Iterable[Modifier] | Modifier | None = None,
        recipe_variables: Mapping[str, Any] | str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read a recipe from a file or from its text."""
        recipe = load(file_path, variables=recipe_variables)
        if add_modifiers is not None:
            extra = [add_modifiers] if isinstance(add_modifiers, Modifier) else list(add_modifiers)
            recipe = recipe.with_modifiers(extra)
        return cls(recipe if metadata is None else recipe.with_metadata(metadata))

    @classmethod
    def compose_staged(
        cls,
        base_recipe: str | os.PathLike[str] | IO[str] | Recipe | Manager,
        additional_recipe: str | os.PathLike[str] | IO[str] | Recipe | Manager,
        save_path: str | os.PathLike[str] | None = None,
    ) -> Self:
        """One recipe after the other: the second starts at the last epoch of the first."""
        manager = cls(compose(_recipe(base_recipe), _recipe(additional_recipe)))
        if save_path is not None:
            manager.save(save_path)
        return manager


def _recipe(given: str | os.PathLike[str] | IO[str] | Recipe | Manager) -> Recipe:
    if isinstance(given, Manager):
        return given.recipe_object
    return given if isinstance(given, Recipe) else load(given)
