"""The prunable layers of a model at given levels of sparsity: size, MACs and zeros, as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from gossamer.errors import GossamerError, SparsityError
from gossamer.io import atomic_write
from gossamer.model import (
    expect_model,
    get_parameter,
    is_depthwise,
    is_transposed,
    layer_path,
    owner_of,
    prunable,
    weight_of,
)
from gossamer.model.counting import macs as count_macs
from gossamer.model.parameters import nothing_to_prune
from gossamer.sparse import energy_removed, zero_count

FORMAT = 1
"""Increases when the meaning of a key in the JSON changes."""
CSV_NAME, JSON_NAME = "pruner_report.csv", "pruner_report.json"


@dataclass(frozen=True)
class LayerRow:
    """One prunable weight; tuples have one entry for each level."""

    name: str
    """The layer: the name of the weight without its last part; empty if the model itself is the layer."""
    weight: str
    shape: tuple[int, ...]
    parameters: int
    macs: int | None
    """In one forward pass of the example inputs; None without them."""
    current_zeros: int
    """Weights that are zero now."""
    sparsity: tuple[float, ...]
    zeros: tuple[int, ...]
    """Zeros at each level: round(sparsity · parameters)."""
    energy_kept: tuple[float, ...]
    """The remaining share of the sum of squares after pruning by magnitude."""
    excluded: str | None = None
    """Why the layer is not pruned; its sparsity is then 0."""

    @property
    def current_sparsity(self) -> float:
        return _share(self.current_zeros, self.parameters)

    @property
    def macs_left(self) -> tuple[int, ...] | None:
        """MACs with non-zero weights, at each level."""
        if self.macs is None:
            return None
        return tuple(self.macs * (self.parameters - count) // max(self.parameters, 1) for count in self.zeros)


@dataclass(frozen=True)
class Totals:
    """Sums over layers; tuples have one entry for each level."""

    layers: int
    parameters: int
    macs: int | None
    current_zeros: int
    zeros: tuple[int, ...]
    macs_left: tuple[int, ...] | None

    @property
    def current_sparsity(self) -> float:
        return _share(self.current_zeros, self.parameters)

    @property
    def sparsity(self) -> tuple[float, ...]:
        return tuple(_share(count, self.parameters) for count in self.zeros)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "current_sparsity": self.current_sparsity, "sparsity": self.sparsity}


@dataclass(frozen=True)
class LayerReport:
    """Every prunable layer of a model at every level, in the model's order."""

    levels: tuple[float, ...]
    layers: tuple[LayerRow, ...]

    @property
    def total(self) -> Totals:
        """Over all prunable layers."""
        return self._summed(self.layers)

    @property
    def taking_part(self) -> Totals:
        """Over the layers that are not excluded."""
        return self._summed([row for row in self.layers if row.excluded is None])

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON.

        `format`: 1. `levels`: the target sparsities, as fractions. `layers`: for each `name`, `weight`, `shape`,
        `parameters`, `macs` (or null), `current_sparsity`, `excluded` (the reason, or null), and with one entry for
        each level `sparsity`, `zeros`, `energy_kept` and `macs_left` (or null). `total` (all layers) and
        `taking_part` (without the excluded ones): `layers` (how many), `parameters`, `macs`, `current_sparsity`,
        `sparsity`, `zeros`, `macs_left`.
        """
        return {
            "format": FORMAT,
            "levels": self.levels,
            "layers": [
                {**asdict(row), "current_sparsity": row.current_sparsity, "macs_left": row.macs_left}
                for row in self.layers
            ],
            "total": self.total.to_json(),
            "taking_part": self.taking_part.to_json(),
        }

    def to_csv(self) -> str:
        """One line for each layer, and a last line `total`; unknown values are empty."""
        labels = [f"{level:.10g}" for level in self.levels]
        columns = [f"{kind}_{label}" for kind in ("sparsity", "energy_kept", "macs_left") for label in labels]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["layer", "weight", "shape", "parameters", "macs", "current_sparsity", *columns, "excluded"])
        for row in self.layers:
            first = [row.name, row.weight, "x".join(map(str, row.shape))]
            writer.writerow([*first, *self._cells(row, row.energy_kept), row.excluded or ""])
        writer.writerow(["total", "", "", *self._cells(self.total, None), ""])
        return text.getvalue()

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write `pruner_report.csv` and `pruner_report.json` atomically and return their paths.

        Raises `GossamerError` if they cannot be written.
        """
        target = Path(folder)
        texts = {
            CSV_NAME: self.to_csv(),
            JSON_NAME: json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        }
        try:
            target.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                with atomic_write(target / name) as scratch:
                    scratch.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise GossamerError(
                f"{target}: the report cannot be written: {error.strerror}; choose a writable folder"
            ) from error
        return target / CSV_NAME, target / JSON_NAME

    def _summed(self, rows: Sequence[LayerRow]) -> Totals:
        macs = [row.macs for row in rows if row.macs is not None]
        left = [row.macs_left for row in rows if row.macs_left is not None]
        known = all(row.macs is not None for row in self.layers)
        levels = range(len(self.levels))
        return Totals(
            layers=len(rows),
            parameters=sum(row.parameters for row in rows),
            macs=sum(macs) if known else None,
            current_zeros=sum(row.current_zeros for row in rows),
            zeros=tuple(sum(row.zeros[level] for row in rows) for level in levels),
            macs_left=tuple(sum(counts[level] for counts in left) for level in levels) if known else None,
        )

    def _cells(self, row: LayerRow | Totals, energy_kept: Sequence[float] | None) -> list[str]:
        unknown = [""] * len(self.levels)
        return [
            str(row.parameters),
            "" if row.macs is None else str(row.macs),
            f"{row.current_sparsity:.6g}",
            *(f"{sparsity:.6g}" for sparsity in row.sparsity),
            *(unknown if energy_kept is None else (f"{share:.6g}" for share in energy_kept)),
            *(unknown if row.macs_left is None else map(str, row.macs_left)),
        ]


def layer_report(
    model: nn.Module,
    sparsities: Mapping[str, Sequence[float]],
    levels: Sequence[float],
    example_inputs: Any = None,
    excluded: Mapping[str, str] = MappingProxyType({}),
) -> LayerReport:
    """Every prunable weight of the model, and what remains of it at each level.

    `sparsities` has one fraction per level for each weight; weights that are missing there, or `excluded` (with the
    reason), are not pruned. Without `example_inputs` there are no MACs. Raises `GossamerError` if the model has no
    prunable layer, or does not run on the inputs.

    >>> report = layer_report(nn.Linear(4, 5), {"weight": [0.3, 0.9]}, levels=[0.3, 0.9], example_inputs=[1, 4])
    >>> report.total.zeros, report.total.macs, report.total.macs_left
    ((6, 18), 20, (14, 2))
    """
    expect_model(model, "model")
    names = prunable(model)
    if not names:
        raise GossamerError(nothing_to_prune(model, "to report on; give the one that is pruned"))
    macs = None if example_inputs is None else count_macs(model, example_inputs)
    reasons = {name: "no sparsity given" for name in names if name not in sparsities} | dict(excluded)
    rows = [
        _row(
            name,
            weight_of(model, name),
            [0.0] * len(levels) if name in reasons else sparsities[name],
            None if macs is None else macs[name],
            reasons.get(name),
        )
        for name in names
    ]
    return LayerReport(tuple(float(level) for level in levels), tuple(rows))


def kind_of(module: nn.Module, name: str) -> str:
    """The kind of layer that a weight belongs to: `conv 3×3`, `depthwise 3×3`, `linear`, `attention` and so on."""
    owner, shape = owner_of(module, name), get_parameter(module, name).shape
    if len(shape) < 3:
        return "attention" if isinstance(owner, nn.MultiheadAttention) else "linear"
    kernel = "×".join(str(size) for size in shape[2:])
    groups = getattr(owner, "groups", 1)
    if is_depthwise(module, name):
        return f"depthwise {kernel}"
    noun = "transposed conv" if is_transposed(module, name) else "conv" if groups == 1 else f"conv in {groups} groups,"
    return f"{noun} {kernel}"


def outputs_first(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Transpose between a weight's layout and output channels first, if they differ."""
    return tensor.transpose(0, 1) if tensor.dim() > 1 and is_transposed(module, name) else tensor


def _row(name: str, weight: Tensor, sparsity: Sequence[float], macs: int | None, excluded: str | None) -> LayerRow:
    zeros = tuple(zero_count(weight.numel(), value) for value in sparsity)
    return LayerRow(
        name=layer_path(name),
        weight=name,
        shape=tuple(weight.shape),
        parameters=weight.numel(),
        macs=macs,
        current_zeros=weight.numel() - int(weight.count_nonzero()),
        sparsity=tuple(float(value) for value in sparsity),
        zeros=zeros,
        energy_kept=_energy_kept(name, weight, zeros),
        excluded=excluded,
    )


def _energy_kept(name: str, weight: Tensor, zeros: Sequence[int]) -> tuple[float, ...]:
    """The remaining share of the sum of squares for each count of zeros, pruned by magnitude."""
    if not any(zeros):
        return (1.0,) * len(zeros)
    if not bool(weight.isfinite().all()):
        raise SparsityError(f"'{name}' contains values that are not finite; load other weights")
    removed = energy_removed(weight, name)
    return tuple(1.0 - float(removed[count - 1]) if count else 1.0 for count in zeros)


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0
