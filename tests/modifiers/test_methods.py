"""Each pruning method against an answer worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import GossamerError, Manager
from gossamer.modifiers import RigLPruningModifier
from tests.loops import PRUNABLE, STEPS_PER_EPOCH, batch, loss_at, network, sampler, sgd, train, zeros

TRACES = json.loads((Path(__file__).parents[1] / "data/gmp_traces.json").read_text())["traces"]
TRACE_FIELDS = {
    "gmp 0-5 f1 cubic": "",
    "linear": ", inter_func: linear",
    "block4": ", mask_type: block4",
    "inverse_cubic": ", inter_func: inverse_cubic",
}


def gmp(fields: str = "", kind: str = "GMPruningModifier") -> str:
    base = {
        "params": "['0.weight']",
        "init_sparsity": 0.05,
        "final_sparsity": 0.8,
        "start_epoch": 0,
        "end_epoch": 5,
        "update_frequency": 1.0,
    }
    given = {part.split(":")[0].strip() for part in fields.split(", ") if ":" in part}
    body = ", ".join(f"{key}: {value}" for key, value in base.items() if key not in given)
    return f"modifiers: [!{kind} {{{body}{', ' if fields else ''}{fields}}}]"


@pytest.mark.parametrize("name", TRACES)
def test_gmp_traces_equal_the_recorded_ones(name: str) -> None:
    model = network()
    optimizer = sgd(model)
    Manager(gmp(TRACE_FIELDS[name].removeprefix(", "))).modify(model, optimizer, STEPS_PER_EPOCH)
    found = [zeros(model[0].weight) / 288]
    for epoch in range(5):
        train(model, optimizer, range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH))
        found.append(zeros(model[0].weight) / 288)
    assert [round(value, 4) for value in found] == [value for _, value in TRACES[name]]


def test_update_frequency_of_a_tenth_with_ten_steps_updates_on_every_step() -> None:
    model = network()
    optimizer = sgd(model)
    Manager(gmp("update_frequency: 0.1, end_epoch: 2, inter_func: linear")).modify(model, optimizer, 10)
    counts = [zeros(model[0].weight)]
    train(model, optimizer, range(20), after=lambda _: counts.append(zeros(model[0].weight)))
    assert counts == [round(288 * (0.05 + 0.75 * step / 20)) for step in range(21)]


def test_init_from_param_starts_at_the_sparsity_each_weight_has() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[:4] = 0
    Manager(gmp("init_sparsity: __FROM_PARAM__, params: ['0.weight', '3.weight']")).modify(model, sgd(model), 4)
    assert (zeros(model[0].weight), zeros(model[3].weight)) == (144, 0)


def test_a_final_sparsity_per_list_of_parameters() -> None:
    model = network()
    text = gmp("params: [], final_sparsity: {0.5: ['0.weight'], 0.25: ['re:3.w']}, init_sparsity: 0.0")
    Manager(text).apply(model)
    assert (zeros(model[0].weight), zeros(model[3].weight), zeros(model[7].weight)) == (144, 144, 0)


def test_leave_enabled_false_lets_the_weights_grow_again_after_the_end() -> None:
    model = network()
    optimizer = sgd(model)
    Manager(gmp("leave_enabled: false, end_epoch: 1")).modify(model, optimizer, STEPS_PER_EPOCH)
    train(model, optimizer, range(4))
    assert zeros(model[0].weight) == 230
    train(model, optimizer, range(4, 5))
    assert zeros(model[0].weight) < 30


def test_a_descending_schedule_opens_the_mask() -> None:
    model = network()
    optimizer = sgd(model)
    Manager(gmp("init_sparsity: 0.5, final_sparsity: 0.1, end_epoch: 2, inter_func: linear")).modify(
        model, optimizer, 4
    )
    train(model, optimizer, range(9))
    assert zeros(model[0].weight) == 29


def test_two_of_four_is_unstructured_up_to_its_ratio_and_exact_at_the_end() -> None:
    model = network()
    optimizer = sgd(model)
    Manager(
        gmp("mask_type: 2:4, final_sparsity: 0.5, init_sparsity: 0.1, params: __ALL_PRUNABLE__, end_epoch: 2")
    ).modify(model, optimizer, 4)
    train(model, optimizer, range(4))
    assert 0.1 < zeros(model[0].weight) / 288 < 0.5
    train(model, optimizer, range(4, 10))
    for name in PRUNABLE:
        weight = model.get_parameter(name)
        groups = weight.reshape(weight.shape[0], weight.shape[1] // 4, 4, -1)
        assert bool(((groups != 0).sum(dim=2) == 2).all())


def test_a_global_threshold_prunes_the_smallest_of_all_layers() -> None:
    model = network()
    with torch.no_grad():
        model[7].weight.mul_(100)
    every = torch.cat([model.get_parameter(name).detach().flatten() for name in PRUNABLE])
    Manager(gmp("params: __ALL_PRUNABLE__", "GlobalMagnitudePruningModifier")).apply(model)
    count = round(every.numel() * 0.8)
    assert sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == count
    survivors = torch.cat([model.get_parameter(name).detach().flatten() for name in PRUNABLE])
    assert float(survivors[survivors != 0].abs().min()) >= float(every.abs().sort().values[count - 1])


def test_movement_is_the_sum_of_minus_weight_times_gradient() -> None:
    model, twin = network(), network()
    Manager(gmp("init_sparsity: 0.0, end_epoch: 1", "MovementPruningModifier")).modify(
        model, optimizer := sgd(model), 3
    )
    by_hand, other = torch.zeros(8, 4, 3, 3), sgd(twin)
    for step in range(3):
        other.zero_grad()
        loss_at(twin, step).backward()
        by_hand -= twin[0].weight.detach() * twin[0].weight.grad
        other.step()
    train(model, optimizer, range(3))
    lowest = by_hand.flatten().argsort()[:230]
    expected = twin[0].weight.detach().flatten().clone()
    expected[lowest] = 0
    assert torch.equal(model[0].weight.detach().flatten(), expected)


@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_movement_sees_the_gradients_of_a_closure_as_well(closure: bool) -> None:
    model = network()
    manager = Manager(gmp("init_sparsity: 0.0", "MovementPruningModifier"))
    optimizer = manager.modify(model, sgd(model), 3)
    weight = model[0].weight.detach().clone()
    optimizer.zero_grad()
    if closure:
        optimizer.step(lambda: (loss := loss_at(model, 0)).backward() or float(loss.detach()))
    else:
        loss_at(model, 0).backward()
        optimizer.step()
    state = manager.state_dict()["modifiers"]["MovementPruningModifier.0"]["state"]
    assert torch.allclose(state["movement"]["0.weight"], -weight * model[0].weight.grad)


def quadratic(gradients: torch.Tensor):
    """A sampler whose gradients of a linear layer's weight are the given rows."""

    def sample(model: nn.Module):
        for row in gradients:
            yield (model.get_parameter("weight").flatten() * row).sum()

    return sample


SECOND_ORDER = (
    "modifiers: [!{kind} {{params: ['weight'], init_sparsity: 0.0, final_sparsity: 0.25, start_epoch: 0, end_epoch: 1, "
    "update_frequency: 1, num_grads: 64, damp: 0.01, fisher_block_size: 4}}]"
)


def test_obs_removes_what_costs_least_and_makes_up_for_it() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 4, bias=False).double()
    gradients = torch.randn(64, 16, dtype=torch.float64)
    weight = model.weight.detach().flatten().clone()
    saliency, fishers = torch.empty(16, dtype=torch.float64), []
    for block in range(4):
        rows = gradients[:, 4 * block : 4 * block + 4]
        fisher = rows.T @ rows / 64 + 0.01 * torch.eye(4, dtype=torch.float64)
        fishers.append(fisher)
        part = slice(4 * block, 4 * block + 4)
        saliency[part] = weight[part] ** 2 / (2 * torch.linalg.inv(fisher).diagonal())
    gone = saliency.argsort()[:4]
    expected = weight.clone()
    for block, fisher in enumerate(fishers):
        part = slice(4 * block, 4 * block + 4)
        out = [int(i) - 4 * block for i in gone if 4 * block <= i < 4 * block + 4]
        stay = [i for i in range(4) if i not in out]
        moved = weight[part].clone()
        moved[stay] += torch.linalg.inv(fisher[stay][:, stay]) @ fisher[stay][:, out] @ weight[part][out]
        moved[out] = 0
        expected[part] = moved
    Manager(SECOND_ORDER.format(kind="OBSPruningModifier")).apply(model, grad_sampler=quadratic(gradients))
    assert torch.allclose(model.weight.detach().flatten(), expected, rtol=1e-10)
    assert model.weight.grad is None


def test_mfac_ranks_by_the_gradients_of_training() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = torch.randn(6, 16, dtype=torch.float64)
    weight = model.weight.detach().flatten().clone()
    inverse = []
    for block in range(4):
        rows = gradients[2:, 4 * block : 4 * block + 4]
        inverse.append(torch.linalg.inv(rows.T @ rows / 4 + 0.01 * torch.eye(4, dtype=torch.float64)).diagonal())
    gone = (weight**2 / (2 * torch.cat(inverse))).argsort()[:4]
    text = SECOND_ORDER.format(kind="MFACPruningModifier").replace("num_grads: 64", "num_grads: 4")
    Manager(text).modify(model, optimizer, 6)
    for row in gradients:
        model.weight.grad = row.reshape(4, 4).clone()
        optimizer.step()
    expected = weight.clone()
    expected[gone] = 0
    assert torch.equal(model.weight.detach().flatten(), expected)


def test_the_gradient_sampler_leaves_gradients_and_statistics_as_they_were() -> None:
    model = network()
    loss_at(model, 0).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    text = gmp("num_grads: 4, fisher_block_size: 8", "OBSPruningModifier")
    Manager(text).modify(model, sgd(model), 4, grad_sampler=sampler)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


def test_sparsemls_form_of_a_gradient_sampler_works() -> None:
    model = network()
    asked = []

    def build(kwargs):
        asked.append(kwargs)
        for step in range(4):
            inputs, labels = batch(step)
            yield [inputs], {}, labels

    text = gmp("num_grads: 4, fisher_block_size: 8, grad_sampler_kwargs: {batch_size: 8}", "OBSPruningModifier")
    given = {"data_loader_builder": build, "loss_function": nn.functional.cross_entropy}
    Manager(text).apply(model, grad_sampler=given)
    assert zeros(model[0].weight) == 230
    assert asked[0] == {"batch_size": 8}


def test_obs_without_a_sampler_says_what_to_pass() -> None:
    model = network()
    with pytest.raises(GossamerError, match="pass grad_sampler= to modify"):
        Manager(gmp("", "OBSPruningModifier")).modify(model, sgd(model), 4)


ACDC = (
    "modifiers: [!ACDCPruningModifier {{params: __ALL_PRUNABLE__, compression_sparsity: 0.9, start_epoch: 1, "
    "end_epoch: {end}, update_frequency: 1, global_sparsity: {wide}}}]"
)


@pytest.mark.parametrize(
    ("end", "sparse_epochs"),
    [(5, [False, False, True, False, True, True]), (6, [False, False, True, False, True, True])],
)
def test_acdc_alternates_dense_and_sparse_phases_and_ends_sparse(end: int, sparse_epochs: list[bool]) -> None:
    model = network()
    optimizer = sgd(model)
    Manager(ACDC.format(end=end, wide="true")).modify(model, optimizer, STEPS_PER_EPOCH)
    found = []
    for epoch in range(6):
        train(model, optimizer, range(epoch * 4, epoch * 4 + 3))
        found.append(sum(zeros(model.get_parameter(name)) for name in PRUNABLE) == round(1184 * 0.9))
        train(model, optimizer, range(epoch * 4 + 3, epoch * 4 + 4))
    assert found == sparse_epochs


def test_rigl_drops_the_smallest_and_grows_where_gradients_are_largest() -> None:
    weight = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    gradient = torch.tensor([[9.0, 9.0, 0.1, 0.2, 0.4, 0.3, 0.9, 0.5]])
    keep = weight != 0
    assert RigLPruningModifier.exchange(weight, gradient, keep, 0.5).tolist() == [
        [True, True, False, False, False, False, True, True]
    ]
    assert RigLPruningModifier.exchange(weight, gradient, keep, 0.0) is keep


RIGL = (
    "modifiers: [!RigLPruningModifier {params: __ALL_PRUNABLE__, final_sparsity: 0.8, start_epoch: 0, end_epoch: 4, "
    "update_frequency: 1, init_update_fraction: 0.5}]"
)


def test_rigl_in_training_grows_the_largest_gradients_and_keeps_the_count() -> None:
    model = network()
    manager = Manager(RIGL)
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    counts = {name: zeros(model.get_parameter(name)) for name in PRUNABLE}
    assert sum(counts.values()) == round(1184 * 0.8)
    train(model, optimizer, range(3))
    old = manager.masks()["3.weight"].clone()
    optimizer.zero_grad()
    loss_at(model, 3).backward()
    gradient = model[3].weight.grad.abs().clone()
    optimizer.step()
    new = manager.masks()["3.weight"]
    grown, refused = new & ~old, ~new & ~old
    assert int(grown.sum()) > 0
    assert float(gradient[grown].min()) >= float(gradient[refused].max())
    assert bool((model[3].weight.detach()[grown] == 0).all())
    assert bool((optimizer.state[model[3].weight]["momentum_buffer"][grown] == 0).all())
    train(model, optimizer, range(4, 20))
    assert {name: int((~mask).sum()) for name, mask in manager.masks().items()} == counts


TOPKAST = (
    "modifiers: [!TopKASTPruningModifier {params: ['0.weight'], forward_sparsity: 0.8, backward_sparsity: 0.5, "
    "start_epoch: 0, end_epoch: 4, update_frequency: 1, active_weight_decay: 0.0}]"
)


def test_topkast_runs_forward_on_one_mask_and_trains_a_larger_one() -> None:
    model = network()
    before = model[0].weight.detach().clone()
    manager = Manager(TOPKAST)
    optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.5), STEPS_PER_EPOCH)
    order = before.abs().flatten().argsort(descending=True, stable=True)
    forward, backward = torch.zeros(288, dtype=torch.bool), torch.zeros(288, dtype=torch.bool)
    forward[order[:58]], backward[order[:144]] = True, True
    assert torch.equal(model[0].weight.detach().flatten(), torch.where(forward, before.flatten(), 0.0))
    optimizer.zero_grad()
    loss_at(model, 0).backward()
    gradient = model[0].weight.grad.flatten().clone()
    optimizer.step()
    whole = before.flatten() - 0.5 * torch.where(backward, gradient, 0.0)
    state = manager.state_dict()["modifiers"]["TopKASTPruningModifier.0"]["state"]
    assert torch.allclose(model[0].weight.detach().flatten(), torch.where(forward, whole, 0.0))
    assert torch.allclose(state["aside"]["0.weight"].flatten(), torch.where(forward, 0.0, whole))
    train(model, optimizer, range(1, 16))
    assert zeros(model[0].weight) == 230


def test_topkast_decays_the_forward_set_and_faster_the_rest_of_the_larger_one() -> None:
    model = network()
    before = model[0].weight.detach().flatten().clone()
    manager = Manager(TOPKAST.replace("active_weight_decay: 0.0", "active_weight_decay: 0.1"))
    optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=1.0), STEPS_PER_EPOCH)
    forward = model[0].weight.detach().flatten() != 0
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    optimizer.step()
    aside = manager.state_dict()["modifiers"]["TopKASTPruningModifier.0"]["state"]["aside"]["0.weight"].flatten()
    assert torch.allclose(model[0].weight.detach().flatten()[forward], before[forward] * 0.9)
    second = before.abs().argsort(descending=True, stable=True)[58:144]
    assert torch.allclose(aside[second], before[second] * (1 - 0.1 / 0.2))


def test_structured_pruning_removes_the_same_filters_from_a_group() -> None:
    model = network()
    text = gmp(
        "params: ['0.weight', '3.weight'], final_sparsity: 0.5, param_groups: [['0.weight', '3.weight']]",
        "StructuredPruningModifier",
    )
    norms = [model[i].weight.detach().abs().flatten(1).mean(dim=1).double() for i in (0, 3)]
    Manager(text).apply(model)
    dead = [(model[i].weight == 0).flatten(1).all(dim=1) for i in (0, 3)]
    assert torch.equal(dead[0], dead[1])
    assert sorted(torch.nonzero(dead[0]).flatten().tolist()) == sorted((norms[0] + norms[1]).argsort()[:4].tolist())


def test_a_transposed_convolution_is_pruned_along_its_own_input_channels() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 3, 2))
    Manager(gmp("mask_type: 2:4, final_sparsity: 0.5")).apply(model)
    groups = model[0].weight.reshape(2, 4, 3, -1)
    assert bool(((groups != 0).sum(dim=1) == 2).all())


def test_pruned_layers_are_identities_until_the_end_and_come_back_as_they_were() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1)), network()[4:])
    layer = model[0][1]
    optimizer = sgd(model)
    recipe = "modifiers: [!LayerPruningModifier {layers: ['0.1'], start_epoch: 1, end_epoch: 2}]"
    Manager(recipe).modify(model, optimizer, 2)
    train(model, optimizer, range(2))
    taken_out = layer.weight.detach().clone()
    assert isinstance(model[0][1], nn.Identity)
    assert "1.weight" not in model[0].state_dict()
    train(model, optimizer, range(2, 4))
    assert model[0][1] is layer
    assert torch.equal(layer.weight.detach(), taken_out)


def test_a_bare_constant_pruning_holds_the_zeros_and_says_what_is_dense() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
    manager = Manager("modifiers: [!ConstantPruningModifier {params: __ALL__}]")
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(5))
    assert bool((model[0].weight[:, ::2] == 0).all())
    assert zeros(model[0].weight) == 144
    assert manager.skipped["ConstantPruningModifier.0"]["3.weight"] == "dense: it has no zeros"
    assert "1.weight" in manager.skipped["ConstantPruningModifier.0"]


def test_pruning_goes_on_around_layers_that_are_taken_out_and_returns_with_them() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), *network()[4:])
    recipe = gmp("params: __ALL_PRUNABLE__, end_epoch: 2").removesuffix("]")
    manager = Manager(recipe + ", !LayerPruningModifier {layers: ['1'], start_epoch: 0.5, end_epoch: 3}]")
    optimizer = manager.modify(model, sgd(model), 2)
    train(model, optimizer, range(5))
    assert isinstance(model[1], nn.Identity)
    assert zeros(model[0].weight) == 230
    assert set(manager.sparsity()) == {"0.weight", "5.weight"}
    train(model, optimizer, range(5, 6))
    assert isinstance(model[1], nn.Conv2d)
    assert bool((model[1].weight.detach()[~manager.masks()["1.weight"]] == 0).all())
    assert zeros(model[1].weight) >= round(576 * 0.05)


def test_names_that_match_nothing_are_allowed_where_params_are_not_strict() -> None:
    model = network()
    Manager(gmp("params: ['0.weight', 'gone.weight'], params_strict: false")).apply(model)
    assert zeros(model[0].weight) == 230
    with pytest.raises(GossamerError, match=r"'gone\.weight' matches none"):
        Manager(gmp("params: ['gone.weight'], params_strict: false")).apply(model)


def test_a_reset_takes_adams_first_moment_and_leaves_the_second() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    Manager(ACDC.format(end=6, wide="false")).modify(model, optimizer, STEPS_PER_EPOCH)
    train(model, optimizer, range(12))
    state = optimizer.state[model[0].weight]
    assert bool((state["exp_avg"] == 0).all())
    assert bool((state["exp_avg_sq"] != 0).any())


def test_movement_does_not_bring_back_what_it_pruned_first() -> None:
    model = network()
    manager = Manager(gmp("init_sparsity: 0.5, final_sparsity: 0.6, end_epoch: 2", "MovementPruningModifier"))
    optimizer = manager.modify(model, sgd(model), STEPS_PER_EPOCH)
    first = ~manager.masks()["0.weight"]
    train(model, optimizer, range(8))
    assert bool((model[0].weight.detach()[first] == 0).all())
    assert zeros(model[0].weight) == round(288 * 0.6)


def test_a_frozen_layer_is_ranked_by_magnitude_and_that_is_said() -> None:
    model = network()
    model[3].requires_grad_(False)
    text = gmp("params: ['0.weight', '3.weight'], init_sparsity: 0.0, end_epoch: 1", "MovementPruningModifier")
    manager = Manager(text)
    optimizer = manager.modify(model, sgd(model), 2)
    weight = model[3].weight.detach().clone()
    train(model, optimizer, range(2))
    assert float(weight[model[3].weight == 0].abs().max()) <= float(weight[model[3].weight != 0].abs().min())
    assert manager.skipped["MovementPruningModifier.0"] == {"3.weight": "no gradient was seen: ranked by magnitude"}
    again = network()
    again[3].requires_grad_(False)
    wide = Manager(text.replace("end_epoch: 1", "end_epoch: 1, global_sparsity: true"))
    optimizer = wide.modify(again, sgd(again), 2)
    with pytest.raises(GossamerError, match=r"'3\.weight' has no gradient and cannot be ranked"):
        train(again, optimizer, range(2))


def test_phases_of_acdc_change_at_its_update_steps_whatever_their_rounding() -> None:
    model = network()
    recipe = (
        "modifiers: [!ACDCPruningModifier {params: ['0.weight'], compression_sparsity: 0.5, "
        "start_epoch: -1, end_epoch: 1.5, update_frequency: 0.25}]"
    )
    manager = Manager(recipe)
    optimizer = manager.modify(model, sgd(model), 10)
    sparse: list[bool] = [bool(manager.masks())]
    train(model, optimizer, range(15), after=lambda _: sparse.append(bool(manager.masks())))
    changes = [step for step in range(1, 16) if sparse[step] != sparse[step - 1]]
    assert not sparse[0]
    assert changes == [2, 5, 8, 10, 12]


def test_groups_that_overlap_are_refused() -> None:
    text = gmp(
        "params: ['0.weight', '3.weight'], final_sparsity: 0.5, param_groups: [['0.weight'], ['0.weight', '3.weight']]",
        "StructuredPruningModifier",
    )
    with pytest.raises(GossamerError, match=r"'0\.weight' is in two groups; merge them"):
        Manager(text).apply(network())


def test_layers_inside_layers_are_taken_out_once() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Identity())), network())
    Manager("modifiers: [!LayerPruningModifier {layers: ['re:0.*']}]").modify(model, sgd(model), 2)
    assert isinstance(model[0], nn.Identity)
