"""Emulated quantization: weights and activations are rounded during training where an integer runtime rounds them.

`emulation` imports torch's compiler, which is slow to load, so it is imported on first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from gossamer.quantization.schemes import SCHEMES, Numbers, Rules, Scheme, scheme_of

if TYPE_CHECKING:
    from gossamer.quantization.emulation import Emulation, emulation_of, emulations_in, withdraw

__all__ = [
    "SCHEMES",
    "Emulation",
    "Numbers",
    "Rules",
    "Scheme",
    "emulation_of",
    "emulations_in",
    "is_emulated",
    "scheme_of",
    "withdraw",
]


def is_emulated(module: nn.Module) -> bool:
    """Whether a model computes in emulated integers. False, without an import, if nothing was emulated so far."""
    loaded = sys.modules.get("gossamer.quantization.emulation")
    return loaded is not None and loaded.emulation_of(module) is not None


def __getattr__(name: str) -> object:
    if name not in ("Emulation", "emulation_of", "emulations_in", "withdraw"):
        raise AttributeError(f"module 'gossamer.quantization' has no attribute '{name}'")
    return getattr(import_module("gossamer.quantization.emulation"), name)
