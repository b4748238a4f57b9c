"""How the layers of a model share a sparsity: by outliers of their scores, or by their spectra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from gossamer.calibration.blocks import by_block
from gossamer.calibration.lockstep import removed
from gossamer.calibration.sites import LinearSite, site_of
from gossamer.errors import ModifierError
from gossamer.model import get_parameter
from gossamer.model.example_inputs import Arguments
from gossamer.modifiers.oneshot import OneShotPruningModifier
from gossamer.sparse import heavy_tailed, outlier_weighted, tail_exponent
from gossamer.sparse.reconstruction import Moments, wanda_scores

OUTLIER = 5.0
"""OWL's default: an outlier is this many times the mean."""


def shares_of(
    modifier: OneShotPruningModifier,
    module: nn.Module,
    shares: Mapping[str, float],
    batches: Sequence[Arguments],
    run: Callable[[nn.Module, Arguments], None],
) -> dict[str, float]:
    """The sparsity of each weight by the modifier's profile; all weights of a block have the same."""
    if modifier.sparsity_profile in (None, "uniform") or not shares:
        return dict(shares)
    goal = next(iter(shares.values()))
    groups = by_block(module, shares)
    sizes = {group: sum(get_parameter(module, name).numel() for name in names) for group, names in groups.items()}
    if modifier.sparsity_profile == "alpha":
        exponents = {
            group: sum(tail_exponent(get_parameter(module, name)) for name in names) / len(names)
            for group, names in groups.items()
        }
        spread = 0.3 if modifier.owl_lmbda is None else modifier.owl_lmbda
        found = heavy_tailed(exponents, sizes, goal, spread)
    elif modifier.sparsity_profile == "owl":
        outliers = _outliers(module, groups, batches, run, modifier.owl_m or OUTLIER)
        found = outlier_weighted(outliers, sizes, goal, 0.08 if modifier.owl_lmbda is None else modifier.owl_lmbda)
    else:
        raise ModifierError("measured is not supported yet", "sparsity_profile")
    return {name: found[group] for group, names in groups.items() for name in names}


def _outliers(
    module: nn.Module,
    groups: Mapping[str, Sequence[str]],
    batches: Sequence[Arguments],
    run: Callable[[nn.Module, Arguments], None],
    multiple: float,
) -> dict[str, float]:
    """By group: the share of Wanda's scores that exceed a multiple of their mean, in the dense model."""
    norms = observed_norms(module, [name for names in groups.values() for name in names], batches, run)
    shares: dict[str, float] = {}
    for group, names in groups.items():
        count, total, size = 0, 0.0, 0
        scores = [
            wanda_scores(matrix, known.norms)
            for name in names
            for matrix, known in zip(site_of(module, name).matrices(), norms.get(name, []), strict=False)
        ]
        total, size = sum(float(part.sum()) for part in scores), sum(part.numel() for part in scores)
        count = sum(int((part > multiple * total / size).count_nonzero()) for part in scores)
        shares[group] = count / max(size, 1)
    return shares


def observed_norms(
    module: nn.Module,
    names: Sequence[str],
    batches: Sequence[Arguments],
    run: Callable[[nn.Module, Arguments], None],
) -> dict[str, list[Moments]]:
    """By weight, for each matrix of it: the norms of its inputs in the model as it is."""
    found: dict[str, list[Moments]] = {}

    def watch(name: str, hooks: ExitStack) -> None:
        site = site_of(module, name)
        if not isinstance(site, LinearSite) and not hasattr(site.layer, "kernel_size"):
            return  # an attention layer, whose inputs are those of its neighbours

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            if name not in found:
                found[name] = [Moments(columns, products=False, device=args[0].device) for columns in site.columns]
            for known, chunks in zip(found[name], site.samples(args[0]), strict=True):
                for chunk in chunks:
                    known.add(chunk)

        hooks.enter_context(removed(site.layer.register_forward_pre_hook(before)))

    with ExitStack() as hooks, torch.no_grad():
        for name in names:
            watch(name, hooks)
        for batch in batches:
            run(module, batch)
    return found
