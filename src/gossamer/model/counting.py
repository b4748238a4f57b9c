"""How many weights a model has and how many of them are zero: the definition behind every figure.

Counts the weights of convolutions, linear layers and attention, prunable or not. Magnitudes of weight norm, buffers of
parametrizations, biases, normalisation and embeddings are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gossamer.model.additions import evaluated
from gossamer.model.parameters import first_names, get_tensor, named_modules, unwrap, weight_of
from gossamer.model.weights import is_subclass, opaque, weights_of


@dataclass(frozen=True)
class WeightCount:
    """One weight of a layer."""

    kind: str
    """`convolution`, or `linear` for all others."""
    shape: tuple[int, ...]
    zeros: int

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@torch.no_grad()
def count_weights(model: nn.Module) -> dict[str, WeightCount]:
    """The weights that `prunable` and `left_dense` name, with the zeros that the model evaluates with.

    A weight that a parametrization computes counts as dense where zeros of the stored tensor are not zeros of the
    weight. Weights of TorchScript and quantized modules, and lazy ones, have no tensor to count and are left out.
    """
    module = unwrap(model)
    known, found = first_names(module), dict[str, WeightCount]()
    replaced = {id(parameter): value for parameter, value in evaluated(module)}
    for path, layer in named_modules(module):
        for weight in () if opaque(layer) is not None else weights_of(layer):
            alias = f"{path}.{weight.leaf}" if path else weight.leaf
            name = known.get(alias, alias)
            tensor = get_tensor(module, name)
            if name in found or is_lazy(tensor):
                continue
            zeros = 0
            if weight.reason is None and not tensor.is_meta and not is_subclass(tensor):
                zeros = _zeros(replaced[id(tensor)] if id(tensor) in replaced else weight_of(module, name))
            convolution = isinstance(layer, nn.modules.conv._ConvNd)  # pyright: ignore[reportPrivateUsage]
            found[name] = WeightCount("convolution" if convolution else "linear", tuple(tensor.shape), zeros)
    return found


def count_by_kind(model: nn.Module) -> dict[str, tuple[int, int]]:
    """For each kind of layer: its weights, and how many of them are not zero.

    >>> count_by_kind(nn.Sequential(nn.Linear(2, 3), nn.Embedding(5, 4)))
    {'linear': (6, 6)}
    """
    totals: dict[str, tuple[int, int]] = {}
    for count in count_weights(model).values():
        total, nonzero = totals.get(count.kind, (0, 0))
        totals[count.kind] = (total + count.weights, nonzero + count.weights - count.zeros)
    return totals


def _zeros(values: Tensor) -> int:
    dense = values if values.layout == torch.strided else values.to_dense()
    countable = dense if dense.element_size() > 1 else dense.float()  # torch cannot count in floats of eight bits
    return countable.numel() - int(torch.count_nonzero(countable))
