"""The recipe's state as a file in the folder of another library's checkpoint.

Knows a folder and plain values; loading never executes code. Each file bears
a mark, by which a checkpoint can say that the file is its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, load_torch

NAME = "gossamer.pt"
_FORMAT = 1


def write_state(folder: Path, state: Mapping[str, Any], mark: str = "") -> Path:
    """Write the file, whole or not at all."""
    path = folder / NAME
    try:
        with atomic_write(path, follow=True) as scratch:
            torch.save({"format": _FORMAT, "mark": mark, "state": dict(state)}, scratch)
    except OSError as error:
        raise GossamerError(f"{path}: the state of the recipe cannot be written: {error.strerror or error}") from error
    return path


def read_state(folder: Path) -> tuple[dict[str, Any], str]:
    """State and mark."""
    path = folder / NAME
    try:
        held = load_torch(path)
    except FileNotFoundError:
        raise GossamerError(
            f"{path}: there is no state of the recipe in this checkpoint; it was saved without the recipe"
        ) from None
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise GossamerError(f"{path}: not a state of a recipe, or damaged; take another checkpoint") from error
    found = cast(dict[str, Any], held) if isinstance(held, dict) else {}
    version, mark, state = found.get("format"), found.get("mark"), found.get("state")
    if type(version) is int and version > _FORMAT:
        raise GossamerError(f"{path}: has format {version}; this version of Gossamer reads {_FORMAT}")
    if type(version) is not int or version != _FORMAT or type(mark) is not str or type(state) is not dict:
        raise GossamerError(f"{path}: not a state of a recipe; take another checkpoint")
    return cast(dict[str, Any], state), mark
