"""Attaching a recipe to a model: the manager, and the run with its clock, masks, optimizer hooks and state.

Names are imported on first use, so that a front end can use one module of the engine alone. Imports inside functions
load what most runs never use (thinning, learning rates, loading a state), so that start-up stays short.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.engine.binding import BoundModifier
    from gossamer.engine.manager import Manager
    from gossamer.engine.run import BindingResult, TrainingRun, check_bindings

__all__ = ["BindingResult", "BoundModifier", "Manager", "TrainingRun", "check_bindings"]

_MODULES = {
    "BindingResult": "run",
    "BoundModifier": "binding",
    "Manager": "manager",
    "TrainingRun": "run",
    "check_bindings": "run",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'gossamer.engine' has no attribute '{name}'")
    return getattr(import_module(f"gossamer.engine.{_MODULES[name]}"), name)
