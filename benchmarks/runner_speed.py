"""Images per second of the runner's loop over a bare PyTorch loop, with the same model, data and augmentation.

The bare loop is what one would write by hand, without a line of ours: a
DataLoader over the digits with torchvision's transforms, forward, backward,
step. The runner's loop has everything on: its display, its records, and for the
sparse one the masks. Stretches of iterations of each take turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchvision
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.measuring import Row, Watch, medians
from gossamer.runner import Runner, SparseRunner
from gossamer.runner.config import read_config
from gossamer.runner.display import Display
from gossamer.runner.distributed import Distributed, Stop, init_distributed
from gossamer.runner.records import Records

CONFIGS = Path(__file__).parents[1] / "configs" / "cls" / "resnet"
ROUNDS = 8
STRETCH = 11
"""Iterations: half an epoch."""
LOG = 10


def runner_speed(watch: Watch) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, init_distributed("cpu") as place:
        dense = _stretch(Runner(read_config(*_given("res18", folder)), place, display=Display()), Path(folder))
        sparse = SparseRunner(read_config(*_given("res18_amba_sparse", folder)), place, display=Display())
        contenders = {"dense": dense, "sparse": _stretch(sparse, Path(folder)), "bare": _bare(folder)}
        found = medians(contenders, watch, "stretches of training", ROUNDS, warm_up=1)
    rates = {name: 64 * STRETCH / seconds for name, seconds in found.items()}
    note = f"ResNet-18, digits 32×32, batch 64; {rates['dense']:.0f} and {rates['bare']:.0f} images/s"
    limit = 1 / 0.97
    yield Row(
        "time of the runner's loop / a bare loop", found["dense"] * 1e3, found["bare"] * 1e3, "ms", limit, note=note
    )
    yield Row("  sparse by levels, masks held", found["sparse"] * 1e3, found["bare"] * 1e3, "ms", None)


def _given(name: str, folder: str) -> tuple[Path, list[str], str]:
    sets = [f"saver.save_dir={folder}/{name}", "trainer.max_epoch=100000", "saver.pretrain_model=null"]
    if "sparse" in name:
        sets.append("sparsity.scheduler.kwargs.sparsity_table=[90]")
    return CONFIGS / f"{name}.yaml", sets, "tiny"


class _StopAt(Stop):
    """Ends a stretch after a number of iterations."""

    def __init__(self, place: Distributed, iteration: int) -> None:
        super().__init__(place)
        self._iteration = iteration

    def agreed(self, iteration: int) -> bool:
        return iteration == self._iteration


def _stretch(runner: Runner, folder: Path) -> Callable[[], object]:
    """Some iterations of a long run, without its tests and checkpoints."""
    runner.build()
    runner.records = Records(folder / type(runner).__name__, tensorboard=True)
    runner._after_step = lambda: None  # pyright: ignore[reportPrivateUsage]

    def train() -> None:
        stop = _StopAt(runner.distributed, runner.iteration + STRETCH)
        with runner.display.training(10**9, runner.steps_per_epoch, runner.iteration):
            runner._run_epochs(stop)  # pyright: ignore[reportPrivateUsage]

    return train


def _bare(folder: str) -> Callable[[], object]:
    config = read_config(*_given("res18", folder)).config
    loader = DataLoader(_Digits(), batch_size=64, shuffle=True, drop_last=True)
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), **config.trainer.optimizer.kwargs)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100000)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from loader

    stream = batches()
    model.train()

    def train() -> None:
        for _ in range(STRETCH):
            images, labels = next(stream)
            loss = cross_entropy(model(images), labels, label_smoothing=config.trainer.label_smoothing)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    return train


class _Digits(Dataset[tuple[torch.Tensor, int]]):
    """The same images and transforms as the config's, by hand."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        pixels = torch.as_tensor(images.reshape(-1, 1, 8, 8) * (255 / 16)).round().to(torch.uint8)
        self._images, self._labels = pixels.expand(-1, 3, -1, -1).contiguous(), [int(label) for label in labels]
        self._transform = v2.Compose(
            [
                v2.Resize((32, 32)),
                v2.RandomAffine(degrees=[-8.0, 8.0], translate=(0.1, 0.1)),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.3] * 3, [0.35] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images[index]), self._labels[index]
