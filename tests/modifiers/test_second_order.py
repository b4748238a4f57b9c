"""OBS with its defaults: the damp relative to the Fisher matrix, batch norm while sampling, and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import GossamerError, Manager
from gossamer.modifiers.scoring import DAMP

RECIPE = """
modifiers:
  - !{kind}
    {{params: __ALL_PRUNABLE__, init_sparsity: {sparsity}, final_sparsity: {sparsity}, start_epoch: 0, end_epoch: 1,
     update_frequency: 1, global_sparsity: {together}{fields}}}
"""


def prune(
    model: nn.Module,
    kind: str = "OBSPruningModifier",
    sampler: Callable[[nn.Module], Iterator[Tensor]] | None = None,
    sparsity: float = 0.5,
    together: bool = True,
    fields: str = ", num_grads: 64",
) -> nn.Module:
    """A pruned copy of the model."""
    pruned = deepcopy(model)
    text = RECIPE.format(kind=kind, sparsity=sparsity, together=str(together).lower(), fields=fields)
    Manager(text).apply(pruned, grad_sampler=sampler)
    return pruned


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)[order]


def losses(model: nn.Module, scale: float = 1.0) -> Iterator[Tensor]:
    images, labels = digits()
    for start in range(0, 512, 8):
        yield scale * functional.cross_entropy(model(images[start : start + 8]), labels[start : start + 8])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))


def normalized() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96, 10)),
    )


@cache
def trained(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model, (images, labels) = build(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(8):
        order = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    images, labels = digits()
    return float((model.eval()(images[1280:]).argmax(1) == labels[1280:]).double().mean())


@pytest.mark.parametrize("together", [True, False], ids=["one threshold", "each layer"])
@pytest.mark.parametrize("build", [perceptron, normalized])
def test_obs_with_its_defaults_keeps_at_least_what_magnitude_keeps(build: Any, together: bool) -> None:
    dense = trained(build)
    for sparsity in (0.5, 0.7, 0.8):
        magnitude = accuracy(prune(dense, "GMPruningModifier", None, sparsity, together, fields=""))
        obs = accuracy(prune(dense, "OBSPruningModifier", losses, sparsity, together))
        assert obs >= magnitude - 0.005, f"at {sparsity:.0%}: {obs:.3f} instead of {magnitude:.3f}"


@pytest.mark.parametrize("together", [True, False])
def test_the_scale_of_the_loss_does_not_matter_to_the_default_damp(together: bool) -> None:
    dense = trained(perceptron)
    one = prune(dense, sampler=losses, together=together)
    thousandth = prune(dense, sampler=lambda model: losses(model, 2.0**-10), together=together)
    for a, b in zip(one.parameters(), thousandth.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 2, bias=False).double() for _ in range(2))


def by_rows(rows: Tensor) -> Callable[[nn.Module], Iterator[Tensor]]:
    """A sampler whose gradients of all parameters together are the given rows."""

    def sample(model: nn.Module) -> Iterator[Tensor]:
        for row in rows:
            yield (torch.cat([p.flatten() for p in model.parameters()]) * row).sum()

    return sample


@pytest.mark.parametrize("together", [True, False])
def test_the_default_damp_is_relative_to_the_weights_that_are_ranked_together(together: bool) -> None:
    torch.manual_seed(0)
    model, rows = Two(), torch.randn(40, 16, dtype=torch.float64)
    rows[:, 8:] *= 10
    diagonal = rows.square().mean(dim=0).view(2, 8)
    damp = DAMP * (diagonal.mean().expand(2) if together else diagonal.mean(dim=1))
    scores = torch.stack(
        [
            parameter.detach().flatten() ** 2
            / torch.linalg.inv(part.T @ part / 40 + damp[i] * torch.eye(8, dtype=torch.float64)).diagonal()
            for i, (parameter, part) in enumerate(zip(model.parameters(), rows.split(8, dim=1), strict=True))
        ]
    )
    kept = scores > scores.flatten().sort().values[7] if together else scores > scores.sort().values[:, 3:4]
    pruned = prune(model, sampler=by_rows(rows), together=together, fields=", num_grads: 40, fisher_block_size: 8")
    assert torch.equal(torch.stack([p.detach().flatten() != 0 for p in pruned.parameters()]), kept)


def test_gradients_of_zero_leave_the_order_of_magnitudes() -> None:
    model = Two()
    pruned = prune(model, sampler=by_rows(torch.zeros(20, 16, dtype=torch.float64)), together=False)
    assert all(torch.equal(p, q) for p, q in zip(
        pruned.parameters(), prune(model, "GMPruningModifier", together=False, fields="").parameters(), strict=True
    ))  # fmt: skip


def test_gradients_that_are_not_finite_are_refused_by_name() -> None:
    rows = torch.zeros(20, 16, dtype=torch.float64)
    rows[3, 9] = float("nan")
    with pytest.raises(GossamerError, match=r"gradients of 'b\.weight' are not finite"):
        prune(Two(), sampler=by_rows(rows))


def test_batch_norm_uses_its_running_statistics_while_gradients_are_sampled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    seen: list[list[bool]] = []

    def sample(net: nn.Module) -> Iterator[Tensor]:
        for _ in range(3):
            seen.append([module.training for module in net.children()])
            yield net(torch.randn(1, 4)).square().sum()

    manager = Manager(RECIPE.format(kind="OBSPruningModifier", sparsity=0.5, together="true", fields=""))
    manager.apply(model, grad_sampler=sample)
    assert seen == [[True, False, True, True]] * 3
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_a_sampler_that_sets_the_mode_changes_nothing_about_batch_norm(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train(training)

    def sample(net: nn.Module) -> Iterator[Tensor]:
        for _ in range(3):
            yield net.train()(torch.randn(1, 4)).square().sum()  # batch norm refuses one sample in training mode

    manager = Manager(RECIPE.format(kind="OBSPruningModifier", sparsity=0.5, together="true", fields=""))
    manager.apply(model, grad_sampler=sample)
    assert model[1].training is training
    assert not model[1]._forward_pre_hooks


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_sampling_more_gradients_takes_no_more_memory() -> None:
    model = nn.Linear(32, 16, bias=False)

    def sample(net: nn.Module) -> Iterator[Tensor]:
        while True:
            yield net(torch.randn(2, 32)).square().sum()

    def largest(count: int) -> int:
        with Largest() as seen:
            prune(model, sampler=sample, fields=f", num_grads: {count}, fisher_block_size: 8")
        return seen.numbers

    assert largest(16) == largest(100) < 100 * 512
