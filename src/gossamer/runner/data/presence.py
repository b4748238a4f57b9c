"""Which files exist: each folder is listed once, which is far quicker than asking for every file."""

from __future__ import annotations

import os


class Presence:
    """Asks for files by listing their folders.

    >>> Presence().has(__file__)
    True
    """

    def __init__(self) -> None:
        self._folders: dict[str, set[str]] = {}

    def has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        if folder not in self._folders:
            self._folders[folder] = _files(folder or os.curdir)
        return name in self._folders[folder]


def _files(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except OSError:
        return set()
