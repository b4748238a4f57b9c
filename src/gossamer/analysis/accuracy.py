"""How well a classifier does on labelled batches: its loss and its accuracy.

Batches are read once and checked, so that bad labels are one sentence and not
a trace. Nothing here knows of sparsity, nor why the model is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.analysis.sensitivity import tensors_in
from gossamer.errors import GossamerError
from gossamer.model import unwrap
from gossamer.model.inputs import batch_arguments
from gossamer.model.tracing.undisturbed import undisturbed


@dataclass(frozen=True)
class Score:
    """What a classifier comes to on some samples."""

    loss: float
    """The mean cross entropy, in nats; infinite when numbers overflow."""
    accuracy: float
    """The share of samples whose label has the highest score, from 0 to 1."""


@dataclass(frozen=True)
class Labelled:
    """One batch: arguments of a call, and what is right."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor


def classifier_score(model: nn.Module, batches: Iterable[Any]) -> Score:
    """Loss and accuracy over all batches, in evaluation mode; the model is left as it was.

    `batches` yields pairs (inputs, labels): inputs are a tensor, a tuple of arguments or a dict of keyword arguments,
    labels are whole numbers, one for each sample. Raises `GossamerError` when a batch is no such pair, or when the
    model's outputs are no scores of classes.

    >>> model = nn.Identity()
    >>> classifier_score(model, [(torch.eye(2) * 50, torch.tensor([0, 0]))])
    Score(loss=25.0, accuracy=0.5)
    """
    module = unwrap(model)
    known = labelled(module, batches)
    with undisturbed(module), torch.no_grad():
        module.eval()
        return score_now(module, known)


def labelled(module: nn.Module, batches: Iterable[Any], samples: int | None = None) -> list[Labelled]:
    """The batches, on the model's device, until there are `samples` samples; all of them unless given."""
    found: list[Labelled] = []
    seen = 0
    for batch in batches:
        pair = cast(Sequence[Any], batch) if isinstance(batch, list | tuple) else ()
        if len(pair) != 2:
            raise GossamerError(
                f"data: expected batches that are pairs (inputs, labels), found {_kind(batch)} in batch "
                f"{len(found) + 1}; without labels, use sensitivity(), which compares outputs"
            )
        args, kwargs = batch_arguments(pair, module)
        found.append(Labelled(args, kwargs, _labels(pair[1], module, len(found) + 1)))
        seen += found[-1].labels.numel()
        if samples is not None and seen >= samples:
            break
    if not seen:
        raise GossamerError("data: expected at least one labelled sample, found none; give a data loader with some")
    return found


def score_now(module: nn.Module, batches: Sequence[Labelled]) -> Score:
    """As `classifier_score`, of a model as it stands: its mode and what it leaves behind are the caller's."""
    loss, hits, count = 0.0, 0, 0
    for batch in batches:
        scores = class_scores(module, batch)
        loss += float(functional.cross_entropy(scores.double(), batch.labels, reduction="sum"))
        hits += int((scores.argmax(dim=1) == batch.labels).sum())
        count += batch.labels.numel()
    mean = loss / count
    return Score(mean if math.isfinite(mean) else math.inf, hits / count)


def class_scores(module: nn.Module, batch: Labelled) -> Tensor:
    """The scores `(samples, classes, …)` that the model gives a batch."""
    wanted = batch.labels.shape
    try:
        outputs = module(*batch.args, **batch.kwargs)
    except Exception as error:  # any model, any reason
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise GossamerError(f"data: the model does not run on a batch of it ({told}); check the inputs") from error
    for scores in tensors_in(outputs):
        if scores.is_floating_point() and scores.dim() > 1 and (scores.shape[:1] + scores.shape[2:]) == wanted:
            highest = int(batch.labels.max())
            if highest >= scores.shape[1] or int(batch.labels.min()) < 0:
                raise GossamerError(
                    f"data: a label is {highest if highest >= scores.shape[1] else int(batch.labels.min())}, but the "
                    f"model tells {scores.shape[1]} classes apart, 0 to {scores.shape[1] - 1}; check the labels"
                )
            return scores
    raise GossamerError(
        f"data: the model returns no scores of classes for labels of shape {tuple(wanted)}; "
        "only classifiers have an accuracy, for others use sensitivity(), which compares outputs"
    )


def _labels(labels: Any, module: nn.Module, number: int) -> Tensor:
    """Labels as whole numbers on the model's device."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex() or not labels.dim():
        kind = f"a tensor of {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise GossamerError(
            f"data: expected labels that are a tensor of whole numbers, one for each sample, found {kind} in batch "
            f"{number}; without such labels, use sensitivity(), which compares outputs"
        )
    like = next(iter(module.parameters()), None)
    return labels.long() if like is None else labels.long().to(like.device)


def _kind(batch: Any) -> str:
    pieces = f" of {len(cast(Sequence[Any], batch))}" if isinstance(batch, list | tuple) else ""
    return f"{type(cast(Any, batch)).__name__}{pieces}"
