"""The channel-permutation search on ten matrices and on ResNet-50: how much of the possible it gains, and time.

A time is shown beside that of one gain matrix by `torch.cdist`, of as many
channels and stripes as one round of the search uses: the machine's speed
falls out of the ratio. Efficacies do not depend on the machine. They are held
against recorded ones: `floor` and `aim` of a plain search by assignments and
pair-wise polish, without and with eight restarts, `best_seen` of that and
long simulated annealing, at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torchvision
from torch import Tensor

from benchmarks.measuring import Row, Watch, medians
from gossamer.asp import ASP
from gossamer.sparse.permutation import ChannelOrder, search

SHORT_EFFORT = 0.25
"""At which the search takes about the time of the floor; at 1, that of the aim."""


@dataclass(frozen=True)
class Case:
    """A matrix and what was recorded on it: efficacies in %, seconds on an idle machine of two cores."""

    name: str
    matrix: Callable[[], Tensor]
    floor: float
    floor_seconds: float
    aim: float | None = None
    aim_seconds: float | None = None
    best_seen: float | None = None
    rounds: int = 5
    efforts: tuple[float, ...] = (SHORT_EFFORT, 1.0)


def gaussian(size: int) -> Callable[[], Tensor]:
    return lambda: torch.from_numpy(np.random.RandomState(0).randn(size, size)).float()


def lognormal_columns(size: int) -> Callable[[], Tensor]:
    def matrix() -> Tensor:
        draws = np.random.RandomState(1)
        return torch.from_numpy(draws.randn(size, size) * np.exp(draws.randn(1, size))).float()

    return matrix


def convolution() -> Tensor:
    """256×256×3×3 as a ResNet initialises it, rows = h·w·out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight = torch.nn.init.kaiming_normal_(torch.empty(256, 256, 3, 3), mode="fan_out")
    return weight.permute(2, 3, 0, 1).reshape(-1, 256)


SMALL = [
    Case("Gaussian 64×64", gaussian(64), 44.5, 0.01, 47.2, 0.02, 48.5),
    Case("Gaussian 128×128", gaussian(128), 35.5, 0.02, 37.8, 0.07, 40.3),
    Case("Gaussian 256×256", gaussian(256), 30.0, 0.2, 30.0, 0.6, 31.1, rounds=3),
    Case("lognormal columns 64×64", lognormal_columns(64), 80.7, 0.01, 82.2, 0.03, 82.2),
    Case("lognormal columns 128×128", lognormal_columns(128), 77.2, 0.04, 77.6, 0.14, 77.8),
    Case("lognormal columns 256×256", lognormal_columns(256), 65.7, 0.1, 66.4, 0.6, 66.6, rounds=3),
]
LARGE = [
    Case("Gaussian 512×512", gaussian(512), 23.5, 0.9, 23.9, 3.2, 24.4, rounds=3),
    Case("lognormal columns 512×512", lognormal_columns(512), 65.8, 1.0, 65.9, 4.4, 66.2, rounds=3),
    Case("convolution 256×256×3×3", convolution, 9.8, 0.6, 10.4, 2.4, 10.6, rounds=3),
    Case("Gaussian 4096×4096", gaussian(4096), 9.9, 29.0, rounds=1, efforts=(1.0,)),
]


def permutation_search(watch: Watch) -> Iterator[Row]:
    for case in SMALL:
        yield from _rows(case, watch)


def permutation_search_large(watch: Watch) -> Iterator[Row]:
    for case in LARGE:
        yield from _rows(case, watch)


RESNET50_EFFICACY = 11.63
"""In %, of torchvision's ResNet-50 from seed 0: what a search of 37 s of processor time reached before."""
RESNET50_SECONDS = 15.0


def permutation_of_resnet50(watch: Watch) -> Iterator[Row]:
    """All of `ASP.prune_trained_model`, compiled loops at hand; and the efficacy over all layers together."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search(gaussian(64)(), effort=0.01)
    began, worked = time.perf_counter(), time.process_time()
    ASP.prune_trained_model(model, optimizer)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    found = ASP.permutation(model)
    assert found is not None
    layers = found.layers
    before, kept, bound = (
        sum(getattr(layer, share) * layer.weights for layer in layers) / sum(layer.weights for layer in layers)
        for share in ("kept_before", "kept", "bound")
    )
    note = f"kept magnitude {before:.2%} without, {kept:.2%} with permutation, at most {bound:.2%}"
    ours = 100 * (kept - before) / (bound - before)
    yield Row("ResNet-50: efficacy before / ours", RESNET50_EFFICACY, ours, "%", 1.01, note=note)
    note = f"{worked:.1f} s of processor time on {torch.get_num_threads()} threads"
    yield Row("ResNet-50: ASP.prune_trained_model / 15 s", seconds, RESNET50_SECONDS, "s", 1.0, note=note)


def _rows(case: Case, watch: Watch) -> Iterator[Row]:
    weights = case.matrix()
    channels, stripes = weights.T.contiguous(), weights.shape[1] // 4
    found: dict[float, ChannelOrder] = {}

    def run(effort: float) -> None:
        found[effort] = search(weights, effort=effort)

    efforts = {f"effort {effort:g}": effort for effort in case.efforts}
    if case.rounds == 1:  # compiles without a warm-up on the matrix itself
        search(torch.rand(3000, 512), effort=0.01)
    contenders: dict[str, Callable[[], object]] = {name: partial(run, effort) for name, effort in efforts.items()}
    contenders["cdist"] = partial(torch.cdist, channels[:stripes], channels[-stripes:], p=1)
    seconds = medians(contenders, watch, f"searches, {case.name}", case.rounds, warm_up=int(case.rounds > 1))
    for name, effort in efforts.items():
        ours = 100 * found[effort].efficacy
        whole = effort == 1.0 and case.aim is not None
        target, target_seconds = (case.aim, case.aim_seconds) if whole else (case.floor, case.floor_seconds)
        kind = "aim" if whole else "floor"
        best = "" if case.best_seen is None else f"; best seen {case.best_seen:g} %"
        note = f"{kind} {target:g} % in {target_seconds:g} s{best}"
        yield Row(f"{case.name}, {name}: efficacy {kind} / ours", target or 0.0, ours, "%", 1.0, note=note)
        yield Row(f"{case.name}, {name} / one gain matrix by cdist", seconds[name], seconds["cdist"], "s")
