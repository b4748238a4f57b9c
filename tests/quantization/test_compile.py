"""torch.compile before, after and inside an emulated model: the same numbers, ranges and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import Manager
from gossamer.quantization import emulation_of, withdraw
from tests.loops import STEPS_PER_EPOCH, batch, network, sgd, train
from tests.quantization.models import Residual
from tests.quantization.watching import assert_same, emulated

# torch looks at the .grad of tensors while it compiles, and hides the warning of that where warnings are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
INPUTS = batch(0)[0]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, backend: str = "eager") -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def inside(model: nn.Module) -> nn.Module:
    model.backbone = compiled(model.backbone)
    return model


def trained(model: nn.Module, call: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps with gradients, one in evaluation; outputs, gradients, and the ranges after them."""
    emulation = emulation_of(model)
    assert emulation is not None
    optimizer, found = sgd(model), []
    for step in range(2):
        optimizer.zero_grad()
        out = call(batch(step)[0])
        out.square().mean().backward()
        optimizer.step()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.eval()
    with torch.no_grad():
        found.append(call(INPUTS))
    model.train()
    return found, dict(emulation.ranges)


def expected() -> tuple[list[Tensor], dict[str, Tensor]]:
    model, _ = emulated(Residual().train())
    return trained(model, model)


def assert_agree(found: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    outputs, ranges = expected()
    assert ranges.keys() == found[1].keys()
    for one, other in zip(found[0], outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for key, value in ranges.items():
        torch.testing.assert_close(found[1][key], value)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_model_that_was_compiled_and_called_before_is_emulated(backend: str) -> None:
    model = Residual().train()
    call = compiled(model, backend)
    model.eval()
    call(INPUTS)
    model.train()
    emulated(call)
    assert_agree(trained(model, call))


def test_a_model_that_compiles_its_call_in_place_is_emulated() -> None:
    model = in_place(Residual()).eval()
    plain = model(INPUTS)
    emulated(model.train())
    assert_agree(trained(model, model))
    withdraw(model)
    fresh = Residual().eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.eval()(INPUTS), fresh(INPUTS))
    assert plain.shape == fresh(INPUTS).shape


def test_a_part_that_was_compiled_on_its_own_is_emulated() -> None:
    model = inside(Residual()).eval()
    model(INPUTS)
    emulated(model.train())
    assert_agree(trained(model, model))


def test_a_model_that_is_compiled_after_emulation_began_goes_on() -> None:
    model, _ = emulated(Residual().train())
    assert_agree(trained(model, compiled(model)))


def test_a_compiled_function_around_an_emulated_model_goes_on() -> None:
    model, _ = emulated(Residual().train())
    call = torch.compile(lambda x: model(x * 1.0) * 1.0, backend="eager")
    assert_agree(trained(model, call))


def test_a_compiled_model_that_is_given_back_computes_in_floats_again() -> None:
    graphs: list[object] = []

    def count(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model = network().eval()
    call = torch.compile(model, backend=count)
    plain = call(INPUTS)
    made = len(graphs)
    emulated(model)
    call(INPUTS)
    assert len(graphs) == made
    withdraw(model)
    assert_same(call(INPUTS), plain)


def test_another_compiled_model_goes_on_while_one_is_emulated() -> None:
    graphs: list[object] = []

    def count(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model, _ = emulated(network().train())
    model(INPUTS)
    other = torch.compile(network(2).eval(), backend=count)
    assert_same(other(INPUTS), network(2).eval()(INPUTS))
    assert graphs


def test_a_recipe_starts_quantization_in_the_middle_of_a_compiled_loop() -> None:
    found = []
    for compiles in (False, True):
        model = network()
        call = compiled(model) if compiles else model
        manager = Manager("modifiers: [!QuantizationModifier {start_epoch: 0.5, freeze_bn_stats_epoch: 1}]")
        optimizer = manager.modify(call, sgd(model), STEPS_PER_EPOCH)
        train(call, optimizer, range(6))
        found.append((model.state_dict(), emulation_of(call).ranges))
    assert found[0][1].keys() == found[1][1].keys()
    for one, other in zip(found[0], found[1], strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)
