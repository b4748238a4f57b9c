"""Image files to arrays of RGB bytes, upright.

Takes whatever Pillow opens: grey, palette, CMYK, transparent and 16-bit images come out alike. Knows nothing of
datasets; a file that cannot be read is one exception with one sentence.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.io import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image


# What Pillow's decoders raise on damaged files, besides OSError.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
)


class ImageFileError(GossamerError):
    """An image file that is missing or damaged."""


def read_image(path: str) -> NDArray[np.uint8]:
    """The image of a file, (height, width, 3), turned as its EXIF orientation says."""
    Image, ImageOps = _pillow()  # noqa: N806
    try:
        # Warnings of damaged metadata and of large images are no reason to end a run.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_regular(path) as file, Image.open(file) as image:
                image.load()
                pixels = np.array(_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
    except FileNotFoundError:
        raise ImageFileError(f"{path}: there is no such image") from None
    except Image.DecompressionBombError as problem:
        raise ImageFileError(f"{path}: the image is too large ({problem})") from None
    except _DAMAGE as problem:
        why = "it is of no known image format" if isinstance(problem, Image.UnidentifiedImageError) else problem
        raise ImageFileError(f"{path}: the image cannot be read ({why})") from None
    if pixels.ndim != 3 or not pixels.size:
        raise ImageFileError(f"{path}: the image has no pixels")
    return pixels


def _rgb(image: Image) -> Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the direct way to RGB warns
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    return image.convert("RGB")


def _eight_bits(image: Image) -> Image:
    """Greys of 16 bits by their upper byte; floats as shares of white if none exceeds 1."""
    Image, _ = _pillow()  # noqa: N806
    pixels = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        scaled = pixels * 255 if pixels.size and np.nanmax(pixels) <= 1 else pixels
    else:
        wide = image.mode.startswith("I;16") or (pixels.size and pixels.max() > 255)
        scaled = pixels // 256 if wide else pixels
    return Image.fromarray(np.nan_to_num(scaled).clip(0, 255).astype(np.uint8))


def _pillow():
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise GossamerError("images need Pillow; install it with: pip install 'gossamer[vision]'") from None
    return Image, ImageOps
