"""Looking for a permutation while somebody watches, and writing down what it does."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.model.permute import Permutation, find
from gossamer.sparse import NM

logger = logging.getLogger("gossamer.asp")

Options = tuple[Any, float, bool]
"""Example inputs, effort, and whether to follow in parts, as `find` takes them."""


def search(
    model: nn.Module,
    names: Sequence[str],
    pattern: NM,
    optimizers: Sequence[torch.optim.Optimizer],
    verbosity: int,
    options: Options,
) -> Permutation:
    """Look for a permutation; a bar shows how far it is where somebody watches."""
    from rich.console import Console
    from rich.progress import Progress

    example_inputs, effort, parts = options
    watched = verbosity >= 2 and sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not watched) as bar:
        task = bar.add_task("permuting channels", total=1.0)
        found = find(
            model,
            names,
            pattern.n,
            pattern.m,
            example_inputs=example_inputs,
            optimizer=optimizers,
            effort=effort,
            parts=parts,
            progress=lambda _, share: bar.update(task, completed=share),
        )
    if (told := found.untraceable or found.note) and verbosity >= 1:
        logger.warning("channels are permuted %s: %s", "in part" if found.moves else "nowhere", told)
    for layer in found.layers if verbosity >= 2 else ():
        kept = f"{layer.kept_before:.2%} of the magnitude kept, {layer.kept:.2%} after permutation"
        logger.info("'%s': %s", layer.name, f"not permuted: {layer.reason}" if layer.reason else kept)
    return found


def save_graph(permutation: Permutation, path: Path) -> None:
    """Which layers share channels and what each gains, as JSON, with a picture beside it."""
    make_folder(path.parent)
    content = {
        "note": permutation.untraceable or permutation.note,
        "groups": list(permutation.groups),
        "layers": [asdict(layer) for layer in permutation.layers],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    if find_spec("matplotlib") is None:
        logger.warning("no picture beside %s: matplotlib is not installed (pip install 'gossamer[report]')", path)
        return
    from gossamer.report.plots import plot_permutation

    plot_permutation(permutation, path.with_suffix(".png"))


def make_folder(folder: Path) -> None:
    """Make it if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"{folder}: the folder for the graph cannot be made: {error.strerror}") from error
