"""From a config file and what the command line adds to settings that are known to be right.

Precedence: the file with what it includes, then `--data`, then `--set`. Loads no model and no data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gossamer.recipe.writer import entry, plain_data
from gossamer.runner.config.checking import checked
from gossamer.runner.config.overlays import retyped, with_data, without_missing_weights
from gossamer.runner.config.schema import Config, Part
from gossamer.runner.config.sparse import check_sparsity
from gossamer.runner.config.tree import Place, Problems, Tree, overridden, planted, read_overrides, read_tree
from gossamer.runner.trust import USER, Trust

UNITS = {"max_iter": "iterations", "max_epoch": "epochs"}
"""What the length of a training is counted in."""


@dataclass(frozen=True)
class Loaded:
    """A config that is right, with what else the runner wants to know of it."""

    config: Config
    name: str
    """Of the file, without its ending."""
    given: frozenset[str]
    """The dotted keys that were given on the command line by `--set`."""
    text: str
    """The whole config as YAML; it reads back to an equal one."""
    warnings: list[str] = field(default_factory=list[str])
    """What the author may not have meant, a sentence each."""
    trust: Trust = USER
    """Which of the code that it names may run: all of it in a config that the user names."""


def read_config(path: str | os.PathLike[str], sets: Sequence[str] = (), data: str | None = None) -> Loaded:
    """The settings in a file, or one `GossamerError` with all that is wrong with them.

    `sets` are texts like `trainer.max_epoch=3`, `data` is `tiny` or a folder of data. Relative paths in a config start
    at the working directory, those of `!include` at the file they stand in.
    """
    path = Path(path)
    problems = Problems()
    return _completed(read_tree(path, problems), path.stem, sets, data, problems)


def config_of(settings: Mapping[str, Any], name: str, sets: Sequence[str] = (), data: str | None = None) -> Loaded:
    """The same for settings that no file holds; `name` stands for the file."""
    problems = Problems()
    return _completed(planted(settings, Place(name)), name, sets, data, problems)


def _completed(written: Tree, name: str, sets: Sequence[str], data: str | None, problems: Problems) -> Loaded:
    """What was written, with what the command line adds."""
    warnings = list[str]()
    overrides = read_overrides(sets, problems)
    tree = written
    if data is not None:
        naming = [override for override in overrides if override.path[0] in ("task", "net")]
        tree = with_data(written, data, overridden(written, naming), name, problems)
    for override in overrides:
        if len(override.path) == 3 and override.path[0] == "dataset" and override.path[2] == "type":
            tree = retyped(tree, override.path[1], override.value.content)
    timed = next((key for key in UNITS if tree.at("trainer", key) is not None), None)
    tree = without_missing_weights(overridden(tree, overrides), warnings)
    config = checked(tree, problems)
    if config is not None:
        check_sparsity(config, tree, problems)
    problems.raise_if_any()
    assert config is not None  # or there were problems
    given = frozenset(key for override in overrides for key in override.keys)
    warnings += [*_doubts(config), *_changed_unit(tree, given, timed)]
    return Loaded(config, name, given, config_text(config), warnings)


def config_text(config: Config) -> str:
    """A config as YAML, with the defaults that it uses."""
    lines = [line for name, value in _settings(config).items() for line in entry(name, value, 0, literal=False)]
    return "\n".join(lines) + "\n"


def _settings(part: Part) -> dict[str, object]:
    """The settings that have a value; None stands for those that were not given."""
    names = sorted(type(part).model_fields, key=lambda name: name != "type")
    fields = ((name, getattr(part, name)) for name in names)
    return {name: _written(value) for name, value in fields if value is not None}


def _written(value: object) -> object:
    if isinstance(value, Part):
        return _settings(value)
    if isinstance(value, list):
        return [_written(item) for item in cast("list[object]", value)]
    return plain_data(value)


def _doubts(config: Config) -> list[str]:
    found: list[str] = []
    runner = config.runtime.runner.type
    if config.sparsity is not None and runner == "base":
        found.append("sparsity has no effect, for runtime.runner.type is base; set it to sparse")
    if config.ema.enable and runner == "sparse":
        found.append("EMA is off in sparse training; leave 'ema' out")
    return found


def _changed_unit(tree: Tree, given: frozenset[str], before: str | None) -> list[str]:
    """Frequencies and lengths of the file count another unit than their author meant."""
    trainer = tree.child("trainer")
    after = next((key for key in UNITS if f"trainer.{key}" in given), None)
    if trainer is None or after is None or before in (None, after):
        return []
    lengths = ("test_freq", "save_freq", "lr_scheduler.kwargs.T_max", "lr_scheduler.kwargs.milestones")
    kept = [key for key in lengths if f"trainer.{key}" not in given and trainer.at(*key.split(".")) is not None]
    told = ", ".join(kept)
    return [f"trainer is timed by --set in {UNITS[after]}, and so are now {told} of the file"] if kept else []
