"""Convert an MSBench config or the arguments of ASP to a recipe, for `gossamer convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from gossamer.asp import ASP
from gossamer.errors import GossamerError, Problem, Problems, within
from gossamer.msbench import build_sparse_scheduler
from gossamer.msbench.config import parse_kwargs
from gossamer.msbench.schedulers import AmbaLevelPruneScheduler, layer_type
from gossamer.quantities import MAX_STEPS_PER_EPOCH, MIN_STEPS_PER_EPOCH, CountOrZero
from gossamer.recipe import Recipe

_NOT_IN_RECIPES = {
    "save_dir": "the training loop saves checkpoints when a recipe is used",
    "do_sparse_analysis": "the analysis is not part of a recipe; use scheduler.sparse_analysis(model)",
    "init_lr": "pass modify(…, lr_scheduler=…) the scheduler before its first step",
}
"""Arguments of schedulers that a recipe does not have."""


class _ASPArguments:
    """The arguments of `ASP.init_model_for_pruning` that a file may have.

    Never instantiated: `parse_kwargs` reads the signature.
    """

    def __init__(
        self,
        *,
        mask_calculator: str = "m4n2_1d",
        verbosity: CountOrZero = 3,
        whitelist: list[Any] | None = None,
        allowed_layer_names: list[str] | None = None,
        disallowed_layer_names: list[str] | None = None,
        allow_recompute_mask: bool = False,
        allow_permutation: bool = True,
    ) -> None: ...


_ASP_KEYS = frozenset(_ASPArguments.__init__.__kwdefaults__ or {})


def to_recipe(
    given: Mapping[str, Any], steps_per_epoch: float = 1.0, model: nn.Module | None = None
) -> tuple[Recipe, list[str]]:
    """The recipe, and a message about each setting that a recipe does not have.

    Iterations become epochs of `steps_per_epoch` iterations. Recipes that depend on the shapes of layers (2:4) need
    the model.
    """
    if not MIN_STEPS_PER_EPOCH <= steps_per_epoch <= MAX_STEPS_PER_EPOCH:
        expected = f"a number above 0 and at most {MAX_STEPS_PER_EPOCH:g}"
        raise GossamerError(f"expected {expected}, found {steps_per_epoch:g}", "steps_per_epoch")
    asp = given.get("asp", given if given and set(given) <= _ASP_KEYS else None)
    if asp is not None:
        return _asp_recipe(asp, model), []
    scheduler = build_sparse_scheduler(given)
    if scheduler.needs_model:
        scheduler.prepare_sparse_model(_expect_model(model))
    kwargs = scheduler.config.kwargs["scheduler"]
    messages = [f"{key}: {reason}" for key, reason in _NOT_IN_RECIPES.items() if kwargs.get(key)]
    if scheduler.learns:
        messages.append(
            "a recipe trains thresholds and probabilities itself: set st_decay (STR) or score_lr (ProbMask)"
        )
    if getattr(scheduler.generator, "tau", 1.0) != 1.0:
        messages.append("tau: the temperature of a recipe starts at 1")
    if isinstance(scheduler, AmbaLevelPruneScheduler):
        messages.append("set_lr_scheduler: pass modify(…, lr_scheduler=…), and levels restart it as before")
    return scheduler.recipe(steps_per_epoch), messages


def _asp_recipe(given: object, model: nn.Module | None) -> Recipe:
    if not isinstance(given, Mapping):
        raise GossamerError(f"expected the arguments of init_model_for_pruning, found {given!r}", "asp")
    problems = Problems()
    arguments = parse_kwargs(_ASPArguments, cast(Mapping[str, Any], given), problems, "asp")
    problems.raise_if_any()
    if arguments.get("whitelist") is not None:
        with within("asp"):
            arguments["whitelist"] = [layer_type(entry) for entry in arguments["whitelist"]]
    network = _expect_model(model)
    ASP.init_model_for_pruning(network, **arguments)
    try:
        return ASP.recipe(network)
    finally:
        ASP.forget(network)


def _expect_model(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise GossamerError(Problem("2:4 depends on the shapes of the layers", fix="pass the model (--model)"))
    return model
