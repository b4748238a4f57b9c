"""Whether what a config says of sparsity is right, asked of those who will read it: MSBench configs, recipes.

Knows how to find the line of what they complain about; the rules are theirs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError, Key, RecipeError, nearest
from gossamer.msbench import build_sparse_scheduler
from gossamer.recipe import load
from gossamer.runner.config.schema import Config, Sparsity
from gossamer.runner.config.tree import Place, Problems, Tree

_LENGTHS = {
    "AmbaLevelPruneScheduler": "total_iters",
    "ADMMScheduler": "total_iters",
    "ProbMaskPruneScheduler": "total_iterations",
    "STRScheduler": "total_iterations",
}
"""Arguments of MSBench's schedulers that are the length of the training, filled in where they are missing."""
FOLDERS = {"save_dir": "levels", "output_dir": "analysis"}
"""Arguments of MSBench's schedulers that are folders to write to, and which of the run folder's they are by default."""
_LONG = 10**6
"""A length for a config that is only checked."""

RUNNERS = ("base", "sparse")


def check_sparsity(config: Config, tree: Tree, problems: Problems) -> None:
    """Add what is wrong with the runner's type and with `sparsity` to `problems`."""
    word = config.runtime.runner.type
    if word not in RUNNERS and ":" not in word:
        asked = tree.at("runtime", "runner", "type") or tree
        known = f"there are {', '.join(RUNNERS)}, or package.module:Class of your own"
        problems.add(asked.place, f"runtime.runner.type: unknown type '{word}'{nearest(word, RUNNERS)}; {known}")
    if config.sparsity is None:
        if word == "sparse":
            asked = tree.at("runtime", "runner", "type") or tree
            told = "runtime.runner.type: sparse training needs 'sparsity', an MSBench config or 'recipe: file.yaml'"
            problems.add(asked.place, told)
        return
    told_of = tree.child("sparsity") or tree
    try:
        if config.sparsity.recipe is not None:
            load(config.sparsity.recipe, variables=config.sparsity.recipe_variables or None)
        else:
            build_sparse_scheduler(msbench_config(config.sparsity, _LONG, Path()))
    except RecipeError as error:
        at = told_of.child("recipe") or told_of
        for problem in error.problems:
            problems.add(at.place, f"sparsity.recipe: {problem}")
    except GossamerError as error:
        has_own_module = ":" in config.net.type
        for problem in error.problems:
            if has_own_module and problem.key[-1:] == ("type",):
                continue  # the module of the model, which is not imported yet, may register classes of its own
            problems.add(_place(problem.key, told_of), str(replace(problem, location=None).within("sparsity")))


def msbench_config(sparsity: Sparsity, length: int, folder: Path) -> dict[str, Any]:
    """The MSBench config in `sparsity`, with what follows from a training of `length` iterations in a run folder."""
    given = sparsity.model_dump(exclude_none=True, exclude={"recipe", "recipe_variables"})
    scheduler: dict[str, Any] = given["scheduler"]
    kind = str(scheduler.get("type"))
    kwargs: Any = scheduler.get("kwargs") or {}
    known: dict[str, Any] = {_LENGTHS[kind]: length} if kind in _LENGTHS else {}
    if kind == "ProbMaskPruneScheduler":
        known |= {"warmup_iteration_stamps": length // 10, "finetune_iteration_stamps": length * 8 // 10}
    if kind == "AmbaLevelPruneScheduler":
        known |= {argument: str(folder / name) for argument, name in FOLDERS.items()}
    if isinstance(kwargs, dict):  # else whoever reads it says what is wrong
        given["scheduler"] = {**scheduler, "kwargs": {**known, **cast(dict[str, Any], kwargs)}}
    return given


def _place(key: Key, tree: Tree) -> Place:
    """Where the value of a key, or the closest one around it, is written."""
    for step in key:
        tree = tree.child(step) or tree
    return tree.told_at
