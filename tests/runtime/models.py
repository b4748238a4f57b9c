"""Networks with zeros, for the tests of the runtime."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.runtime import Engine


def pruned(model: nn.Module, share: float = 0.9, seed: int = 0) -> nn.Module:
    """The model with zeros in every layer and batch norm that does something."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.data
            weight[torch.rand_like(weight) < share] = 0
    return model.eval()


def kernels(engine: Engine) -> str:
    """The classes of an engine's operators and the shapes of their weights, one line for each."""
    lines = list[str]()
    for layer in engine.layers():
        shape = "×".join(map(str, layer.shape))
        lines += [f"{name} {shape}" for name in layer.native] or [f"torch: {layer.operator}"]
    return "\n".join(lines)


class Residual(nn.Module):
    """Blocks with a skip connection, a strided branch and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.left, self.right = nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(16, 16, 1, 2)
        self.norm, self.last = nn.BatchNorm2d(32), nn.Conv2d(32, 16, 5, padding=2)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        y = (self.left(x) + self.right(x)).relu()
        z = torch.cat([y, nn.functional.silu(y)], 1)
        z = self.last(self.norm(z).relu()) + y
        return self.head(z.mean((2, 3)))
