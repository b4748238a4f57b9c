"""The manager: clock, hooks on the optimizer, masks, state."""

from gossamer.engine.binding import Binding, bindings
from gossamer.engine.manager import Manager

__all__ = ["Binding", "Manager", "bindings"]
