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
from gossamer.sparse import pack
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
WEIGHT = "3.weight"


def started(recipe: str = RECIPE, steps: int = 5) -> tuple[nn.Sequential, torch.optim.Optimizer, Manager]:
    model = network()
    manager = Manager(recipe)
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(steps))
    return model, optimizer, manager


def sparsity(model: nn.Module) -> float:
    return sum(zeros(model.get_parameter(name)) for name in PRUNABLE) / 1184


def mask_of(keep: torch.Tensor) -> dict[str, Any]:
    """A mask as a state holds it."""
    return {"__bits__": pack(keep.bool())}


DAMAGE: list[Callable[[dict[str, Any]], object]] = [
    lambda state: state.update(step="x"),
    lambda state: state.update(steps_per_epoch=0),
    lambda state: state.update(step=-5),
    lambda state: state["modifiers"][GMP].update(masks=None),
    lambda state: state["modifiers"][GMP].update(status="begun"),
    lambda state: state["modifiers"][GMP]["state"].update(init_sparsity=3),
    lambda state: state["modifiers"]["LayerPruningModifier.0"].update(state={}),
    lambda state: state["modifiers"][GMP].update(masks={}),
    lambda state: state["modifiers"][GMP]["masks"].pop("3.weight"),
    lambda state: state["modifiers"][GMP]["masks"].update({"3.wieght": state["modifiers"][GMP]["masks"].pop(WEIGHT)}),
    lambda state: state["modifiers"][GMP]["masks"].update({"3.bias": mask_of(torch.ones(8))}),
    lambda state: state["modifiers"][GMP]["masks"].update({WEIGHT: torch.ones(3, dtype=torch.bool)}),
    lambda state: state["modifiers"][GMP]["masks"].update({WEIGHT: mask_of(torch.zeros(4, 4))}),
    lambda state: state["modifiers"][GMP]["masks"].update({WEIGHT: mask_of(torch.ones(8, 8, 3, 3))}),
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
        run.weights.write("0.weight", torch.zeros_like(run.weights.parameter("0.weight")))
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


def test_what_belongs_to_another_model_is_left_out_and_named() -> None:
    recipe = "modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 9}]"
    _, _, manager = started(recipe)
    small = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    second = Manager(recipe)
    optimizer = second.modify(small, sgd(small), 4)
    problems = second.load_state_dict(manager.state_dict())
    assert [problem.split(" is dropped: ")[1] for problem in problems] == ["it is not in the model"] * 2
    train(small, optimizer, range(5, 7))


ENDING = SPARSE.replace("end_epoch: 20", "end_epoch: 1").replace("update_frequency: 10", "update_frequency: 0.5")


@pytest.mark.parametrize("damage", DAMAGE[-7:])
def test_masks_that_are_not_those_of_the_state_are_refused_after_pruning(damage: Callable[[Any], object]) -> None:
    """No later update would prune again."""
    model, optimizer, manager = started(f"modifiers:\n{ENDING}", steps=6)
    state = deepcopy(manager.state_dict())
    assert state["modifiers"][GMP]["status"] == "ended"
    damage(state)
    with pytest.raises(GossamerError, match=r"^state\.modifiers\.GMPruningModifier\.0\.masks"):
        manager.load_state_dict(state)
    with pytest.raises(GossamerError, match=r"^state\.modifiers\.GMPruningModifier\.0\.masks"):
        resumed(f"modifiers:\n{ENDING}", state)
    train(model, optimizer, range(6, 9))
    assert sparsity(model) == pytest.approx(0.9, abs=1e-3)


def resumed(recipe: str, state: dict[str, Any]) -> tuple[nn.Sequential, torch.optim.Optimizer, Manager]:
    model, manager = network(), Manager(recipe)
    manager.load_state_dict(state)
    return model, manager.modify(model, sgd(model), 4), manager


def test_a_tensor_of_another_shape_is_refused_where_the_model_is_the_same() -> None:
    _, _, manager = started("modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 9}]")
    state = deepcopy(manager.state_dict())
    state["modifiers"]["STRPruningModifier.0"]["state"]["thresholds"][WEIGHT] = torch.zeros(3)
    with pytest.raises(GossamerError, match=r"thresholds\.3\.weight: expected shape \(\), found \(3,\)"):
        manager.load_state_dict(state)


def of_an_old_version(state: dict[str, Any]) -> dict[str, Any]:
    """The same state without the shapes and counts that older versions did not save."""
    found = deepcopy(state)
    for entry in found["modifiers"].values():
        entry.pop("parameters", None)
    return found


def test_a_state_without_shapes_of_parameters_is_loaded() -> None:
    model, optimizer, manager = started()
    saved = deepcopy([model.state_dict(), optimizer.state_dict()])
    again, other, second = started(steps=0)
    again.load_state_dict(saved[0], strict=False)
    other.load_state_dict(saved[1])
    assert second.load_state_dict(of_an_old_version(manager.state_dict())) == []
    for each, steps in ((model, optimizer), (again, other)):
        train(each, steps, range(5, 9))
    assert fingerprint(model) == fingerprint(again)


HOLD = "  - !ConstantPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 2}\n"
SEVERAL = (
    ENDING.replace("0.9", "0.5").replace("start_epoch: 0", "start_epoch: 1").replace("end_epoch: 1", "end_epoch: 2")
)


@pytest.mark.parametrize("lost", [[WEIGHT], PRUNABLE])
@pytest.mark.parametrize("together", [False, True])
def test_finalize_warns_about_sparsity_that_a_loaded_state_lost(
    caplog: pytest.LogCaptureFixture, lost: list[str], together: bool
) -> None:
    recipe = f"modifiers:\n{ENDING}"
    recipe = recipe.replace("params:", "global_sparsity: true, params:") if together else recipe
    _, _, manager = started(recipe, steps=6)
    state = of_an_old_version(manager.state_dict())
    for name in lost:
        del state["modifiers"][GMP]["masks"][name]
    model, optimizer, second = resumed(recipe, state)
    train(model, optimizer, range(6, 8))
    caplog.clear()
    second.finalize()
    (message,) = caplog.messages
    first = "0.weight" if together else lost[0]
    assert f"weights are less sparse than its targets: sparsity of '{first}'" in message
    assert "of 90.0%" in message


@pytest.mark.parametrize("more", ["", HOLD, SEVERAL, HOLD.replace("}", ", end_epoch: 2.25}")])
@pytest.mark.parametrize("together", [False, True])
def test_finalize_does_not_warn_after_a_sound_state(
    caplog: pytest.LogCaptureFixture, more: str, together: bool
) -> None:
    recipe = f"modifiers:\n{ENDING}{more}"
    recipe = (
        recipe.replace("{params:", "{global_sparsity: true, params:") if together and "Const" not in more else recipe
    )
    _, _, manager = started(recipe, steps=10)
    for state in (manager.state_dict(), of_an_old_version(manager.state_dict())):
        model, optimizer, second = resumed(recipe, state)
        train(model, optimizer, range(10, 14))
        caplog.clear()
        second.finalize()
        assert caplog.messages == []


@pytest.mark.parametrize("steps", [3, 6])
def test_a_step_far_beyond_the_recipe_is_reported(steps: int) -> None:
    _, _, manager = started(f"modifiers:\n{ENDING}", steps=steps)
    state = deepcopy(manager.state_dict())
    assert manager.load_state_dict(state) == []
    assert manager.load_state_dict({**state, "step": 10**9}) == [
        "the state is at step 1000000000 and the recipe ends at step 4: check that the state is of this run"
    ]


def test_training_on_after_the_recipe_is_not_reported() -> None:
    _, _, manager = started(f"modifiers:\n{ENDING}", steps=12)
    assert manager.load_state_dict(manager.state_dict()) == []


def test_a_modifier_of_ones_own_that_cannot_be_restored_changes_nothing() -> None:
    @register
    class Unrestorable(Modifier):
        def start(self, run: Run) -> None:
            pass

        def restore(self, run: Run) -> None:
            raise GossamerError("cannot go on")

    model = network()
    manager = Manager(f"modifiers:\n{SPARSE}\n  - !Unrestorable {{end_epoch: 30}}")
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(5))
    state = deepcopy(manager.state_dict())
    train(model, optimizer, range(5, 60))
    before, masks = fingerprint(model), {name: mask.clone() for name, mask in manager.masks().items()}
    with pytest.raises(GossamerError, match="cannot go on"):
        manager.load_state_dict(state)
    assert manager.step == 60
    assert fingerprint(model) == before
    assert all(torch.equal(mask, masks[name]) for name, mask in manager.masks().items())


def test_a_saved_mask_of_a_tied_embedding_is_not_dropped() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
            self.first, self.head.weight = nn.Linear(8, 8), self.table.weight

    states = []
    for params in ("[first.weight, table.weight]", "__ALL_PRUNABLE__"):
        model = Tied()
        manager = Manager(
            f"modifiers: [!GMPruningModifier {{params: {params}, init_sparsity: 0.5, final_sparsity: 0.5, "
            "start_epoch: 0, end_epoch: 1, update_frequency: 1}]"
        )
        _optimizer = manager.modify(model, sgd(model), 4)
        states.append(manager.state_dict())
    with pytest.raises(GossamerError, match="left dense unless the recipe names it"):
        manager.load_state_dict(states[0])
