"""Testing a model on data, in evaluation mode and without gradients."""

from __future__ import annotations

import logging

import torch
from torch import nn

from gossamer.runner.data import Batches
from gossamer.runner.display import Display
from gossamer.runner.processes import gathered
from gossamer.runner.tasks import Task

logger = logging.getLogger("gossamer")


def tested(
    model: nn.Module,
    task: Task,
    batches: Batches,
    device: torch.device,
    display: Display,
    told: set[str],
    channels_last: bool,
) -> dict[str, float]:
    """The task's numbers. The model stays in evaluation mode; it must not be wrapped: ranks may differ in batches."""
    evaluator = task.evaluator()
    model.eval()
    skipped: list[str] = []
    notes: list[str] = []
    with torch.no_grad(), display.testing(batches.batches_per_epoch) as advance:
        for batch in batches.epoch(0):
            skipped += batch.skipped
            notes += batch.notes
            if len(batch):  # else none of its images can be read
                evaluator.update(model, batch.to(device, channels_last=channels_last))
            advance()
        metrics = evaluator.compute()
    tell_left_out(skipped, notes, "dataset.test", told)
    return metrics


def tell_left_out(skipped: list[str], notes: list[str], place: str, told: set[str]) -> None:
    """Say once how many images were not used, or used though something is wrong; all processes call this.

    `told` holds what was said before.
    """
    skipped, notes = ([word for own in gathered(words) for word in own] for words in (skipped, notes))
    for sentences, what in ((skipped, "left out"), (notes, "used as they are")):
        new = [sentence for sentence in dict.fromkeys(sentences) if f"{place}: {sentence}" not in told]
        told.update(f"{place}: {sentence}" for sentence in new)
        if new:
            images = "1 image is" if len(new) == 1 else f"{len(new)} images are"
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            logger.warning("%s: %s %s: %s%s", place, images, what, new[0], more)
