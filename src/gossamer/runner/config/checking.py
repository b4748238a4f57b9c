"""Checks a tree against the schema and its `sparsity` by building it; every problem has its location."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from gossamer.errors import GossamerError, Problems, nearest
from gossamer.msbench import build_sparse_scheduler
from gossamer.recipe import Recipe, load
from gossamer.runner.config.schema import Config, Sparsity
from gossamer.runner.config.tree import Tree, at_reference
from gossamer.validation import problems_of

RUNNERS = ("base", "sparse")

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
    "runtime.special_bn_init": "remove it",
    "runtime.aligned": "remove it",
    "runtime.async_norm": "remove it",
    "to_kestrel": "remove it; saver.export writes safetensors and onnx",
    "quant": "remove it; quantization is part of a recipe: 'sparsity: {recipe: file.yaml}'",
    "flip": "remove it",
}
"""Settings of United Perception that are written differently here, by key (`*` is one step), and what to write.

The schema alone would only call them unknown. `net` is one of them only if it is a list.
"""


def check(tree: Tree, problems: Problems) -> Config | None:
    """The settings of a tree, or None if there are problems."""
    tree, removed = _without_foreign_settings(tree, problems)
    plain = tree.to_plain()
    try:
        config = Config.model_validate(plain)
    except ValidationError as error:
        for problem in problems_of(error, plain, Config, noun="key"):
            is_missing = tree.at(*problem.key) is None
            if problem.key not in removed and not (is_missing and problem.key[:-1] in removed):
                problems.add(problem, location=tree.locate(*problem.key))
        return None
    return None if problems else config


def _without_foreign_settings(tree: Tree, problems: Problems) -> tuple[Tree, set[tuple[str | int, ...]]]:
    """The tree without settings of United Perception, and the keys that miss something now."""
    incomplete: set[tuple[str | int, ...]] = set()
    for key in list(tree.key_paths()):
        name = ".".join(key)
        fix = next((fix for pattern, fix in UNITED_PERCEPTION.items() if _matches(name, pattern)), None)
        value = tree.at(*key)
        if fix is None or value is None or (name == "net" and not isinstance(value.content, list)):
            continue
        problems.add("a setting of United Perception", *key, location=value.location, fix=fix)
        tree = tree.without(*key)
        incomplete |= {key, key[:-1]}
    return tree, incomplete


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


def check_sparsity(config: Config, tree: Tree, problems: Problems) -> Recipe | None:
    """Check `sparsity` and the runner's type; returns the recipe, if `sparsity` names one.

    An MSBench scheduler needs the number of iterations, which depends on the data. Here it is built with an example.
    """
    key, kind = ("runtime", "runner", "type"), config.runtime.runner.type
    if kind not in RUNNERS and ":" not in kind:
        fix = f"choose one of {', '.join(RUNNERS)}, or package.module:Class of your own"
        problems.add(f"unknown type '{kind}'{nearest(kind, RUNNERS)}", *key, location=tree.locate(*key), fix=fix)
    if config.sparsity is None:
        if kind == "sparse":
            message = "sparse training needs 'sparsity': an MSBench config, or 'recipe: file.yaml'"
            problems.add(message, *key, location=tree.locate(*key))
        return None
    if config.sparsity.recipe is not None:
        try:
            return load(config.sparsity.recipe, variables=config.sparsity.recipe_variables or None)
        except GossamerError as error:
            location = tree.locate("sparsity", "recipe")
            problems.extend((at_reference(problem, location) for problem in error.problems), "sparsity", "recipe")
            return None
    try:
        build_sparse_scheduler(msbench_config(config.sparsity, _EXAMPLE_LENGTH, Path()))
    except GossamerError as error:
        for problem in error.problems:
            if ":" in config.net.type and problem.key[-1:] == ("type",):
                continue  # the module of the model is not imported yet and may register its own classes
            located = replace(problem, location=tree.locate("sparsity", *problem.key))
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
