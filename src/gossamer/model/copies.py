"""Deep copies of models, also of those whose hooks leave a computed weight in a layer."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

from torch import Tensor, nn

from gossamer.model.weights import hooks_that_compute

M = TypeVar("M", bound=nn.Module)


def duplicate(model: M) -> M:
    """A deep copy of a model; raises what the model's own code raises.

    Spectral norm, weight norm and `torch.nn.utils.prune` keep the weight that they computed last as an attribute of
    the layer, with its graph, which torch does not copy. The copy gets its values, until it computes its own.
    """
    computed = [vars(layer).get(leaf) for layer in model.modules() for leaf in hooks_that_compute(layer)]
    return deepcopy(model, {id(value): value.detach().clone() for value in computed if isinstance(value, Tensor)})
