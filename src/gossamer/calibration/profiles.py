"""How the layers of a model share a sparsity: by outliers of their scores, or by their spectra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gossamer.calibration.blocks import by_block
from gossamer.calibration.lockstep import removed
from gossamer.calibration.sites import LinearSite, site_of
from gossamer.errors import ModifierError
from gossamer.model import get_parameter
from gossamer.model.example_inputs import Arguments
from gossamer.modifiers.oneshot import OneShotPruningModifier
from gossamer.sparse import Unstructured, heavy_tailed, least_cost, outlier_weighted, tail_exponent
from gossamer.sparse.reconstruction import Moments, wanda_mask, wanda_scores

STEP = 0.1
"""`measured`: how far from the goal the costs of a block are measured, and how far its sparsity may lie."""
_TOKENS, _IMAGES = 1024, 256
"""`measured`: token ids, or other samples, on which outputs are compared."""
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
        found = _measured(module, groups, sizes, goal, batches, run)
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
        scores = [
            wanda_scores(matrix, known.norms)
            for name in names
            for matrix, known in zip(site_of(module, name).matrices(), norms.get(name, []), strict=False)
        ]
        total, size = sum(float(part.sum()) for part in scores), sum(part.numel() for part in scores)
        count = sum(int((part > multiple * total / size).count_nonzero()) for part in scores)
        shares[group] = count / max(size, 1)
    return shares


def _measured(
    module: nn.Module,
    groups: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    goal: float,
    batches: Sequence[Arguments],
    run: Callable[[nn.Module, Arguments], None],
) -> dict[str, float]:
    """The sparsities with the least divergence of the pruned model's outputs from the dense model's.

    All blocks are pruned by Wanda to the goal. One block after the other is then denser and sparser by `STEP`, while
    the outputs on a few samples are compared with those of the dense model (Kullback-Leibler). Costs of blocks add up
    well enough near the goal, where they are measured.
    """
    names = [name for inside in groups.values() for name in inside]
    norms = observed_norms(module, names, batches, run)
    samples = _few(batches)
    levels = {name: sorted({max(goal - STEP, 0.0), goal, min(goal + STEP, 1.0)}) for name in groups}
    dense = {name: get_parameter(module, name).detach().clone() for name in names}

    def prune(group: str, share: float) -> None:
        for name in groups[group]:
            get_parameter(module, name).copy_(dense[name])
            site = site_of(module, name)
            known = norms.get(name)
            pruned = [
                matrix * wanda_mask(
                    matrix.abs() if known is None else wanda_scores(matrix, known[index].norms), Unstructured(), share
                )
                for index, matrix in enumerate(site.matrices())
            ]  # fmt: skip
            site.write(pruned)

    with torch.no_grad():
        targets = [_logits(module, batch).log_softmax(-1) for batch in samples]
        try:
            for group in groups:
                prune(group, goal)
            level = _divergence(module, samples, targets)
            costs: dict[str, dict[float, float]] = {}
            for group in groups:
                costs[group] = {goal: level}
                for share in levels[group]:
                    if share != goal:
                        prune(group, share)
                        costs[group][share] = _divergence(module, samples, targets)
                prune(group, goal)
        finally:
            for name, value in dense.items():
                get_parameter(module, name).copy_(value)
    return least_cost(costs, sizes, goal)


def _few(batches: Sequence[Arguments]) -> list[Arguments]:
    """The first samples of the data, as many as have `_NUMBERS` token ids or `_IMAGES` of other samples."""
    found: list[Arguments] = []
    left = 0
    for number, batch in enumerate(batches):
        first = next(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
        per_sample = 1 if first.is_floating_point() else max(first[0].numel(), 1)
        if not number:
            left = max((_IMAGES if first.is_floating_point() else _TOKENS) // per_sample, 1)
        count = min(left, len(first))
        found.append(pytree.tree_map_only(Tensor, lambda part: part[:count], batch))  # noqa: B023
        left -= count
        if left <= 0:
            break
    return found


def _logits(module: nn.Module, batch: Arguments) -> Tensor:
    args, kwargs = batch
    output = module(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    logits = getattr(output, "logits", tensors[0] if tensors else None)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise ModifierError("measured needs a model whose first output is logits", "sparsity_profile")
    return logits.float()


def _divergence(module: nn.Module, batches: Sequence[Arguments], targets: Sequence[Tensor]) -> float:
    """The mean Kullback-Leibler divergence of the model's outputs from `targets`, log-probabilities."""
    total, count = 0.0, 0
    for batch, target in zip(batches, targets, strict=True):
        found = _logits(module, batch).log_softmax(-1)
        total += float(functional.kl_div(found, target, reduction="sum", log_target=True))
        count += target[..., 0].numel()
    return total / max(count, 1)


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
