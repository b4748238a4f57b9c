"""Small images and annotation files, written where a test wants them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(path: Path, width: int = 20, height: int = 10, colour: tuple[int, int, int] = (10, 20, 30)) -> Path:
    """One colour, as PNG or what the suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), colour).save(path)
    return path


def noisy_picture(path: Path, seed: int = 0, size: int = 64) -> Path:
    """Nothing that compresses, so that half of the file is half of the image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def truncated_picture(path: Path) -> Path:
    noisy_picture(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def coco(
    folder: Path,
    annotations: Iterable[dict[str, Any]],
    images: Iterable[dict[str, Any]] | None = None,
    categories: Iterable[dict[str, Any]] | None = None,
) -> Path:
    """A COCO file; by default of one image of 20 × 10 pixels with id 1, and of cat (3) and dog (7)."""
    folder.mkdir(parents=True, exist_ok=True)
    if images is None:
        picture(folder / "a.png")
        images = [{"id": 1, "file_name": "a.png", "width": 20, "height": 10}]
    if categories is None:
        categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
    content = {"images": list(images), "annotations": list(annotations), "categories": list(categories)}
    path = folder / "boxes.json"
    path.write_text(json.dumps(content))
    return path


def annotation(bbox: Any = (2, 3, 5, 4), **others: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 1, "category_id": 3, "bbox": list(bbox) if isinstance(bbox, tuple) else bbox} | others


def json_lines(folder: Path, *records: Any) -> Path:
    path = folder / "boxes.jsonl"
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def record(*instances: Any, filename: str = "a.png", height: int = 10, width: int = 20) -> dict[str, Any]:
    return {"filename": filename, "image_height": height, "image_width": width, "instances": list(instances)}


def instance(bbox: Any = (2, 3, 7, 7), label: Any = 1, **others: Any) -> dict[str, Any]:
    return {"bbox": list(bbox) if isinstance(bbox, tuple) else bbox, "label": label} | others
