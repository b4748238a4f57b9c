"""Models as ONNX files: the float ones, and those that were trained with emulated quantization.

`to_onnx` writes a model, `quantize_qat_export` makes integers of one that emulates them, `integer_operators` says what
onnxruntime computes in integers.
"""

from gossamer.export.qat import integer_weights, quantize_qat_export
from gossamer.export.runtime import integer_operators
from gossamer.export.writing import to_onnx

__all__ = ["integer_operators", "integer_weights", "quantize_qat_export", "to_onnx"]
