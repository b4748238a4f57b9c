"""Loss and accuracy of a classifier on labelled batches, which are read once and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError, short_error
from gossamer.model import unwrap
from gossamer.model.tracing.tracer import batch_arguments, preserved


@dataclass(frozen=True)
class Score:
    """The result of a classifier on some samples."""

    loss: float
    """The mean cross entropy in nats; infinite if numbers overflow."""
    accuracy: float
    """Top-1 accuracy from 0 to 1."""


@dataclass(frozen=True)
class Labelled:
    """One batch: arguments of a call, and labels."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor


def classifier_score(model: nn.Module, batches: Iterable[Any]) -> Score:
    """Loss and accuracy over all batches, in evaluation mode; the model does not change.

    `batches` yields pairs (inputs, labels): inputs are a tensor, a tuple of arguments or a dict of keyword arguments,
    labels are integers, one for each sample. Raises `GossamerError` if a batch is not such a pair, or if the model does
    not return class scores.

    >>> model = nn.Identity()
    >>> classifier_score(model, [(torch.eye(2) * 50, torch.tensor([0, 0]))])
    Score(loss=25.0, accuracy=0.5)
    """
    module = unwrap(model)
    data = labelled(module, batches)
    with preserved(module), torch.no_grad():
        module.eval()
        return score_now(module, data)


def labelled(module: nn.Module, batches: Iterable[Any], samples: int | None = None) -> list[Labelled]:
    """Read batches onto the model's device until there are `samples` samples, by default all."""
    read: list[Labelled] = []
    seen = 0
    for batch in batches:
        if not is_labelled(batch):
            raise GossamerError(
                f"expected pairs of inputs and a tensor of integer labels, found another in batch {len(read) + 1}; "
                "without such labels, use sensitivity(), which compares outputs",
                "data",
            )
        args, kwargs = batch_arguments(batch, module)
        like = next(iter(module.parameters()), None)
        read.append(Labelled(args, kwargs, batch[1].long().to(None if like is None else like.device)))
        seen += read[-1].labels.numel()
        if samples is not None and seen >= samples:
            break
    if not seen:
        raise GossamerError("no labelled samples; give a data loader that yields some", "data")
    return read


def is_labelled(batch: Any) -> bool:
    """Whether a batch is a pair with a tensor of integers."""
    labels = cast(Sequence[Any], batch)[1] if isinstance(batch, list | tuple) and len(cast(Any, batch)) == 2 else None
    if not isinstance(labels, Tensor) or not labels.dim():
        return False
    return not labels.is_floating_point() and not labels.is_complex()


def score_now(module: nn.Module, batches: Sequence[Labelled]) -> Score:
    """Like `classifier_score`, in the current mode of the model; the caller restores its state."""
    loss, hits, count = 0.0, 0, 0
    for batch in batches:
        scores = class_scores(module, batch)
        loss += float(functional.cross_entropy(scores.double(), batch.labels, reduction="sum"))
        hits += int((scores.argmax(dim=1) == batch.labels).sum())
        count += batch.labels.numel()
    mean = loss / count
    return Score(mean if math.isfinite(mean) else math.inf, hits / count)


def class_scores(module: nn.Module, batch: Labelled) -> Tensor:
    """The class scores of a batch, `(samples, classes, …)`."""
    shape = batch.labels.shape
    try:
        outputs = module(*batch.args, **batch.kwargs)
    except Exception as error:  # a model may raise anything
        raise GossamerError(f"the model fails on a batch ({short_error(error)}); check the inputs", "data") from error
    for scores in output_tensors(outputs):
        if scores.is_floating_point() and scores.dim() > 1 and (scores.shape[:1] + scores.shape[2:]) == shape:
            lowest, highest = int(batch.labels.min()), int(batch.labels.max())
            if highest >= scores.shape[1] or lowest < 0:
                classes = f"0 to {scores.shape[1] - 1}"
                raise GossamerError(f"labels are {lowest} to {highest}, but the model has classes {classes}", "data")
            return scores
    raise GossamerError(
        f"the model returns no class scores for labels of shape {tuple(shape)}; "
        "only classifiers have an accuracy; for others use sensitivity(), which compares outputs",
        "data",
    )


def output_tensors(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists, dicts and data classes."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        items: Iterable[Any] = cast(Mapping[Any, Any], value).values()
    elif isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in fields(value)]
    else:
        return []
    return [tensor for item in items for tensor in output_tensors(item)]
