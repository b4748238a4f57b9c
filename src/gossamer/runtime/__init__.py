"""Runs networks with zeros in their weights fast on a CPU."""

from gossamer.runtime.decoder import Cache, Decoder, compile_decoder, load_decoder
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
    "Cache",
    "Decoder",
    "Engine",
    "ExecutionMode",
    "GraphOptimizationLevel",
    "InferenceSession",
    "LayerReport",
    "SessionOptions",
    "Times",
    "compile",
    "compile_decoder",
    "get_available_providers",
    "get_device",
    "load",
    "load_decoder",
]
