"""Which code that a config or a file names may be imported: only code that the user trusts.

The user trusts a config that is given to `gossamer train`. Names in a run folder, a checkpoint or an exported file are
data: they are imported only if this user trained in that folder on this machine, or names the package with `--import`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from gossamer.errors import GossamerError, nearest
from gossamer.io import atomic_write, read_regular

logger = logging.getLogger("gossamer")

STATE = "GOSSAMER_STATE_DIR"
"""The environment variable with another folder for the list of the user's runs."""
MAX_RUNS = 2000
"""Runs that are remembered; older ones are forgotten."""
MAX_BYTES = 100_000
"""Size of the entry of one run; a larger file is not read."""

_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Trust:
    """The code that the user trusts when a config or a file names code."""

    everything: bool = False
    """The user wrote or chose the whole text."""
    paths: frozenset[str] = frozenset()
    """Import paths, as `my_package.models:small_net`."""
    packages: tuple[str, ...] = ()
    """Packages and modules of `--import`, with everything inside."""
    source: str = ""
    """The folder or file that names the code, for messages."""

    def covers(self, path: str) -> bool:
        """Whether an import path, or a package, may be imported."""
        return self.everything or path in self.paths or self._in_packages(path.partition(":")[0])

    def check(self, named: Iterable[tuple[str, str]]) -> None:
        """Raise unless every import path is covered; `named` are pairs of key and path."""
        missing = [(key, path) for key, path in named if not self.covers(path)]
        if missing:
            paths = ", ".join(f"{path!r} ({key})" for key, path in missing)
            modules = list(dict.fromkeys(path.partition(":")[0] for _, path in missing))
            options = " ".join(f"--import {name}" for name in modules)
            raise GossamerError(
                f"{self.source}: names code to run: {paths}, which you have not trained with in this folder; "
                f"if you trust it, add {options}, in Python imports={modules}"
            )

    def check_origin(self, path: str, value: Any) -> None:
        """Raise if only a package is trusted and the path leads to an object defined outside of it."""
        if self.everything or path in self.paths:
            return
        home: Any = getattr(value, "__module__", None)
        if not isinstance(home, str) or not self._in_packages(home):
            way_out = f"add --import {home} too" if isinstance(home, str) else "name a function or a class of it"
            raise GossamerError(f"{self.source}: {path!r} is not defined in what --import names; {way_out}")

    def _in_packages(self, module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in self.packages)


USER = Trust(everything=True)
"""For names that the user gives: on the command line, or in a config to train."""


def trust_of(source: str | Path, folder: Path, imports: Sequence[str], named: Iterable[str] = ()) -> Trust:
    """For names in a run folder: code that this user trained there, and what the command line names."""
    for name in imports:
        if not _PACKAGE.fullmatch(name):
            raise GossamerError(f"expected a package or a module, as my_package.models, found {name!r}", "--import")
    return Trust(False, frozenset(named) | remembered(folder), tuple(imports), str(source))


def imported(path: str, trust: Trust, noun: str = "name", key: str = "") -> Any:
    """Import `package.module:name`, if the user trusts it; `key` names it in the config, for messages."""
    module_name, _, name = path.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".")
        raise GossamerError(f"{path}: expected a module, not a file: write {dotted}:{name}")
    if not module_name or not name:
        raise GossamerError(f"{path}: expected package.module:{noun}, as in 'my_package.models:small_net'")
    trust.check([(key or noun, path)])
    value: Any = import_module(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            raise GossamerError(f"{path}: '{module_name}' has no '{part}'{nearest(part, dir(value))}")
        value = getattr(value, part)
    trust.check_origin(path, value)
    return value


def import_module(name: str, *, installed: bool = False) -> ModuleType:
    """Import a trusted module, from the current folder first, or an `installed` one."""
    here = str(Path.cwd())
    if not installed and here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise GossamerError(f"cannot import '{name}': {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An exception as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def check_links(folder: Path) -> None:
    """Raise if an entry of a run folder is a link to the outside, or neither a file nor a folder.

    Files could be written or removed through such a link. Only folders of a run that this user trained here may be
    links to the outside.

    >>> check_links(Path("no such folder"))
    """
    home = Path(os.path.realpath(folder))
    own = is_own(folder)
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent) / name for name in (*folders, *names)):
            real = Path(os.path.realpath(path))
            inside = real.is_relative_to(home)
            if path.is_symlink() and not inside and not (own and real.is_dir()):
                problem = f"{path}: is a link to {real}, outside of the folder, and may be written to"
                kind = "folder" if real.is_dir() else "file"
                raise GossamerError(f"{problem}; put the {kind} itself there, or remove the link")
            if real.exists() and not real.is_file() and not real.is_dir():
                raise GossamerError(f"{path}: is neither a file nor a folder; remove it")


# The list of the user's runs: a small file for each, so that runs that start together do not interfere


class _Entry(BaseModel):
    folder: str
    imports: set[str]


def remembered(folder: Path) -> frozenset[str]:
    """The import paths of the runs that this user trained in a folder, on this machine."""
    entry = _read_entry(folder)
    return frozenset() if entry is None else frozenset(entry.imports)


def is_own(folder: Path) -> bool:
    """Whether this user trained in a folder, on this machine."""
    return _read_entry(folder) is not None


def _read_entry(folder: Path) -> _Entry | None:
    path = _entry_path(folder)
    try:
        if not _is_private(path):
            return None
        entry = _Entry.model_validate_json(read_regular(path, MAX_BYTES))
    except (OSError, ValidationError):
        return None
    return entry if entry.folder == str(folder.resolve()) else None


def remember(folder: Path, paths: Sequence[str]) -> None:
    """Remember that this user trains in a folder, with this code. Warns if that cannot be written."""
    known = _read_entry(folder)
    if known is not None and known.imports.issuperset(paths):
        return
    entry = _Entry(folder=str(folder.resolve()), imports={*paths} if known is None else {*known.imports, *paths})
    path = _entry_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.chmod(0o700)
        with atomic_write(path) as part:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            part.write_text(entry.model_dump_json(), encoding="utf-8")
        path.chmod(0o600)
        _forget(path.parent)
    except OSError as error:
        options = " ".join(f"--import {name}" for name in dict.fromkeys(path.partition(":")[0] for path in paths))
        needed = f"need {options}" if options else "refuse links in it that lead to the outside"
        reason = f"{path}: {error.strerror or error}"
        log = logger.warning if options else logger.info
        log("cannot remember that this run is yours (%s); later commands on it %s", reason, needed)


def state_folder() -> Path:
    """The user's folder for the list of runs."""
    if given := os.environ.get(STATE):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "gossamer"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "gossamer"
    given = os.environ.get("XDG_STATE_HOME", "")
    # The specification says to ignore relative paths.
    return (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state") / "gossamer"


def _entry_path(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return state_folder() / "runs" / f"{name}.json"


def _is_private(path: Path) -> bool:
    """Whether only this user can have written a file, on systems with owners of files."""
    if not hasattr(os, "geteuid"):
        return path.is_file()
    owned = [entry.stat() for entry in (path, path.parent)]
    return path.is_file() and all(entry.st_uid == os.geteuid() and not entry.st_mode & 0o022 for entry in owned)


def _forget(folder: Path) -> None:
    """Remove the oldest runs beyond `MAX_RUNS`."""
    notes = [(entry.stat().st_mtime, entry.path) for entry in os.scandir(folder)]
    for _, path in sorted(notes)[: max(len(notes) - MAX_RUNS, 0)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
