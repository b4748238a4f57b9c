"""Gossamer makes PyTorch networks sparse while they train.

The names below are imported when they are first used, so that `import
gossamer` and the command line start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from gossamer.version import __version__ as __version__

if TYPE_CHECKING:
    from gossamer import create
    from gossamer.calibration import oneshot
    from gossamer.engine import Manager
    from gossamer.engine.distributed_state import gathered_state, read_distributed_state
    from gossamer.errors import GossamerError, RecipeError
    from gossamer.export.load import load
    from gossamer.model.recalibration import recalibrate
    from gossamer.modifiers import Modifier, register
    from gossamer.recipe import Recipe, compose

__all__ = [
    "GossamerError",
    "Manager",
    "Modifier",
    "Recipe",
    "RecipeError",
    "compose",
    "create",
    "gathered_state",
    "load",
    "oneshot",
    "read_distributed_state",
    "recalibrate",
    "register",
]

_HOMES = {
    "GossamerError": "errors",
    "RecipeError": "errors",
    "recalibrate": "model.recalibration",
    "Modifier": "modifiers",
    "register": "modifiers",
    "Recipe": "recipe",
    "compose": "recipe",
    "load": "export.load",
    "Manager": "engine",
    "oneshot": "calibration",
    "gathered_state": "engine.distributed_state",
    "read_distributed_state": "engine.distributed_state",
}
_PARTS = ("create", "export", "quantization")
"""Modules that are attributes of this one without an import of their own."""


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return import_module(f"gossamer.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer' has no attribute '{name}'")
    value = getattr(import_module(f"gossamer.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
