"""Which filters of a model can only be removed together, and which cannot be removed at all.

Output channels that a residual, a depthwise convolution or a shared layer couples form one group, with the weights that
produce them and the weights that read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from gossamer.model.parameters import (
    embedding_tables,
    is_depthwise,
    is_transposed,
    named_parameters,
    owner_of,
    prunable,
)
from gossamer.model.tracing.channels import Ints
from gossamer.model.tracing.coupling import READS_INPUT, Coupling, couple
from gossamer.model.weights import layer_path


@dataclass(frozen=True)
class FilterGroup:
    """Output channels that belong together, with the weights that hold them; clean names, in the model's order."""

    filters: int
    producers: tuple[str, ...]
    """Weights whose output channels these are; a depthwise convolution hands its input's channels on, and counts."""
    consumers: tuple[str, ...]
    """Weights that read them."""
    held: str | None
    """Why none of these channels can be removed; None when they can, as far as the graph shows."""


def filter_groups(model: nn.Module, example_inputs: Any = None) -> list[FilterGroup]:
    """The groups of filters of a model, in the order of its weights; raises `Untraceable`.

    `example_inputs`: a tensor, a tuple of arguments for `forward`, or a dict of keyword arguments; without it common
    shapes are tried. Linear layers have filters too: their rows.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(group.filters, group.producers, group.consumers, group.held is None) for group in filter_groups(net)]
    [(8, ('0.weight',), ('2.weight',), True), (2, ('2.weight',), (), False)]
    """
    graph = FilterGraph(model, couple(model, example_inputs, parts=True))
    return [graph.group(classes) for classes in graph.components()]


class FilterGraph:
    """Classes of channels (see `channels`) as the model's weights produce and read them."""

    def __init__(self, model: nn.Module, coupling: Coupling) -> None:
        self.coupling = coupling
        self.produced: dict[str, Ints] = {}
        """Of each weight, the class of every output channel."""
        self.read: dict[str, Ints] = {}
        """Of each weight that sums over its input, the class of every input channel."""
        self.depthwise = {name for name in prunable(model) if is_depthwise(model, name)}
        tables = dict.fromkeys(embedding_tables(model), 1)  # their columns are channels
        self.output_dim = {name: int(is_transposed(model, name)) for name in prunable(model)} | tables
        for name, out in self.output_dim.items():
            by_dims: Mapping[tuple[int, ...], Ints] = {
                factor.dims: coupling.channels.resolved(factor)[0] for factor in coupling.layouts.get(name, ())
            }
            side = self.output_side(name)
            if (side,) in by_dims:
                self.produced[name] = by_dims[(side,)]
            # Where a grouped convolution's rows see different channels, those come as a matrix.
            into = by_dims.get((1 - out,), by_dims.get((0, 1)))
            if into is not None and name not in tables and name not in self.depthwise:
                self.read[name] = into
        self.held = _held(coupling)
        self.vectors = self._vectors(model)
        """The class at each position of the biases of layers, and of the affine parameters of batch norm."""

    def _vectors(self, model: nn.Module) -> dict[str, Ints]:
        found: dict[str, Ints] = {}
        layers = {layer_path(name) for name in self.output_dim}
        for name, parameter in named_parameters(model):
            path, _, leaf = name.rpartition(".")
            own_bias = leaf == "bias" and path in layers
            if parameter.dim() == 1 and (own_bias or isinstance(owner_of(model, name), _NormBase)):
                for factor in self.coupling.layouts.get(name, ()):
                    if factor.dims == (0,):
                        found[name] = self.coupling.channels.resolved(factor)[0]
        return found

    def output_side(self, name: str) -> int:
        """The dimension of a weight along which its output channels lie; those of a depthwise one are its rows."""
        return 0 if name in self.depthwise else self.output_dim[name]

    def reads_input(self, name: str) -> bool:
        """Whether a weight reads channels of the network's input."""
        classes = self.read.get(name)
        return classes is not None and any(self.held.get(n) == READS_INPUT for n in classes.reshape(-1).tolist())

    def components(self) -> list[Ints]:
        """The classes of each group, sorted; groups in the order of their first weight."""
        size = len(self.coupling.classes.colour)
        label = np.arange(size)
        for classes in self.produced.values():
            merged, own = np.arange(size), label[classes]
            merged[own] = own.min()
            label = merged[label]
        found: dict[int, list[Ints]] = {}
        for classes in self.produced.values():
            found.setdefault(int(label[classes.flat[0]]), []).append(classes.reshape(-1))
        return [np.unique(np.concatenate(members)) for members in found.values()]

    def group(self, classes: Ints) -> FilterGroup:
        """A group's weights and, when all its channels are held, the most common reason."""
        kept = [self.held[number] for number in classes.tolist() if number in self.held]
        return FilterGroup(
            filters=len(classes),
            producers=tuple(name for name, own in self.produced.items() if np.isin(own, classes).any()),
            consumers=tuple(name for name, own in self.read.items() if np.isin(own, classes).any()),
            held=max(kept, key=kept.count) if len(kept) == len(classes) else None,
        )


def _held(coupling: Coupling) -> dict[int, str]:
    """Why a class cannot be removed: it has a fixed position, belongs to a part of a tensor, or to an average."""
    found: dict[int, str] = {}
    classes = coupling.classes
    for reasons in (classes.reasons, classes.counts, classes.limits):
        for number in np.flatnonzero(reasons.number >= 0).tolist():
            found.setdefault(number, reasons.messages[int(reasons.number[number])])
    return found
