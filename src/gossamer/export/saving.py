"""`save`: a model as a file in one of five formats, read back and verified before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.export.examples import ExampleInputs, outputs_of
from gossamer.export.onnx.model_files import make_parent
from gossamer.export.weights import load_into
from gossamer.export.weights.file import (
    RESERVED,
    Encoding,
    State,
    Stored,
    bits,
    copied,
    open_model_file,
    plan,
    state_of,
    write_model_file,
)
from gossamer.export.weights.quantized import IntegerState, as_integers
from gossamer.io import atomic_write
from gossamer.model import expect_model, unwrap
from gossamer.model.additions import without_additions
from gossamer.model.weights import check_values
from gossamer.progress import Progress
from gossamer.quantization import is_emulated
from gossamer.sparse import NM

FORMATS = ("onnx", "pt2", "safetensors", "sparse24", "bitmask")
_ENCODINGS: dict[str, Encoding] = {"safetensors": "dense", "sparse24": "sparse24", "bitmask": "bitmask"}


@dataclass(frozen=True)
class Verified:
    """What reading a written file back showed."""

    weights: int
    zeros: int
    notes: tuple[str, ...]
    largest_difference: float | None = None
    """None for a file without a program."""


@dataclass(frozen=True)
class Written:
    """A written and verified file."""

    path: Path
    format: str
    bytes: int
    """Size of the file."""
    dense_bytes: int
    """Size of the model's tensors, dense and in their own dtypes."""
    weights: int
    """Number of prunable weights in the file."""
    zeros: int
    """How many of them are zero."""
    largest_difference: float | None
    """Between the outputs of the file and the model; None if the file holds no program."""
    notes: tuple[str, ...]
    """What a user may not expect, such as weights that are not 2:4."""


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    format: str,
    *,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    opset: int = 18,
    dynamic_batch: bool = True,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    integers: bool = True,
    about: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write a model atomically, read it back and verify it; the model itself is not changed.

    `onnx` and `pt2` hold a program and need `example_inputs`: a tensor, a list or tuple of positional arguments of
    `forward`, or a dict of keyword arguments; with `dynamic_batch` the batch size is not fixed. `safetensors`,
    `sparse24` and `bitmask` hold tensors for `gossamer.load`, and also accept a state dict, which is written as it is.
    If a model replaces weights in its forward pass (STR, ProbMask, emulated quantization), its state dict holds the
    original ones, so pass the model. What training methods add (ASP's masks, MSBench's sparsers) is not written. A
    model that emulates quantization is written with integer weights as `onnx`, `bitmask` and `sparse24`, unless
    `integers=False`. `about` is text to store in the file.
    """
    target, texts = Path(path), about or {}
    _check_save_arguments(target, format, texts)
    report: Progress = progress or (lambda _label, _share: None)
    if format in _ENCODINGS:
        state = state_of(model, target)
        dense_bytes = state.bytes

        def write(scratch: Path) -> Verified:
            return _write_state(model, state, scratch, target, format, example_inputs, integers, texts, report)

    else:
        network, inputs = _program_arguments(model, target, format, example_inputs)
        dense_bytes = state_bytes(network)

        def write(scratch: Path) -> Verified:
            from gossamer.export.programs import write_onnx, write_pt2

            if format == "pt2":
                return write_pt2(network, scratch, target, inputs, dynamic_batch, texts, report)
            names = {"input_names": input_names, "output_names": output_names}
            return write_onnx(network, scratch, target, inputs, opset, dynamic_batch, names, integers, texts, report)

    make_parent(target)
    try:
        with atomic_write(target) as scratch:
            verified = write(scratch)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None
    report("Written", 1.0)
    return Written(
        target,
        format,
        target.stat().st_size,
        dense_bytes,
        verified.weights,
        verified.zeros,
        verified.largest_difference,
        verified.notes,
    )


def state_bytes(model: nn.Module) -> int:
    """The size of a model's parameters and buffers, each once, without what training methods added."""
    named = {**dict(unwrap(model).named_parameters()), **dict(unwrap(model).named_buffers())}
    tensors = {id(tensor): tensor for tensor in without_additions(named).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_save_arguments(target: Path, format: str, about: Mapping[str, str]) -> None:
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise GossamerError(f"format: there is no '{format}'{nearest(format, FORMATS)}; there are {known}")
    suffix = ".safetensors" if format in _ENCODINGS else f".{format}"
    if target.suffix != suffix:
        raise GossamerError(f"{target}: expected a name that ends in {suffix} for the format {format}")
    for key, value in cast(Mapping[Any, Any], about).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise GossamerError(f"about: {key!r}: names and values must be strings; convert numbers to text")
        if key in RESERVED:
            raise GossamerError(f"about: the name '{key}' is reserved; use another")


def _program_arguments(
    model: nn.Module | Mapping[str, Tensor], target: Path, format: str, example_inputs: Any
) -> tuple[nn.Module, ExampleInputs]:
    if isinstance(model, Mapping):
        raise GossamerError(
            f"{target}: the format {format} needs the model, not its state dict; {', '.join(_ENCODINGS)} accept one"
        )
    expect_model(model, str(target))
    check_values(model, str(target))
    if example_inputs is None:
        raise GossamerError(f"{target}: the format {format} needs example_inputs, an example of the model's inputs")
    return model, ExampleInputs.of(example_inputs).on_cpu().ordered(unwrap(model))


# Files of tensors


def _write_state(
    model: nn.Module | Mapping[str, Tensor],
    state: State,
    scratch: Path,
    target: Path,
    format: str,
    example: Any,
    integers: bool,
    about: Mapping[str, str],
    report: Progress,
) -> Verified:
    encoding = _ENCODINGS[format]
    # Other tools do not know our list of tied tensors, so a plain file repeats them.
    tied: dict[str, str] = {} if encoding == "dense" else state.tied
    tensors = state.tensors | {name: state.tensors[first] for name, first in state.tied.items() if name not in tied}
    notes: list[str] = []
    quantized: IntegerState | None = None
    if isinstance(model, nn.Module) and is_emulated(model):
        if integers and encoding != "dense":
            quantized = as_integers(model, state, target)
        if quantized is None:
            notes.append("the model emulates quantization: the file holds its float weights, but not its ranges")
        else:
            tensors = quantized.tensors
            notes.append("its weights are integers with scales")
            notes += _listed("stored as floats, as in the model", [n for n in state.axes if n not in quantized.names])
    report("Writing the file", 0.0)
    stored = plan(tensors, encoding, state.axes)
    with scratch.open("wb") as file:
        metadata = None if quantized is None else quantized.metadata
        write_model_file(file, tensors, stored, encoding=encoding, tied=tied, about=about, quantized=metadata)
    report("Checking the file", 0.6)
    zeros = _verify(scratch, target, tensors, state.axes, encoding)
    if isinstance(model, nn.Module) and quantized is not None and example is not None:
        _compare_outputs(model, scratch, target, ExampleInputs.of(example).on_cpu())
    if encoding == "sparse24":
        notes += _pattern_notes(state, stored)
    if encoding != "dense" and quantized is None:
        negative = [name for name in state.axes if _has_negative_zero(state.tensors[name])]
        notes += _listed("−0.0 takes space in the file (add 0.0 to the weights to make it 0)", negative)
    return Verified(sum(state.tensors[name].numel() for name in state.axes), zeros, tuple(notes))


def _verify(
    scratch: Path, target: Path, tensors: Mapping[str, Tensor], prunable: Mapping[str, int], encoding: Encoding
) -> int:
    """Read every tensor back, compare it to the bit, and count the zeros of the prunable weights."""
    from safetensors import safe_open

    zeros = 0
    with open_model_file(scratch) as file, cast(Any, safe_open)(scratch, "pt") as library:
        file.check()
        for name, tensor in tensors.items():
            written = file.read(name)
            # Other tools read a plain file with the safetensors library.
            for read in (written, library.get_tensor(name)) if encoding == "dense" else (written,):
                if read.dtype != tensor.dtype or not torch.equal(bits(read), bits(tensor)):
                    raise GossamerError(f"{target}: not written: '{name}' in the file differs from the model's")
            zeros += _zeros(written) if name in prunable else 0
    return zeros


def _compare_outputs(model: nn.Module, scratch: Path, target: Path, example: ExampleInputs) -> None:
    """Load a quantized file into a copy of the model, whose outputs must not change in any bit."""
    copy = copied(model, target)
    expected = outputs_of(copy, example)
    load_into(copy, scratch)
    for before, after in zip(expected, outputs_of(copy, example), strict=True):
        if not torch.equal(before, after):
            raise GossamerError(
                f"{target}: not written: the model also uses, as a float, a weight that is an integer in the file; "
                "write floats with save(…, integers=False)"
            )


def _zeros(tensor: Tensor) -> int:
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # torch cannot count 8-bit floats
    return tensor.numel() - int(torch.count_nonzero(wide))


# Notes


def _pattern_notes(state: State, stored: Sequence[Stored]) -> list[str]:
    """Weights that are not stored as 2:4, by reason."""
    reasons: dict[str, list[str]] = {}
    for entry in stored:
        if entry.name in state.axes and entry.encoding != "sparse24":
            weight = state.tensors[entry.name]
            shape = weight.transpose(0, 1).shape if state.axes[entry.name] == 0 else weight.shape
            reason = NM(2, 4).fits(shape) or "they hold groups with more than two of four weights"
            reasons.setdefault(f"not 2:4, written as {entry.encoding} ({reason})", []).append(entry.name)
    return [note for reason, names in reasons.items() for note in _listed(reason, names)]


def _has_negative_zero(tensor: Tensor) -> bool:
    return _zeros(tensor) + int(torch.count_nonzero(bits(tensor))) > tensor.numel()


def _listed(what: str, names: Sequence[str]) -> list[str]:
    """A note on these weights with the names of the first three, or none without names."""
    return [f"{what}: {', '.join(names[:3])}{', …' * (len(names) > 3)}"] if names else []
