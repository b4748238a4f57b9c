"""The model stays the user's: names, parameters, copies, what is printed and saved; and it can be given back."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from gossamer.quantization import emulation_of, withdraw
from tests.loops import batch, network, sgd, train
from tests.quantization.models import Residual
from tests.quantization.watching import assert_same, calibrated, emulated, layers, watched

INPUTS = batch(0)[0]


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return sum(len(getattr(layer, kind)) for layer in model.modules() for kind in kinds)


def test_names_parameters_text_and_signature_stay_as_they_are() -> None:
    model = Residual()

    def described() -> list[Any]:
        return [
            list(model.state_dict()),
            [(name, id(value)) for name, value in model.named_parameters()],
            [(name, id(value)) for name, value in model.named_buffers()],
            [(name, id(value), type(value)) for name, value in model.named_modules()],
            repr(model),
            inspect.signature(model.forward),
            inspect.signature(model.backbone[0].forward),
            sorted(name for name in dir(model) if not name.startswith("_")),
        ]

    before = described()
    emulated(model.train())
    assert described() == before
    model(INPUTS).sum().backward()
    assert described() == before


def test_a_state_dict_goes_between_emulated_and_plain_models() -> None:
    model, plain = Residual(), Residual()
    calibrated(model, INPUTS)
    result = model.load_state_dict({name: value * 0.5 for name, value in plain.state_dict().items()})
    assert not result.missing_keys
    assert not result.unexpected_keys
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(INPUTS), plain.eval()(INPUTS), rtol=0, atol=0.1)


def test_the_optimizer_goes_on_with_the_same_parameters_in_the_middle_of_a_loop() -> None:
    model = network()
    optimizer = sgd(model)
    train(model, optimizer, range(3))
    moments = {id(p): optimizer.state[p]["momentum_buffer"] for p in model.parameters()}
    emulated(model)
    train(model, optimizer, range(3, 5))
    assert {id(p): optimizer.state[p]["momentum_buffer"] for p in model.parameters()} == moments


def test_a_model_that_is_given_back_computes_in_floats_to_the_bit() -> None:
    model = Residual().eval()
    before, count = model(INPUTS), hooks(model)
    calibrated(model, INPUTS)
    assert not torch.equal(model(INPUTS), before)
    withdraw(model)
    assert_same(model(INPUTS), before)
    assert hooks(model) == count
    assert emulation_of(model) is None
    assert "_compiled_call_impl" not in model.__dict__ or model.__dict__["_compiled_call_impl"] is None


def test_emulating_twice_is_emulating_once() -> None:
    model = network()
    calibrated(model, INPUTS)
    count, once = hooks(model), model(INPUTS)
    calibrated(model, INPUTS)
    assert hooks(model) == count
    assert_same(model(INPUTS), once)


def test_a_copy_computes_the_same_and_goes_its_own_way() -> None:
    model = Residual()
    emulation = calibrated(model, INPUTS)
    other = copy.deepcopy(model)
    own = emulation_of(other)
    assert own is not None
    assert own is not emulation
    assert_same(other(INPUTS), model(INPUTS))
    before = {key: value.clone() for key, value in emulation.ranges.items()}
    own.frozen = False
    other.train()(INPUTS * 10)
    assert all(torch.equal(emulation.ranges[key], value) for key, value in before.items())
    assert any(not torch.equal(own.ranges[key], value) for key, value in before.items())
    withdraw(other)
    assert emulation_of(model) is emulation
    assert len(layers(watched(model, INPUTS))) == 4


def test_a_replica_with_weights_of_its_own_computes_with_them() -> None:
    """As DataParallel makes them: shallow copies of modules, with other tensors in them."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    calibrated(model, inputs)
    replica, layer = model._replicate_for_data_parallel(), model[0]._replicate_for_data_parallel()
    layer.weight, layer.bias = torch.zeros(3, 4), torch.ones(3)
    replica._modules["0"] = layer
    assert_same(replica(inputs), torch.ones(5, 3))


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_computes_the_same_and_goes_its_own_way(how: str) -> None:
    model = Residual()
    emulation = calibrated(model, INPUTS)
    expected = model(INPUTS)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert_same(other(INPUTS), expected)
    own = emulation_of(other)
    assert own is not None
    assert own is not emulation
    assert own.frozen
    withdraw(other)
    assert_same(model(INPUTS), expected)


@pytest.mark.slow
def test_a_pickled_model_computes_the_same_in_another_process(tmp_path: Any) -> None:
    model = Residual()
    calibrated(model, INPUTS)
    torch.save([model, INPUTS, model(INPUTS).detach()], tmp_path / "model.pt")
    script = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "found = model(inputs)\n"
        "assert torch.equal(found, expected), (found - expected).abs().max()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt")], check=True, cwd=Path(__file__).parents[2]
    )


def test_two_models_in_one_process_do_not_know_of_each_other() -> None:
    one, other, plain = network(1), network(2), network(3).eval()
    expected = plain(INPUTS)
    first, second = calibrated(one, INPUTS), calibrated(other, INPUTS * 5, scheme="tensorrt")
    assert emulation_of(one) is first
    assert emulation_of(other) is second
    alone = [one(INPUTS), other(INPUTS)]
    for _ in range(2):
        assert_same(one(INPUTS), alone[0])
        assert_same(plain(INPUTS), expected)
        assert_same(other(INPUTS), alone[1])
    withdraw(one)
    assert emulation_of(other) is second
    assert_same(other(INPUTS), alone[1])


def test_a_model_inside_the_forward_of_another_is_rounded_by_its_own_rules() -> None:
    """As a teacher or a loss network that is held in a list, and is no child of the model."""
    inner = network(1)
    calibrated(inner, INPUTS, scheme="tensorrt")
    alone = inner(INPUTS)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.own = [inner], nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            return self.own(x), self.held[0](x)

    outer = Outer()
    calibrated(outer, INPUTS)
    assert_same(outer(INPUTS)[1], alone)


def test_other_weights_by_functional_call_are_rounded_like_the_models_own() -> None:
    model = Residual()
    calibrated(model, INPUTS)
    expected = model(INPUTS, double=True)
    given = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert_same(functional_call(model, given, (INPUTS,), {"double": True}), expected)
    halved = {name: value * 0.5 for name, value in given.items()}
    assert not torch.equal(functional_call(model, halved, (INPUTS,)), model(INPUTS))
    assert_same(model(INPUTS, double=True), expected)


def test_a_model_of_half_precision_or_of_doubles_keeps_its_type() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = Residual().to(dtype)
        calibrated(model, INPUTS.to(dtype))
        found = model(INPUTS.to(dtype))
        assert found.dtype == dtype
        found.sum().backward()
        assert model.head.weight.grad.dtype == dtype
