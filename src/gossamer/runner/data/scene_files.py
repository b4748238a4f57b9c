"""Scenes as files, for tools that read COCO: a PNG for each and one JSON for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.io import atomic_write
from gossamer.runner.config.schema import Scenes
from gossamer.runner.data.digits import CLASSES, digits
from gossamer.runner.data.scenes import Scene, compose


def write_coco(source: Scenes, folder: Path) -> Path:
    """Write `annotations.json` and `images/`; the path of the JSON, whose `images` folder is beside it."""
    count = source.count if source.limit is None else min(source.count, source.limit)
    path = folder / "annotations.json"
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for index in range(count):
            scene = compose(digits(source.split), source.seed, source.split, index, source.size)
            name = f"images/{index:06d}.png"
            _write_png(scene, folder / name)
            images.append({"id": index, "file_name": name, "height": source.size, "width": source.size})
            for (x1, y1, x2, y2), digit in zip(scene.corners.tolist(), scene.digits.tolist(), strict=True):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index,
                        "category_id": digit + 1,
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "area": (x2 - x1) * (y2 - y1),
                        "iscrowd": 0,
                    }
                )
        categories = [{"id": digit + 1, "name": name} for digit, name in enumerate(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        with atomic_write(path) as scratch:
            scratch.write_text(json.dumps(content), encoding="utf-8")
    except OSError as problem:
        raise GossamerError(f"{folder}: cannot write the scenes ({problem.strerror})") from None
    return path


def _write_png(scene: Scene, path: Path) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise GossamerError("images need Pillow; install it with: pip install 'gossamer[vision]'") from None
    with atomic_write(path) as scratch:
        Image.fromarray(scene.image).save(scratch)
