"""Whether a cut takes whole channels out of a model: from every tensor that produces, carries or reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from gossamer.model.thin.cuts import Cuts
from gossamer.model.tracing.coupling import Untraceable, couple
from gossamer.model.tracing.filter_groups import FilterGraph


def incoherent(model: nn.Module, cuts: Cuts, example_inputs: Any = None) -> str | None:
    """The first tensor that is not cut as the others are, None when all are; the model is as before the cut.

    Of a model that cannot be followed as a whole nothing is known, and None is returned.

    >>> import torch
    >>> net, two = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2)), torch.arange(2)
    >>> incoherent(net, Cuts({"0.weight": {0: two}, "1.weight": {1: two}}))
    >>> incoherent(net, Cuts({"0.weight": {0: two}}))
    '1.weight'
    """
    try:
        coupling = couple(model, example_inputs, parts=True)
    except Untraceable:
        return None
    if coupling.note is not None:
        return None
    classes = {
        (name, factor.dims[0]): coupling.channels.resolved(factor)[0].reshape(-1)
        for name, layout in coupling.layouts.items()
        for factor in layout
        if len(factor.dims) == 1
    }
    gone = np.zeros(len(coupling.classes.colour), np.bool_)
    for name, dims in cuts.kept.items():
        for dim, kept in dims.items():
            if (name, dim) not in classes:
                return name
            own = classes[name, dim]
            stays = np.isin(np.arange(len(own)), kept.cpu().numpy())
            gone[own[~stays]] = True
    gone_and_needed = [number for number in FilterGraph(model, coupling).held if gone[number]]
    for (name, dim), own in classes.items():
        kept = cuts.kept.get(name, {}).get(dim)
        stays = np.ones(len(own), np.bool_) if kept is None else np.isin(np.arange(len(own)), kept.cpu().numpy())
        if (stays == gone[own]).any() or np.isin(own, gone_and_needed).any():
            return name
    return None
