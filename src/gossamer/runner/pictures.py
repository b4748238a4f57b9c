"""Pictures of detections: ground truth with a thin green outline, detections in the colour of their class.

Drawn with Pillow: torchvision's draw_bounding_boxes lets labels overlap, and its make_grid needs images of one size.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.io import atomic_write
from gossamer.runner.data.examples import ImageFileError

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

MAX_IMAGES = 6
"""Images in one picture."""

_SIDE, _GAP, _LEGEND, _TEXT = 384, 10, 34, 13
_TRUTH, _PAPER, _INK = (60, 220, 90), (250, 250, 250), (40, 40, 40)
_COLOURS = (
    (235, 87, 87),
    (66, 133, 244),
    (245, 166, 35),
    (155, 81, 224),
    (0, 172, 193),
    (216, 27, 160),
    (141, 110, 60),
    (92, 107, 192),
    (255, 112, 67),
    (120, 144, 156),
)
Box = tuple[float, float, float, float]


class _Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, key: int) -> Any: ...


class _Detects(Protocol):
    def predict(self, model: nn.Module, images: list[Tensor]) -> Any: ...


def draw_tests(
    model: nn.Module,
    task: _Detects,
    data: _Samples,
    classes: Sequence[str],
    path: Path,
    device: torch.device | str = "cpu",
    *,
    score: float = 0.3,
) -> Path | None:
    """Draw the detections of a model on the first readable images; None if no image is readable."""
    images: list[Tensor] = []
    truths: list[Mapping[str, Tensor]] = []
    for index in range(len(data)):
        with contextlib.suppress(ImageFileError):
            image, truth = data[index]
            images.append(image)
            truths.append(truth)
        if len(images) == MAX_IMAGES:
            break
    if not images:
        return None
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            detections = task.predict(model, [image.to(device) for image in images])
    finally:
        model.train(was_training)
    draw_detections(images, detections, truths, classes, path, score=score)
    return path


def draw_detections(
    images: Sequence[Tensor],
    predictions: Sequence[Mapping[str, Tensor]],
    truths: Sequence[Mapping[str, Tensor]],
    classes: Sequence[str],
    path: Path,
    *,
    score: float = 0.3,
) -> None:
    """Write a PNG grid of up to six images (C, H, W), bytes or floats from 0 to 1.

    `predictions` have boxes (n, 4) as x1, y1, x2, y2, labels (n,) from 1 and scores (n,); `truths` boxes and labels.
    Predictions below `score` are not drawn.
    """
    from PIL import Image, ImageDraw

    shown = list(zip(images, predictions, truths, strict=True))[:MAX_IMAGES]
    cells = [_cell(image, detection, truth, classes, score) for image, detection, truth in shown]
    columns = min(3, len(cells))
    rows = math.ceil(len(cells) / columns) if columns else 0
    width = max((cell.width for cell in cells), default=_SIDE)
    heights = [max(cell.height for cell in cells[row * columns : (row + 1) * columns]) for row in range(rows)]
    grid_width = max(columns * (width + _GAP) + _GAP, _SIDE + 2 * _GAP)
    grid = Image.new("RGB", (grid_width, sum(heights) + (rows + 1) * _GAP + _LEGEND), _PAPER)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        top = _GAP + sum(heights[:row]) + row * _GAP
        grid.paste(cell, (_GAP + column * (width + _GAP), top))
    detections = any(_above(detection, score) for _, detection, _ in shown)
    _draw_legend(ImageDraw.Draw(grid), grid.height - _LEGEND, score, detections=detections)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            grid.save(part, format="PNG")
    except OSError as error:
        raise GossamerError(f"{path}: cannot write the picture ({error.strerror or error})") from None


def _cell(
    image: Tensor, detection: Mapping[str, Tensor], truth: Mapping[str, Tensor], classes: Sequence[str], score: float
) -> Image.Image:
    from PIL import Image, ImageDraw

    pixels = _pixels(image)
    height, width = pixels.shape[-2:]
    scale = _SIDE / max(height, width)
    resample = Image.Resampling.NEAREST if scale >= 4 else Image.Resampling.BICUBIC
    cell = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).resize(
        (max(round(width * scale), 1), max(round(height * scale), 1)), resample
    )
    draw = ImageDraw.Draw(cell)
    entries = [
        (label, confidence, _scaled(box, scale, cell.size))
        for label, confidence, box in reversed(_above(detection, score))  # the highest score on top
    ]
    for label, _, box in entries:
        draw.rectangle(box, outline=_colour(label), width=3)
    for true_box in truth["boxes"]:
        draw.rectangle(_scaled([float(side) for side in true_box], scale, cell.size), outline=_TRUTH, width=1)
    taken: list[Box] = []
    for label, confidence, box in reversed(entries):
        _draw_name(draw, cell.size, box, f"{_name(label, classes)} {confidence:.2f}", _colour(label), taken)
    return cell


def _pixels(image: Tensor) -> Tensor:
    """An image as bytes (3, H, W); floats outside [0, 1], as of a normalized image, are rescaled to it."""
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = pixels.float().nan_to_num()
        low, high = (float(pixels.min()), float(pixels.max())) if pixels.numel() else (0.0, 1.0)
        if low < -0.01 or high > 1.01:
            pixels = (pixels - low) / max(high - low, 1e-6)
        pixels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels[:3] if pixels.shape[0] >= 3 else pixels[:1].expand(3, -1, -1)


def _above(detection: Mapping[str, Tensor], score: float) -> list[tuple[int, float, list[float]]]:
    """Label, score and box of the detections with at least `score`, the highest first."""
    columns: list[list[Any]] = [detection[name].tolist() for name in ("labels", "scores", "boxes")]
    entries: list[tuple[int, float, list[float]]] = list(zip(*columns, strict=True))
    return sorted((entry for entry in entries if entry[1] >= score), key=lambda entry: -entry[1])


def _scaled(box: Sequence[float], scale: float, size: tuple[int, int]) -> Box:
    """A box in pixels of the picture, clamped to it, with its corners in order."""
    last_x, last_y = size[0] - 1, size[1] - 1
    x1, x2 = sorted(min(max(value * scale, 0), last_x) if math.isfinite(value) else 0 for value in box[0::2])
    y1, y2 = sorted(min(max(value * scale, 0), last_y) if math.isfinite(value) else 0 for value in box[1::2])
    return x1, y1, x2, y2


def _draw_name(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    box: Box,
    text: str,
    colour: tuple[int, int, int],
    taken: list[Box],
) -> None:
    """The name on a background of its colour: above, below or inside the box, where it overlaps no other name."""
    width, height = draw.textlength(text, font=_font()) + 6, _TEXT + 5
    x = max(min(box[0], size[0] - width), 0)
    tops = (box[1] - height, box[3] + 1, box[1], box[3] - height)
    plates = [(x, top, x + width, top + height) for top in tops if 0 <= top <= size[1] - height]
    free = [plate for plate in plates if not any(_overlap(plate, other) for other in taken)]
    plate = next(iter([*free, *plates]), (x, 0.0, x + width, float(height)))
    taken.append(plate)
    draw.rectangle(plate, fill=colour)
    draw.text((plate[0] + 3, plate[1] + 1), text, fill="white", font=_font())


def _draw_legend(draw: ImageDraw.ImageDraw, top: int, score: float, *, detections: bool) -> None:
    """What the green boxes are, and which detections are drawn."""
    x, y = float(_GAP), top + 8
    draw.rectangle((x, y + 2, x + 16, y + 14), outline=_TRUTH, width=2)
    noun = "detections" if detections else "no detections"
    draw.text((x + 22, y), f"ground truth; {noun} with a score of {score:g} or more", fill=_INK, font=_font())


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _colour(label: int) -> tuple[int, int, int]:
    return _COLOURS[(label - 1) % len(_COLOURS)]


def _name(label: int, classes: Sequence[str]) -> str:
    return classes[label - 1] if 1 <= label <= len(classes) else f"class {label}"


@functools.cache
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(_TEXT)
