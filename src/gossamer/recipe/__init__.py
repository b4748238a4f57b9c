"""Recipe objects, and reading, editing and writing their text."""

from gossamer.recipe.recipe import Recipe, compose, load

__all__ = ["Recipe", "compose", "load"]
