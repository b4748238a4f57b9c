"""A state that is refused changes nothing, and the training goes on as if nobody had tried to load it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from gossamer import GossamerError, Manager, Modifier, register
from gossamer.modifiers.base import Run
from gossamer.modifiers.state import StateField, integer
from tests.fuzz.harness import attempt, fingerprint
from tests.loops import PRUNABLE, network, sgd, train, zeros

SPARSE = """
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.8, final_sparsity: 0.9, start_epoch: 0,
                        end_epoch: 20, update_frequency: 10}
"""
RECIPE = f"""
modifiers:
  - !TrainableParamsModifier {{params: ['3.bias'], trainable: false, end_epoch: 30}}
  - !LayerPruningModifier {{layers: ['4'], end_epoch: 30}}
{SPARSE}
"""
GMP = "GMPruningModifier.0"


def started(recipe: str = RECIPE, steps: int = 5) -> tuple[nn.Sequential, torch.optim.Optimizer, Manager]:
    model = network()
    manager = Manager(recipe)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(steps))
    return model, optimizer, manager


def sparsity(model: nn.Module) -> float:
    return sum(zeros(model.get_parameter(name)) for name in PRUNABLE) / 1184


DAMAGE: list[Callable[[dict[str, Any]], object]] = [
    lambda state: state.update(step="x"),
    lambda state: state.update(steps_per_epoch=0),
    lambda state: state.update(step=-5),
    lambda state: state["modifiers"][GMP].update(masks=None),
    lambda state: state["modifiers"][GMP].update(status="begun"),
    lambda state: state["modifiers"][GMP]["state"].update(init_sparsity=3),
    lambda state: state["modifiers"]["LayerPruningModifier.0"].update(state={}),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_masks_modules_and_frozen_parameters_stay_when_a_state_is_refused(damage: Callable[[Any], object]) -> None:
    model, optimizer, manager = started()
    same, other, undisturbed = started()
    state = deepcopy(manager.state_dict())
    damage(state)
    before = fingerprint(model)
    with pytest.raises(GossamerError):
        manager.load_state_dict(state)
    assert fingerprint(model) == before
    assert manager.step == 5
    for each, steps in ((model, optimizer), (same, other)):
        train(each, steps, range(5, 8))
        assert sparsity(each) == pytest.approx(0.8, abs=1e-3)
        assert isinstance(each[4], nn.Identity)
        assert not each[3].bias.requires_grad
    assert fingerprint(model) == fingerprint(same)
    assert torch.equal(manager.masks()["0.weight"], undisturbed.masks()["0.weight"])


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_refused_state_before_modify_leaves_model_and_optimizer_free(damage: Callable[[Any], object]) -> None:
    _, _, manager = started()
    state = deepcopy(manager.state_dict())
    damage(state)
    model, second = network(), Manager(RECIPE)
    optimizer, before = sgd(model), fingerprint(model)

    def resume() -> None:
        second.load_state_dict(state)
        second.modify(model, optimizer, 4)

    with pytest.raises(GossamerError):
        resume()
    assert fingerprint(model) == before
    assert not optimizer._optimizer_step_post_hooks
    second.load_state_dict(manager.state_dict())
    second.modify(model, optimizer, 4)
    assert second.step == 5


def test_a_state_is_still_loaded_to_the_bit_after_another_was_refused() -> None:
    model, optimizer, manager = started()
    saved = deepcopy([model.state_dict(), optimizer.state_dict(), manager.state_dict()])
    train(model, optimizer, range(5, 9))
    again, other, second = started(steps=0)  # which has pruned the weights that it found
    again.load_state_dict(saved[0], strict=False)
    other.load_state_dict(saved[1])
    with pytest.raises(GossamerError):
        second.load_state_dict({**saved[2], "step": None})
    assert second.load_state_dict(saved[2]) == []
    train(again, other, range(5, 9))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@register
class FailingModifier(Modifier):
    """Cannot start."""

    def start(self, run: Run) -> None:
        run.write("0.weight", torch.zeros_like(run.parameter("0.weight")))
        run.state["tries"] = 1
        raise RuntimeError("no start")

    def state_fields(self, run: Run) -> dict[str, StateField]:
        return {"tries": integer()}


@pytest.mark.parametrize(
    "more",
    [
        "",
        "  - !STRPruningModifier {params: ['7.weight'], start_epoch: 0, end_epoch: 9}",
        "  - !QuantizationModifier {start_epoch: 0}",
        "  - !DistillationModifier {start_epoch: 0}",
    ],
)
def test_a_modifier_that_cannot_start_when_a_state_is_loaded_changes_nothing(more: str) -> None:
    recipe = RECIPE.replace("__ALL_PRUNABLE__", "['0.weight', '3.weight']") + more
    model, optimizer, manager = started(f"{recipe}\n  - !FailingModifier {{start_epoch: 10}}")
    state = deepcopy(manager.state_dict())
    train(model, optimizer, range(5, 7))
    before, held = fingerprint(model), str(manager.state_dict())
    state["step"] = 50
    with pytest.raises(RuntimeError, match="no start"):
        manager.load_state_dict(state)
    assert fingerprint(model) == before
    assert str(manager.state_dict()) == held
    same, other, _ = started(f"{recipe}\n  - !FailingModifier {{start_epoch: 10}}", steps=7)
    for each, steps in ((model, optimizer), (same, other)):
        train(each, steps, range(7, 9))
    assert fingerprint(model) == fingerprint(same)


def test_a_mask_larger_than_the_model_takes_no_memory() -> None:
    """Its bits are all there: as many as the shape needs, of one byte in memory."""
    _, _, manager = started(f"modifiers:\n{SPARSE}")
    state = manager.state_dict()
    bits = torch.zeros(1, dtype=torch.uint8).expand(2**29)
    state["modifiers"][GMP]["masks"]["0.weight"] = {"__bits__": {"bits": bits, "shape": [2**32]}}
    assert not attempt(lambda: manager.load_state_dict(state))


def test_a_key_that_a_modifier_does_not_declare_is_an_error_when_the_state_is_saved() -> None:
    @register
    class ForgetfulModifier(Modifier):
        """Declares nothing."""

        def start(self, run: Run) -> None:
            run.state["seen"] = 1

    _, _, manager = started("modifiers: [!ForgetfulModifier {}]", steps=1)
    with pytest.raises(GossamerError, match=r"ForgetfulModifier: run\.state holds 'seen', which its state_fields"):
        manager.state_dict()


def test_a_modifier_without_a_state_refuses_one() -> None:
    _, _, manager = started("modifiers: [!SetParamModifier {params: ['7.bias'], val: 0.0}]", steps=1)
    state = manager.state_dict()
    state["modifiers"]["SetParamModifier.0"]["state"]["val"] = 1.0
    with pytest.raises(GossamerError, match="unknown key 'val'"):
        manager.load_state_dict(state)


def test_what_belongs_to_another_model_is_left_out_and_named() -> None:
    recipe = "modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 9}]"
    _, _, manager = started(recipe)
    small = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    second = Manager(recipe)
    optimizer = second.modify(small, sgd(small), 4)
    problems = second.load_state_dict(manager.state_dict())
    assert [problem.split(" is dropped: ")[1] for problem in problems] == ["it is not in the model"] * 2
    train(small, optimizer, range(5, 7))
