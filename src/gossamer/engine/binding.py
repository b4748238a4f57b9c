"""A recipe held against a model: which modifier acts on what, and what stands in its way.

Nothing is touched here; a run starts from what is found.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from torch import nn

from gossamer.engine.attachment import Attachment, Shared, logger
from gossamer.engine.sampling import Sampler
from gossamer.errors import GossamerError, ModifierError, Problem
from gossamer.model import left_dense, prunable, unwrap
from gossamer.modifiers import Modifier
from gossamer.modifiers.pruning import EXCLUDED
from gossamer.recipe import Recipe


@dataclass(frozen=True)
class Binding:
    """What one modifier comes to on one model."""

    modifier: Modifier
    targets: list[str]
    skipped: dict[str, str]
    problems: tuple[Problem, ...]


def bindings(recipe: Recipe, module: nn.Module) -> list[Binding]:
    """Hold every modifier against a model without touching it; problems are collected, not raised."""
    sampler: Sampler = lambda _: ()  # noqa: E731  (never called: nothing starts)
    shared = Shared(module, unwrap(module), None, 1.0, grad_sampler=sampler)
    found: list[Binding] = []
    for attachment in attachments(recipe, shared):
        problems = () if attachment.modifier.unavailable else bind(recipe, attachment)
        found.append(Binding(attachment.modifier, list(attachment.bound), dict(attachment.skipped), problems))
    return found


def attachments(recipe: Recipe, shared: Shared) -> list[Attachment]:
    """One per modifier, keyed by class name and number within the class."""
    seen: Counter[str] = Counter()
    result: list[Attachment] = []
    for index, modifier in enumerate(recipe.modifiers):
        result.append(Attachment(index, f"{modifier.name}.{seen[modifier.name]}", modifier, shared))
        seen[modifier.name] += 1
    shared.attachments = result
    return result


def bind(recipe: Recipe, attachment: Attachment) -> tuple[Problem, ...]:
    """Find the modifier's parameters; returns what is wrong, with its location in the recipe."""
    modifier = attachment.modifier
    if modifier.unavailable is not None:
        return (
            Problem(f"cannot run yet: {modifier.unavailable}", (modifier.name,), recipe.location(attachment.index)),
        )
    try:
        attachment.bound = modifier.bind(attachment)
    except ModifierError as error:
        return located(recipe, attachment, error).problems
    weights = {*prunable(attachment.module), *left_dense(attachment.module)}
    skipped: dict[tuple[int, str], list[str]] = {}
    for name, reason in attachment.skipped.items():
        level = logging.WARNING if name in weights and reason != EXCLUDED else logging.INFO
        skipped.setdefault((level, reason), []).append(f"'{name}'")
    for (level, reason), names in skipped.items():
        logger.log(level, "%s leaves %s alone: %s", modifier.name, ", ".join(names), reason)
    return ()


def located(recipe: Recipe, attachment: Attachment, error: ModifierError) -> GossamerError:
    """The error with the modifier's name, and the file and line of the field at fault."""
    return GossamerError(
        problem.within(attachment.modifier.name, location=recipe.location(attachment.index, *problem.key))
        for problem in error.problems
    )
