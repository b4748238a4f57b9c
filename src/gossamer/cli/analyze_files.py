"""What `gossamer analyze -o FOLDER` writes: each file whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli import analyze_view as view
from gossamer.errors import GossamerError
from gossamer.io import atomic_write

if TYPE_CHECKING:
    from gossamer.cli.analyze import Analysis

PICTURES = ("sensitivity.svg", "sensitivity.png")


def folder_for(path: Path) -> None:
    """Make the folder, before anything takes long."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"--output: {path} cannot be made a folder: {error.strerror}; name another") from error


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """`analysis.json`, `layers.csv`, and where there are such, pictures of the sensitivity and a recipe."""
    texts = {
        "analysis.json": json.dumps(view.as_data(analysis), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "layers.csv": analysis.table.to_csv(),
    }
    if analysis.proposal is not None:
        texts["recipe.yaml"] = analysis.proposal.to_recipe(analysis.epochs)
    written = [folder / name for name in texts]
    for name, text in texts.items():
        try:
            with atomic_write(folder / name) as part:
                part.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise GossamerError(f"{folder / name}: cannot be written: {error.strerror}") from error
    if analysis.sensitivity is not None:
        from gossamer.report.plots import plot_sensitivity

        for name in PICTURES:
            plot_sensitivity(analysis.sensitivity, folder / name, analysis.loaded.name)
            written.append(folder / name)
    return written
