"""Images and what is true of them, from files or from the embedded digits, as batches for training and tests.

`build_dataset` reads what a config names, `Batches` serves it to one rank.
"""

from gossamer.runner.data.dataset import Batch, Batches, ImageData
from gossamer.runner.data.examples import ImageFileError
from gossamer.runner.data.sources import build_dataset

__all__ = ["Batch", "Batches", "ImageData", "ImageFileError", "build_dataset"]
