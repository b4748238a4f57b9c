"""Decodes image files to RGB bytes: whatever Pillow opens, with 8 or 16 bits, a palette, CMYK or transparency."""

from __future__ import annotations

import struct
import warnings
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError, Location, Problem
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
    """The pixels (height, width, 3) of an image file, rotated by its EXIF orientation."""
    Image, ImageOps = _pillow()  # noqa: N806
    try:
        # Warnings about damaged metadata and large images must not end a run that turns warnings into errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_regular(path) as file, Image.open(file) as image:
                image.load()
                pixels = np.array(_rgb(ImageOps.exif_transpose(image)), dtype=np.uint8)
    except FileNotFoundError:
        raise _error(path, "no such image") from None
    except Image.DecompressionBombError as error:
        raise _error(path, f"the image is too large ({error})") from None
    except _DAMAGE as error:
        reason = "unknown image format" if isinstance(error, Image.UnidentifiedImageError) else error
        raise _error(path, f"cannot read the image ({reason})") from None
    if pixels.ndim != 3 or not pixels.size:
        raise _error(path, "the image has no pixels")
    return pixels


def _error(path: str, message: str) -> ImageFileError:
    return ImageFileError(Problem(message, location=Location(path)))


def _rgb(image: Image) -> Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # converting directly to RGB warns
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    return image.convert("RGB")


def _eight_bits(image: Image) -> Image:
    """16-bit grey values by their upper byte; floats scaled from [0, 1] to bytes if none exceeds 1."""
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
