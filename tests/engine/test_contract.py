"""What every method promises, one row each: a new method gets these tests by adding its row."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gossamer import Manager
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, has_minus_zero, network, sampler, sgd, through_disk, train, zeros

STEPS = 4 * STEPS_PER_EPOCH
SPAN = "params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, update_frequency: 0.5"
GRADUAL = SPAN + ", init_sparsity: 0.1, final_sparsity: {}"


@dataclass(frozen=True)
class Row:
    """A method: its modifier, and how many of the 1184 prunable weights (and of each layer) are zero at the end."""

    modifier: str
    total: int | None = None
    each: tuple[int, int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.modifier.split(" ")[0]


ROWS = [
    Row(f"GMPruningModifier {{{GRADUAL.format(0.9)}}}", each=(259, 518, 288)),
    Row(f"MagnitudePruningModifier {{{GRADUAL.format(0.9)}, inter_func: linear}}", each=(259, 518, 288)),
    Row(f"GlobalMagnitudePruningModifier {{{GRADUAL.format(0.9)}}}", total=1066),
    Row(f"GMPruningModifier {{{GRADUAL.format(0.5)}, mask_type: 2:4}}", each=(144, 288, 160)),
    Row(f"GMPruningModifier {{{GRADUAL.format(0.5)}, mask_type: 2:4, permute: true}}", each=(144, 288, 160)),
    Row(f"GMPruningModifier {{{GRADUAL.format(0.75)}, mask_type: block4}}", each=(216, 432, 240)),
    Row(f"GMPruningModifier {{{GRADUAL.format(0.5)}, mask_type: channel}}", each=(0, 288, 160)),
    Row(f"MovementPruningModifier {{{GRADUAL.format(0.9)}}}", each=(259, 518, 288)),
    Row(f"MFACPruningModifier {{{GRADUAL.format(0.9)}, num_grads: 3, fisher_block_size: 16}}", each=(259, 518, 288)),
    Row(
        f"OBSPruningModifier {{{GRADUAL.format(0.9)}, num_grads: 4, fisher_block_size: 8, num_recomputations: 2}}",
        each=(259, 518, 288),
        options={"grad_sampler": sampler},
    ),
    Row(
        f"ACDCPruningModifier {{{SPAN}, compression_sparsity: 0.9}}",
        total=1066,
    ),
    Row(
        f"RigLPruningModifier {{{SPAN}, final_sparsity: 0.8}}",
        total=947,
    ),
    Row(
        f"TopKASTPruningModifier {{{SPAN}, forward_sparsity: 0.8, backward_sparsity: 0.5}}",
        each=(230, 461, 256),
    ),
    Row(f"StructuredPruningModifier {{{GRADUAL.format(0.5)}, mask_type: filter}}", each=(144, 288, 0)),
    Row("LevelPruningModifier {levels: [0.3, 0.6, 0.9], end_epoch: 3}", each=(259, 518, 288)),
    Row("LevelPruningModifier {levels: [0.3, 0.6, 0.9], end_epoch: 3, allocation: energy}", total=1066),
    Row("LevelPruningModifier {levels: [0.3, 0.6, 0.9], end_epoch: 3, allocation: global}", total=1066),
    Row(f"StructuredPruningModifier {{{GRADUAL.format(0.5)}, score_type: l2}}", each=(144, 288, 0)),
    Row(f"StructuredPruningModifier {{{GRADUAL.format(0.5)}, score_type: fpgm_l2}}", each=(144, 288, 0)),
    Row(f"StructuredPruningModifier {{{GRADUAL.format(0.5)}, score_type: nuclear}}", each=(144, 288, 0)),
    Row("STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, s_init: -3.5, st_decay: 0.01}"),
    Row("STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, final_sparsity: 0.9}", total=1066),
    Row(
        "ProbMaskPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 3, final_sparsity: 0.9}",
        total=1066,
    ),
    Row(f"ADMMPruningModifier {{{SPAN}, final_sparsity: 0.9}}", each=(259, 518, 288)),
]
rows = pytest.mark.parametrize("row", ROWS, ids=str)


def sparsity_of(model: torch.nn.Module, name: str) -> float:
    return zeros(model.get_parameter(name)) / model.get_parameter(name).numel()


def begin(row: Row) -> tuple[torch.nn.Sequential, torch.optim.Optimizer, Manager]:
    model = network()
    manager = Manager(f"modifiers: [!{row.modifier}]")
    return model, manager.modify(model, sgd(model), STEPS_PER_EPOCH, **row.options), manager


@rows
def test_the_sparsity_at_the_end_is_exact_and_nothing_is_reported_missing(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, manager = begin(row)
    end = 3 * STEPS_PER_EPOCH
    targets, shares = manager.targets(), manager.planned()
    train(model, optimizer, range(end))
    masks = manager.masks()
    masked = tuple(int((~masks[name]).sum()) if name in masks else 0 for name in PRUNABLE)
    train(model, optimizer, range(end, STEPS))
    manager.finalize()
    assert [message for message in caplog.messages if "carried out" in message] == []
    # What the recipe says about one layer holds for it; what it says about all of them holds on average.
    for name, target in targets.items():
        assert sparsity_of(model, name) == pytest.approx(target, abs=0.01)
    sizes = {name: model.get_parameter(name).numel() for name in shares}
    reached = sum(zeros(model.get_parameter(name)) for name in shares)
    assert reached == pytest.approx(sum(shares[name] * sizes[name] for name in shares), abs=2)
    for found in (masked, tuple(zeros(model.get_parameter(name)) for name in PRUNABLE)):
        assert row.each is None or found == row.each
        assert row.total is None or sum(found) == row.total


@rows
def test_a_run_that_stops_halfway_says_so(row: Row, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, manager = begin(row)
    train(model, optimizer, range(6))
    manager.finalize()
    assert len([message for message in caplog.messages if "6 of 12 steps (epoch 1.5 of 3)" in message]) == 1


@rows
def test_masked_weights_stay_zero_through_momentum_after_every_step(row: Row) -> None:
    model, optimizer, manager = begin(row)

    def masked_weights_are_plus_zero(step: int) -> None:
        for name, keep in manager.masks().items():
            weight = model.get_parameter(name).detach()
            assert bool((weight[~keep] == 0).all()), f"{name} after step {step}"
            assert not has_minus_zero(weight)

    train(model, optimizer, range(STEPS), after=masked_weights_are_plus_zero)
    assert manager.masks()


@rows
def test_interrupted_at_any_step_it_ends_in_the_same_bits(row: Row) -> None:
    model, optimizer, manager = begin(row)
    saved: list[Any] = []

    def save(_: int) -> None:
        saved.append(through_disk([model.state_dict(), optimizer.state_dict(), manager.state_dict()]))

    train(model, optimizer, range(STEPS), after=save)
    for step in range(0, STEPS - 1, 1):
        again, other, second = begin(row)
        again.load_state_dict(saved[step][0])
        other.load_state_dict(saved[step][1])
        assert second.load_state_dict(saved[step][2]) == []
        train(again, other, range(step + 1, STEPS))
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), f"{name} after an interruption behind step {step}"


@rows
def test_the_order_of_loading_does_not_matter(row: Row) -> None:
    model, optimizer, manager = begin(row)
    train(model, optimizer, range(7))
    state = through_disk([model.state_dict(), optimizer.state_dict(), manager.state_dict()])
    train(model, optimizer, range(7, STEPS))
    for before_modify in (True, False):
        again = network(seed=1)
        again.load_state_dict(state[0])
        other, second = sgd(again), Manager(f"modifiers: [!{row.modifier}]")
        other.load_state_dict(deepcopy(state[1]))
        if before_modify:
            second.load_state_dict(state[2])
        second.modify(again, other, STEPS_PER_EPOCH, **row.options)
        if not before_modify:
            second.load_state_dict(state[2])
        train(again, other, range(7, STEPS))
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), f"{name}, state before modify: {before_modify}"


@rows
def test_the_same_weights_and_gradients_give_the_same_masks_without_a_shared_seed(row: Row) -> None:
    found = []
    for seed in (1, 2):
        model, optimizer, manager = begin(row)
        torch.manual_seed(seed)
        train(model, optimizer, range(STEPS))
        found.append(manager.masks())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@rows
def test_state_holds_plain_values_and_masks_as_bits(row: Row) -> None:
    model, optimizer, manager = begin(row)
    train(model, optimizer, range(9))
    state = manager.state_dict()
    masks = next(iter(state["modifiers"].values()))["masks"]
    for name, packed in masks.items():
        assert packed["__bits__"]["bits"].numel() == model.get_parameter(name).numel() / 8
    assert torch.bool not in {tensor.dtype for tensor in tensors(state)}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for item in items for tensor in tensors(item)]
