"""ADMM: its two variables against the textbook's three lines, and weights that have moved before they are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer import Manager, RecipeError, load
from gossamer.sparse import NM, Unstructured, magnitude
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, loss_at, network, sgd, train, zeros

FIELDS = "start_epoch: 0, end_epoch: 4, update_frequency: 0.5, final_sparsity: 0.9"


def recipe(fields: str = "", params: str = "__ALL_PRUNABLE__") -> str:
    text = f"params: {params}, {FIELDS}{', ' if fields else ''}{fields}"
    return f"modifiers: [!ADMMPruningModifier {{{text}}}]"


def test_the_gradient_gets_what_the_textbook_adds() -> None:
    """W ← step on L + ρ/2·‖W − Z + U‖², Z ← Π(W + U), U ← U + W − Z, written out beside the modifier."""
    model, twin = network(), network()
    optimizer = Manager(recipe("rho: 0.1")).modify(model, sgd(model), STEPS_PER_EPOCH)
    other = sgd(twin)

    def nearest(weight: torch.Tensor) -> torch.Tensor:
        return weight * Unstructured().mask(magnitude(weight), 0.9)

    near = {name: nearest(twin.get_parameter(name).detach()) for name in PRUNABLE}
    dual = {name: torch.zeros_like(value) for name, value in near.items()}
    for step in range(15):
        train(model, optimizer, range(step, step + 1))
        other.zero_grad()
        pull = sum((twin.get_parameter(n) - near[n] + dual[n]).square().sum() for n in PRUNABLE)
        (loss_at(twin, step) + 0.05 * pull).backward()
        other.step()
        for name in PRUNABLE:
            weight = twin.get_parameter(name).detach()
            assert torch.allclose(model.get_parameter(name), weight, rtol=1e-3, atol=1e-5), f"{name} after step {step}"
            if step % 2 == 1:
                near[name] = nearest(weight + dual[name])
                dual[name] = dual[name] + weight - near[name]


def test_weights_outside_the_pattern_have_become_small_before_the_cut() -> None:
    shares = []
    for rho in (1e-6, 0.1):
        model = network()
        raw: dict[str, torch.Tensor] = {}
        optimizer = sgd(model)
        optimizer.register_step_post_hook(
            lambda *_, model=model, raw=raw: raw.update({n: model.get_parameter(n).detach().clone() for n in PRUNABLE})
        )
        manager = Manager(recipe(f"rho: {rho}"))
        manager.modify(model, optimizer, 30)
        train(model, optimizer, range(119))
        assert manager.masks() == {}
        train(model, optimizer, range(119, 120))
        lost = sum(float(raw[n][~keep].square().sum()) for n, keep in manager.masks().items())
        shares.append(lost / sum(float(raw[n].square().sum()) for n in PRUNABLE))
        for name, keep in manager.masks().items():
            assert torch.equal(model.get_parameter(name).detach(), raw[name].masked_fill(~keep, 0))
            assert torch.equal(keep, Unstructured().mask(raw[name].abs(), 0.9))
    assert shares[1] < shares[0] / 2


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_pull_does_not_depend_on_the_loss_scale(fused: bool) -> None:
    found = []
    for scale in (1.0, 1024.0):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
        scaler = Manager(recipe("rho: 0.1")).modify(
            model, optimizer, STEPS_PER_EPOCH, scaler=torch.amp.GradScaler("cpu", init_scale=scale)
        )
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_at(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(model)
    for name in PRUNABLE:
        assert torch.allclose(*(model.get_parameter(name) for model in found), rtol=1e-3, atol=1e-5)


def test_a_weight_without_a_gradient_is_not_moved_and_is_cut_all_the_same() -> None:
    model = network()
    model[3].requires_grad_(False)
    before = model[3].weight.detach().clone()
    optimizer = Manager(recipe()).modify(model, sgd(model), STEPS_PER_EPOCH)
    train(model, optimizer, range(15))
    assert torch.equal(model[3].weight, before)
    assert model[3].weight.grad is None
    train(model, optimizer, range(15, 16))
    assert zeros(model[3].weight) == 518


def test_patterns_and_one_threshold_for_all_layers() -> None:
    model = network()
    Manager(recipe("mask_type: 2:4").replace("0.9", "0.5")).apply(model)
    assert all(NM(2, 4).violations(model.get_parameter(name).detach()) == 0 for name in PRUNABLE)
    wide = network()
    optimizer = Manager(recipe("global_sparsity: true")).modify(wide, sgd(wide), STEPS_PER_EPOCH)
    train(wide, optimizer, range(18))
    counts = [zeros(wide.get_parameter(name)) for name in PRUNABLE]
    assert sum(counts) == 1066
    assert counts != [259, 518, 288]


def test_after_the_end_weights_grow_again_only_where_the_recipe_lets_them() -> None:
    for leave, held in (("true", True), ("false", False)):
        model = network()
        manager = Manager(recipe(f"leave_enabled: {leave}"))
        optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
        train(model, optimizer, range(16))
        assert zeros(model[0].weight) == 259
        [entry] = manager.state_dict()["modifiers"].values()
        assert entry["state"] == {}
        train(model, optimizer, range(16, 18))
        assert (zeros(model[0].weight) == 259) == held


def test_half_precision_weights_are_drawn_too() -> None:
    torch.manual_seed(0)
    model = nn.Linear(32, 8, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    Manager(recipe("rho: 0.5")).modify(model, optimizer, STEPS_PER_EPOCH)
    for _ in range(12):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    small = model.weight.detach().float().abs().flatten().sort().values[:230]
    assert model.weight.dtype == torch.bfloat16
    assert float(small.max()) < 0.02


def test_the_schedule_says_dense_until_the_cut() -> None:
    [modifier] = load(recipe().replace("start_epoch: 0", "start_epoch: 1")).modifiers
    assert [modifier.sparsity_at(epoch) for epoch in (0, 1, 3.9, 4, 9)] == [None, 0.0, 0.0, 0.9, 0.9]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            recipe().replace("end_epoch: 4", "end_epoch: -1"),
            "end_epoch: expected the epoch at which the modifier ends",
        ),
        (recipe("rho: 0"), "rho"),
        (recipe("mask_type: 2:4"), "final_sparsity: mask_type 2:4 means 0.5, found 0.9"),
        (recipe().replace("0.5,", "0,"), "update_frequency"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(text)
    assert told in str(raised.value)
