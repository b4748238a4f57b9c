"""Networks with whole filters of zeros, and batch norm whose shifts are anything but zero."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.model import get_parameter
from gossamer.model.thin import Thinned, thin
from gossamer.model.tracing.coupling import couple
from gossamer.model.tracing.filter_groups import FilterGraph


def lively(model: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics and shifts as after training: of both signs."""
    source = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.weight.data.uniform_(0.5, 1.5, generator=source)
            layer.bias.data.normal_(0, 0.3, generator=source)
            layer.running_mean.normal_(0, 0.2, generator=source)
            layer.running_var.uniform_(0.5, 2, generator=source)
    return model.eval()


def prune(model: nn.Module, inputs: Any, share: float = 0.5, seed: int = 0) -> int:
    """Zero a share of the filters of each group that can lose them; how many channels that are."""
    graph = FilterGraph(model, couple(model, inputs, parts=True))
    source, count = np.random.default_rng(seed), 0
    for classes in graph.components():
        if graph.group(classes).held is None:
            gone = source.permutation(classes)[: round(share * len(classes))]
            count += len(gone)
            for name, own in graph.produced.items():
                weight = get_parameter(model, name).detach().movedim(graph.output_side(name), 0)
                weight[torch.from_numpy(np.isin(own, gone))] = 0
    return count


def thinned_alike(model: nn.Module, inputs: Any, tolerance: float = 1e-5) -> tuple[nn.Module, Thinned]:
    """A thinned copy, after checking that it computes the same on inputs that thinning did not see."""
    smaller = copy.deepcopy(model)
    found = thin(smaller, inputs)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad():
        before, after = flat(model(*arguments)), flat(smaller(*arguments))
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(a.abs().max()) if a.numel() else 0)
    return smaller, found


def flat(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values if value is not None for tensor in flat(value)]
