"""Training with 2:4 sparsity from initialisation: dense, sparse, masks recomputed between steps, dense again.

Run it with `python examples/asp_toy.py`; it takes some seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.asp import ASP

BATCH = 32
INPUTS, HIDDEN, OUTPUTS = 16, 40, 8
DENSE, SPARSE, RECOMPUTED, LAST = 300, 300, 300, 100
EVERY = 25
"""Steps between two computations of the masks."""


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 2 * HIDDEN),
        nn.LayerNorm(2 * HIDDEN),
        nn.ReLU(),
        nn.Linear(2 * HIDDEN, OUTPUTS),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, truth: Tensor, steps: int, every: int = 0) -> float:
    """The mean loss of the last steps; with `every`, masks are computed anew that often."""
    losses: list[float] = []
    for step in range(steps):
        x = torch.randn(BATCH, INPUTS)
        loss = (model(x) - torch.sin(x @ truth)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if every and step % every == every - 1:
            ASP.compute_sparse_masks()
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> None:
    torch.manual_seed(0)
    truth = torch.randn(INPUTS, OUTPUTS) / INPUTS**0.5
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ASP.init_model_for_pruning(model, "m4n2_1d", verbosity=1, whitelist=[nn.Linear], allow_recompute_mask=True)
    ASP.init_optimizer_for_pruning(optimizer)

    print(f"dense              loss {train(model, optimizer, truth, DENSE):.4f}")
    ASP.compute_sparse_masks()
    print(f"2:4                loss {train(model, optimizer, truth, SPARSE):.4f}   zeros {zeros(model):.1%}")
    loss = train(model, optimizer, truth, RECOMPUTED, EVERY)
    print(f"2:4, recomputed    loss {loss:.4f}   zeros {zeros(model):.1%}")
    ASP.restore_pruned_weights()
    print(f"dense again        loss {train(model, optimizer, truth, LAST):.4f}   zeros {zeros(model):.1%}")


def zeros(model: nn.Module) -> float:
    """The share of zeros in the weights that take part."""
    weights = [model.get_parameter(name) for name, reason in ASP.layers().items() if reason is None]
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


if __name__ == "__main__":
    main()
