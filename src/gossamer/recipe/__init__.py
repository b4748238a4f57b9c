"""Recipes: text to objects and back, with errors that say where.

`load` reads a recipe file in any of its forms; `Recipe` is what it gives.
"""

from gossamer.recipe.recipe import Recipe, compose, load

__all__ = ["Recipe", "compose", "load"]
