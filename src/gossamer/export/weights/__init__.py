"""Files of weights: safetensors with dense, bit-mask, 2:4 and quantized tensors."""

from gossamer.export.weights.reading import (
    THINNED,
    emulate_as,
    is_model_file,
    is_thinned,
    load_into,
    open_weights,
    read_about,
    read_integers,
    read_state,
)

__all__ = [
    "THINNED",
    "emulate_as",
    "is_model_file",
    "is_thinned",
    "load_into",
    "open_weights",
    "read_about",
    "read_integers",
    "read_state",
]
