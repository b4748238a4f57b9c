"""Pictures of detections: ground truth with a thin green outline, detections in the colour of their class."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import file_error
from gossamer.io import atomic_write
from gossamer.runner.data import ImageFileError

MAX_IMAGES = 6
"""Images in one picture."""
MIN_SCORE = 0.3
"""Detections with a lower score are not drawn."""

_SIDE, _GAP, _COLUMNS = 384, 10, 3
TRUTH = (60, 220, 90)
COLOURS = ((235, 87, 87), (66, 133, 244), (245, 166, 35), (155, 81, 224), (0, 172, 193), (216, 27, 160), (141, 110, 60))
"""Of classes in turn."""


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
) -> None:
    """Draw the detections of a model on the first readable images; writes nothing if no image is readable."""
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
        return
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            detections = task.predict(model, [image.to(device) for image in images])
    finally:
        model.train(was_training)
    draw_detections(images, detections, truths, classes, path)


def draw_detections(
    images: Sequence[Tensor],
    predictions: Sequence[Mapping[str, Tensor]],
    truths: Sequence[Mapping[str, Tensor]],
    classes: Sequence[str],
    path: Path,
) -> None:
    """Write a PNG grid of float images (3, H, W).

    `predictions` have boxes (n, 4) as x1, y1, x2, y2, labels (n,) from 1 and scores (n,); `truths` have boxes.
    """
    from torchvision.utils import make_grid, save_image  # pyright: ignore[reportUnknownVariableType]

    cells = [_cell(*each, classes) for each in zip(images, predictions, truths, strict=True)]
    grid = make_grid(cells, nrow=_COLUMNS, padding=_GAP, pad_value=250)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            save_image(grid / 255, part, format="PNG")
    except OSError as error:
        raise file_error(path, f"cannot write the picture ({error.strerror or error})") from None


def _cell(
    image: Tensor, detection: Mapping[str, Tensor], truth: Mapping[str, Tensor], classes: Sequence[str]
) -> Tensor:
    """One image as bytes (3, side, side), enlarged or reduced to fit, with its boxes and the names of classes."""
    from torchvision.transforms.v2 import functional

    height, width = image.shape[-2:]
    scale = _SIDE / max(height, width)
    size = [max(round(height * scale), 1), max(round(width * scale), 1)]
    cell = functional.resize(_pixels(image), size)
    cell = functional.pad(cell, [0, 0, _SIDE - size[1], _SIDE - size[0]], fill=250)
    shown = detection["scores"] >= MIN_SCORE
    labels = [int(label) for label in detection["labels"][shown]]
    scores = [float(score) for score in detection["scores"][shown]]
    names = [f"{_name(label, classes)} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
    colours = [COLOURS[(label - 1) % len(COLOURS)] for label in labels]
    cell = _draw_boxes(cell, detection["boxes"][shown] * scale, 3, colours, names)
    return _draw_boxes(cell, truth["boxes"] * scale, 1, [TRUTH] * len(truth["boxes"]))


def _draw_boxes(
    cell: Tensor, boxes: Tensor, width: int, colours: list[tuple[int, int, int]], names: list[str] | None = None
) -> Tensor:
    from torchvision.ops import clip_boxes_to_image
    from torchvision.utils import draw_bounding_boxes

    if not len(boxes):
        return cell
    boxes = clip_boxes_to_image(boxes.cpu().nan_to_num(), (_SIDE - 1, _SIDE - 1))
    ordered = torch.cat([boxes[:, :2], boxes[:, :2].maximum(boxes[:, 2:])], dim=1)
    return draw_bounding_boxes(cell, ordered, names, colors=list(colours), width=width)


def _pixels(image: Tensor) -> Tensor:
    """An image as bytes (3, H, W); values outside [0, 1], as of a normalized image, are rescaled to it."""
    pixels = image.detach().cpu().float()
    low, high = float(pixels.min()), float(pixels.max())
    if low < -0.01 or high > 1.01:
        pixels = (pixels - low) / (high - low)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def _name(label: int, classes: Sequence[str]) -> str:
    return classes[label - 1] if 1 <= label <= len(classes) else f"class {label}"
