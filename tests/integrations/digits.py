"""scikit-learn's digits as tensors, and what the tests ask of a trained model."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[2]
TRAINED_ON = 1440
BATCH = 32
BATCHES = TRAINED_ON // BATCH


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """1797 pictures as 64 values from 0 to 1, and their digits, in an order that is always the same."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pictures, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def loader(pictures: int = TRAINED_ON) -> DataLoader:
    """Not shuffled, so that a training that goes on sees what it would have seen."""
    inputs, labels = digits()
    return DataLoader(TensorDataset(inputs[:pictures], labels[:pictures]), batch_size=BATCH)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def accuracy(model: nn.Module) -> float:
    """On the pictures that no training has seen."""
    inputs, labels = (part[TRAINED_ON:] for part in digits())
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).double().mean())


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """To the bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def pruning(final: float = 0.8, end: float = 3, name: str = "re:.*weight") -> str:
    return (
        f"  - !GMPruningModifier {{params: ['{name}'], init_sparsity: 0.1, final_sparsity: {final}, "
        f"start_epoch: 0, end_epoch: {end}, update_frequency: 0.5}}\n"
    )


def rates(end: float = 4, initial: float = 0.01) -> str:
    return (
        f"  - !LearningRateFunctionModifier {{start_epoch: 0, end_epoch: {end}, lr_func: linear, "
        f"init_lr: {initial}, final_lr: 0.001}}\n"
    )


RECIPE = "modifiers:\n" + pruning()
WITH_RATES = "modifiers:\n" + rates() + pruning()


def in_a_new_process(module: str, call: str) -> None:
    """Run `call` with the names of a test module; an error there is raised here.

    Autograd's threads do not survive a fork of a process that has trained, so processes are forked from a new one.
    """
    code = f"from pathlib import Path\nimport {module} as tests\nfrom {module} import *\n{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
