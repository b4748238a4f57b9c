"""Ways to call an emulated model: parts alone, exceptions, threads, checkpointing, autocast, without gradients."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.quantization import withdraw
from tests.loops import batch, network
from tests.quantization.test_users_model import Residual
from tests.quantization.watching import assert_same, calibrated, convolutions, emulated, layers, modes, stance, watched

INPUTS = batch(0)[0]


class Fails(nn.Module):
    """Raises what it is told to, in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


def failing() -> nn.Sequential:
    model = network()
    return nn.Sequential(model[0], model[1], model[2], Fails(), model[3:])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_forward_leaves_nothing_on(error: type[BaseException]) -> None:
    model, other = failing(), network(5).eval()
    plain = other(INPUTS)
    calibrated(model, INPUTS)
    expected = model(INPUTS)
    model[3].error = error("stop")
    with pytest.raises(error, match="stop"):
        model(INPUTS)
    assert modes() == []
    assert stance() == "default"
    assert_same(other(INPUTS), plain)
    model[3].error = None
    assert_same(model(INPUTS), expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_a_part_that_is_called_alone_leaves_nothing_on(error: type[BaseException]) -> None:
    model = nn.Sequential(failing())
    calibrated(model, INPUTS)
    expected = model(INPUTS)
    model[0][3].error = error("stop")
    with pytest.raises(error, match="stop"):
        model[0](INPUTS)
    assert modes() == []
    model[0][3].error = None
    assert_same(model(INPUTS), expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_autocast_and_frozen_batch_norm_as_they_were(error: type[BaseException]) -> None:
    class Norm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            raise error("stop")

    model = nn.Sequential(nn.Conv2d(4, 8, 3), Norm(8)).train()
    _, emulation = emulated(model)
    emulation.norms_frozen = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(error, match="stop"):
            model(INPUTS)
        assert torch.is_autocast_enabled("cpu")
    assert model[1].training
    assert not torch.is_autocast_enabled("cpu")


def test_an_exception_that_the_model_catches_itself_does_not_end_the_emulation() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = failing(), nn.Conv2d(4, 4, 1)
            self.part[3].error = ValueError("stop")

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.part(x)
            except ValueError:
                x = x * 2
            return self.other(x)

    model = Tries()
    calibrated(model, INPUTS)
    seen = watched(model, INPUTS)
    assert [seen.is_rounded(call.args[0]) for call in convolutions(seen)] == [True, True]


def test_a_hook_of_the_user_that_raises_and_is_caught_does_not_end_the_emulation() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.part(x)
            except ValueError:
                x = x * 2
            return self.other(x + self.other(x))

    def refuse(*_: object) -> None:
        raise ValueError("no")

    model = Tries()
    model.part.register_forward_pre_hook(refuse)
    calibrated(model, INPUTS)
    seen = watched(model, INPUTS)
    assert all(seen.is_rounded(call.args[0]) for call in convolutions(seen))
    (addition,) = seen.of(Tensor.add)
    assert all(seen.is_rounded(value) for value in addition.args[:2])


def test_a_part_that_is_called_alone_computes_as_inside_the_model() -> None:
    model = Residual()
    calibrated(model, INPUTS)
    heard: list[Tensor] = []
    handle = model.backbone.register_forward_hook(lambda m, a, out: heard.append(out))
    model(INPUTS)
    handle.remove()
    assert_same(model.backbone(INPUTS), heard[0])
    seen = watched(model.backbone, INPUTS)
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])


def test_a_model_that_calls_itself_computes_in_integers_to_the_end() -> None:
    """As for test-time augmentation: a picture and its mirror image through the same model."""

    class Mirrors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor, mirror: bool = False) -> Tensor:
            if mirror:
                return self.last(self(x) + self(x.flip(-1)))
            return self.body(x)

    model = Mirrors()
    calibrated(model, INPUTS, True)
    seen = watched(model, INPUTS, True)
    assert [seen.is_rounded(call.args[0]) for call in convolutions(seen)] == [True, True, True]
    (addition,) = seen.of(Tensor.add)
    assert [seen.is_rounded(value) for value in addition.args[:2]] == [True, True]


def test_evaluation_before_the_first_training_batch_takes_activations_as_they_are() -> None:
    model, _ = emulated(network().eval())
    seen = watched(model, INPUTS)
    assert seen.activations == []
    assert all(seen.is_rounded(call.args[1]) for call in layers(seen))


def test_evaluation_and_frozen_training_do_not_move_ranges() -> None:
    model, emulation = emulated(network().train())
    model(INPUTS)
    known = {key: value.clone() for key, value in emulation.ranges.items()}
    model.eval()(INPUTS * 9)
    emulation.frozen = True
    model.train()(INPUTS * 9)
    assert emulation.ranges.keys() == known.keys()
    assert all(torch.equal(emulation.ranges[key], value) for key, value in known.items())
    emulation.frozen = False
    model(INPUTS * 9)
    assert any(not torch.equal(emulation.ranges[key], value) for key, value in known.items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_numbers_are_the_same(mode: Callable[[], Any]) -> None:
    model = Residual()
    calibrated(model, INPUTS)
    expected = model(INPUTS)
    with mode():
        assert_same(model(INPUTS), expected)
    assert_same(model(INPUTS), expected)


def test_training_goes_on_after_a_batch_in_inference_mode() -> None:
    model, emulation = emulated(network().train())
    with torch.inference_mode():
        model(INPUTS)
    model(INPUTS).sum().backward()
    emulation.frozen = True
    model(INPUTS).sum().backward()
    assert model[0].weight.grad is not None


# Computing anew in the backward pass


class Saves(nn.Module):
    """Three blocks, of which one is used twice, with sums inside and outside; computed anew when asked to."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first, self.block, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), network()

    def run(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if self.way == "plain":
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.way == "reentrant")

    def mixed(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y) * x

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.first, x)
        y = self.run(self.block, x * 3)
        y = self.run(self.block, y.relu())
        z = self.run(self.mixed, x, y)
        return self.run(self.last, z)


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_what_is_computed_anew_has_the_same_gradients_and_ranges(way: str) -> None:
    found = []
    for how in ("plain", way):
        model, emulation = emulated(Saves(how).train())
        model.last[1].momentum = 0.0
        for scale in (1.0, 4.0):
            model.zero_grad()
            model(INPUTS.clone().requires_grad_() * scale).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((gradients, {key: value.clone() for key, value in emulation.ranges.items()}))
    (gradients, ranges), (others, observed) = found
    assert ranges.keys() == observed.keys()
    for key, value in ranges.items():
        torch.testing.assert_close(observed[key], value, msg=lambda text, key=key: f"{key}: {text}")
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_a_whole_model_that_is_computed_anew_has_the_same_gradients(way: str) -> None:
    found = []
    for saving in (False, True):
        model, _ = emulated(Residual().train())
        inputs = INPUTS.clone().requires_grad_()
        out = checkpoint(model, inputs, use_reentrant=way == "reentrant") if saving else model(inputs)
        out.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# Mixed precision


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
    told = [record for record in caplog.records if "mixed precision" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "memory" in told[0].message


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
        except BaseException as error:  # noqa: BLE001  (told to the test below)
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


class Meeting:
    """Two threads are at one place at the same time; the first to come is the first to leave the model."""

    def __init__(self) -> None:
        self.first_came, self.second_came, self.first_left = threading.Event(), threading.Event(), threading.Event()

    def attend(self, *_: object) -> None:
        if not self.first_came.is_set():
            self.first_came.set()
            self.second_came.wait(20)
        else:
            self.second_came.set()
            self.first_left.wait(20)

    def run(self, first: nn.Module, second: nn.Module) -> None:
        def early() -> None:
            first(INPUTS)
            self.first_left.set()

        def late() -> None:
            self.first_came.wait(20)
            second(INPUTS)

        in_threads(early, late)


def test_threads_that_overlap_leave_nothing_on() -> None:
    models, meeting = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.Identity()) for _ in range(2)], Meeting()
    for model in models:
        calibrated(model, INPUTS)
        model[1].register_forward_hook(meeting.attend)
    meeting.run(*models)
    assert stance() == "default"
    assert modes() == []


def test_batch_norm_stays_frozen_while_two_threads_are_in_it() -> None:
    meeting = Meeting()

    class Norm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            meeting.attend()
            return super().forward(input)

    model = nn.Sequential(nn.Conv2d(4, 8, 3), Norm(8)).train()
    _, emulation = emulated(model)
    emulation.norms_frozen = True
    meeting.run(model, model)
    assert int(model[1].num_batches_tracked) == 0
    assert model[1].training


def test_a_model_that_is_given_back_while_nothing_runs_leaves_nothing_on() -> None:
    model = failing()
    calibrated(model, INPUTS)
    model[3].error = ValueError("stop")
    with pytest.raises(ValueError, match="stop"):
        model(INPUTS)
    withdraw(model)
    model[3].error = None
    assert_same(model(INPUTS), failing().eval()(INPUTS))
