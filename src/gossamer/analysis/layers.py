"""The prunable layers of a model at given levels of sparsity: size, MACs and zeros, as CSV and JSON."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from gossamer.errors import GossamerError, SparsityError, nearest
from gossamer.io import atomic_write
from gossamer.model import expect_model, layer_path, left_dense, prunable, weight_of
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
            "levels": list(self.levels),
            "layers": [
                {
                    "name": row.name,
                    "weight": row.weight,
                    "shape": list(row.shape),
                    "parameters": row.parameters,
                    "macs": row.macs,
                    "current_sparsity": row.current_sparsity,
                    "excluded": row.excluded,
                    "sparsity": list(row.sparsity),
                    "zeros": list(row.zeros),
                    "energy_kept": list(row.energy_kept),
                    "macs_left": _listed(row.macs_left),
                }
                for row in self.layers
            ],
            "total": _totals_json(self.total),
            "taking_part": _totals_json(self.taking_part),
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
        contents = {
            target / CSV_NAME: self.to_csv(),
            target / JSON_NAME: json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        }
        _write(target, contents)
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
    reason), are not pruned. Without `example_inputs` there are no MACs. Raises `GossamerError` if names or numbers do
    not fit the model, or if the model does not run on the inputs.

    >>> report = layer_report(nn.Linear(4, 5), {"weight": [0.3, 0.9]}, levels=[0.3, 0.9], example_inputs=[1, 4])
    >>> report.total.zeros, report.total.macs, report.total.macs_left
    ((6, 18), 20, (14, 2))
    """
    names = prunable(model)
    expect_model(model, "model")
    _check(model, names, sparsities, levels, excluded)
    macs = None if example_inputs is None else count_macs(model, example_inputs)
    missing = {name: "no sparsity given" for name in names if name not in sparsities}
    reasons = {**missing, **excluded}
    none = [0.0] * len(levels)
    rows = [
        _row(
            name,
            weight_of(model, name),
            none if name in reasons else sparsities[name],
            None if macs is None else macs[name],
            reasons.get(name),
        )
        for name in names
    ]
    return LayerReport(tuple(float(level) for level in levels), tuple(rows))


def _check(
    model: nn.Module,
    names: Sequence[str],
    sparsities: Mapping[str, Sequence[float]],
    levels: Sequence[float],
    excluded: Mapping[str, str],
) -> None:
    """Raise if names or numbers do not fit the model or each other."""
    if not names:
        raise GossamerError(nothing_to_prune(model, "to report on; give the one that is pruned"))
    for level in levels:
        if not 0 <= level <= 1:
            raise SparsityError(f"level {level} is not between 0 and 1; give fractions, such as 0.9 for 90 %")
    if len({f"{level:.10g}" for level in levels}) < len(levels):
        raise SparsityError(f"levels {', '.join(f'{level:g}' for level in levels)} repeat; give each of them once")
    for name in (*sparsities, *excluded):
        if name not in names and name not in left_dense(model):
            close = nearest(name, names) or f"; the first is '{names[0]}'"
            raise GossamerError(f"'{name}' is not one of the {len(names)} prunable weights{close}")
    for name, values in sparsities.items():
        if len(values) != len(levels):
            raise SparsityError(f"'{name}' has {len(values)} sparsities for {len(levels)} levels; give one for each")
        if not all(0 <= value <= 1 for value in values):
            raise SparsityError(f"'{name}' has a sparsity that is not between 0 and 1; give fractions")
        if name in excluded and any(values):
            raise GossamerError(f"'{name}' is excluded ({excluded[name]}) and has a sparsity; give only one of the two")


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


def _totals_json(totals: Totals) -> dict[str, Any]:
    return {
        "layers": totals.layers,
        "parameters": totals.parameters,
        "macs": totals.macs,
        "current_sparsity": totals.current_sparsity,
        "sparsity": list(totals.sparsity),
        "zeros": list(totals.zeros),
        "macs_left": _listed(totals.macs_left),
    }


def _listed(values: Sequence[int] | None) -> list[int] | None:
    return None if values is None else list(values)


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


def _write(folder: Path, contents: dict[Path, str]) -> None:
    """Write all files, or none."""
    current = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            for current, text in reversed(contents.items()):
                stack.enter_context(atomic_write(current)).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        path: object = error.filename2 or current  # moving failed, or writing
        raise GossamerError(f"{path}: cannot be written: {error.strerror}; choose a writable folder") from error
