"""Runs networks with zeros in their weights fast on a CPU."""

from gossamer.runtime.decoder import Cache, Decoder, compile_decoder, load_decoder
from gossamer.runtime.engine import Engine, compile, load
from gossamer.runtime.onnx import InferenceSession

__all__ = ["Cache", "Decoder", "Engine", "InferenceSession", "compile", "compile_decoder", "load", "load_decoder"]
