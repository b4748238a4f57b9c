"""`save`: a model as a file in one of five formats, read back and verified before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.export.examples import ExampleInputs, outputs_of
from gossamer.export.onnx.model_files import make_parent
from gossamer.export.programs import Progress, Verified, write_onnx, write_pt2
from gossamer.export.weights import ForeignFile, load_into
from gossamer.export.weights.file import RESERVED, Encoding, Stored, open_model_file, plan, write_model_file
from gossamer.export.weights.packing import bits
from gossamer.export.weights.quantized import IntegerState, as_integers
from gossamer.export.weights.states import State, copied, state_of
from gossamer.io import atomic_write
from gossamer.model import expect_model, unwrap
from gossamer.model.additions import without_additions
from gossamer.model.weights import check_values
from gossamer.quantization import is_emulated
from gossamer.sparse import NM

FORMATS = ("onnx", "pt2", "safetensors", "sparse24", "bitmask")
_ENCODINGS: dict[str, Encoding] = {"safetensors": "dense", "sparse24": "sparse24", "bitmask": "bitmask"}
_LISTED = 3


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
    target = Path(path)
    _check_arguments(target, format, about or {})
    report: Progress = progress or (lambda _label, _share: None)
    if format in _ENCODINGS:
        return _save_state(model, target, format, example_inputs, integers, about or {}, report)
    if not isinstance(model, Mapping):
        expect_model(model, str(target))
        check_values(model, str(target))
    if not isinstance(model, nn.Module):
        raise GossamerError(
            f"{target}: the format {format} needs the model, not its state dict; {', '.join(_ENCODINGS)} accept one"
        )
    if example_inputs is None:
        raise GossamerError(f"{target}: the format {format} needs example_inputs, an example of the model's inputs")
    inputs = ExampleInputs.of(example_inputs).on_cpu().ordered(unwrap(model))

    def write(scratch: Path) -> Verified:
        if format == "pt2":
            return write_pt2(
                model, scratch, target, inputs, dynamic_batch=dynamic_batch, about=about or {}, progress=report
            )
        return write_onnx(
            model,
            scratch,
            target,
            inputs,
            opset=opset,
            dynamic_batch=dynamic_batch,
            names={"input_names": input_names, "output_names": output_names},
            integers=integers,
            about=about or {},
            progress=report,
        )

    return _write(target, format, state_bytes(model), write, report)


def state_bytes(model: nn.Module) -> int:
    """The size of a model's parameters and buffers, each once, without what training methods added."""
    named = {**dict(unwrap(model).named_parameters()), **dict(unwrap(model).named_buffers())}
    tensors = {id(tensor): tensor for tensor in without_additions(named).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_arguments(target: Path, format: str, about: Mapping[str, str]) -> None:
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


def _write(target: Path, format: str, dense_bytes: int, write: Callable[[Path], Verified], report: Progress) -> Written:
    make_parent(target)
    try:
        with atomic_write(target) as scratch:
            verified = write(scratch)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None
    report("Written", 1.0)
    size = target.stat().st_size
    return Written(
        target,
        format,
        size,
        dense_bytes,
        verified.weights,
        verified.zeros,
        verified.largest_difference,
        verified.notes,
    )


# Files of tensors


def _save_state(
    model: nn.Module | Mapping[str, Tensor],
    target: Path,
    format: str,
    example: Any,
    integers: bool,
    about: Mapping[str, str],
    report: Progress,
) -> Written:
    encoding = _ENCODINGS[format]
    state = state_of(model, target)
    prunable = list(state.axes)
    # Other tools do not know our list of tied tensors, so a plain file repeats them.
    tied: dict[str, str] = {} if encoding == "dense" else state.tied
    floats = state.tensors | {name: state.tensors[first] for name, first in state.tied.items() if name not in tied}
    emulated = isinstance(model, nn.Module) and is_emulated(model)
    quantized: IntegerState | None = None
    if isinstance(model, nn.Module) and emulated and integers and encoding != "dense":
        quantized = as_integers(model, state, target)
    tensors = floats if quantized is None else quantized.tensors

    def write(scratch: Path) -> Verified:
        stored = plan(tensors, encoding, state.axes)
        with scratch.open("wb") as file:
            write_model_file(
                file,
                tensors,
                stored,
                encoding=encoding,
                tied=tied,
                about=about,
                quantized=None if quantized is None else quantized.metadata,
                seen=lambda share: report("Writing the file", 0.6 * share),
            )
        zeros = _verify(
            scratch, target, tensors, prunable, encoding, lambda share: report("Checking", 0.6 + 0.4 * share)
        )
        notes = _pattern_notes(state, stored) if encoding == "sparse24" else []
        notes += _negative_zero_notes(state, prunable) if encoding != "dense" and quantized is None else []
        if isinstance(model, nn.Module) and quantized is not None:
            if example is not None:
                _compare_outputs(model, scratch, target, ExampleInputs.of(example).on_cpu())
            sizes = [sum(entry.bytes for entry in one) for one in (stored, plan(floats, encoding, state.axes))]
            notes += _integer_notes(quantized, prunable, *sizes)
        elif emulated:
            notes.append("the model emulates quantization: the file holds its float weights, but not its ranges")
        return Verified(sum(state.tensors[name].numel() for name in prunable), zeros, tuple(notes))

    return _write(target, format, state.bytes, write, report)


def _verify(
    scratch: Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    prunable: Sequence[str],
    encoding: Encoding,
    seen: Callable[[float], None],
) -> int:
    """Read every tensor back, compare it to the bit, and count the zeros of the prunable weights."""
    from safetensors import safe_open

    zeros = 0
    with open_model_file(scratch) as file:
        file.check(lambda share: seen(share / 2))
        for done, (name, tensor) in enumerate(tensors.items()):
            seen(0.5 + 0.5 * done / len(tensors))
            written = file.read(name)
            if written.dtype != tensor.dtype or not torch.equal(bits(written), bits(tensor)):
                raise GossamerError(f"{target}: not written: '{name}' in the file differs from the model's")
            zeros += _zeros(written) if name in prunable else 0
    if encoding == "dense":  # other tools read it with the safetensors library
        with cast(Any, safe_open)(scratch, "pt") as library:
            foreign = ForeignFile(library, target)
            for name, tensor in tensors.items():
                if not torch.equal(bits(foreign.read(name)), bits(tensor)):
                    raise GossamerError(f"{target}: not written: safetensors reads '{name}' differently")
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


def _integer_notes(quantized: IntegerState, prunable: Sequence[str], bytes: int, float_bytes: int) -> list[str]:
    floats = [name for name in prunable if name not in quantized.names]
    sizes = f"its tensors take {bytes / 1e6:.3f} MB, and {float_bytes / 1e6:.3f} MB with float weights"
    notes = [f"its weights are integers with scales: {sizes}"]
    return notes + ([f"stored as floats, as in the model: {_listed(floats)}"] if floats else [])


def _pattern_notes(state: State, stored: Sequence[Stored]) -> list[str]:
    """Weights that are not stored as 2:4, by reason."""
    reasons: dict[str, list[str]] = {}
    for entry in stored:
        if entry.name in state.axes and entry.encoding != "sparse24":
            weight = state.tensors[entry.name]
            shape = weight.transpose(0, 1).shape if state.axes[entry.name] == 0 else weight.shape
            reason = NM(2, 4).fits(shape) or "they hold groups with more than two of four weights"
            reasons.setdefault(f"{reason}, written as {entry.encoding}", []).append(entry.name)
    return [f"not 2:4: {_listed(names)}: {reason}" for reason, names in reasons.items()]


def _negative_zero_notes(state: State, prunable: Sequence[str]) -> list[str]:
    """Weights with −0.0, which is stored like any other value."""
    names = [
        name
        for name in prunable
        if _zeros(tensor := state.tensors[name]) + int(torch.count_nonzero(bits(tensor))) > tensor.numel()
    ]
    return [f"{_listed(names)}: −0.0 takes space in the file; add 0.0 to the weights to make it 0"] if names else []


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
