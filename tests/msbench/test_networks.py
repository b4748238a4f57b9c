"""Models that no graph can represent: torch.fx follows their networks, and what lies outside is not pruned."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.msbench import build_sparse_scheduler

LEVELS = {"type": "AmbaLevelPruneScheduler", "kwargs": {"total_iters": 4, "sparsity_table": [50], "save_dir": None}}
SCHEDULERS = {"levels": LEVELS, "2:4": {"type": "AmpereScheduler"}}


class Finder(nn.Module):
    """Chooses its path by values, as detectors do; `scale` belongs to what is done with the network's output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 8)
        self.scale = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.body(x))
        return self.scale(found) if float(found.detach().sum()) > 0 else found

    def network(self) -> nn.Module:
        return nn.Sequential(self.body, self.head)


def prepared(kind: str, **more: object) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = Finder()
    scheduler = build_sparse_scheduler({"scheduler": SCHEDULERS[kind], **more})
    assert scheduler.prepare_sparse_model(model, networks={"network": model.network()}) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler.init_optimizer(optimizer)
    for iteration in range(4):
        scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    return model, scheduler


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_layers_outside_of_the_networks_stay_dense(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model, scheduler = prepared(kind)
    assert sorted(scheduler.names) == ["body.0.weight", "head.weight"]
    assert scheduler.compute_sparse_rate(model) == 0.5
    assert int((model.scale.weight == 0).sum()) == 0
    assert not caplog.records


def test_a_leaf_may_name_a_part_of_a_network_or_of_the_model() -> None:
    for leaf in ("0.0", "body.0", "Linear"):
        prepared("levels", leaf_module=[leaf])
    with pytest.raises(
        GossamerError, match="leaf_module: the model has no module or class 'Lineal'; nearest: 'Linear'"
    ):
        prepared("levels", leaf_module=["Lineal"])
