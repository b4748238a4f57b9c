"""DDP: one process ends as without it, two processes end alike, and one of them writes the checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from gossamer.msbench import build_sparse_scheduler
from tests.loops import loss_at, network, sgd
from tests.msbench.configs import TOTAL, admm, ampere, levels, loop, prepared, probmask, same, str_config
from tests.msbench.test_resume import wide_network
from tests.ranks import in_ranks

CONFIGS: dict[str, tuple[Any, Any]] = {
    "levels": (levels, network),
    "energy": (lambda: levels(prun_algo=1), network),
    "STR": (lambda: str_config(-3.0), network),
    "ProbMask": (probmask, network),
    "ADMM": (admm, network),
    "Ampere": (ampere, wide_network),
}


@pytest.fixture
def one_process() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        yield
        distributed.destroy_process_group()


def run(kind: str, wrapped: str | None) -> dict[str, torch.Tensor]:
    config, make = CONFIGS[kind]
    scheduler = build_sparse_scheduler(config())
    model = make()
    if wrapped == "before":
        model = DistributedDataParallel(model)
    model = scheduler.prepare_sparse_model(model)
    if wrapped == "after":
        model = DistributedDataParallel(model)
    optimizer = sgd(model)
    if kind == "Ampere":
        scheduler.init_optimizer(optimizer)
    loop(scheduler, model, optimizer, range(TOTAL))
    assert scheduler.compute_sparse_rate(model) > 0.05
    exported = scheduler.export_sparse_model(model)
    assert exported is model
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


REFUSED = {("STR", "before"), ("ProbMask", "before")}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("kind", "wrapped"),
    # A wrapper would not train what these add, so it is refused: see test_calls.py.
    [(kind, at) for kind in CONFIGS for at in ("before", "after") if (kind, at) not in REFUSED],
)
def test_a_wrapped_model_ends_as_one_that_is_not(kind: str, wrapped: str) -> None:
    assert same(run(kind, wrapped), run(kind, None))


@pytest.mark.usefixtures("one_process")
def test_checkpoints_and_states_have_the_users_names() -> None:
    scheduler, model = prepared(levels())
    wrapped = DistributedDataParallel(model)
    loop(scheduler, wrapped, sgd(wrapped), range(TOTAL))
    saved = torch.load("checkpoints/global_sparse_rate_0.9.pth.tar", weights_only=True)
    assert list(saved["model"]) == list(network().state_dict())
    assert list(scheduler.layers) == ["0", "3", "7"]


def worker(rank: int, folder: str) -> None:
    found = {}
    for kind, (config, make) in CONFIGS.items():
        given = config()
        if "save_dir" in given["scheduler"].get("kwargs", {}):
            given["scheduler"]["kwargs"]["save_dir"] = f"{folder}/{kind} of rank {rank}"
        scheduler = build_sparse_scheduler(given)
        model = DistributedDataParallel(scheduler.prepare_sparse_model(make(seed=rank)))
        torch.manual_seed(100 + rank)
        optimizer = sgd(model)
        if kind == "Ampere":
            scheduler.init_optimizer(optimizer)
        loop(scheduler, model, optimizer, range(TOTAL), loss=lambda net, step: loss_at(net, 10 * step + rank))
        scheduler.export_sparse_model(model)
        found[kind] = {name: value for name, value in model.module.state_dict().items() if "running" not in name}
    torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights_and_one_of_them_writes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2))
        written = {path.name for path in Path(folder).iterdir() if path.is_dir()}
    assert written == {"levels of rank 0", "energy of rank 0"}
    for kind in CONFIGS:
        assert same(first[kind], second[kind]), kind
