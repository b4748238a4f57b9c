"""Runs networks with zeros in their weights fast on a CPU."""

from gossamer.runtime.engine import Engine, compile, load
from gossamer.runtime.layers import LayerReport, Times
from gossamer.runtime.onnx import InferenceSession
from gossamer.runtime.session_options import (
    ExecutionMode,
    GraphOptimizationLevel,
    SessionOptions,
    get_available_providers,
    get_device,
)

__all__ = [
    "Engine",
    "ExecutionMode",
    "GraphOptimizationLevel",
    "InferenceSession",
    "LayerReport",
    "SessionOptions",
    "Times",
    "compile",
    "get_available_providers",
    "get_device",
    "load",
]
