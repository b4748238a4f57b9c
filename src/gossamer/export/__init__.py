"""Export of models to files for other programs, each read back and verified.

`save` writes ONNX, pt2 and three kinds of safetensors files, which `load_into` and `read_state` read. `to_onnx` and
`quantize_qat_export` write ONNX only. `semi_structured` converts a model on CUDA, `thin` returns a smaller copy. The
names are imported when they are first used, because each format needs other modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.export.conversion import Conversion, semi_structured, thin
    from gossamer.export.onnx.qat import integer_operators, integer_weights, quantize_qat_export
    from gossamer.export.onnx.writer import to_onnx
    from gossamer.export.saving import FORMATS, Written, save, state_bytes
    from gossamer.export.weights import THINNED, is_model_file, load_into, read_about, read_integers, read_state

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

_HOMES = {
    "conversion": ("Conversion", "semi_structured", "thin"),
    "onnx.qat": ("integer_operators", "integer_weights", "quantize_qat_export"),
    "onnx.writer": ("to_onnx",),
    "saving": ("FORMATS", "Written", "save", "state_bytes"),
    "weights": ("THINNED", "is_model_file", "load_into", "read_about", "read_integers", "read_state"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"gossamer.export.{home}"), name)
    raise AttributeError(f"module 'gossamer.export' has no attribute '{name}'")
