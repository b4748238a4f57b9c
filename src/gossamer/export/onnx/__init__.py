"""ONNX files: tracing a model, folding its quantization to integers, and checking the result."""
