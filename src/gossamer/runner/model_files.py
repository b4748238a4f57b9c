"""Exported files of a model: which are written, under which names, and the description of the model in them.

`gossamer.export` writes and verifies each file.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, Field, Json, ValidationError
from torch import Tensor, nn

from gossamer.errors import GossamerError, Location, Problem, nearest
from gossamer.io import as_name, name_fault
from gossamer.quantization import is_emulated
from gossamer.runner.config.schema import Net
from gossamer.runner.detectors import Network

if TYPE_CHECKING:
    from gossamer.export import Written

logger = logging.getLogger("gossamer")
NAME = "model"
PROGRAMS = ("onnx", "pt2")
"""Formats of programs. Each network of a detector is one file, without post-processing."""
STATES = {"safetensors": "", "bitmask": "-bitmask", "sparse24": "-sparse24"}
"""Formats of weights, with the suffix of their file names."""
FORMATS = (*PROGRAMS, *STATES, "thin")
FETCHING = ("weights", "weights_backbone", "pretrained")
"""Arguments with which a model downloads weights; a file of weights replaces them."""
Networks = Callable[[nn.Module], Mapping[str, Network]]
"""The parts of a model that take and return tensors."""
Skipped = Callable[[str], None]


@dataclass(frozen=True)
class Export:
    """Which files to write, and how."""

    formats: Sequence[str]
    opset: int = 18
    dynamic_batch: bool = True
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    """The description of the model in files of weights."""

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                close, known = nearest(name.lower(), FORMATS), ", ".join(FORMATS)
                raise GossamerError(f"unknown format '{name}'{close}; choose from {known}", "--format")


def write_model(
    model: nn.Module,
    example: Any,
    networks: Networks,
    folder: Path,
    plan: Export,
    name: str = NAME,
    skipped: Skipped = logger.warning,
) -> list[Written]:
    """Write and verify the files of a model. The model is not changed.

    `example` is what the model takes, a batch of one. `skipped` is called with the reason why a format has no file.
    If a format cannot be written, the others are, and the error lists both.
    """
    was_training = model.training
    model.eval()
    written: list[Written] = []
    errors: list[GossamerError] = []
    try:
        for format in dict.fromkeys(plan.formats):
            try:
                if format == "thin":
                    written += _thinned(model, example, networks, folder / f"{name}-thin", plan, skipped)
                else:
                    written += _files(model, example, networks, folder / name, format, plan)
            except GossamerError as error:
                errors.append(error)
    finally:
        model.train(was_training)
    if len(errors) == 1 and not written:
        raise errors[0]
    if errors:
        files = ", ".join(str(one.path) for one in written) or "none of the files"
        raise GossamerError([*(problem for error in errors for problem in error.problems), f"written: {files}"])
    return written


def _thinned(
    model: nn.Module, example: Any, networks: Networks, stem: Path, plan: Export, skipped: Skipped
) -> list[Written]:
    """The programs and weights of the network without filters and channels that are zero; sizes refer to all of it."""
    from gossamer.export import THINNED, state_bytes, thin

    smaller, thinned = thin(model, example)
    kept = [f"{weight} keeps filters that are zero: {why}" for weight, why in thinned.kept.items()]
    if not thinned.removed:
        reasons = kept or ["no filter or channel is zero as a whole"]
        skipped(f"thin: nothing to remove, so no file is written: {'; '.join(reasons)}")
        return []
    thinned_plan = replace(plan, about={**plan.about, **THINNED})
    # torch.export takes no emulated integers.
    formats = ("onnx",) if is_emulated(model) else (*PROGRAMS, "safetensors")
    before, after = thinned.parameters
    notes = [f"{before:,} parameters became {after:,}", *kept]
    notes += [thinned.note] if thinned.note else []
    written = [one for format in formats for one in _files(smaller, example, networks, stem, format, thinned_plan)]
    dense = state_bytes(model)
    whole = [replace(one, dense_bytes=dense) for one in written]
    return [replace(whole[0], notes=(*whole[0].notes, *notes)), *whole[1:]]


def _files(model: nn.Module, example: Any, networks: Networks, stem: Path, format: str, plan: Export) -> list[Written]:
    """The weights of a model, or a program for each of its networks."""
    from gossamer.export import save

    if format in STATES:
        path = stem.with_name(f"{stem.name}{STATES[format]}.safetensors")
        inputs = example if isinstance(example, Tensor) else None
        return [save(model, path, format, example_inputs=inputs, about=plan.about)]
    with torch.no_grad():
        parts = networks(model)
    written: list[Written] = []
    for name, network in parts.items():
        path = stem.with_name(f"{stem.name}.{format}" if len(parts) == 1 else f"{stem.name}-{as_name(name)}.{format}")
        one = save(
            network.module,
            path,
            format,
            example_inputs=network.inputs,
            opset=plan.opset,
            dynamic_batch=plan.dynamic_batch,
            output_names=network.outputs,
        )
        written.append(one)
    return written


def describe_model(
    name: str, kind: str, net: Net | None, num_classes: int | None, image: Tensor | None
) -> dict[str, str]:
    """The description of a model for files of weights, from which it can be built; see `read_description`."""
    known = {"name": as_name(name), "task": kind}
    if net is not None:
        kwargs = {key: value for key, value in net.kwargs.items() if key not in FETCHING}
        known["net"] = json.dumps({"type": net.type, "kwargs": kwargs}, default=str)
    if num_classes is not None:
        known["num_classes"] = str(num_classes)
    if image is not None:
        known["input"] = json.dumps(list(image.shape))
    return known


MAX_ELEMENTS = 2**26
"""Of an input that a file describes; an image of 1300 by 1300 pixels has 5 million."""
_MAX_TEXT = 10_000
_MAX_CLASSES = 10**5
"""Of a model whose tensors are smaller than that."""
_EXPECTED = {
    "name": "a name",
    "net": "a type and its kwargs",
    "num_classes": "a number of classes",
    "input": f"the sizes of an input of up to {MAX_ELEMENTS:,} numbers",
}


def _checked_name(text: str) -> str:
    if (fault := name_fault(text)) is not None:
        raise ValueError(fault)
    return text


def _without_downloads(net: Net) -> Net:
    return net.model_copy(update={"kwargs": {k: None if k in FETCHING else v for k, v in net.kwargs.items()}})


def _checked_input(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(sizes) > MAX_ELEMENTS:
        raise ValueError("it is too large")
    return sizes


class ModelDescription(BaseModel):
    """The checked description of a model in a file of weights."""

    name: Annotated[str, AfterValidator(_checked_name)] | None = None
    """For titles and names of files; never a path."""
    net: Annotated[Json[Net], AfterValidator(_without_downloads)] | None = None
    """Without the arguments with which a model downloads weights."""
    num_classes: Annotated[int, Field(ge=1)] | None = None
    input: (
        Annotated[
            Json[Annotated[tuple[Annotated[int, Field(ge=1, strict=True)], ...], Field(min_length=1, max_length=8)]],
            AfterValidator(_checked_input),
        ]
        | None
    ) = None
    """The shape of an input, a batch of one."""
    thinned: bool = False


def read_description(path: Path) -> ModelDescription:
    """The description in a file of weights. Raises if `describe_model` cannot have written it.

    Empty for files without one, such as those of other programs.
    """
    from gossamer.export.weights import THINNED, open_weights

    with open_weights(path) as weights:
        known = {key: weights.about[key] for key in _EXPECTED if key in weights.about}
        thinned = THINNED.items() <= weights.about.items()
        largest = max((size for entry in weights.tensors.values() for size in entry.shape), default=0)
    try:
        if any(len(text) > _MAX_TEXT for text in known.values()):
            raise ValueError(f"it has more than {_MAX_TEXT} characters")
        description = ModelDescription.model_validate({**known, "thinned": thinned})
        if (description.num_classes or 0) > max(largest, _MAX_CLASSES):
            raise ValueError("num_classes: there are more classes than the model has weights")
    except ValueError as error:
        reason = _reason(error, known) if isinstance(error, ValidationError) else str(error)
        fix = f"name the model, and add --weights {path}"
        message = f"its description of the model cannot be read, {reason}"
        raise GossamerError(Problem(message, location=Location(str(path)), fix=fix)) from None
    return description


def _reason(error: ValidationError, known: Mapping[str, str]) -> str:
    """The first problem of a description."""
    first = error.errors()[0]
    key = str(first["loc"][0])
    fault = f": {first['ctx']['error']}" if first["type"] == "value_error" and "ctx" in first else ""
    return f"{key}: expected {_EXPECTED[key]}, found {known[key][:40]!r}{fault}"
