"""Models as files that other programs take, each read back and checked after writing.

`save` writes ONNX, pt2 and three kinds of safetensors files; `load_into` and `read_state` read the latter. `to_onnx`
and `quantize_qat_export` are for ONNX alone, `semi_structured` for a model on CUDA;
`thin` makes a smaller copy of a model.
"""

from gossamer.export.onnx.qat import integer_operators, integer_weights, quantize_qat_export
from gossamer.export.onnx.writer import to_onnx
from gossamer.export.saving import FORMATS, Written, save, state_bytes
from gossamer.export.semi_structured import Conversion, semi_structured
from gossamer.export.thin import thin
from gossamer.export.weights.reading import THINNED, is_model_file, load_into, read_about, read_integers, read_state

__all__ = [
    "FORMATS",
    "THINNED",
    "Conversion",
    "Written",
    "integer_operators",
    "integer_weights",
    "is_model_file",
    "load_into",
    "quantize_qat_export",
    "read_about",
    "read_integers",
    "read_state",
    "save",
    "semi_structured",
    "state_bytes",
    "thin",
    "to_onnx",
]
