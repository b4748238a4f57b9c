"""Attaching a recipe copies only the values that it overwrites, and a failure brings them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import GossamerError, Manager, Modifier, register
from gossamer.modifiers import Run
from tests.loops import network, sgd, train

LARGE, SMALL = 512, 64
HOLD = "modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]"


def prune(start: float, params: str) -> str:
    return (
        f"modifiers: [!GMPruningModifier {{params: {params}, init_sparsity: 0.5, final_sparsity: 0.8, "
        f"start_epoch: {start}, end_epoch: 4, update_frequency: 1}}]"
    )


class FloatBytes(TorchDispatchMode):
    """Counts the bytes of floating-point results that are not views of an argument, as every copy of a weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.untyped_storage().data_ptr() not in storages
        ):
            self.count += result.nbytes
        return result


def model_of_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LARGE, LARGE), nn.Linear(LARGE, SMALL), nn.Linear(SMALL, SMALL))


def copied_bytes(recipe: str, model: nn.Module) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FloatBytes() as found:
        Manager(recipe).modify(model, optimizer, steps_per_epoch=10)
    return found.count


def test_a_recipe_that_writes_nothing_at_step_0_copies_nothing() -> None:
    assert copied_bytes(prune(1, "__ALL_PRUNABLE__"), model_of_layers()) == 0


def test_a_recipe_that_prunes_one_layer_copies_only_values_of_that_layer() -> None:
    model = model_of_layers()
    manager = Manager(prune(0, "[2.weight]"))
    manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=10)
    assert manager._run is not None
    (saved,) = manager._run.before_attach._saved
    assert saved.tensor is model[2].weight
    assert saved.values.numel() == SMALL * SMALL // 2
    copied = copied_bytes(prune(0, "[2.weight]"), model_of_layers())  # with the scores
    assert model[2].weight.nbytes // 2 <= copied < model[1].weight.nbytes


def test_holding_the_zeros_of_a_sparse_model_copies_no_weights() -> None:
    model = model_of_layers()
    for layer in model:
        layer.weight.data[::2] = 0
    manager = Manager(HOLD)
    manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=10)
    assert manager._run is not None
    assert manager._run.before_attach._saved == []


@register
class FailingAtStart(Modifier):
    def start(self, run: Run) -> None:
        raise GossamerError("cannot start")


@pytest.mark.parametrize(
    "modifiers",
    [
        "!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.8, start_epoch: 0, "
        "end_epoch: 4, update_frequency: 1}, !ConstantPruningModifier {params: __ALL_PRUNABLE__}",
        "!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.5, start_epoch: 0, "
        "end_epoch: 4, update_frequency: 1, mask_type: '2:4', permute: true}",
    ],
    ids=["masks", "permutation"],
)
def test_a_failure_brings_back_model_and_optimizer(modifiers: str) -> None:
    model = network()
    optimizer = sgd(model)
    train(model, optimizer, range(1))
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    tensors += [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(GossamerError, match="cannot start"):
        Manager(f"modifiers: [{modifiers}, !FailingAtStart {{}}]").modify(
            model, optimizer, 4, example_inputs=torch.zeros(1, 4, 8, 8)
        )
    assert all(torch.equal(tensor, values) for tensor, values in zip(tensors, before, strict=True))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_buffer_that_was_made_in_inference_mode_does_not_matter(resumed: bool) -> None:
    model = model_of_layers()
    with torch.inference_mode():
        model.register_buffer("cache", torch.ones(3), persistent=False)
    optimizer, manager = torch.optim.SGD(model.parameters(), lr=0.1), Manager(HOLD)
    manager.modify(model, optimizer, steps_per_epoch=10)
    if resumed:
        state = manager.state_dict()
        state["modifiers"] = {}  # so that the modifier starts, which may fail, and the model is copied before
        manager.load_state_dict(state)
    model(torch.ones(1, LARGE)).sum().backward()
    optimizer.step()
    assert manager.step == 1
    manager.finalize()
