"""A model as a table: size, MACs and zeros of each prunable layer, now and after a recipe."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from gossamer.analysis.layers import LayerRow, kind_of, layer_report, outputs_first
from gossamer.analysis.projection import Outlook, Projection
from gossamer.model import expect_model, left_dense, prunable, unwrap, weight_of
from gossamer.model.counting import WeightCount, count_weights
from gossamer.model.parameters import named_state
from gossamer.model.weights import check_values
from gossamer.sparse import NM, Block, Channel, Filter, Pattern

PATTERNS: dict[str, Pattern] = {"filter": Filter(), "channel": Channel(), "2:4": NM(2, 4), "block4": Block(1, 4)}
"""Patterns that are detected, the coarsest first."""


@dataclass(frozen=True)
class ModelRow:
    """One prunable weight."""

    layer: LayerRow
    """Its size, MACs and zeros now, without levels."""
    kind: str
    """`conv 3×3`, `depthwise 3×3`, `linear`, `attention` and so on."""
    value_bytes: int
    """Bytes of one value."""
    patterns: tuple[str, ...]
    """The patterns of its zeros, the coarsest first; `unstructured` if there is none, and empty without zeros."""
    outlook: Outlook | None = None
    """What the recipe does to it; None without a recipe, or if it stays dense."""
    dense: str | None = None
    """Why the recipe leaves it dense."""

    @property
    def weight(self) -> str:
        return self.layer.weight

    @property
    def parameters(self) -> int:
        return self.layer.parameters

    @property
    def zeros_then(self) -> int | None:
        """Zeros at the end of the recipe; None if training decides. Zeros without a mask do not survive training."""
        return 0 if self.outlook is None else self.outlook.zeros

    def macs_left(self, zeros: int | None) -> int | None:
        """MACs with non-zero weights."""
        if self.layer.macs is None or zeros is None:
            return None
        return self.layer.macs * (self.parameters - zeros) // max(self.parameters, 1)


@dataclass(frozen=True)
class Sizes:
    """Bytes of all parameters and buffers in a file, without its header."""

    dense: int
    bitmask: int | None
    """One bit per weight plus the non-zero values; None if their number is not known."""
    sparse24: int | None
    """2:4 layers as half of their values with two bits each, the others dense; None without 2:4 layers."""


@dataclass(frozen=True)
class State:
    """All layers together, at one point in time."""

    zeros: int | None
    macs: int | None
    """MACs with non-zero weights; None without example inputs, or if training decides."""
    sizes: Sizes


@dataclass(frozen=True)
class ModelTable:
    """Every prunable layer of a model in its order, and sums over all layers with weights."""

    rows: tuple[ModelRow, ...]
    parameters: int
    """Weights of all layers, including those that no method can prune."""
    other_parameters: int
    """Biases, normalisation, embeddings and the like."""
    macs: int | None
    now: State
    then: State | None
    """At the end of the recipe; None without one."""
    projection: Projection | None = None
    left_dense: Mapping[str, str] = field(default_factory=dict[str, str])
    """Weights that no method can prune and that have no row, with the reason."""
    dense: Mapping[str, WeightCount] = field(default_factory=dict[str, WeightCount])
    """The sizes of those that can be counted."""

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON: `layers`, `total`, `recipe` if there is one, and `left_dense`."""
        project = self.projection
        return {
            "layers": [_row_json(row, project is not None) for row in self.rows],
            "total": {
                "layers": len(self.rows),
                "parameters": self.parameters,
                "left_dense_parameters": sum(count.weights for count in self.dense.values()),
                "other_parameters": self.other_parameters,
                "macs": self.macs,
                "now": _state_json(self.now, self.parameters),
                "then": None if self.then is None else _state_json(self.then, self.parameters),
            },
            "recipe": None
            if project is None
            else {"name": project.recipe, "epochs": project.epochs, "notes": list(project.notes)},
            "left_dense": dict(self.left_dense),
        }

    def to_csv(self) -> str:
        """One line for each layer; unknown values are empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        rows = [_row_json(row, self.projection is not None) for row in self.rows]
        columns = list(rows[0])
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_cell(row[column]) for column in columns])
        return text.getvalue()


def model_table(model: nn.Module, example_inputs: Any = None, projection: Projection | None = None) -> ModelTable:
    """The layers of a model; without `example_inputs` there are no MACs.

    Raises `GossamerError` if the model has no prunable layer, or does not run on the inputs.

    >>> table = model_table(nn.Linear(8, 4, bias=False), [1, 8])
    >>> table.macs, table.now.sizes
    (32, Sizes(dense=128, bitmask=128, sparse24=None))
    """
    expect_model(model, "model")
    module = unwrap(model)
    names = prunable(module)
    check_values(module, "model")
    layers = layer_report(module, dict.fromkeys(names, ()), (), example_inputs).layers
    rows = tuple(_row(module, layer, projection) for layer in layers)
    state = dict(named_state(module))
    rest = sum(tensor.numel() * tensor.element_size() for name, tensor in state.items() if name not in names)
    own = {id(parameter) for parameter in module.parameters()}
    dense = {name: count for name, count in count_weights(module).items() if name not in names}
    counted = {*names, *dense}
    others = sum(tensor.numel() for name, tensor in state.items() if id(tensor) in own and name not in counted)
    rest_of_file = _Others(rest, sum(count.zeros for count in dense.values()))
    now = [row.layer.current_zeros for row in rows]
    then = None
    if projection is not None:
        total = projection.zeros(row.weight for row in rows)
        halved = [_ends_at_two_of_four(row) for row in rows]
        then = _state(rows, [row.zeros_then for row in rows], total, halved, rest_of_file)
    counted_macs = layers[0].macs is not None
    return ModelTable(
        rows=rows,
        parameters=sum(row.parameters for row in rows) + sum(count.weights for count in dense.values()),
        other_parameters=others,
        macs=sum(row.layer.macs or 0 for row in rows) if counted_macs else None,
        now=_state(rows, now, sum(now), ["2:4" in row.patterns for row in rows], rest_of_file),
        then=then,
        projection=projection,
        left_dense=left_dense(module),
        dense=dense,
    )


def patterns_of(weight: Tensor) -> tuple[str, ...]:
    """The patterns that a weight `(out, in, …)` satisfies, the coarsest first.

    >>> import torch
    >>> patterns_of(torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, 0.0, 3.0, 4.0]]))
    ('2:4',)
    >>> patterns_of(torch.tensor([[1.0, 1.0], [0.0, 1.0]])), patterns_of(torch.ones(2, 2))
    (('unstructured',), ())
    """
    if bool(weight.all()):
        return ()
    fitting = {name: pattern for name, pattern in PATTERNS.items() if not pattern.fits(weight.shape)}
    return tuple(name for name, pattern in fitting.items() if pattern.violations(weight) == 0) or ("unstructured",)


def bitmask_bytes(parameters: int, zeros: int, value_bytes: int) -> int:
    """A weight as one bit per value plus the non-zero values, or dense if that is smaller."""
    return min(math.ceil(parameters / 8) + (parameters - zeros) * value_bytes, parameters * value_bytes)


def sparse24_bytes(parameters: int, value_bytes: int) -> int:
    """A 2:4 weight as half of its values, each with a two-bit index."""
    return parameters // 2 * value_bytes + math.ceil(parameters / 2 * 2 / 8)


# Rows and sums


@dataclass(frozen=True)
class _Others:
    """Everything in a file besides the prunable weights."""

    bytes: int
    zeros: int
    """Zeros of weights that no method can prune."""


def _row(module: nn.Module, layer: LayerRow, projection: Projection | None) -> ModelRow:
    weight = outputs_first(module, layer.weight, weight_of(module, layer.weight))
    patterns = patterns_of(weight) if layer.current_zeros else ()
    outlook = None if projection is None else projection.layers.get(layer.weight)
    if outlook is not None and outlook.certainty == "held" and patterns:
        outlook = outlook._replace(pattern=patterns[0])  # existing zeros stay where they are
    return ModelRow(
        layer=layer,
        kind=kind_of(module, layer.weight),
        value_bytes=weight.element_size(),
        patterns=patterns,
        outlook=outlook,
        dense=None if projection is None else projection.dense.get(layer.weight),
    )


def _state(
    rows: Sequence[ModelRow],
    zeros: Sequence[int | None],
    total: int | None,
    halved: Sequence[bool],
    others: _Others,
) -> State:
    """All layers with these counts of zeros; `halved` tells which of them are 2:4."""
    dense = [row.parameters * row.value_bytes for row in rows]
    pairs = list(zip(rows, zeros, strict=True))
    bitmask = _total(
        None if count is None else bitmask_bytes(row.parameters, count, row.value_bytes) for row, count in pairs
    )
    if bitmask is None and total is not None and len({row.value_bytes for row in rows}) == 1:
        # The size of the file depends on the total of zeros only, except for layers that stay dense in it.
        bits = sum(math.ceil(row.parameters / 8) for row in rows if row.outlook is not None)
        kept = sum(row.parameters for row in rows) - total
        bitmask = min(bits + kept * rows[0].value_bytes, sum(dense))
    packed = [
        sparse24_bytes(row.parameters, row.value_bytes) if is_24 else size
        for row, size, is_24 in zip(rows, dense, halved, strict=True)
    ]
    return State(
        zeros=None if total is None else total + others.zeros,
        macs=_total(row.macs_left(count) for row, count in pairs),
        sizes=Sizes(
            dense=others.bytes + sum(dense),
            bitmask=None if bitmask is None else others.bytes + bitmask,
            sparse24=others.bytes + sum(packed) if any(halved) else None,
        ),
    )


def _ends_at_two_of_four(row: ModelRow) -> bool:
    outlook = row.outlook
    if outlook is not None and outlook.certainty == "held":
        return "2:4" in row.patterns
    return outlook is not None and outlook.pattern in ("2:4", "tensorrt", "m4n2_1d", "m4n2_2d_best", "m4n2_2d_greedy")


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum; None if one is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


# As text


def _row_json(row: ModelRow, with_recipe: bool) -> dict[str, Any]:
    layer, outlook = row.layer, row.outlook
    data = {
        "weight": row.weight,
        "kind": row.kind,
        "shape": list(layer.shape),
        "parameters": row.parameters,
        "macs": layer.macs,
        "zeros": layer.current_zeros,
        "sparsity": layer.current_sparsity,
        "patterns": list(row.patterns),
    }
    if not with_recipe:
        return data
    then = row.zeros_then
    return data | {
        "zeros_then": then,
        "sparsity_then": None if then is None else then / max(row.parameters, 1),
        "pattern_then": None if outlook is None else outlook.pattern,
        "sure": None if outlook is None else outlook.certainty,
        "modifier": None if outlook is None else outlook.modifier,
        "macs_then": row.macs_left(then),
        "dense_because": row.dense,
    }


def _state_json(state: State, parameters: int) -> dict[str, Any]:
    return {
        "zeros": state.zeros,
        "sparsity": None if state.zeros is None else state.zeros / max(parameters, 1),
        "macs": state.macs,
        "bytes": asdict(state.sizes),
    }


def _cell(value: Any) -> str:
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return ("x" if items and isinstance(items[0], int) else " ").join(map(str, items))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
