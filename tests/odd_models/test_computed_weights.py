"""Layers that compute their weight: what is pruned is the tensor whose zeros the weight has, and NaN never comes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from gossamer import Manager
from gossamer.analysis.model_table import model_table
from gossamer.asp import ASP
from gossamer.errors import GossamerError
from gossamer.export import save, semi_structured, thin
from gossamer.export.load import load
from gossamer.model import left_dense, prunable
from gossamer.model.counting import macs
from tests.odd_models.architectures import built, mlp, rows
from tests.odd_models.front_ends import computed_weight, optimizer_of, step

COMPUTED = {
    "spectral_norm": "0.parametrizations.weight.original",
    "spectral_norm_by_hook": "0.weight_orig",
    "weight_norm": "0.parametrizations.weight.original1",
    "weight_norm_by_hook": "0.weight_v",
    "weight_norm_as_one": "0.parametrizations.weight.original1",
    "pruned_by_torch": "0.weight_orig",
}


def magnitude(params: Any, sparsity: float = 0.5, more: str = "") -> Manager:
    fields = f"params: {params}, init_sparsity: 0.1, final_sparsity: {sparsity}, start_epoch: 0, end_epoch: 2"
    return Manager(f"modifiers: [!GMPruningModifier {{{fields}, update_frequency: 1{more}}}]")


def trained(manager: Manager, model: nn.Module, example: Any, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    manager.modify(model, optimizer, steps_per_epoch=1, example_inputs=example)
    for _ in range(steps):
        step(model, optimizer, example)
    return optimizer


@pytest.mark.parametrize("name", COMPUTED)
def test_the_stored_tensor_is_pruned_and_the_weight_has_its_zeros(name: str) -> None:
    model, example = built(name)
    assert COMPUTED[name] in prunable(model)
    manager = magnitude("__ALL_PRUNABLE__")
    trained(manager, model, example)
    assert manager.sparsity()[COMPUTED[name]] == 0.5
    assert int((computed_weight(model, COMPUTED[name]) == 0).sum()) == 512
    by_norm = 32 * 32 if name.startswith("spectral") else 0  # each forward pass multiplies by the weight once for it
    assert macs(model, example)[COMPUTED[name]] == 8 * 32 * 32 + by_norm
    manager.finalize()


@pytest.mark.parametrize("name", COMPUTED)
def test_a_run_goes_on_to_the_bit_from_its_state(name: str) -> None:
    whole, example = built(name)
    manager = magnitude("__ALL_PRUNABLE__")
    optimizer = trained(manager, whole, example, steps=1)
    weights = {key: value.clone() for key, value in whole.state_dict().items()}
    saved = weights, manager.state_dict(), optimizer.state_dict()
    other, _ = built(name)
    other.load_state_dict(saved[0])
    second, later = magnitude("__ALL_PRUNABLE__"), optimizer_of(other)
    later.load_state_dict(torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, saved[2]))
    second.load_state_dict(saved[1])
    second.modify(other, later, steps_per_epoch=1)
    for _ in range(2):
        step(whole, optimizer, example)
        step(other, later, example)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    manager.finalize()
    second.finalize()


@pytest.mark.parametrize("params", ["__ALL__", "['re:.*weight.*']"])
@pytest.mark.parametrize(
    ("name", "magnitudes"),
    [("weight_norm", "0.parametrizations.weight.original0"), ("weight_norm_by_hook", "0.weight_g")],
)
def test_the_magnitudes_of_weight_norm_are_left_alone(params: str, name: str, magnitudes: str) -> None:
    model, example = built(name)
    manager = magnitude(params, 0.9)
    trained(manager, model, example)
    assert magnitudes not in manager.masks()
    assert manager.skipped["GMPruningModifier.0"][magnitudes].startswith("the magnitudes of weight norm")
    assert bool(computed_weight(model, COMPUTED[name]).any(1).all())
    manager.finalize()


def test_every_row_under_weight_norm_keeps_a_weight_and_the_count_is_exact() -> None:
    model, example = built("weight_norm")
    with torch.no_grad():
        model[0].parametrizations.weight.original1[:4] *= 1e-6
    manager = magnitude("['0.weight']", 0.95)
    trained(manager, model, example)
    keep = manager.masks()[COMPUTED["weight_norm"]]
    assert int((~keep).sum()) == round(1024 * 0.95)
    assert bool(keep.any(1).all())
    manager.finalize()


def test_a_sparsity_that_would_empty_a_row_leaves_the_layer_dense_with_the_bound() -> None:
    model, example = built("weight_norm")
    manager = magnitude("__ALL_PRUNABLE__", 0.98)
    trained(manager, model, example)
    reason = manager.skipped["GMPruningModifier.0"][COMPUTED["weight_norm"]]
    assert reason.startswith("weight norm needs a weight in each of 32 rows, so at most 96.9% can be zero")
    manager.finalize()
    with pytest.raises(GossamerError, match="original1' cannot be pruned: weight norm needs"):
        trained(magnitude("['0.weight']", 0.98), built("weight_norm")[0], example)


def test_one_threshold_that_would_empty_a_row_is_refused_before_anything_changes() -> None:
    model, example = built("weight_norm")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fields = "init_sparsity: 0.995, final_sparsity: 0.995, global_sparsity: true"
    manager = Manager(
        f"modifiers: [!GMPruningModifier {{params: __ALL_PRUNABLE__, {fields}, start_epoch: 0, end_epoch: 1, "
        "update_frequency: 1}]"
    )
    with pytest.raises(GossamerError, match=r"the layer divides by a norm, and the mask leaves\s+nothing of a row"):
        trained(manager, model, example)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_rigl_leaves_weight_norm_alone_because_it_may_empty_a_row() -> None:
    model, example = built("weight_norm")
    fields = "params: __ALL_PRUNABLE__, final_sparsity: 0.5, start_epoch: 0, end_epoch: 2, update_frequency: 1"
    manager = Manager(f"modifiers: [!RigLPruningModifier {{{fields}}}]")
    trained(manager, model, example)
    assert COMPUTED["weight_norm"] in manager.skipped["RigLPruningModifier.0"]
    manager.finalize()


def test_the_zeros_of_torchs_own_pruning_count_and_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, example = built("pruned_by_torch")
    zero = model[0].weight_mask == 0
    before = model(example).detach()
    manager = magnitude("['0.weight']", 0.5)
    with caplog.at_level(logging.INFO, "gossamer"):
        trained(manager, model, example, steps=0)
    assert "'0.weight_orig' has 256 zeros of torch.nn.utils.prune, which stay zero" in caplog.text
    assert manager.sparsity()["0.weight_orig"] == 0.25
    torch.testing.assert_close(model(example).detach(), before)
    optimizer = manager._attached().optimizer
    assert optimizer is not None
    for _ in range(3):
        step(model, optimizer, example)
    assert manager.sparsity()["0.weight_orig"] == 0.5
    assert not manager.masks()["0.weight_orig"][zero].any()
    manager.finalize()
    prune.remove(model[0], "weight")
    assert int((model[0].weight == 0).sum()) == 512


def test_analysis_counts_the_zeros_that_torch_masks() -> None:
    model, _ = built("pruned_by_torch")
    row = model_table(model).rows[0]
    assert (row.weight, row.layer.name, row.layer.current_sparsity) == ("0.weight_orig", "0", 0.25)


def test_filters_that_torch_masks_are_thinned_after_remove() -> None:
    model = mlp()
    prune.ln_structured(model[0], "weight", 0.5, 2, 0)
    smaller, found = thin(model, rows())
    assert not found.removed
    torch.testing.assert_close(smaller(rows()), model.eval()(rows()))
    prune.remove(model[0], "weight")
    with torch.no_grad():
        model[0].bias[model[0].weight.abs().sum(1) == 0] = 0
    assert thin(model, rows())[1].removed


def test_a_parametrization_that_does_not_keep_zeros_is_reported_and_refused_by_name() -> None:
    model, example = built("own_parametrization")
    assert left_dense(model) == {
        "0.parametrizations.weight.original": "it is computed by the parametrization Symmetric, which need not keep "
        "zeros where they are; call torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') first"
    }
    with pytest.raises(GossamerError, match=r"'0.weight' cannot be pruned: it is computed by the parametrization"):
        trained(magnitude("['0.weight']"), model, example)
    parametrize.remove_parametrizations(model[0], "weight")
    manager = magnitude("['0.weight']")
    trained(manager, model, example)
    assert manager.sparsity() == {"0.weight": 0.5}
    manager.finalize()


def test_asp_masks_of_the_users_own_may_not_empty_a_row_under_weight_norm() -> None:
    model, _ = built("weight_norm")

    def first_rows_only(weight: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(weight)).lt(4).unsqueeze(1).expand_as(weight)

    ASP.init_model_for_pruning(model, first_rows_only, verbosity=0)
    with pytest.raises(GossamerError, match="removes a whole row that the layer divides by its norm"):
        ASP.compute_sparse_masks(model)
    ASP.forget(model)


@pytest.mark.parametrize("name", ["spectral_norm", "spectral_norm_by_hook", "weight_norm", "weight_norm_by_hook"])
def test_a_2_4_file_of_computed_weights_comes_back_to_the_bit(name: str, tmp_path: Any) -> None:
    model, example = built(name)
    optimizer = optimizer_of(model)
    ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=False)
    ASP.init_optimizer_for_pruning(optimizer, model=model)
    ASP.compute_sparse_masks(model)
    step(model, optimizer, example)
    written = save(model, tmp_path / "model.safetensors", "sparse24")
    assert (written.zeros * 2, written.notes) == (written.weights, ())
    other, _ = built(name)
    load(tmp_path / "model.safetensors", other)
    assert torch.equal(other.eval()(example), model.eval()(example))
    ASP.forget(model)


@pytest.mark.parametrize("name", ["spectral_norm", "spectral_norm_by_hook"])
def test_the_bias_of_a_removed_filter_is_zero_with_it_under_spectral_norm(name: str) -> None:
    model, example = built(name)
    manager = magnitude("['0.weight']", 0.5, more=", mask_type: filter")
    trained(manager, model, example)
    dead = ~manager.masks()[COMPUTED[name]].any(1)
    assert int(dead.sum()) == 16
    assert not model[0].bias[dead].any()
    assert not model[0](example)[:, dead].any()
    manager.finalize()


def test_layers_are_named_without_their_parametrizations() -> None:
    model, _ = built("weight_norm")
    manager = Manager("modifiers: [!LayerPruningModifier {layers: __ALL_PRUNABLE__, start_epoch: 5}]")
    manager.modify(model, optimizer_of(model), steps_per_epoch=1)
    assert list(manager._attached().modifiers[0].bound_names) == ["0", "2", "4"]
    manager.finalize(warn=False)
    reasons = {layer.name: layer.reason for layer in semi_structured(model, dry_run=True)}
    assert reasons[COMPUTED["weight_norm"]] == (
        "its layer computes the weight from it; remove the norm, mask or parametrization first"
    )


def test_to_look_at_a_model_leaves_the_vectors_of_spectral_norm_as_they_are() -> None:
    model, example = built("spectral_norm")
    before = {name: tensor.clone() for name, tensor in model.train().state_dict().items()}
    left_dense(model)
    model_table(model, example)
    manager = magnitude("__ALL_PRUNABLE__")
    manager.modify(model, optimizer_of(model), steps_per_epoch=1)
    manager.sparsity()
    manager.finalize(warn=False)
    for name, tensor in model.state_dict().items():
        assert name in prunable(model) or torch.equal(tensor, before[name]), name


def test_a_state_whose_mask_empties_a_row_under_weight_norm_is_refused() -> None:
    model, _ = built("weight_norm")
    manager = Manager(
        "modifiers: [!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.5, "
        "start_epoch: 0, end_epoch: 1, update_frequency: 1}]"
    )
    _optimizer = manager.modify(model, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_epoch=1)
    state, before = manager.state_dict(), manager.masks()[COMPUTED["weight_norm"]].clone()
    saved = state["modifiers"]["GMPruningModifier.0"]["masks"][COMPUTED["weight_norm"]]
    saved["__bits__"]["bits"] = torch.zeros_like(saved["__bits__"]["bits"])
    with pytest.raises(GossamerError, match="keeps a weight in each row"):
        manager.load_state_dict(state)
    assert torch.equal(manager.masks()[COMPUTED["weight_norm"]], before)
