"""Gossamer makes PyTorch networks sparse while they train."""

from gossamer.errors import GossamerError, RecipeError
from gossamer.modifiers import Modifier, register
from gossamer.recipe import Recipe, compose, load
from gossamer.training import Manager

__version__ = "0.1.0"

__all__ = ["GossamerError", "Manager", "Modifier", "Recipe", "RecipeError", "compose", "load", "register"]
