"""The recipe's state as a file in the checkpoint folder of another library.

It is a file of `torch.save`, like the other files there; loading never runs code. A mark in it ties the file to its
checkpoint.
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
    """Write the file atomically."""
    path = folder / NAME
    try:
        with atomic_write(path, follow=True) as scratch:
            torch.save({"format": _FORMAT, "mark": mark, "state": dict(state)}, scratch)
    except OSError as error:
        raise GossamerError(f"{path}: the recipe's state cannot be written: {error.strerror or error}") from error
    return path


def read_state(folder: Path) -> tuple[dict[str, Any], str]:
    """The state and its mark."""
    path = folder / NAME
    try:
        content = load_torch(path)
    except FileNotFoundError:
        raise GossamerError(f"{path}: the checkpoint has no recipe state; it was saved without the recipe") from None
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise GossamerError(f"{path}: not a recipe state, or damaged; use another checkpoint") from error
    entries = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    version, mark, state = entries.get("format"), entries.get("mark"), entries.get("state")
    if type(version) is int and version > _FORMAT:
        raise GossamerError(f"{path}: has format {version}; this version of Gossamer reads up to {_FORMAT}")
    if type(version) is not int or version != _FORMAT or type(mark) is not str or type(state) is not dict:
        raise GossamerError(f"{path}: not a recipe state; use another checkpoint")
    return cast(dict[str, Any], state), mark
