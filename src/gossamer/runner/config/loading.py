"""Loads configs: the file with its includes, then `--data`, then `--set`, checked against the schema.

`sparsity` is checked by building it; every problem has its location. Loads no model and no data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from gossamer.errors import GossamerError, Key, Location, Problems, nearest
from gossamer.msbench import build_sparse_scheduler
from gossamer.recipe import Recipe, load
from gossamer.recipe.writer import entry, plain_data
from gossamer.runner.config.overlays import remove_missing_weights, use_data, use_source_type
from gossamer.runner.config.schema import Config, Sparsity
from gossamer.runner.config.settings import (
    Settings,
    apply_overrides,
    at_reference,
    key_paths,
    read_overrides,
    read_settings,
)
from gossamer.runner.trust import USER, Trust
from gossamer.validation import problems_of

RUNNERS = ("base", "sparse")


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
    return _load(read_settings(path, problems), path.stem, sets, data, problems)


def config_of(settings: Mapping[str, Any], name: str, sets: Sequence[str] = (), data: str | None = None) -> Loaded:
    """The same for settings that are not in a file; `name` stands for the file."""
    return _load(Settings(settings, {(): Location(name)}), name, sets, data, Problems())


def _load(settings: Settings, name: str, sets: Sequence[str], data: str | None, problems: Problems) -> Loaded:
    warnings = list[str]()
    overrides = read_overrides(sets, problems)
    if data is not None:
        early = settings.copy()
        apply_overrides(early, [override for override in overrides if override.key[0] in ("task", "net")])
        use_data(settings, data, early, name, problems)
    for override in overrides:
        if len(override.key) == 3 and override.key[0] == "dataset" and override.key[2] == "type":
            use_source_type(settings, override.key[1], override.value)
    in_epochs = settings.get("trainer", "max_epoch") is not None
    apply_overrides(settings, overrides)
    remove_missing_weights(settings, warnings)
    config = _check(settings, problems)
    recipe = None if config is None else check_sparsity(config, settings, problems)
    problems.raise_if_any()
    assert config is not None  # otherwise there are problems
    given = frozenset(key for override in overrides for key in override.dotted_keys())
    warnings += _ineffective_settings(config)
    if in_epochs and config.trainer.max_iter is not None:
        lengths = ("test_freq", "save_freq", "lr_scheduler.kwargs.T_max", "lr_scheduler.kwargs.milestones")
        kept = [key for key in lengths if f"trainer.{key}" not in given and settings.get("trainer", *key.split("."))]
        message = "--set trainer.max_iter counts iterations; these settings of the file now do too: "
        warnings += [message + ", ".join(kept)] if kept else []
    return Loaded(config, name, given, config_text(config), recipe, warnings)


def config_text(config: Config) -> str:
    """A config as YAML, with the defaults that it uses."""
    settings = config.model_dump(exclude_none=True)
    lines = [line for name, value in settings.items() for line in entry(name, plain_data(value), 0, literal=False)]
    return "\n".join(lines) + "\n"


def _ineffective_settings(config: Config) -> list[str]:
    warnings: list[str] = []
    runner = config.runtime.runner.type
    if config.sparsity is not None and runner == "base":
        warnings.append("sparsity has no effect because runtime.runner.type is base; set it to sparse")
    if config.ema.enable and runner == "sparse":
        warnings.append("EMA is off in sparse training; remove 'ema'")
    return warnings


# Checks against the schema

UNITED_PERCEPTION = {
    "net": "name one model: 'net: {type: resnet18}'; a backbone, neck and heads come together under one name",
    "dataset.*.dataset": "name the data here: 'type: coco' with 'path' and 'images', 'type: image_list', …",
    "dataset.dataloader": "set 'batch_size' and 'num_workers' under dataset.train and dataset.test",
    "dataset.*.batch_sampler": "set 'batch_size' here; its kwargs are not needed",
    "dataset.*.sampler": "remove it: training is shuffled and split between ranks, tests run in order",
    "trainer.optimizer.register_type": "remove it; 'type' names a class of torch.optim",
    "trainer.lr_scheduler.warmup_register_type": "remove it; 'warmup_type' is linear, exp or constant",
    "trainer.max_epochs": "write 'max_epoch'",
    "trainer.max_iters": "write 'max_iter'",
    "saver.results_dir": "remove it; results go into the run folder, saver.save_dir",
    "saver.save_cfg": "remove it; the resolved config is always saved in the run folder",
    "ema.ema_type": "remove it; there is one kind, with 'enable' and 'decay'",
    "ema.kwargs": "write 'decay' directly below 'ema'",
    "runtime.task_names": "write 'task: classification' or 'task: detection' at the top level, or remove it",
    "runtime.random_seed": "write 'seed'",
    "to_kestrel": "remove it; saver.export writes safetensors and onnx",
    "quant": "remove it; quantization is part of a recipe: 'sparsity: {recipe: file.yaml}'",
}
"""Settings of United Perception that are written differently here, by key (`*` is one step), and what to write.

The schema alone would only call them unknown. `net` is one of them only if it is a list.
"""


def _check(settings: Settings, problems: Problems) -> Config | None:
    """The config, or None if there are problems."""
    foreign: set[Key] = set()  # keys that are reported already, and those that miss something without them
    for key in list(key_paths(settings.values)):
        name = ".".join(key)
        fix = next((fix for pattern, fix in UNITED_PERCEPTION.items() if _matches(name, pattern)), None)
        if fix is None or (name == "net" and not isinstance(settings.get("net"), list)):
            continue
        problems.add("a setting of United Perception", *key, location=settings.locate(*key), fix=fix)
        settings.remove(*key)
        foreign |= {key, key[:-1]}
    try:
        config = Config.model_validate(settings.values)
    except ValidationError as error:
        for problem in problems_of(error, settings.values, Config, noun="key"):
            is_missing = settings.get(*problem.key) is None
            if problem.key not in foreign and not (is_missing and problem.key[:-1] in foreign):
                problems.add(problem, location=settings.locate(*problem.key))
        return None
    return None if problems else config


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


# Sparsity

_LENGTHS = {
    "AmbaLevelPruneScheduler": "total_iters",
    "ADMMScheduler": "total_iters",
    "ProbMaskPruneScheduler": "total_iterations",
    "STRScheduler": "total_iterations",
}
"""Arguments of MSBench's schedulers that are the number of iterations; the runner sets them if they are missing."""
FOLDERS = {"save_dir": "levels", "output_dir": "analysis"}
"""Arguments of MSBench's schedulers that are output folders, and their default names in the run folder."""
_EXAMPLE_LENGTH = 10**6


def check_sparsity(config: Config, settings: Settings, problems: Problems) -> Recipe | None:
    """Check `sparsity` and the runner's type; returns the recipe, if `sparsity` names one.

    An MSBench scheduler needs the number of iterations, which depends on the data. Here it is built with an example.
    """
    key, kind = ("runtime", "runner", "type"), config.runtime.runner.type
    if kind not in RUNNERS and ":" not in kind:
        fix = f"choose one of {', '.join(RUNNERS)}, or package.module:Class of your own"
        problems.add(f"unknown type '{kind}'{nearest(kind, RUNNERS)}", *key, location=settings.locate(*key), fix=fix)
    if config.sparsity is None:
        if kind == "sparse":
            message = "sparse training needs 'sparsity': an MSBench config, or 'recipe: file.yaml'"
            problems.add(message, *key, location=settings.locate(*key))
        return None
    if config.sparsity.recipe is not None:
        try:
            return load(config.sparsity.recipe, variables=config.sparsity.recipe_variables or None)
        except GossamerError as error:
            location = settings.locate("sparsity", "recipe")
            problems.extend((at_reference(problem, location) for problem in error.problems), "sparsity", "recipe")
            return None
    try:
        build_sparse_scheduler(msbench_config(config.sparsity, _EXAMPLE_LENGTH, Path()))
    except GossamerError as error:
        for problem in error.problems:
            if ":" in config.net.type and problem.key[-1:] == ("type",):
                continue  # the module of the model is not imported yet and may register its own classes
            located = replace(problem, location=settings.locate("sparsity", *problem.key))
            problems.add(located, "sparsity")
    return None


def msbench_config(sparsity: Sparsity, length: int, folder: Path) -> dict[str, Any]:
    """The MSBench config in `sparsity`, with defaults for a training of `length` iterations in a run folder."""
    given = sparsity.model_dump(exclude_none=True, exclude={"recipe", "recipe_variables"})
    scheduler: dict[str, Any] = given["scheduler"]
    kind = str(scheduler.get("type"))
    kwargs: Any = scheduler.get("kwargs") or {}
    defaults: dict[str, Any] = {_LENGTHS[kind]: length} if kind in _LENGTHS else {}
    if kind == "ProbMaskPruneScheduler":
        defaults |= {"warmup_iteration_stamps": length // 10, "finetune_iteration_stamps": length * 8 // 10}
    if kind == "AmbaLevelPruneScheduler":
        defaults |= {argument: str(folder / name) for argument, name in FOLDERS.items()}
    if isinstance(kwargs, dict):  # otherwise MSBench reports what is wrong
        given["scheduler"] = {**scheduler, "kwargs": {**defaults, **cast(dict[str, Any], kwargs)}}
    return given
