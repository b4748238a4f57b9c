"""The weights of a run folder as a report shows them: layers, histograms, masks.

Tensors come from `model.safetensors`, else from the checkpoint that is the model of the run; where neither can be used,
the notes of the run have layers and histograms. No model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.model.additions import is_added
from gossamer.report.content import Bins, Layer, MaskPicture, WeightHistogram
from gossamer.report.weights import bins, chosen, count_zeros, mask_picture
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.reporting.notes import Weights, noted_weights
from gossamer.runner.weights import read_weights

MODEL = "model.safetensors"
FEW = 0.001
"""A model with fewer zeros than this share is dense: some weights are zero by chance."""


@dataclass(frozen=True)
class Shown:
    layers: tuple[Layer, ...] = ()
    histograms: tuple[WeightHistogram, ...] = ()
    masks: tuple[MaskPicture, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])


def shown_weights(
    folder: Path,
    summary: Mapping[str, Any],
    plan: Mapping[str, Any] | None,
    start: Mapping[str, Any] | None,
    end: Mapping[str, Any] | None,
    *,
    complete: bool,
) -> Shown:
    """What can be shown of the weights at the end of a run, or where it stopped."""
    known = _known(plan)
    tensors, exported, why = _tensors(folder, known, complete=complete)
    at = summary["model"]["iteration"]
    of_model = end is not None and (complete if at is None else end.get("iteration") == at)
    noted = noted_weights(end) if of_model else None
    before = noted_weights(start)
    if tensors and not exported and not _is_smaller(tensors, before) and _makes_zeros_late(summary, tensors):
        tensors, why = {}, "This method writes its zeros into the weights when the run is complete."
    if not tensors and noted is None:
        return Shown(missing=dict.fromkeys(("layers", "histograms", "masks"), why))
    if tensors:
        now = Weights({n: tuple(t.shape) for n, t in tensors.items()}, {n: bins(t) for n, t in tensors.items()})
        zeros = count_zeros(tensors)
    else:
        assert noted is not None
        now, zeros = noted, {name: found.zeros for name, found in noted.bins.items()}
    layers = tuple(_layer(name, now, zeros[name], known.get(name, {})) for name in now.shapes)
    picked = chosen(layers)
    masks, missing = _masks(tensors, layers, picked, known, why)
    return Shown(layers, tuple(_histograms(now.bins, before, picked)), masks, missing)


def _tensors(folder: Path, known: Mapping[str, Any], *, complete: bool) -> tuple[dict[str, Tensor], bool, str]:
    """The prunable weights, whether they are of the exported model, and the reason where there are none."""
    model = Checkpoints(folder / "checkpoints", keep=1).model()
    paths = [folder / MODEL] if complete and (folder / MODEL).is_file() else []
    why = "The folder holds no weights: neither model.safetensors nor a checkpoint."
    for path in [*paths, *([] if model is None else [model.path])]:
        try:
            weights = read_weights(path)
        except GossamerError as error:
            # The page may be shared: the file, without the folders above it.
            why = f"The weights cannot be read: {str(error).replace(str(folder), folder.resolve().name)}."
            continue
        order = [name for name in known if name in weights] or list(weights)
        found = {name: weights[name] for name in order if _is_shown(name, weights[name], known)}
        if found:
            return found, path in paths, why
        why = f"{path.name} holds no weights of convolutions or linear layers."
    return {}, False, why


def _is_smaller(tensors: Mapping[str, Tensor], before: Weights | None) -> bool:
    """Whether filters were removed since the start."""
    shapes = {} if before is None else before.shapes
    return any(tuple(shapes.get(name, tensor.shape)) != tuple(tensor.shape) for name, tensor in tensors.items())


def _is_shown(name: str, tensor: Tensor, known: Mapping[str, Any]) -> bool:
    if known:
        return name in known and tensor.is_floating_point()
    named = "weight" in name and not is_added(name)
    return named and tensor.dim() >= 2 and tensor.is_floating_point()


def _makes_zeros_late(summary: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    pruned = summary["sparsity_of_pruned_layers"]
    total = sum(tensor.numel() for tensor in tensors.values())
    return bool(pruned and pruned > 0.05) and sum(count_zeros(tensors).values()) < 0.01 * total


def _layer(name: str, weights: Weights, zeros: int, known: Mapping[str, Any]) -> Layer:
    target, dense = known.get("target"), known.get("dense")
    return Layer(
        name.removesuffix(".weight"),
        weights.shapes[name],
        weights.bins[name].total,
        zeros,
        float(target) if isinstance(target, int | float) and 0 <= target <= 1 else None,
        dense if isinstance(dense, str) else None,
    )


def _histograms(after: Mapping[str, Bins], start: Weights | None, picked: list[str]) -> list[WeightHistogram]:
    before = {} if start is None else start.bins
    found = [
        WeightHistogram(name.removesuffix(".weight"), _same_size(before.get(name), now), now)
        for name, now in after.items()
    ]
    return sorted(found, key=lambda histogram: histogram.layer not in picked)


def _same_size(before: Bins | None, after: Bins) -> Bins | None:
    """Only bins that can be laid over each other."""
    return before if before is not None and len(before.counts) == len(after.counts) else None


def _masks(
    tensors: Mapping[str, Tensor],
    layers: tuple[Layer, ...],
    picked: list[str],
    known: Mapping[str, Mapping[str, Any]],
    why: str,
) -> tuple[tuple[MaskPicture, ...], dict[str, str]]:
    if not tensors:
        return (), {"masks": f"{why} Write them by gossamer export with --format safetensors."}
    if sum(layer.zeros for layer in layers) < FEW * sum(layer.parameters for layer in layers):
        return (), {"masks": "The model is dense: no mask to show."}
    found = [
        mask_picture(name.removesuffix(".weight"), tensor, transposed=bool(known.get(name, {}).get("transposed")))
        for name, tensor in tensors.items()
        if name.removesuffix(".weight") in picked
    ]
    return tuple(found), {}


def _known(plan: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """By weight: what the run noted of it."""
    layers: Any = None if plan is None else plan.get("layers")
    if not isinstance(layers, dict):
        return {}
    return {name: entry for name, entry in cast(dict[str, Any], layers).items() if isinstance(entry, dict)}
