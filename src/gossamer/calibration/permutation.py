"""Reorder channels before N:M pruning, by the scores of the method, so that less is lost; outputs stay the same."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.calibration.profiles import observed_norms
from gossamer.calibration.sites import site_of
from gossamer.model import get_parameter
from gossamer.model.example_inputs import Arguments
from gossamer.model.parameters import get_tensor
from gossamer.model.permute import Permutation, find_permutation
from gossamer.modifiers.oneshot import LayerProblem, OneShotPruningModifier
from gossamer.sparse import NM

logger = logging.getLogger("gossamer")


def permute(
    module: nn.Module,
    modifier: OneShotPruningModifier,
    names: Sequence[str],
    batches: Sequence[Arguments],
    run: Callable[[nn.Module, Arguments], None],
    changing: Callable[[str, Tensor], None],
) -> Permutation:
    """Find and apply the order of channels with which the pattern keeps the highest squared scores.

    While the search reads the model, its weights hold the scores.
    """
    pattern = modifier.pattern
    assert isinstance(pattern, NM)
    norms = {} if modifier.statistics == "nothing" else observed_norms(module, names, batches, run)
    scores: dict[str, Tensor] = {}
    for name in names:
        site = site_of(module, name)
        known = norms.get(name)
        problems = [
            LayerProblem(name, matrix, None if known is None else known[index], pattern.sparsity)
            for index, matrix in enumerate(site.matrices())
        ]
        found = [modifier.scores(problem) if problem.moments else problem.weight.abs() for problem in problems]
        scores[name] = site.weight([score.square() for score in found])
    with _holding(module, scores):
        permutation = find_permutation(
            module, list(names), pattern.n, pattern.m, example_inputs=_example(module, batches)
        )
    if permutation.untraceable is not None:
        logger.warning("permute: the channels stay where they are: %s", permutation.untraceable)
    for name in permutation.moves:
        changing(name, get_tensor(module, name))
    permutation.apply(module)
    return permutation


@contextmanager
def _holding(module: nn.Module, values: Mapping[str, Tensor]) -> Generator[None]:
    """Parameters have other values inside."""
    kept = {name: get_parameter(module, name).data for name in values}
    try:
        for name, value in values.items():
            get_parameter(module, name).data = value.to(kept[name])
        yield
    finally:
        for name, value in kept.items():
            get_parameter(module, name).data = value


def _example(module: nn.Module, batches: Sequence[Arguments]) -> Any:
    """One sample of the data, as the search takes it."""
    if not batches:
        return None
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor[:1], batches[0])
    if not kwargs:
        return args
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
