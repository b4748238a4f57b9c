"""Takes a sealed file (a checkpoint or an export) apart and writes it again, changed and with the right digests.

A fuzz test that changes bytes of such a file meets its digests and nothing else; what is sealed again gets behind them.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.io import DTYPES, bytes_of, write_sealed

_DIGESTS = ("digest", "content")
_BLANK = "0" * 64


@dataclass
class Sealed:
    """The parts of a file; any of them may be replaced by what does not belong there."""

    metadata: dict[str, Any]
    """What the file says of itself, without the digests; each value is text in a sound file."""
    entries: dict[str, Any]
    """The description of each tensor by its name: `dtype`, `shape` and `data_offsets`."""
    content: bytes
    """The bytes of all tensors, one after another."""

    def copy(self) -> Sealed:
        return copy.deepcopy(self)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a sound file, as copies."""
        dtypes = {name: dtype for dtype, name in DTYPES.items()}
        found: dict[str, Tensor] = {}
        for name, entry in self.entries.items():
            first, last = entry["data_offsets"]
            found[name] = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
            bytes_of(found[name])[:] = self.content[first:last]
        return found

    @tensors.setter
    def tensors(self, tensors: dict[str, Tensor]) -> None:
        self.entries, self.content = {}, b""
        for name, tensor in tensors.items():
            start = len(self.content)
            self.content += bytes(bytes_of(tensor))
            offsets = [start, len(self.content)]
            self.entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}


def unseal(path: Path) -> Sealed:
    """The parts of a sound file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    metadata = entries.pop("__metadata__")
    return Sealed({key: value for key, value in metadata.items() if key not in _DIGESTS}, entries, data[start:])


def seal(path: Path, sealed: Sealed) -> Path:
    """Write a file of these parts, with digests that fit whatever they are."""
    metadata = dict.fromkeys(_DIGESTS, _BLANK) | sealed.metadata
    text = json.dumps({"__metadata__": metadata, **sealed.entries}, separators=(",", ":")).encode("ascii")
    with path.open("wb") as file:
        write_sealed(file, text + b" " * (-len(text) % 8), [memoryview(sealed.content)])
    return path
