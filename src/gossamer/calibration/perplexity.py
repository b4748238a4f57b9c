"""Perplexity of a causal language model on a text."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.calibration.data import load_tokenizer, longest, read_text, token_ids
from gossamer.errors import file_error, first_line
from gossamer.model import embedding_tables
from gossamer.model.counting import count_weights
from gossamer.progress import Progress

_TOGETHER = 2**11
"""Tokens of one batch."""


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text."""

    value: float
    """exp of the mean of −log p over all predicted tokens."""
    tokens: int
    """Predicted tokens."""
    length: int
    """Tokens of a sequence; each is predicted from those before it in the sequence."""
    weights: int
    """Weights of layers, without embeddings."""
    zeros: int
    """How many of them are zero."""


def perplexity(
    folder: str | os.PathLike[str], text: str | os.PathLike[str], *, length: int | None = None, progress: Progress
) -> Perplexity:
    """The perplexity of the model in a folder on a text file, in sequences that do not overlap."""
    ids = token_ids(read_text(text), load_tokenizer(folder))
    model = load_causal_model(folder)
    size = length or longest(model)
    if len(ids) < 2:
        raise file_error(text, "has fewer than two tokens")
    size = min(size, len(ids))
    windows = ids[: len(ids) // size * size].reshape(-1, size)
    total, predicted = negative_log_likelihood(model, windows, progress)
    tables = set(embedding_tables(model))
    counts = {name: count for name, count in count_weights(model).items() if name not in tables}
    return Perplexity(
        math.exp(min(total / predicted, 700.0)),
        predicted,
        size,
        sum(count.weights for count in counts.values()),
        sum(count.zeros for count in counts.values()),
    )


def negative_log_likelihood(model: nn.Module, windows: Tensor, progress: Progress) -> tuple[float, int]:
    """−log p of the tokens behind the first of each window `(windows, length)`, summed, and their number."""
    total = 0.0
    together = max(_TOGETHER // windows.shape[1], 1)
    with torch.no_grad():
        for first in range(0, len(windows), together):
            batch = windows[first : first + together]
            logits: Tensor = model(batch, use_cache=False).logits[:, :-1].float()
            total += float(functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
            progress("predicting", min((first + together) / len(windows), 1.0))
    return total, windows.shape[0] * (windows.shape[1] - 1)


def load_causal_model(folder: str | os.PathLike[str]) -> nn.Module:
    """The model in a folder of Transformers."""
    try:
        from transformers import AutoModelForCausalLM

        model = cast(Any, AutoModelForCausalLM).from_pretrained(str(Path(folder)), local_files_only=True)
    except ModuleNotFoundError:
        raise file_error(folder, "needs the library transformers: pip install 'gossamer[transformers]'") from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise file_error(folder, f"is not a causal language model that loads ({first_line(error)})") from None
    return model.eval()
