"""Images and what is true of them, from files or from the embedded digits, as batches for training and tests.

`build_dataset` reads what a config names, `Batches` serves it to one rank, `write_coco` writes scenes as files.
"""

from gossamer.runner.data.dataset import Batch, ImageData
from gossamer.runner.data.digits import write_coco
from gossamer.runner.data.loader import Batches
from gossamer.runner.data.sources import build_dataset

__all__ = ["Batch", "Batches", "ImageData", "build_dataset", "write_coco"]
