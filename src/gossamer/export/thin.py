"""`thin`: a smaller copy of a model, without filters and channels that do not contribute.

The copy computes the same outputs and can be saved in any format. `gossamer.model.thin` decides what can be removed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from gossamer.errors import GossamerError, first_line
from gossamer.model import expect_model
from gossamer.model import thin as thinning
from gossamer.model.additions import strip
from gossamer.model.parameters import unwrap
from gossamer.model.thin import Progress, Thinned
from gossamer.model.thin.cuts import spread_over_processes
from gossamer.model.weights import check_values, duplicate


def thin(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    names: Collection[str] | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, Thinned]:
    """A copy of the model in evaluation mode without filters and channels of zeros, and a report of what was removed.

    `example_inputs` is a tensor, a tuple of arguments for `forward`, or a dict of keyword arguments; by default, common
    shapes are tried. `names` restricts the removal to filters of these weights. The model itself is not changed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> _ = net[0].weight.data[:6].zero_(), net[0].bias.data.zero_()
    >>> small, report = thin(net)
    >>> small[0], report.parameters
    (Linear(in_features=4, out_features=2, bias=True), (58, 16))
    """
    expect_model(model, "thin")
    check_values(model, "thin")
    if reason := spread_over_processes(model):
        raise GossamerError(f"thin: {reason}; pass the unwrapped model")
    try:
        smaller: nn.Module = strip(duplicate(unwrap(model)).eval())
    except Exception as error:  # of the model's own code, or of torch
        reason = first_line(error).partition(". ")[0]
        raise GossamerError(
            f"thin: the model cannot be copied ({reason}); pass a model that copy.deepcopy supports"
        ) from error
    return smaller, thinning.thin(smaller, example_inputs, names=names, progress=progress)
