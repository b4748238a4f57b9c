"""Recipes written for a model: `initialize`, as in Sparsify's documentation, attaches one to a training run."""

from gossamer.create import schemas
from gossamer.create.generator import Design, design, initialize, recipe_for
from gossamer.create.schemas import RecipeVariables

__all__ = ["Design", "RecipeVariables", "design", "initialize", "recipe_for", "schemas"]
