"""A config, or the arguments of ASP, as a recipe that does the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from gossamer.asp import ASP
from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler
from gossamer.msbench.config import arguments
from gossamer.msbench.levels import AmbaLevelPruneScheduler
from gossamer.msbench.methods import ADMMScheduler, AmpereScheduler, layer_type
from gossamer.quantities import MAX_STEPS_PER_EPOCH, MIN_STEPS_PER_EPOCH, CountOrZero
from gossamer.recipe import Recipe

ASP_KEYS = (
    "mask_calculator",
    "verbosity",
    "whitelist",
    "allowed_layer_names",
    "disallowed_layer_names",
    "allow_recompute_mask",
    "allow_permutation",
)
LEFT_OUT = {
    "save_dir": "checkpoints per level are the training loop's in a recipe",
    "do_sparse_analysis": "the analysis is not part of a recipe; scheduler.sparse_analysis(model) makes it",
    "init_lr": "pass modify(…, lr_scheduler=…) the scheduler at its beginning",
}


def to_recipe(
    given: Mapping[str, Any], steps_per_epoch: float = 1.0, model: nn.Module | None = None
) -> tuple[Recipe, list[str]]:
    """The recipe, and a sentence on each setting that a recipe does not carry.

    Times become epochs of `steps_per_epoch` iterations. What depends on the shapes of layers (2:4) needs the model.
    """
    if not MIN_STEPS_PER_EPOCH <= steps_per_epoch <= MAX_STEPS_PER_EPOCH:
        wanted = f"a number above 0 and at most {MAX_STEPS_PER_EPOCH:g}"
        raise GossamerError(f"steps_per_epoch: expected {wanted}, found {steps_per_epoch:g}")
    asp = given.get("asp", given if given and set(given) <= set(ASP_KEYS) else None)
    if asp is not None:
        return _of_asp(asp, model), []
    scheduler = build_sparse_scheduler(given)
    if isinstance(scheduler, AmpereScheduler):
        scheduler.prepare_sparse_model(_needed(model))
    if isinstance(scheduler, ADMMScheduler) and scheduler.lengths[0] is None:
        raise GossamerError(
            "sparsity_config: ADMMScheduler learns its length from before_run; "
            "write total_iters and iters_per_epoch into its kwargs"
        )
    kwargs = scheduler.config.kwargs["scheduler"]
    told = [f"{key}: {reason}" for key, reason in LEFT_OUT.items() if kwargs.get(key)]
    if scheduler.learns:
        told.append("the recipe trains what is learned itself: set st_decay (STR) or score_lr (ProbMask) there")
    if getattr(scheduler.generator, "tau", 1.0) != 1.0:
        told.append("tau: the temperature of a recipe begins at 1")
    if isinstance(scheduler, AmbaLevelPruneScheduler):
        told.append("set_lr_scheduler: pass modify(…, lr_scheduler=…), and levels start it over as before")
    return scheduler.recipe(steps_per_epoch), told


def _of_asp(given: Any, model: nn.Module | None) -> Recipe:
    if not isinstance(given, Mapping):
        raise GossamerError(f"asp: expected the arguments of init_model_for_pruning, found {given!r}")
    problems: list[str] = []
    entries = dict(cast(Mapping[str, Any], given))
    holder = type("asp", (), {"__init__": _asp_arguments})
    checked = arguments(holder, entries, "asp", problems)
    if problems:
        raise GossamerError("\n".join(problems))
    if "whitelist" in checked:
        checked["whitelist"] = [layer_type(entry) for entry in checked["whitelist"]]
    network = _needed(model)
    ASP.init_model_for_pruning(network, **checked)
    try:
        return ASP.recipe(network)
    finally:
        ASP.forget(network)


def _asp_arguments(
    *,
    mask_calculator: str = "m4n2_1d",
    verbosity: CountOrZero = 3,
    whitelist: list[Any] | None = None,
    allowed_layer_names: list[str] | None = None,
    disallowed_layer_names: list[str] | None = None,
    allow_recompute_mask: bool = False,
    allow_permutation: bool = True,
) -> None: ...


def _needed(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise GossamerError("which layers take 2:4 depends on their shapes; name the model (--model)")
    return model
