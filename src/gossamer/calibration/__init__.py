"""One-shot compression: calibrate a trained model layer by layer, and prune or quantize it on the way."""

from gossamer.calibration.oneshot import oneshot

__all__ = ["oneshot"]
