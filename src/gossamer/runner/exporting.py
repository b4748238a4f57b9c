"""A model in files that other programs take: which files, under which names, of which part of it.

What is in each of them, and whether it is right, is known in `gossamer.export`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.quantization import is_emulated
from gossamer.runner.config.schema import Net
from gossamer.runner.networks import Network

if TYPE_CHECKING:
    from gossamer.export import Written
    from gossamer.graph.thinning import Thinned
    from gossamer.runner.subjects import Subject

logger = logging.getLogger("gossamer")
NAME = "model"
PROGRAMS = ("onnx", "pt2")
"""Of a detector they hold its networks, a file for each, without post-processing."""
STATES = {"safetensors": "", "bitmask": "-bitmask", "sparse24": "-sparse24"}
"""The weights alone, and what their files have behind the name."""
FORMATS = (*PROGRAMS, *STATES, "thin")
FETCHING = ("weights", "weights_backbone", "pretrained")
"""Arguments by which a model fetches weights, which a file of weights makes needless."""
Networks = Callable[[nn.Module], Mapping[str, Network]]
"""The parts of a model that are tensors in and tensors out."""
LeftOut = Callable[[str], None]


@dataclass(frozen=True)
class Export:
    """What is to be written, and how."""

    formats: Sequence[str]
    opset: int = 18
    dynamic_batch: bool = True
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    """What files of weights say of the model."""

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                close, known = nearest(name.lower(), FORMATS), ", ".join(FORMATS)
                raise GossamerError(f"--format: there is no '{name}'{close}; there are {known}")


def write_subject(
    subject: Subject, wanted: Export, folder: Path | None = None, left_out: LeftOut = logger.warning
) -> list[Written]:
    """Write the model that a word names: that of a run into its folder, unless told where; others here."""
    where = folder or subject.folder or Path()
    name = NAME if subject.folder is not None else subject.name
    plan = replace(wanted, about=subject.about())
    return write_model(subject.model, subject.example, subject.networks_of, where, plan, name, left_out)


def write_model(
    model: nn.Module,
    example: Any,
    networks: Networks,
    folder: Path,
    wanted: Export,
    name: str = NAME,
    left_out: LeftOut = logger.warning,
) -> list[Written]:
    """Write a model in the formats that are wanted, each verified; the model is left as it was.

    `example` is what the model takes, a batch of one. `left_out` is called with the reason why a format has no file.
    Where one format cannot be written the others are, and the error names both.
    """
    was_training = model.training
    model.eval()
    written: list[Written] = []
    errors: list[GossamerError] = []
    try:
        for format in dict.fromkeys(wanted.formats):
            try:
                if format == "thin":
                    written += _thinned(model, example, networks, folder / f"{name}-thin", wanted, left_out)
                else:
                    written += _files(model, example, networks, folder / name, format, wanted)
            except GossamerError as error:
                errors.append(error)
    finally:
        model.train(was_training)
    if len(errors) == 1 and not written:
        raise errors[0]
    if errors:
        files = ", ".join(str(one.path) for one in written) or "none of the files"
        raise GossamerError(f"{'; '.join(map(str, errors))}; written: {files}")
    return written


def _thinned(
    model: nn.Module, example: Any, networks: Networks, stem: Path, wanted: Export, left_out: LeftOut
) -> list[Written]:
    """The network without what is zero as a whole: its programs and its weights, measured against all of it."""
    from gossamer.export import THINNED, state_bytes, thin

    smaller, found = thin(model, example)
    kept = _kept(found)
    if not found.removed:
        reasons = kept or ["no filter or channel is zero as a whole"]
        left_out(f"thin: nothing to remove, so no file is written: {'; '.join(reasons)}")
        return []
    plan = replace(wanted, about={**wanted.about, **THINNED})
    # torch.export takes no emulated integers.
    formats = ("onnx",) if is_emulated(model) else (*PROGRAMS, "safetensors")
    before, after = found.parameters
    notes = [f"{before:,} parameters became {after:,}", *kept]
    notes += [found.note] if found.note else []
    written = [one for format in formats for one in _files(smaller, example, networks, stem, format, plan)]
    dense = state_bytes(model)
    whole = [replace(one, dense_bytes=dense) for one in written]
    return [replace(whole[0], notes=(*whole[0].notes, *notes)), *whole[1:]]


def _kept(found: Thinned) -> list[str]:
    """Which weights keep filters of zeros, by reason."""
    reasons: dict[str, list[str]] = {}
    for weight, why in found.kept.items():
        reasons.setdefault(why, []).append(weight)
    return [f"{_listed(names)} keep filters that are zero: {why}" for why, names in reasons.items()]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _files(
    model: nn.Module, example: Any, networks: Networks, stem: Path, format: str, wanted: Export
) -> list[Written]:
    """The weights of a model, or a program for each of its networks."""
    from gossamer.export import save

    if format in STATES:
        path = stem.with_name(f"{stem.name}{STATES[format]}.safetensors")
        inputs = example if isinstance(example, Tensor) else None
        return [save(model, path, format, example_inputs=inputs, about=wanted.about)]
    with torch.no_grad():
        found = networks(model)
    written: list[Written] = []
    for name, network in found.items():
        path = stem.with_name(f"{stem.name}.{format}" if len(found) == 1 else f"{stem.name}-{name}.{format}")
        one = save(
            network.module,
            path,
            format,
            example_inputs=network.inputs,
            opset=wanted.opset,
            dynamic_batch=wanted.dynamic_batch,
            output_names=network.outputs,
        )
        written.append(one)
    return written


def describe_model(
    name: str, kind: str, net: Net | None, num_classes: int | None, image: Tensor | None
) -> dict[str, str]:
    """What a file of weights says of its model, so that it can be made again."""
    known = {"name": name, "task": kind}
    if net is not None:
        kwargs = {key: value for key, value in net.kwargs.items() if key not in FETCHING}
        known["net"] = json.dumps({"type": net.type, "kwargs": kwargs}, default=str)
    if num_classes is not None:
        known["num_classes"] = str(num_classes)
    if image is not None:
        known["input"] = json.dumps(list(image.shape))
    return known
