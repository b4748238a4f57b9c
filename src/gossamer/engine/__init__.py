"""The manager, and the run that it attaches to a model: clock, masks, hooks on the optimizer, state."""

from gossamer.engine.binding import Binding, BoundModifier, bindings
from gossamer.engine.manager import Manager
from gossamer.engine.run import TrainingRun

__all__ = ["Binding", "BoundModifier", "Manager", "TrainingRun", "bindings"]
