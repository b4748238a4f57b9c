"""STR: thresholds that are learned, trained by the user's optimizer and gone after export."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.model import get_parameter
from gossamer.msbench import build_sparse_scheduler
from gossamer.msbench.sparsers import STRFakeSparse, fold, nodes
from tests.loops import PRUNABLE, batch, has_minus_zero, loss_at, network, sgd, zeros
from tests.msbench.configs import POSITIONS, TOTAL, Position, loop, prepared, str_config

BOTH = pytest.mark.parametrize("scheduler_name", ["BaseScheduler", "STRScheduler"])


def thresholds(model: nn.Module) -> dict[str, Tensor]:
    return {name: node.s.detach().clone() for name, node in nodes(model).items() if isinstance(node, STRFakeSparse)}


@BOTH
def test_each_layer_has_one_threshold_among_the_models_parameters(scheduler_name: str) -> None:
    _, model = prepared(str_config(-4.0, scheduler_name))
    names = [name for name, _ in model.named_parameters() if name.endswith(".s")]
    assert names == [f"{name}_fake_sparse.s" for name in PRUNABLE]
    assert all(torch.equal(model.get_parameter(name), torch.tensor(-4.0)) for name in names)
    assert [n for n, _ in model.named_parameters() if "fake_sparse" not in n] == [
        n for n, _ in network().named_parameters()
    ]


def test_layers_compute_with_the_soft_threshold_of_their_weights() -> None:
    dense = network()
    expected = deepcopy(dense)
    sigma = torch.sigmoid(torch.tensor(-3.0))
    with torch.no_grad():
        for name in PRUNABLE:
            weight = expected.get_parameter(name)
            weight.copy_(weight.sign() * (weight.abs() - sigma).relu())
    _, model = prepared(str_config(-3.0), dense)
    assert torch.allclose(model(batch(0)[0]), expected(batch(0)[0]), atol=1e-6)


def test_thresholds_and_weights_receive_the_gradient_of_the_formula() -> None:
    _, model = prepared(str_config(-3.0))
    loss_at(model, 0).backward()
    for node in nodes(model).values():
        assert node.s.grad is not None
        assert float(node.s.grad) != 0
    weight, node = model.get_parameter("3.weight"), nodes(model)["3.weight"]
    slope = torch.sigmoid(node.s) * (1 - torch.sigmoid(node.s))
    expected = -slope * (weight.sign() * weight.grad).sum()
    assert torch.allclose(node.s.grad, expected, rtol=1e-4)
    assert not bool(weight.grad[weight.abs() <= torch.sigmoid(node.s)].any())


def test_more_decay_on_the_thresholds_gives_more_zeros() -> None:
    rates = []
    for decay in (0.0, 0.03, 0.1):
        scheduler, model = prepared(str_config(-5.0))
        optimizer = torch.optim.SGD(scheduler.param_groups(model, 1e-4, st_decay=decay), lr=0.05, momentum=0.9)
        loop(scheduler, model, optimizer, range(30))
        rates.append(scheduler.compute_sparse_rate(model))
    assert rates[0] + 0.05 < rates[1]
    assert rates[1] + 0.05 < rates[2] < 1


def test_param_groups_hold_every_parameter_once_with_the_decay_of_its_kind() -> None:
    scheduler, model = prepared(str_config())
    own, learned = scheduler.param_groups(model, weight_decay=1e-4, st_decay=5e-3)
    assert (own["weight_decay"], learned["weight_decay"]) == (1e-4, 5e-3)
    assert {id(p) for p in learned["params"]} == {id(node.s) for node in nodes(model).values()}
    assert sorted(id(p) for p in own["params"] + learned["params"]) == sorted(id(p) for p in model.parameters())
    assert scheduler.param_groups(model, weight_decay=1e-4)[1]["weight_decay"] == 1e-4
    scheduler.export_sparse_model(model)
    assert len(scheduler.param_groups(model)) == 1


@BOTH
def test_exported_weights_are_those_that_the_layers_computed_with(scheduler_name: str) -> None:
    scheduler, model = prepared(str_config(-3.0, scheduler_name))
    loop(scheduler, model, sgd(model), range(8))
    model.eval()
    inputs = batch(50)[0]
    with torch.no_grad():
        before = model(inputs)
        rate = scheduler.compute_sparse_rate(model)
        raw = {name: model.get_parameter(name).clone() for name in PRUNABLE}
        sigma = {name: s.sigmoid() for name, s in thresholds(model).items()}
        scheduler.export_sparse_model(model)
        assert torch.allclose(model(inputs), before, atol=1e-6)
    for name, weight in raw.items():
        exported = model.get_parameter(name).detach()
        assert torch.equal(exported == 0, weight.abs() <= sigma[name])
        assert torch.allclose(exported, weight.sign() * (weight.abs() - sigma[name]).relu(), atol=1e-7)
        assert not has_minus_zero(exported)
    assert list(model.state_dict()) == list(network().state_dict())
    assert scheduler.compute_sparse_rate(model) == rate > 0
    assert not nodes(model)


def test_folding_writes_only_where_there_is_a_sparser() -> None:
    _, model = prepared(str_config(-3.0))
    del model.get_submodule("3").weight_fake_sparse
    before = {name: model.get_parameter(name)._version for name in PRUNABLE}
    fold(model, list(PRUNABLE))
    assert [name for name in PRUNABLE if model.get_parameter(name)._version != before[name]] == ["0.weight", "7.weight"]


def test_training_on_after_export_keeps_the_zeros() -> None:
    scheduler, model = prepared(str_config(-3.0))
    loop(scheduler, model, sgd(model), range(3))
    scheduler.export_sparse_model(model)
    before = [zeros(model.get_parameter(name)) for name in PRUNABLE]
    loop(scheduler, model, sgd(model), range(3, 6))
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == before
    assert min(before) > 0


def test_half_precision_weights_keep_their_type() -> None:
    scheduler, model = prepared(str_config(-3.0), network().to(torch.bfloat16))
    assert model(batch(0)[0].bfloat16()).dtype == torch.bfloat16
    scheduler.export_sparse_model(model)
    assert model.get_parameter("3.weight").dtype == torch.bfloat16
    assert zeros(model.get_parameter("3.weight")) > 0


def test_a_model_can_be_prepared_again_after_export() -> None:
    scheduler, model = prepared(str_config(-3.0))
    scheduler.export_sparse_model(model)
    exported = zeros(model.get_parameter("3.weight"))
    other = build_sparse_scheduler(str_config(-5.0))
    again = other.prepare_sparse_model(model)
    assert set(nodes(again)) == set(PRUNABLE)
    other.export_sparse_model(again)
    assert zeros(again.get_parameter("3.weight")) >= exported


@pytest.mark.parametrize("position", POSITIONS)
def test_a_prune_rate_is_followed_and_reached(position: Position) -> None:
    scheduler, model = prepared(str_config(prune_rate=0.8, total_iterations=TOTAL))
    found: list[float] = []
    loop(
        scheduler,
        model,
        torch.optim.SGD(scheduler.param_groups(model, weight_decay=1e-4), lr=0.05, momentum=0.9),
        range(TOTAL),
        position=position,
        after=lambda _: found.append(scheduler.compute_sparse_rate(model)),
    )
    assert found[0] < 0.6 < found[TOTAL // 2 - 2]
    assert found[TOTAL // 2 + 1 :] == pytest.approx([0.8] * (TOTAL // 2 - 1), abs=1e-3)
    assert len({float(s) for s in thresholds(model).values()}) == 3
    scheduler.export_sparse_model(model)
    count = sum(get_parameter(model, name).numel() for name in PRUNABLE)
    assert sum(zeros(get_parameter(model, name)) for name in PRUNABLE) == round(0.8 * count)
    [modifier] = scheduler.recipe(steps_per_epoch=4).modifiers
    assert (modifier.final_sparsity, modifier.end_epoch) == (0.8, 3.0)


def test_a_prune_rate_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(GossamerError, match=r"scheduler\.kwargs\.total_iterations: missing key; prune_rate needs it"):
        prepared(str_config(prune_rate=0.8))
    with pytest.raises(GossamerError, match=r"scheduler\.kwargs\.prune_rate: expected a number < 1, found 1"):
        prepared(str_config(prune_rate=1.0, total_iterations=TOTAL))


@pytest.mark.slow
# torch looks at the substitute's .grad while it compiles, and hides the warning of that where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_trains_its_thresholds_and_computes_the_same_after_export() -> None:
    scheduler, model = prepared(str_config(-3.0))
    compiled = torch.compile(model, backend="eager")
    plain, other = prepared(str_config(-3.0))
    for one, trained_model in ((scheduler, compiled), (plain, other)):
        loop(one, trained_model, sgd(trained_model), range(3))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    inputs = batch(50)[0]
    expected = compiled.eval()(inputs)
    scheduler.export_sparse_model(compiled)
    assert not nodes(model)
    assert torch.allclose(compiled(inputs), expected, atol=1e-6)
    assert torch.allclose(model(inputs), expected, atol=1e-6)
