"""A recipe made for your model, and attached to it: two lines in a training script.

`initialize` is what the documentation of Sparsify shows; `recipe_for` gives
the recipe alone.
"""

from gossamer.create import schemas
from gossamer.create.generator import Design, design, recipe_for
from gossamer.create.initialization import initialize
from gossamer.create.schemas import RecipeVariables

__all__ = ["Design", "RecipeVariables", "design", "initialize", "recipe_for", "schemas"]
