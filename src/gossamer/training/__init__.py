"""The manager: clock, hooks on the optimizer, masks, state."""

from gossamer.training.manager import Binding, Manager, bindings

__all__ = ["Binding", "Manager", "bindings"]
