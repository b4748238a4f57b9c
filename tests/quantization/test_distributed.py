"""Two processes with DDP: other data and seeds, the same ranges and weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossamer import Manager
from gossamer.quantization import emulation_of
from tests.loops import batch, loss_at, network, sgd
from tests.ranks import in_ranks

RECIPE = """
modifiers:
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0, end_epoch: 1,
                        update_frequency: 0.5}
  - !QuantizationModifier {start_epoch: %s, disable_quantization_observer_epoch: 2, freeze_bn_stats_epoch: 2.5}
"""


def worker(rank: int, folder: str) -> None:
    found = []
    for start, calibrates in (("0.5", False), ("0", True)):
        model = DistributedDataParallel(network(seed=rank))
        torch.manual_seed(100 + rank)
        manager = Manager(RECIPE % start)
        data = [batch(70 + rank)[0] * (1 + 4 * rank)] if calibrates else None
        optimizer = manager.modify(model, sgd(model), 4, calibration_data=data)
        history = [dict(emulation_of(model).ranges)] if calibrates else []
        for step in range(12):
            optimizer.zero_grad()
            (loss_at(model, 10 * step + rank) * (1 + rank)).backward()
            optimizer.step()
            emulation = emulation_of(model)
            history.append({} if emulation is None else {key: v.clone() for key, v in emulation.ranges.items()})
        found.append([history, model.module.state_dict()])
    torch.save(found, f"{folder}/rank{rank}.pt")


def test_two_ranks_agree_on_ranges_and_weights_after_every_step() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        ranks = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for (history, weights), (others, other_weights) in zip(*ranks, strict=True):
        for step, (one, other) in enumerate(zip(history, others, strict=True)):
            assert one.keys() == other.keys()
            assert all(torch.equal(value, other[key]) for key, value in one.items()), f"step {step}"
            assert all(bool(value.isfinite().all()) for value in one.values())
        assert len(history[-1]) == 4
        assert all(torch.equal(history[-1][key], value) for key, value in history[-4].items())
        for name in dict(network().named_parameters()):
            assert torch.equal(weights[name], other_weights[name]), name
            assert bool(weights[name].isfinite().all())
    assert ranks[0][0][0][1] == {}
    calibrated = ranks[0][1][0][0]["0.input"]
    each = [batch(70 + rank)[0] * (1 + 4 * rank) for rank in range(2)]
    expected = torch.stack([torch.stack([values.min(), values.max()]) for values in each]).mean(0)
    torch.testing.assert_close(calibrated, expected)


class Drops(nn.Module):
    """Each process leaves out another layer, as LayerDrop does."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.left_out = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), left_out

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == self.left_out else layer(x)
        return x


def dropping(rank: int, folder: str) -> None:
    model = DistributedDataParallel(Drops(rank + 1), find_unused_parameters=True)
    optimizer = Manager("modifiers: [!QuantizationModifier {start_epoch: 0}]").modify(model, sgd(model), 4)
    model(torch.full((2, 4), 1.0 + rank)).sum().backward()
    optimizer.step()
    torch.save(dict(emulation_of(model).ranges), f"{folder}/rank{rank}.pt")


def test_ranges_belong_to_their_calls_also_where_processes_went_different_ways() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(dropping, folder)
        one, other = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert one.keys() == other.keys() == {"layers.0.input", "layers.1.input", "layers.2.input"}
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    torch.testing.assert_close(one["layers.0.input"], torch.tensor([1.5, 1.5]))
    second = Drops(0).layers[0](torch.full((2, 4), 2.0)).detach()
    torch.testing.assert_close(one["layers.1.input"], torch.stack([second.min(), second.max()]), rtol=0.05, atol=0.05)
