"""One layer pruned or quantized so that its outputs on calibration data are reconstructed: functions over tensors."""

from gossamer.sparse.reconstruction.alps import alps
from gossamer.sparse.reconstruction.grids import Grid
from gossamer.sparse.reconstruction.moments import Moments, inverse_factor, output_error
from gossamer.sparse.reconstruction.smoothing import smoothing_scales
from gossamer.sparse.reconstruction.sweep import gptq, sparsegpt
from gossamer.sparse.reconstruction.wanda import wanda_mask, wanda_scores

__all__ = [
    "Grid",
    "Moments",
    "alps",
    "gptq",
    "inverse_factor",
    "output_error",
    "smoothing_scales",
    "sparsegpt",
    "wanda_mask",
    "wanda_scores",
]
