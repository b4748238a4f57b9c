"""Configs, a network for digits and the training loop of MSBench's users, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.model import get_parameter
from gossamer.msbench import BaseScheduler, build_sparse_scheduler
from tests.loops import loss_at, network, sgd

Position = Literal["before forward", "before step", "after step"]
POSITIONS: tuple[Position, ...] = ("before forward", "before step", "after step")
MASKS = {"mask_generator": {"type": "NormalMaskGenerator"}, "fake_sparse": {"type": "FakeSparse"}}
TOTAL = 12


def levels(generator: str = "NormalMaskGenerator", **kwargs: Any) -> dict[str, Any]:
    """Three levels of four iterations, by magnitude and uniform over layers by default."""
    given = {"total_iters": TOTAL, "sparsity_table": [30, 60, 90], "prun_algo": 0, "save_dir": "checkpoints", **kwargs}
    return {
        "mask_generator": {"type": generator},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": given},
    }


def ampere(**kwargs: Any) -> dict[str, Any]:
    return {"scheduler": {"type": "AmpereScheduler", "kwargs": {"verbosity": 0, **kwargs}}}


def str_config(s: float = -5.0, scheduler: str = "STRScheduler", **kwargs: Any) -> dict[str, Any]:
    return {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": s}},
        "scheduler": {"type": scheduler, "kwargs": kwargs},
    }


def probmask(**kwargs: Any) -> dict[str, Any]:
    stamps = {"total_iterations": TOTAL, "warmup_iteration_stamps": 2, "finetune_iteration_stamps": 8}
    return {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"prune_rate": 0.8, **stamps, **kwargs}},
    }


def admm(target: float = 0.75, uniform: bool = True, **kwargs: Any) -> dict[str, Any]:
    lengths = {"total_iters": TOTAL, "iters_per_epoch": 2}
    return {
        "sparsity": {"target_sparsity": target, "uniform": uniform},
        "scheduler": {"type": "ADMMScheduler", "kwargs": {**lengths, **kwargs}},
    }


def prepared(config: dict[str, Any], model: nn.Module | None = None) -> tuple[BaseScheduler, nn.Module]:
    scheduler = build_sparse_scheduler(config)
    return scheduler, scheduler.prepare_sparse_model(network() if model is None else model)


def loop(
    scheduler: BaseScheduler,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    iterations: range,
    lr_scheduler: Any = None,
    position: Position = "before forward",
    after: Callable[[int], None] | None = None,
    loss: Callable[[nn.Module, int], Tensor] = loss_at,
) -> None:
    """A loop that calls `prune_model` at one of the usual positions; `after` is called after each iteration."""
    for iteration in iterations:
        if position == "before forward":
            scheduler.prune_model(model, iteration)
        optimizer.zero_grad()
        loss(model, iteration).backward()
        if position == "before step":
            scheduler.prune_model(model, iteration)
        optimizer.step()
        if position == "after step":
            scheduler.prune_model(model, iteration)
        if lr_scheduler is not None:
            lr_scheduler.step()
        if after is not None:
            after(iteration)


def trained(config: dict[str, Any], iterations: int = TOTAL) -> tuple[BaseScheduler, nn.Module]:
    """Prepared, and trained by SGD with momentum."""
    scheduler, model = prepared(config)
    optimizer = sgd(model)
    if config["scheduler"]["type"] == "AmpereScheduler":
        scheduler.init_optimizer(optimizer)
    loop(scheduler, model, optimizer, range(iterations))
    return scheduler, model


def weights(scheduler: BaseScheduler, model: nn.Module) -> dict[str, Tensor]:
    return {name: get_parameter(model, name).detach().clone() for name in scheduler.names}


def pattern(scheduler: BaseScheduler, model: nn.Module) -> dict[str, Tensor]:
    """Where each pruned weight is not zero."""
    return {name: weight != 0 for name, weight in weights(scheduler, model).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# Digits


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1797 handwritten digits, 8×8, in a fixed order; the last 517 are for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)[order]


class DigitNet(nn.Module):
    """Three convolutions and a linear layer; conv2 and conv3 have channels that 2:4 fits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
        x = functional.max_pool2d(functional.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(functional.relu(self.conv3(x)).flatten(1))


def digit_loss(model: nn.Module, iteration: int) -> Tensor:
    images, labels = digits()
    rows = torch.randint(0, 1280, (64,), generator=torch.Generator().manual_seed(iteration))
    return functional.cross_entropy(model(images[rows]), labels[rows])


@cache
def _digit_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for iteration in range(120):
        optimizer.zero_grad()
        digit_loss(model, iteration).backward()
        optimizer.step()
    return model.state_dict()


def trained_digit_net() -> DigitNet:
    """A dense network that reads digits, as users have it before they prune."""
    model = DigitNet()
    model.load_state_dict(_digit_weights())
    return model


def accuracy(model: nn.Module) -> float:
    images, labels = digits()
    model.eval()
    with torch.no_grad():
        return float((model(images[1280:]).argmax(dim=1) == labels[1280:]).double().mean())
