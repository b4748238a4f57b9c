"""`save`: a model as a file of one of five formats, read back and checked before it takes its place.

A file that fails its check is never there under its name. What is in a format is known by the modules that write it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.export.examples import ExampleInputs, computed
from gossamer.export.onnx.model_files import check_place
from gossamer.export.programs import Checked, write_onnx, write_pt2
from gossamer.export.weights.file import RESERVED, Encoding, Stored, opened, plan, write_model_file
from gossamer.export.weights.packing import words
from gossamer.export.weights.quantized import Integers, as_integers
from gossamer.export.weights.reading import ForeignFile, Progress, load_into
from gossamer.export.weights.states import State, copied, state_of
from gossamer.io import atomic_write
from gossamer.model import expect_model, unwrap
from gossamer.model.additions import without_additions
from gossamer.model.weights import check_values
from gossamer.quantization import is_emulated
from gossamer.sparse import NM

FORMATS = ("onnx", "pt2", "safetensors", "sparse24", "bitmask")
_ENCODINGS: dict[str, Encoding] = {"safetensors": "dense", "sparse24": "sparse24", "bitmask": "bitmask"}
_SHOWN = 3


@dataclass(frozen=True)
class Written:
    """A file as it was found when it was read back."""

    path: Path
    format: str
    bytes: int
    """The size of the file."""
    dense_bytes: int
    """What the model's tensors take, dense and in their own numbers."""
    weights: int
    """How many prunable weights the file holds."""
    zeros: int
    """How many of them are zero."""
    largest_difference: float | None
    """Of the file's outputs and the model's; None where the file holds no program."""
    notes: tuple[str, ...]
    """What is not as one may expect, such as weights that are not 2:4."""


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
    """Write a model, whole or not at all, read it back and check it; the model itself is not touched.

    `onnx` and `pt2` hold a program and need `example_inputs`: a tensor, the arguments of `forward` in a list or tuple,
    or by name in a dict; the batch may vary in the file with `dynamic_batch`. `safetensors`, `sparse24` and `bitmask`
    hold the tensors, which `gossamer.load` reads, and take a state dict in place of the model too. A state dict is
    written as it is: where a model replaces weights while it computes (STR, ProbMask, emulated quantization), the raw
    ones are in its state dict, so pass the model. What training added is in no file: ASP's masks, MSBench's sparsers. A
    model that emulates quantization is written with integer weights as `onnx`, `bitmask` and `sparse24`, unless
    `integers=False`. `about` is text to keep in the file.
    """
    target = Path(path)
    _check_words(target, format, about or {})
    step: Progress = progress or (lambda _label, _share: None)
    if format in _ENCODINGS:
        return _save_state(model, target, format, example_inputs, integers, about or {}, step)
    if not isinstance(model, Mapping):
        expect_model(model, str(target))
        check_values(model, str(target))
    if not isinstance(model, nn.Module):
        known = ", ".join(_ENCODINGS)
        reason = f"the format {format} needs the model, not its state dict; tensors go into {known}"
        raise GossamerError(f"{target}: {reason}")
    if example_inputs is None:
        raise GossamerError(f"{target}: the format {format} needs example_inputs, an example of what the model takes")
    inputs = ExampleInputs.of(example_inputs).on_cpu().ordered(unwrap(model))
    dense = state_bytes(model)

    def write(scratch: Path) -> Checked:
        if format == "pt2":
            return write_pt2(model, scratch, target, inputs, dynamic_batch=dynamic_batch, about=about or {}, step=step)
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
            step=step,
        )

    return _written(target, format, dense, write, step)


def state_bytes(model: nn.Module) -> int:
    """What the parameters and buffers of a model take in memory, each once, without what training added."""
    named = {**dict(unwrap(model).named_parameters()), **dict(unwrap(model).named_buffers())}
    tensors = {id(tensor): tensor for tensor in without_additions(named).values()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _written(
    target: Path, format: str, dense: int, write: Callable[[Path], Checked | _Counted], step: Progress
) -> Written:
    """Let a file be written under another name, and give it its own when that went well."""
    check_place(target)
    try:
        with atomic_write(target) as scratch:
            found = write(scratch)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None
    step("Written", 1.0)
    difference = found.largest_difference if isinstance(found, Checked) else None
    size = target.stat().st_size
    return Written(target, format, size, dense, found.weights, found.zeros, difference, found.notes)


@dataclass(frozen=True)
class _Counted:
    """What was found in a file of tensors."""

    weights: int
    zeros: int
    notes: tuple[str, ...]


def _save_state(
    model: nn.Module | Mapping[str, Tensor],
    target: Path,
    format: str,
    example: Any,
    integers: bool,
    about: Mapping[str, str],
    step: Progress,
) -> Written:
    encoding = _ENCODINGS[format]
    state = state_of(model, target)
    names = list(state.axes)
    # Other tools know nothing of ties: a plain file has every name.
    tied: dict[str, str] = {} if encoding == "dense" else state.tied
    floats = state.tensors | {name: state.tensors[first] for name, first in state.tied.items() if name not in tied}
    emulated = isinstance(model, nn.Module) and is_emulated(model)
    quantized: Integers | None = None
    if isinstance(model, nn.Module) and emulated and integers and encoding != "dense":
        quantized = as_integers(model, state, target)
    tensors = floats if quantized is None else quantized.tensors

    def write(scratch: Path) -> _Counted:
        stored = plan(tensors, encoding, state.axes)
        with scratch.open("wb") as file:
            write_model_file(
                file,
                tensors,
                stored,
                encoding=encoding,
                tied=tied,
                about=about,
                quantized=None if quantized is None else quantized.text,
                seen=lambda share: step("Writing the file", 0.6 * share),
            )
        zeros = _compare(scratch, target, tensors, names, encoding, lambda share: step("Checking", 0.6 + 0.4 * share))
        notes = _notes(state, stored) if encoding == "sparse24" else []
        notes += _negative_zeros(state, names) if encoding != "dense" and quantized is None else []
        if isinstance(model, nn.Module) and quantized is not None:
            if example is not None:
                _compare_outputs(model, scratch, target, ExampleInputs.of(example).on_cpu())
            sizes = [sum(entry.bytes for entry in one) for one in (stored, plan(floats, encoding, state.axes))]
            notes += _integer_notes(quantized, names, *sizes)
        elif emulated:
            notes.append("the model emulates quantization: its float weights are in the file, its ranges are not")
        return _Counted(sum(state.tensors[name].numel() for name in names), zeros, tuple(notes))

    return _written(target, format, state.bytes, write, step)


def _compare_outputs(model: nn.Module, scratch: Path, target: Path, example: ExampleInputs) -> None:
    """Load a quantized file into a copy of the model; both compute the same, to the bit."""
    copy = copied(model, target)
    expected = computed(copy, example)
    load_into(copy, scratch)
    for one, other in zip(expected, computed(copy, example), strict=True):
        if not torch.equal(one, other):
            raise GossamerError(
                f"{target}: not written: the model uses a weight that is an integer in the file in floats too; "
                "write floats by save(…, integers=False)"
            )


def _integer_notes(quantized: Integers, names: Sequence[str], bytes: int, in_floats: int) -> list[str]:
    floats = [name for name in names if name not in quantized.names]
    taken = f"its tensors take {bytes / 1e6:.3f} MB, and {in_floats / 1e6:.3f} MB with float weights"
    notes = [f"its weights are integers with scales: {taken}"]
    return notes + ([f"in floats, as in the model: {_listed(floats)}"] if floats else [])


def _compare(
    scratch: Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    encoding: Encoding,
    seen: Callable[[float], None],
) -> int:
    """Read every tensor back; all are the model's to the bit. How many of the prunable weights are zero."""
    from safetensors import safe_open

    zeros = 0
    with opened(scratch) as file:
        file.check(lambda share: seen(share / 2))
        for done, (name, tensor) in enumerate(tensors.items()):
            seen(0.5 + 0.5 * done / len(tensors))
            found = file.read(name)
            if found.dtype != tensor.dtype or not torch.equal(words(found), words(tensor)):
                raise GossamerError(f"{target}: not written: '{name}' does not come back from the file as it was")
            zeros += _zeros(found) if name in names else 0
    if encoding == "dense":  # as other tools read it
        with cast(Any, safe_open)(scratch, "pt") as library:
            others = ForeignFile(library, target)
            for name, tensor in tensors.items():
                if not torch.equal(words(others.read(name)), words(tensor)):
                    raise GossamerError(f"{target}: not written: safetensors reads '{name}' as another tensor")
    return zeros


def _zeros(tensor: Tensor) -> int:
    wide = tensor if tensor.element_size() > 1 else tensor.float()  # numbers of eight bits cannot be counted
    return tensor.numel() - int(torch.count_nonzero(wide))


def _notes(state: State, stored: Sequence[Stored]) -> list[str]:
    """Which weights are not stored as 2:4, by reason."""
    reasons: dict[str, list[str]] = {}
    for entry in stored:
        if entry.name in state.axes and entry.encoding != "sparse24":
            weight = state.tensors[entry.name]
            shape = weight.transpose(0, 1).shape if state.axes[entry.name] == 0 else weight.shape
            reason = NM(2, 4).fits(shape) or "they hold groups with more than two of four weights"
            reasons.setdefault(f"{reason}, written as {entry.encoding}", []).append(entry.name)
    return [f"not 2:4: {_listed(names)}: {reason}" for reason, names in reasons.items()]


def _negative_zeros(state: State, names: Sequence[str]) -> list[str]:
    """Zeros with a sign take the room of any number."""
    found = [name for name in names if _zeros(tensor := state.tensors[name]) + _kept(tensor) > tensor.numel()]
    told = "hold −0.0, which takes room in the file; adding 0.0 to the weights makes it 0"
    return [f"{_listed(found)}: {told}"] if found else []


def _kept(tensor: Tensor) -> int:
    return int(torch.count_nonzero(words(tensor)))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_words(target: Path, format: str, about: Mapping[str, str]) -> None:
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise GossamerError(f"format: there is no '{format}'{nearest(format, FORMATS)}; there are {known}")
    ending = ".safetensors" if format in _ENCODINGS else f".{format}"
    if target.suffix != ending:
        raise GossamerError(f"{target}: a file of the format {format} ends in {ending}; name it so")
    for key, value in cast(Mapping[Any, Any], about).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise GossamerError(f"about: {key!r}: names and values are text; write numbers as text")
        if key in RESERVED:
            raise GossamerError(f"about: the name '{key}' is one that such files use themselves; take another")
