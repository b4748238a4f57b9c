"""What was measured on this CPU, in this process and in earlier ones: how to compute layers of some shape fastest."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any, cast

from gossamer.runtime._cache import cache_folder, read_cached, write_cached
from gossamer.runtime._compiler import processor
from gossamer.version import __version__

_MOST = 20_000
"""Entries of the file; the first ones are dropped."""


class Measured:
    """Choices by what they depend on. `again` forgets those of earlier processes."""

    def __init__(self, again: bool = False) -> None:
        folder = cache_folder("tuning")
        name = hashlib.sha256(f"{__version__} {processor()}".encode()).hexdigest()
        self._path = None if folder is None else folder / name
        self._known = {} if again else self._stored()
        self._new: dict[str, Any] = {}

    def get(self, key: object) -> Any:
        """The choice, as JSON has it; None if nothing was measured. A file may hold any value."""
        return self._known.get(_digest(key))

    def put(self, key: object, choice: Any) -> None:
        name = _digest(key)
        self._known[name] = self._new[name] = choice

    def save(self) -> None:
        """Keep new choices for other processes, beside what they have measured in the meantime."""
        if self._path is not None and self._new:
            stored = self._stored()
            entries = [(name, choice) for name, choice in stored.items() if name not in self._new]
            entries += self._new.items()
            write_cached(self._path, json.dumps(dict(entries[-_MOST:]), separators=(",", ":")).encode())
            self._new = {}

    def _stored(self) -> dict[str, Any]:
        content = None if self._path is None else read_cached(self._path)
        with suppress(ValueError, RecursionError):
            found = json.loads(content or b"{}")
            if isinstance(found, dict):
                return cast(dict[str, Any], found)
        return {}


def _digest(key: object) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]
