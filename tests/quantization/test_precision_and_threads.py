"""Under autocast an emulated model computes in full precision; threads do not get in each other's way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer import Manager
from tests.loops import STEPS_PER_EPOCH, batch, network, sgd
from tests.quantization.models import Residual
from tests.quantization.watching import assert_same, calibrated, layers, watched

INPUTS = batch(0)[0]


def test_mixed_precision_is_off_inside_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    calibrated(model, INPUTS)
    expected = model(INPUTS)
    with caplog.at_level(logging.INFO, "gossamer"):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = model(INPUTS)
                assert torch.is_autocast_enabled("cpu")
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
            assert found.dtype == torch.float32
            assert_same(found, expected)
        model[7](torch.ones(2, 32))
    warned = [record for record in caplog.records if "autocast has no effect" in record.message]
    assert [record.levelname for record in warned] == ["WARNING"]
    assert "memory" in warned[0].message


def test_a_loop_with_a_scaler_and_autocast_goes_on_when_quantization_starts(caplog: pytest.LogCaptureFixture) -> None:
    model = network().train()
    manager = Manager("modifiers: [!QuantizationModifier {start_epoch: 0.5}]")
    optimizer, dtypes = sgd(model), []
    scaler = manager.modify(model, optimizer, STEPS_PER_EPOCH, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    for step in range(5):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
            loss = functional.cross_entropy(outputs, labels)
        dtypes.append(outputs.dtype)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 3
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert len([record for record in caplog.records if "autocast has no effect" in record.message]) == 1


def test_half_inputs_are_welcome_under_autocast() -> None:
    """What another model gave under autocast is of half precision, and this one took it before quantization began."""
    model = network().eval()
    half = INPUTS.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(half)
        calibrated(model, INPUTS)
        found = model(half)
    torch.testing.assert_close(found, model(half.float()), rtol=0, atol=1e-6, check_dtype=False)


def test_autocast_that_the_model_switches_on_itself_is_off_too() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Casts().eval()
    calibrated(model, INPUTS)
    seen = watched(model, INPUTS)
    assert {call.result.dtype for call in layers(seen)} == {torch.float32}


# Threads


def in_threads(*functions: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  (warned to the test below)
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_two_threads_run_one_model() -> None:
    model = Residual()
    calibrated(model, INPUTS)
    expected, found = model(INPUTS), []

    def run() -> None:
        for _ in range(20):
            found.append(model(INPUTS).detach())

    in_threads(run, run)
    assert len(found) == 40
    assert all(torch.equal(out, expected.detach()) for out in found)
