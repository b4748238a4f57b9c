"""ONNX files: export from torch, and integer weights in place of emulated quantization."""
