"""Watches notice the optimizers that train their model, no others, and leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from gossamer.engine.optimizer import GlobalStepHooks
from tests.loops import loss_at, network, sgd, train, zeros
from tests.msbench.configs import levels, prepared, str_config


def hooks() -> set[tuple[str, int]]:
    """The hooks on all optimizers that torch holds."""
    held = {
        "before": torch_optimizer._global_optimizer_pre_hooks,
        "after": torch_optimizer._global_optimizer_post_hooks,
    }
    return {(kind, key) for kind, entries in held.items() for key in entries}


def added(before: set[tuple[str, int]], expected: int = 0) -> int:
    """How many came since, when everything that nobody holds is gone; collecting takes half a second."""
    if len(hooks() - before) != expected:
        gc.collect()
    return len(hooks() - before)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    before = hooks()
    yield
    assert added(before) == 0


class Listener:
    def __init__(self, module: nn.Module) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.watch = GlobalStepHooks(module, self.before, self.after)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.heard.append(("before", optimizer))

    def after(self, optimizer: Any) -> None:
        self.heard.append(("after", optimizer))


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("exists", [False, True])
def test_it_hears_before_and_after_each_step_of_an_optimizer_that_was_never_named(exists: bool) -> None:
    model = network()
    before = sgd(model)
    listener = Listener(model)
    optimizer = before if exists else torch.optim.Adam(model.parameters(), lr=0.01)
    step(optimizer)
    step(optimizer)
    assert listener.heard == [("before", optimizer), ("after", optimizer)] * 2


def test_unrelated_optimizers_are_not_heard() -> None:
    model, other = network(), network()
    listener = Listener(model)
    step(sgd(other))
    assert listener.heard == []


def test_one_optimizer_of_several_models_is_heard_by_each() -> None:
    models = [network(), network()]
    listeners = [Listener(model) for model in models]
    step(torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1))
    assert [len(listener.heard) for listener in listeners] == [2, 2]


def test_an_optimizer_that_takes_up_the_models_parameters_later_is_heard_from_then_on() -> None:
    model = network()
    listener = Listener(model)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    step(optimizer)
    assert listener.heard == []
    optimizer.add_param_group({"params": list(model.parameters())})
    step(optimizer)
    assert len(listener.heard) == 2


def test_neither_listener_nor_model_nor_optimizer_is_kept_alive() -> None:
    model = network()
    listener = Listener(model)
    optimizer = sgd(model)
    step(optimizer)
    listener.heard.clear()
    references = [weakref.ref(part) for part in (listener, listener.watch, model, optimizer)]
    del listener, model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_remove_ends_it_at_once() -> None:
    model = network()
    before = hooks()
    listener = Listener(model)
    listener.watch.remove()
    listener.watch.remove()
    assert added(before) == 0
    step(sgd(model))
    assert listener.heard == []


def test_what_before_returns_are_the_arguments_to_step_with() -> None:
    model = network()
    calls: list[str] = []

    class Wraps:
        def __init__(self) -> None:
            self.watch = GlobalStepHooks(model, self.before, self.after)

        def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
            closure = args[1] if len(args) > 1 else kwargs["closure"]

            def wrapped() -> Any:
                calls.append("wrapped")
                return closure()

            return (args[0], wrapped), {}

        def after(self, optimizer: Any) -> None:
            calls.append("after")

    holder = Wraps()
    optimizer = sgd(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_at(model, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls == ["wrapped", "after"]
    del holder


# Schedulers, which listen in this way


@pytest.mark.parametrize("config", [levels(), str_config()], ids=["levels", "STR"])
def test_a_scheduler_that_is_gone_leaves_no_hooks(config: dict[str, Any]) -> None:
    before = hooks()
    scheduler, model = prepared(config)
    optimizer = sgd(model)
    scheduler.prune_model(model, 0)
    train(model, optimizer, range(1))
    assert added(before, 2) == 2
    del scheduler
    assert added(before) == 0
    train(model, optimizer, range(1, 2))


def test_a_scheduler_that_prepares_again_listens_once() -> None:
    before = hooks()
    scheduler, model = prepared(levels())
    model = scheduler.prepare_sparse_model(model)
    assert added(before, 2) == 2


def test_a_scheduler_masks_after_each_of_several_optimizers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scheduler, model = prepared(levels())
    groups = [list(model.get_submodule(name).parameters()) for name in ("0", "3", "7")]
    optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
    for iteration in range(6):
        scheduler.prune_model(model, iteration)
        model.zero_grad()
        loss_at(model, iteration).backward()
        for name, optimizer in zip(("0", "3", "7"), optimizers, strict=True):
            optimizer.step()
            weight = model.get_parameter(f"{name}.weight")
            assert zeros(weight) == round(weight.numel() * (0.3 if iteration < 4 else 0.6))
