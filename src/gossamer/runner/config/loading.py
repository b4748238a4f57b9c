"""Loads configs: the file with its includes, then `--data`, then `--set`, checked against the schema.

Loads no model and no data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gossamer.errors import Location, Problems
from gossamer.recipe import Recipe
from gossamer.recipe.writer import entry, plain_data
from gossamer.runner.config.checking import check, check_sparsity
from gossamer.runner.config.overlays import with_data, with_source_type, without_missing_weights
from gossamer.runner.config.schema import Config, Part
from gossamer.runner.config.tree import Tree, overridden, read_overrides, read_tree
from gossamer.runner.trust import USER, Trust

UNITS = {"max_iter": "iterations", "max_epoch": "epochs"}
"""The unit of each setting for the length of a training."""


@dataclass(frozen=True)
class Loaded:
    """A valid config."""

    config: Config
    name: str
    """Of the file, without its suffix."""
    given: frozenset[str]
    """The dotted keys set by `--set`."""
    text: str
    """The whole config as YAML; it loads to an equal config."""
    recipe: Recipe | None = None
    """The recipe that `sparsity` names."""
    warnings: list[str] = field(default_factory=list[str])
    """Settings that have no effect, or another one than the author may expect."""
    trust: Trust = USER
    """Which of the code that it names may run: all of it in a config that the user names."""


def read_config(path: str | os.PathLike[str], sets: Sequence[str] = (), data: str | None = None) -> Loaded:
    """Load a config file, or raise one `GossamerError` with all of its problems.

    `sets` are overrides such as `trainer.max_epoch=3`, `data` is `tiny` or a folder of data. Relative paths in a config
    are relative to the working directory, those of `!include` to the file that contains it.
    """
    path = Path(path)
    problems = Problems()
    return _load(read_tree(path, problems), path.stem, sets, data, problems)


def config_of(settings: Mapping[str, Any], name: str, sets: Sequence[str] = (), data: str | None = None) -> Loaded:
    """The same for settings that are not in a file; `name` stands for the file."""
    return _load(Tree.of(settings, Location(name)), name, sets, data, Problems())


def _load(file: Tree, name: str, sets: Sequence[str], data: str | None, problems: Problems) -> Loaded:
    warnings = list[str]()
    overrides = read_overrides(sets, problems)
    tree = file
    if data is not None:
        early = [override for override in overrides if override.key[0] in ("task", "net")]
        tree = with_data(file, data, overridden(file, early), name, problems)
    for override in overrides:
        if len(override.key) == 3 and override.key[0] == "dataset" and override.key[2] == "type":
            tree = with_source_type(tree, override.key[1], override.value.content)
    unit = next((key for key in UNITS if tree.at("trainer", key) is not None), None)
    tree = without_missing_weights(overridden(tree, overrides), warnings)
    config = check(tree, problems)
    recipe = None if config is None else check_sparsity(config, tree, problems)
    problems.raise_if_any()
    assert config is not None  # otherwise there are problems
    given = frozenset(key for override in overrides for key in override.dotted_keys)
    warnings += [*_ineffective_settings(config), *_changed_unit(tree, given, unit)]
    return Loaded(config, name, given, config_text(config), recipe, warnings)


def config_text(config: Config) -> str:
    """A config as YAML, with the defaults that it uses."""
    lines = [line for name, value in _settings(config).items() for line in entry(name, value, 0, literal=False)]
    return "\n".join(lines) + "\n"


def _settings(part: Part) -> dict[str, object]:
    """The settings with a value; None means not given."""
    names = sorted(type(part).model_fields, key=lambda name: name != "type")
    fields = ((name, getattr(part, name)) for name in names)
    return {name: _plain(value) for name, value in fields if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, Part):
        return _settings(value)
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[object]", value)]
    return plain_data(value)


def _ineffective_settings(config: Config) -> list[str]:
    warnings: list[str] = []
    runner = config.runtime.runner.type
    if config.sparsity is not None and runner == "base":
        warnings.append("sparsity has no effect because runtime.runner.type is base; set it to sparse")
    if config.ema.enable and runner == "sparse":
        warnings.append("EMA is off in sparse training; remove 'ema'")
    return warnings


def _changed_unit(tree: Tree, given: frozenset[str], before: str | None) -> list[str]:
    """Warn if `--set` changes the unit of frequencies and lengths in the file."""
    trainer = tree.child("trainer")
    after = next((key for key in UNITS if f"trainer.{key}" in given), None)
    if trainer is None or after is None or before in (None, after):
        return []
    lengths = ("test_freq", "save_freq", "lr_scheduler.kwargs.T_max", "lr_scheduler.kwargs.milestones")
    kept = [key for key in lengths if f"trainer.{key}" not in given and trainer.at(*key.split(".")) is not None]
    if not kept:
        return []
    return [f"--set trainer.{after} counts {UNITS[after]}; these settings of the file now do too: {', '.join(kept)}"]
