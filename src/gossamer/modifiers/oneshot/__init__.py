"""Modifiers that act on a trained model in one pass over calibration data: see `gossamer.oneshot`."""

from gossamer.modifiers.oneshot.base import LayerModifier, LayerProblem, OneShotModifier
from gossamer.modifiers.oneshot.pruning import (
    ALPSPruningModifier,
    OneShotMagnitudePruningModifier,
    OneShotPruningModifier,
    SparseGPTModifier,
    WandaPruningModifier,
)
from gossamer.modifiers.oneshot.quantization import GPTQModifier
from gossamer.modifiers.oneshot.smoothing import SmoothQuantModifier

__all__ = [
    "ALPSPruningModifier",
    "GPTQModifier",
    "LayerModifier",
    "LayerProblem",
    "OneShotMagnitudePruningModifier",
    "OneShotModifier",
    "OneShotPruningModifier",
    "SmoothQuantModifier",
    "SparseGPTModifier",
    "WandaPruningModifier",
]
