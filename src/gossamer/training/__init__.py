"""The manager: clock, hooks on the optimizer, masks, state."""

from gossamer.training.binding import Binding, bindings
from gossamer.training.manager import Manager

__all__ = ["Binding", "Manager", "bindings"]
