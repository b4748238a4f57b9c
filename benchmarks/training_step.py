"""A training step of ResNet-18 with masks on every layer, and of a small MLP, over the dense step.

One model takes steps in turns by two optimizers, without and with the masks of
Gossamer, so that both work on the same memory; a copy takes them with the
masks of `torch.nn.utils.prune`. Of the MLP, whose step takes less than a
millisecond, many steps are taken, and the spread of the ratio is shown.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator

import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

from benchmarks.measuring import Row, Watch, medians, ratio_quartiles, rounds_of
from gossamer import Manager

ROUNDS = 60
SMALL_ROUNDS, TURNS = 40, 25
SPARSITY = 0.9

PRUNE, PRUNE_EACH_STEP = (
    f"""
modifiers:
  - !GMPruningModifier {{params: __ALL_PRUNABLE__, init_sparsity: 0, final_sparsity: {SPARSITY},
                         start_epoch: 0, end_epoch: 1, update_frequency: {frequency}}}
"""
    for frequency in (1, -1)
)
HOLD = "modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]"


def training_step(watch: Watch) -> Iterator[Row]:
    torch.manual_seed(0)
    batch = torch.randn(32, 3, 64, 64), torch.randint(0, 1000, (32,))
    model = torchvision.models.resnet18()
    reparametrized = copy.deepcopy(model)

    Manager(PRUNE).apply(model)
    hold = Manager(HOLD)
    optimizer = hold.modify(model, _optimizer(model), steps_per_epoch=ROUNDS)
    for layer in reparametrized.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            prune.l1_unstructured(layer, "weight", amount=SPARSITY)

    contenders = {
        "dense": _step(model, _optimizer(model), batch),
        "gossamer": _step(model, optimizer, batch),
        "prune": _step(reparametrized, _optimizer(reparametrized), batch),
    }
    found = medians(contenders, watch, "training steps", ROUNDS, warm_up=4)
    layers = len(hold.masks())
    note = f"{layers} layers at {SPARSITY:.0%}, batch 32 of 3×64×64"
    step = {name: 1e3 * seconds for name, seconds in found.items()}
    yield Row("training step with masks / dense", step["gossamer"], step["dense"], "ms", 1.02, 1.03, note)
    yield Row("  the same with torch.nn.utils.prune", step["prune"], step["dense"], "ms")


def small_training_step(watch: Watch) -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _small_rows(watch)
    finally:
        torch.set_num_threads(threads)


def _small_rows(watch: Watch) -> Iterator[Row]:
    torch.manual_seed(0)
    batch = torch.randn(64, 256), torch.randint(0, 256, (64,))
    note = f"3 layers of 256×256, batch 64, one thread; medians of {SMALL_ROUNDS * TURNS} steps, quartiles over rounds"
    for recipe, what, aim in ((HOLD, "masks held", 1.05), (PRUNE_EACH_STEP, "masks updated at every step", 2.0)):
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        if recipe == HOLD:
            Manager(PRUNE).apply(model)
        manager, steps = Manager(recipe), (SMALL_ROUNDS + 1) * TURNS
        contenders = {
            "dense": _step(model, _optimizer(model), batch),
            "ours": _step(model, manager.modify(model, _optimizer(model), steps_per_epoch=steps), batch),
        }
        seconds = rounds_of(contenders, watch, f"{TURNS} steps of an MLP", SMALL_ROUNDS, turns=TURNS)
        ours, dense = (1e6 * statistics.median(seconds[name]) for name in ("ours", "dense"))
        spread = ratio_quartiles(seconds["ours"], seconds["dense"], TURNS)
        yield Row(f"step of a small MLP, {what} / dense", ours, dense, "µs", aim, note=note, spread=spread)


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    images, labels = batch

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step
