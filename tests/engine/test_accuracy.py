"""Real training on real images: each method reaches its sparsity and still reads digits."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from gossamer import Manager

RECIPE = """
modifiers:
  - !LearningRateFunctionModifier {{start_epoch: 0, end_epoch: 24, lr_func: cosine, init_lr: 0.1, final_lr: 0.0}}
  - !{}
    params: ['0.weight', '2.weight']
    start_epoch: 4
    end_epoch: 16
"""
GRADUAL = "    init_sparsity: 0.2\n    final_sparsity: 0.9\n    update_frequency: 0.5\n"
METHODS = {
    "GMPruningModifier": GRADUAL,
    "GlobalMagnitudePruningModifier": GRADUAL,
    "MovementPruningModifier": GRADUAL,
    "MFACPruningModifier": GRADUAL.replace("0.5", "2") + "    num_grads: 16\n    fisher_block_size: 64\n",
    "OBSPruningModifier": GRADUAL.replace("0.5", "2")
    + "    num_grads: 64\n    fisher_block_size: 32\n    damp: 1e-4\n",
    "ACDCPruningModifier": "    compression_sparsity: 0.9\n    update_frequency: 2\n",
    "RigLPruningModifier": "    final_sparsity: 0.9\n    update_frequency: 0.5\n",
    "STRPruningModifier": "    final_sparsity: 0.9\n",
    "TopKASTPruningModifier": "    forward_sparsity: 0.9\n    backward_sparsity: 0.6\n    update_frequency: 0.5\n",
}


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


@pytest.mark.parametrize("method", METHODS)
def test_a_network_at_ninety_percent_sparsity_reads_digits(
    method: str, digits: tuple[torch.Tensor, torch.Tensor]
) -> None:
    images, labels = digits
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    manager = Manager(RECIPE.format(method) + METHODS[method])

    def losses(net: nn.Module):
        for start in range(0, 1280, 20):
            yield functional.cross_entropy(net(images[start : start + 20]), labels[start : start + 20])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    manager.modify(model, optimizer, 20, grad_sampler=losses if method == "OBSPruningModifier" else None)
    for epoch in range(24):
        order = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    manager.finalize()
    zeros = sum(int((model[i].weight == 0).sum()) for i in (0, 2))
    assert zeros == pytest.approx(0.9 * 128 * 128, abs=1)
    accuracy = float((model(images[1280:]).argmax(dim=1) == labels[1280:]).double().mean())
    assert accuracy >= 0.93, f"{method}: {accuracy:.4f}"
