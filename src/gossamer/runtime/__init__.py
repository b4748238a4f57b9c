"""Runs networks with zeros in their weights fast on a CPU."""

from gossamer.runtime.engine import Engine, compile, load
from gossamer.runtime.layers import LayerReport, Times
from gossamer.runtime.onnx import InferenceSession

__all__ = ["Engine", "InferenceSession", "LayerReport", "Times", "compile", "load"]
