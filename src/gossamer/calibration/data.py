"""Calibration data: texts, token ids or batches of a loader, as arguments of the model's `forward`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.errors import GossamerError, file_error, first_line
from gossamer.model.example_inputs import Arguments, batch_arguments

SAMPLES = 512
"""Samples that are used unless a number is given, as in llm-compressor."""
LENGTH = 2048
"""The longest sequence that text is cut into unless a length is given."""
_TOKENS, _NUMBERS = 2**11, 2**20
"""Batches are joined until they have so many token ids, or so many floating-point numbers."""
_EXPECTED = "give a text file, or a loader or list of tensors, tuples or dicts"


def calibration_batches(
    data: Any, module: nn.Module, *, tokenizer: Any = None, samples: int | None = None, length: int | None = None
) -> list[Arguments]:
    """The first `samples` samples of the data in batches; raises `GossamerError` for data of another kind.

    Text needs the tokenizer, and is cut into sequences of `length` tokens. Small batches of the same shape are joined.
    """
    for name, value in (("num_calibration_samples", samples), ("max_seq_length", length)):
        if value is not None and value < 1:
            raise GossamerError(f"expected a number above 0, found {value}", name)
    if isinstance(data, str | os.PathLike):
        ids = token_ids(read_text(cast("str | os.PathLike[str]", data)), tokenizer)
        windows = _windows(ids, length or longest(module), cast(object, data))
        items: Iterable[Any] = [windows[row : row + 1] for row in range(len(windows))]
    elif isinstance(data, Tensor | Mapping) or not isinstance(data, Iterable):
        kind = type(cast(object, data)).__name__
        raise GossamerError(f"data: expected several batches, found one {kind}; {_EXPECTED}")
    else:
        items = (_as_batch(item, tokenizer, length) for item in cast("Iterable[Any]", data))
    device = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), None)
    found: list[Arguments] = []
    left = SAMPLES if samples is None else samples
    for item in items:
        args, kwargs = _accepted(*batch_arguments(item, nn.Module()), module)
        count = _samples((args, kwargs))
        if not count:
            raise GossamerError(f"data: expected tensors with samples, found {type(item).__name__}; {_EXPECTED}")
        if count > left:
            args, kwargs = pytree.tree_map_only(Tensor, lambda part: part[:left], (args, kwargs))  # noqa: B023
        if device is not None:
            args, kwargs = pytree.tree_map_only(Tensor, lambda part: part.to(device), (args, kwargs))
        found.append((args, kwargs))
        left -= min(count, left)
        if left <= 0:
            break
    if not found:
        raise GossamerError(f"data: expected at least one sample, found none; {_EXPECTED}")
    return _joined(found)


def read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise file_error(path, f"cannot be read: {reason}") from None


def token_ids(text: str, tokenizer: Any) -> Tensor:
    """`(tokens,)`: the ids of a text."""
    if tokenizer is None:
        raise GossamerError("text needs a tokenizer; give one, or batches of token ids", "tokenizer")
    ids: Sequence[int] = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def longest(module: nn.Module) -> int:
    """The longest sequence that text is cut into for a model."""
    most: Any = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return min(most, LENGTH) if isinstance(most, int) and most > 0 else LENGTH


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer in the folder of a model."""
    try:
        from transformers import AutoTokenizer

        return cast(Any, AutoTokenizer).from_pretrained(str(folder), local_files_only=True)
    except ModuleNotFoundError:
        raise GossamerError("text needs the library transformers: pip install 'gossamer[transformers]'") from None
    except (OSError, ValueError, KeyError) as error:
        raise file_error(folder, f"has no tokenizer that can be loaded ({first_line(error)})") from None


def _windows(ids: Tensor, length: int, path: object) -> Tensor:
    """`(windows, length)`, from the beginning; what is left over is dropped."""
    count = len(ids) // length
    if not count:
        raise file_error(path, f"has {len(ids)} tokens, fewer than one sequence of {length}; set max_seq_length")
    return ids[: count * length].reshape(count, length)


def _as_batch(item: Any, tokenizer: Any, length: int | None) -> Any:
    """One item of a data set: texts become token ids, and lists of ids tensors."""
    if isinstance(item, str):
        return token_ids(item, tokenizer)[None, :length]
    if isinstance(item, Mapping):
        entries = cast("Mapping[str, Any]", item)
        if "input_ids" not in entries and isinstance(entries.get("text"), str):
            return token_ids(entries["text"], tokenizer)[None, :length]
        if "input_ids" in entries:
            tensors = {key: torch.as_tensor(value) for key, value in entries.items() if _is_numeric(value)}
            rows = {key: value[None] if value.dim() == 1 else value for key, value in tensors.items()}
            return {key: value[:, :length] if value.dim() == 2 else value for key, value in rows.items()}
    return cast(Any, item)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(items) and (isinstance(items[0], int | float) or (isinstance(items[0], list) and _is_numeric(items[0])))


def _accepted(args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> Arguments:
    """Without labels, which a model needs for its loss only, and without a cache of keys."""
    parameters = inspect.signature(module.forward).parameters
    optional = [name for name, parameter in parameters.items() if parameter.default is None]
    if "labels" in kwargs and ("labels" in optional or "labels" not in parameters):
        kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
    if "use_cache" in parameters:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


def _samples(arguments: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 0


def _joined(batches: Sequence[Arguments]) -> list[Arguments]:
    """Neighbours of the same shape as one batch, while it is small."""
    groups: list[list[Arguments]] = []
    for batch in batches:
        if groups and _fits(groups[-1], batch):
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return [_concatenated(group) for group in groups]


def _fits(group: list[Arguments], batch: Arguments) -> bool:
    first, spec = pytree.tree_flatten(group[0])
    other, other_spec = pytree.tree_flatten(batch)
    if spec != other_spec:
        return False
    for one, two in zip(first, other, strict=True):
        same = (
            isinstance(two, Tensor) and one.dim() and one.shape[1:] == two.shape[1:] and one.dtype == two.dtype
            if isinstance(one, Tensor)
            else one is two
        )
        if not same:
            return False
    tensors = [leaf for leaf in first if isinstance(leaf, Tensor)]
    # Only where every tensor has the samples first, so that positions or masks of the whole batch stay as they are.
    if any(len(tensor) != len(tensors[0]) for tensor in tensors):
        return False
    most = _NUMBERS if tensors[0].is_floating_point() else _TOKENS
    rows = sum(_samples(arguments) for arguments in [*group, batch])
    return rows * tensors[0][0].numel() <= most


def _concatenated(group: Sequence[Arguments]) -> Arguments:
    if len(group) == 1:
        return group[0]
    flat = [pytree.tree_flatten(arguments) for arguments in group]
    leaves = [
        torch.cat(list(parts)) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return cast(Arguments, pytree.tree_unflatten(leaves, flat[0][1]))
