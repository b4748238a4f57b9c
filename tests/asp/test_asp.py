"""Two lines of ASP: what each call of the original does here."""

from __future__ import annotations

import gc
import io
import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gossamer import Manager
from gossamer.asp import ASP, create_mask, set_identical_seed
from gossamer.errors import GossamerError
from gossamer.model import get_parameter
from gossamer.sparse import NM, NM2d

BATCH = 16


def network(seed: int = 0, hidden: int = 32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 16),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, width: int = 16) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(BATCH, width, generator=generator) for _ in range(2))
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Models of earlier tests are gone, so that `last initialised` means this test's."""
    gc.collect()
    yield
    gc.collect()


def two_of_four(model: nn.Module, *names: str) -> bool:
    return all(NM(2, 4).violations(get_parameter(model, name).detach()) == 0 for name in names)


def test_two_lines_make_a_trained_model_two_of_four_and_keep_it_so_through_adam() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer, 5)
    ASP.prune_trained_model(model, optimizer)
    zeros = {name: get_parameter(model, name) == 0 for name in ("0.weight", "2.weight", "5.weight")}
    assert all(int(where.sum()) == where.numel() // 2 for where in zeros.values())
    train(model, optimizer, 20, first=5)
    for name, where in zeros.items():
        weight = get_parameter(model, name).detach()
        assert torch.equal(weight == 0, where)
        assert not torch.signbit(weight[where]).any()
    assert two_of_four(model, *zeros)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_the_search_on_a_terminal_and_nothing_elsewhere(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(sys, "stderr", stream := Stream())
    monkeypatch.setenv("TERM", "xterm")
    model = network()
    ASP.prune_trained_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ("permuting channels" in stream.getvalue()) is terminal
    assert capsys.readouterr().out == ""


def test_permutation_alone_changes_nothing_that_the_model_computes() -> None:
    model = network(hidden=64).double()
    x = torch.randn(4, 16, dtype=torch.double)
    before, weight = model(x), model[2].weight.clone()
    report = ASP.permute_model(model)
    assert not torch.equal(model[2].weight, weight)
    assert torch.allclose(model(x), before, atol=1e-12, rtol=0)
    gains = {layer.name: layer.kept - layer.kept_before for layer in report.layers}
    assert gains["2.weight"] > 0.005
    assert ASP.already_init_asp_model(model) is False


def test_permutation_takes_the_optimizers_moments_along() -> None:
    runs: list[torch.Tensor] = []
    for permute in (False, True):
        model = network(hidden=64).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(model.float(), optimizer, 3)
        model.double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _train_double(model, optimizer, 3)
        if permute:
            ASP.permute_model(model, optimizer=optimizer)
        _train_double(model, optimizer, 3)
        runs.append(model(torch.ones(2, 16, dtype=torch.double)))
    assert torch.allclose(runs[0], runs[1], atol=1e-10, rtol=0)


def _train_double(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 16, dtype=torch.double, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_are_masked_before_the_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ASP.prune_trained_model(model, optimizer)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    gradient = model[2].weight.grad
    assert gradient is not None
    assert bool((gradient[model[2].weight == 0] == 0).all())


def test_a_closure_has_its_gradients_masked_at_each_call() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    ASP.prune_trained_model(model, optimizer)
    x = torch.randn(8, 16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert two_of_four(model, "0.weight", "2.weight", "5.weight")


def test_restoring_brings_back_the_very_values_that_were_pruned() -> None:
    model = network()
    ASP.init_model_for_pruning(model, allow_recompute_mask=True, allow_permutation=False, verbosity=0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    ASP.compute_sparse_masks()
    ASP.restore_pruned_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_second_computation_without_recomputation_is_refused_and_changes_nothing() -> None:
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.compute_sparse_masks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(GossamerError, match="allow_recompute_mask=True"):
        ASP.compute_sparse_masks()
    with pytest.raises(GossamerError, match="allow_recompute_mask=True"):
        ASP.restore_pruned_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("order", ["load first", "hook first"])
def test_resuming_as_the_original_does_equals_the_uninterrupted_run(order: str) -> None:
    """Init, load the checkpoint, init the optimizer; its own test hooks the optimizer first. Both continue."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    train(model, optimizer, 5)
    checkpoint = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": {**optimizer.state_dict()},
    }
    import copy

    checkpoint = copy.deepcopy(checkpoint)
    train(model, optimizer, 5, first=5)

    resumed = network(seed=1)
    again = torch.optim.Adam(resumed.parameters(), lr=0.01)
    ASP.init_model_for_pruning(resumed, "m4n2_1d", verbosity=0, whitelist=[nn.Linear, nn.Conv2d])
    if order == "hook first":
        ASP.init_optimizer_for_pruning(again)
    resumed.load_state_dict(checkpoint["model"])
    assert ASP.is_sparsity_enabled()
    if order == "load first":
        ASP.init_optimizer_for_pruning(again)
    again.load_state_dict(checkpoint["optimizer"])
    train(resumed, again, 5, first=5)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_buffers_have_the_names_that_checkpoints_of_the_original_have() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(16, 16), "attention": nn.MultiheadAttention(32, 4)})
    ASP.init_model_for_pruning(model, allow_recompute_mask=True, verbosity=0)
    added = {name for name in model.state_dict() if "mma" in name}
    assert {"fc.__weight_mma_mask", "fc.__weight_mma_pruned_p", "attention.__in_proj_weight_mma_mask"} <= added
    assert model.state_dict()["fc.__weight_mma_mask"].dtype == torch.bool


def test_a_model_that_was_saved_whole_keeps_its_masks() -> None:
    model = network()
    ASP.prune_trained_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    import copy

    loaded = copy.deepcopy(model)
    ASP.init_model_for_pruning(loaded, verbosity=0)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    ASP.init_optimizer_for_pruning(optimizer)
    train(loaded, optimizer, 3)
    assert two_of_four(loaded, "0.weight", "2.weight", "5.weight")


def test_two_models_at_once_do_not_disturb_each_other() -> None:
    first, second = network(seed=0), network(seed=1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    ASP.init_model_for_pruning(first, verbosity=0)
    ASP.init_model_for_pruning(second, verbosity=0)
    for optimizer in optimizers:
        ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled(second)
    assert not ASP.is_sparsity_enabled(first)
    train(first, optimizers[0], 2)
    assert bool((first[2].weight != 0).all())
    ASP.compute_sparse_masks(first)
    train(first, optimizers[0], 2)
    train(second, optimizers[1], 2)
    assert two_of_four(first, "2.weight")
    assert two_of_four(second, "2.weight")


def test_a_model_that_is_gone_leaves_nothing_behind() -> None:
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0)
    assert ASP.already_init_asp_model() is True
    del model
    gc.collect()
    assert ASP.already_init_asp_model() is False
    assert ASP.is_sparsity_enabled() is False
    with pytest.raises(GossamerError, match="init_model_for_pruning"):
        ASP.compute_sparse_masks()


def test_a_notebook_cell_can_be_run_twice() -> None:
    model = network()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ASP.prune_trained_model(model, optimizer)
        train(model, optimizer, 2)
    assert two_of_four(model, "0.weight", "2.weight", "5.weight")


def test_an_exception_half_way_leaves_the_model_as_it_was() -> None:
    model = network(hidden=64)
    calls: list[int] = []

    def failing(weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no mask today")
        return NM(2, 4).keep_largest(weight)

    ASP.init_model_for_pruning(model, failing, verbosity=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="no mask today"):
        ASP.compute_sparse_masks()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ASP.compute_sparse_masks()
    assert two_of_four(model, "2.weight")


def test_a_failure_after_the_permutation_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(hidden=64)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state[model[2].weight]["exp_avg"].clone()

    def broken(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NM, "keep_largest", broken)
        with pytest.raises(KeyboardInterrupt):
            ASP.compute_sparse_masks()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(optimizer.state[model[2].weight]["exp_avg"], moments)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(lambda w: torch.ones(3), r"shape \(3,\)"), (lambda w: "all", "str"), (lambda w: w[:, :4] != 0, "shape")],
)
def test_a_mask_of_the_wrong_shape_is_refused_by_the_layers_name(wrong: object, found: str) -> None:
    model = network()
    ASP.init_model_for_pruning(model, wrong, verbosity=0)  # type: ignore[arg-type]
    with pytest.raises(
        GossamerError, match=rf"mask_calculator: expected a mask of shape \(32, 16\) for '0.weight'.*{found}"
    ):
        ASP.compute_sparse_masks()
    assert not ASP.is_sparsity_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_pruned_alike(dtype: torch.dtype) -> None:
    model = network(hidden=64).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ASP.prune_trained_model(model, optimizer)
    model(torch.ones(2, 16, dtype=dtype)).float().sum().backward()
    optimizer.step()
    assert two_of_four(model, "0.weight", "2.weight", "5.weight")


def test_channels_last_convolutions_are_pruned_along_input_channels() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ASP.prune_trained_model(model, optimizer)
    model(torch.randn(1, 16, 8, 8)).sum().backward()
    optimizer.step()
    assert two_of_four(model, "0.weight", "2.weight")


def test_a_model_that_cannot_be_followed_is_pruned_without_permutation_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            return self.b(hidden if hidden.sum() > 0 else -hidden)

    model = Undecided()
    with caplog.at_level(logging.WARNING, "gossamer.asp"):
        ASP.prune_trained_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "channels are not permuted" in caplog.text
    assert two_of_four(model, "a.weight", "b.weight")


def test_layers_that_hardware_cannot_run_are_left_dense_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 12, 3), nn.Conv2d(12, 16, 3), nn.Conv2d(16, 16, 1))
    model[3].weight.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "gossamer.asp"):
        ASP.init_model_for_pruning(model)
    reasons = ASP.layers()
    assert reasons["0.weight"] == "3 input channels do not divide by 16"
    assert reasons["1.weight"] == "12 output channels do not divide by 8"
    assert reasons["3.weight"] == "it is frozen"
    assert "4 of 4 layers stay dense" in caplog.text
    with pytest.raises(GossamerError, match="no layer can be pruned"):
        ASP.compute_sparse_masks()


def test_subclasses_count_as_their_type_and_custom_layers_are_named() -> None:
    class Mine(nn.Linear):
        pass

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(16, 32))
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.matrix.t()) * self.scale

    model = nn.Sequential(Mine(16, 32), nn.ReLU(), Own())
    ASP.init_model_for_pruning(model, custom_layer_dict={Own: ["matrix", "scale"]}, verbosity=0)
    ASP.compute_sparse_masks()
    assert two_of_four(model, "0.weight", "2.matrix")
    assert ASP.layers()["2.scale"] == "it has fewer than two dimensions"
    with pytest.raises(GossamerError, match="custom_layer_dict"):
        ASP.init_model_for_pruning(model, whitelist=[Own])


def test_layers_are_chosen_by_name_and_a_wrong_name_is_told() -> None:
    model = network()
    ASP.init_model_for_pruning(model, allowed_layer_names=["0", "2"], disallowed_layer_names=["0"], verbosity=0)
    assert list(ASP.layers()) == ["2.weight"]
    with pytest.raises(GossamerError, match="allowed_layer_names: the model has no layer 'fc9'"):
        ASP.init_model_for_pruning(model, allowed_layer_names=["fc9"])


@pytest.mark.parametrize("pattern", ["m4n2_2d_best", "m4n2_2d_greedy"])
def test_two_dimensional_patterns_hold_for_the_transposed_weight_too(pattern: str) -> None:
    model = network()
    ASP.init_model_for_pruning(model, pattern, verbosity=0)
    ASP.compute_sparse_masks()
    weight = model[2].weight.detach()
    assert NM2d(2, 4).violations(weight) == 0
    assert NM(2, 4).violations(weight.t()) == 0


@pytest.mark.parametrize("wrong", ["m4n5_1d", "unstructured", "m4n2_3d", 7])
def test_a_pattern_that_is_none_is_told(wrong: object) -> None:
    with pytest.raises(GossamerError, match="mask_calculator"):
        ASP.init_model_for_pruning(network(), wrong)  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_told() -> None:
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0)
    with pytest.raises(GossamerError, match="holds no parameter of a model that was initialised"):
        ASP.init_optimizer_for_pruning(torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(GossamerError, match=r"expected a torch\.optim\.Optimizer"):
        ASP.init_optimizer_for_pruning("adam")  # type: ignore[arg-type]


def test_nan_in_a_weight_is_told_by_name_and_nothing_is_pruned() -> None:
    model = network()
    with torch.no_grad():
        model[5].weight[0, 0] = float("nan")
    ASP.init_model_for_pruning(model, verbosity=0)
    with pytest.raises(GossamerError, match=r"'5\.weight' cannot be pruned.*NaN"):
        ASP.compute_sparse_masks()
    assert bool((model[0].weight != 0).all())


def test_the_calls_can_be_written_as_a_recipe_that_comes_to_the_same_weights() -> None:
    by_asp, by_recipe = network(hidden=64), network(hidden=64)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (by_asp, by_recipe)]
    ASP.prune_trained_model(by_asp, optimizers[0])
    manager = Manager(ASP.recipe().text)
    manager.modify(by_recipe, optimizers[1], steps_per_epoch=10)
    train(by_asp, optimizers[0], 5)
    train(by_recipe, optimizers[1], 5)
    for name, value in by_recipe.named_parameters():
        assert torch.equal(value, get_parameter(by_asp, name)), name


def test_the_graph_is_written_as_json_and_a_picture(tmp_path) -> None:
    model = network(hidden=64)
    ASP.set_permutation_saving_params(True, True, tmp_path / "graphs")
    try:
        ASP.init_model_for_pruning(model, verbosity=0)
        ASP.compute_sparse_masks()
    finally:
        ASP.set_permutation_saving_params(True, False)
    import json

    graph = json.loads((tmp_path / "graphs" / "model_offline_permutation_graph.json").read_text())
    assert any("2.weight" in group["searched_on"] and "0.weight" in group["moved_along"] for group in graph["groups"])
    assert (tmp_path / "graphs" / "model_offline_permutation_graph.png").stat().st_size > 1000


def test_set_identical_seed_exists_and_is_not_needed() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    set_identical_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_initialising_again_keeps_the_masks_and_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    zeros = model[2].weight == 0
    ASP.init_model_for_pruning(model, verbosity=0)
    assert ASP.is_sparsity_enabled(model) is True
    train(model, optimizer, 3)
    assert torch.equal(model[2].weight == 0, zeros)


def test_initialising_again_with_fewer_layers_lets_the_others_go_dense() -> None:
    model = network()
    ASP.init_model_for_pruning(model, allow_recompute_mask=True, allow_permutation=False, verbosity=0)
    dense = model[5].weight.detach().clone()
    ASP.compute_sparse_masks()
    ASP.init_model_for_pruning(model, allow_recompute_mask=True, disallowed_layer_names=["5"], verbosity=0)
    assert torch.equal(model[5].weight, dense)
    assert two_of_four(model, "2.weight")
    assert {name for name in model.state_dict() if "mma" in name and name.startswith("5")} == set()


def test_a_mistake_in_a_second_initialisation_changes_nothing() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ASP.prune_trained_model(model, optimizer)
    with pytest.raises(GossamerError, match="disallowed_layer_names"):
        ASP.init_model_for_pruning(model, disallowed_layer_names=["nine"])
    train(model, optimizer, 3)
    assert two_of_four(model, "0.weight", "2.weight", "5.weight")


def test_permuting_a_pruned_model_takes_its_masks_along() -> None:
    model = network(hidden=64).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ASP.init_model_for_pruning(model, allowed_layer_names=["0"], allow_permutation=False, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    x = torch.randn(4, 16, dtype=torch.double)
    before = model(x)
    found = ASP.permute_model(model)
    assert "0.weight" in found.moves
    model(x).sum().backward()
    optimizer.step()
    assert float((model[0].weight == 0).double().mean()) == 0.5
    assert torch.allclose(model(x), before, atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_a_pruned_model_goes_on_to_quantization_with_its_zeros_held() -> None:
    """Preparing for quantization-aware training replaces the layers; masks and zeros stay."""

    class Observed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zero, scale = torch.zeros((), dtype=torch.int32), self.weight.detach().abs().max() / 127
            rounded = torch.fake_quantize_per_tensor_affine(self.weight, scale, zero, -128, 127)
            return nn.functional.linear(x, rounded, self.bias)

    model = network()
    ASP.prune_trained_model(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zeros = model[2].weight == 0
    for index in (0, 2, 5):
        replaced = Observed(model[index].in_features, model[index].out_features)
        replaced.weight, replaced.bias = model[index].weight, model[index].bias
        model[index] = replaced
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ASP.init_optimizer_for_pruning(optimizer)
    train(model, optimizer, 5)
    assert torch.equal(model[2].weight == 0, zeros)
    assert "2.__weight_mma_mask" in model.state_dict()


def test_weights_that_are_stored_transposed_are_pruned_along_input_channels() -> None:
    class Conv1D(nn.Module):
        """As in Transformers: the weight is (in, out)."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model = nn.Sequential(Conv1D())
    ASP.init_model_for_pruning(model, custom_layer_dict={Conv1D: ["weight"]}, verbosity=0)
    ASP.compute_sparse_masks()
    assert NM(2, 4).violations(model[0].weight.detach().t()) == 0


def test_the_mask_of_a_tied_weight_lies_in_the_layer_that_was_chosen() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 32), "head": nn.Linear(32, 16, bias=False)})
    model["head"].weight = model["embedding"].weight
    ASP.init_model_for_pruning(model, verbosity=0)
    assert not [name for name in model.state_dict() if "mma" in name]
    ASP.init_model_for_pruning(model, verbosity=0, allowed_layer_names=["head"])
    assert [name for name in model.state_dict() if "mma" in name] == ["head.__weight_mma_mask"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"whitelist": nn.Linear}, "whitelist: expected a list of layer types"),
        ({"whitelist": ["Linear"]}, "whitelist: expected types of layers, such as nn.Linear, found 'Linear'"),
        ({"allowed_layer_names": "02"}, "allowed_layer_names: expected a list of layer names, found '02'"),
        ({"custom_layer_dict": {nn.LayerNorm: ["wieght"]}}, "LayerNorm has no parameter 'wieght'; nearest: 'weight'"),
        ({"custom_layer_dict": {nn.LayerNorm: "weight"}}, "LayerNorm: expected a list of parameter names"),
        ({"verbosity": "high"}, "verbosity: expected a number from 0 to 3, found str"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told_in_one_sentence(arguments: dict, sentence: str) -> None:
    with pytest.raises(GossamerError, match=sentence):
        ASP.init_model_for_pruning(network(), **arguments)


def test_names_of_weights_serve_as_names_of_layers() -> None:
    model = network()
    ASP.init_model_for_pruning(model, allowed_layer_names=["2.weight", "module.5"], verbosity=0)
    assert list(ASP.layers()) == ["2.weight", "5.weight"]


def test_scores_instead_of_a_mask_are_refused() -> None:
    model = network()
    ASP.init_model_for_pruning(model, lambda weight: weight.abs(), verbosity=0)
    with pytest.raises(GossamerError, match=r"expected a mask of zeros and ones for '0\.weight'"):
        ASP.compute_sparse_masks()


def test_a_folder_that_cannot_be_made_fails_before_anything_is_changed(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    model = network()
    ASP.set_permutation_saving_params(True, True, tmp_path / "file" / "graphs")
    try:
        ASP.init_model_for_pruning(model, verbosity=0)
        with pytest.raises(GossamerError, match="the folder for the graph cannot be created"):
            ASP.compute_sparse_masks()
    finally:
        ASP.set_permutation_saving_params(True)
    assert not ASP.is_sparsity_enabled(model)


def test_saving_parameters_never_allow_what_was_forbidden() -> None:
    model = network(hidden=64)
    ASP.init_model_for_pruning(model, allow_permutation=False, verbosity=0)
    ASP.set_permutation_saving_params(True)
    ASP.compute_sparse_masks()
    assert ASP.permutation() is None


def test_masks_are_made_of_single_tensors_too() -> None:
    weight = torch.tensor([[1.0, -4.0, 2.0, -3.0]])
    assert create_mask(weight).tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert create_mask(weight[0], "m4n1_1d").tolist() == [0.0, 1.0, 0.0, 0.0]


def test_a_child_that_outlives_its_model_trains_on() -> None:
    model = network()
    child = model[2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ASP.prune_trained_model(model, optimizer)
    del model
    gc.collect()
    child(torch.randn(2, 32)).sum().backward()
    optimizer.step()


def test_masks_of_a_tied_weight_are_permuted_with_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.middle, self.head = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.middle(self.embedding(x))))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ASP.init_model_for_pruning(model, allowed_layer_names=["head"], allow_permutation=False, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    tokens = torch.arange(16)
    before = model(tokens)
    found = ASP.permute_model(model)
    assert "embedding.weight" in found.moves
    model(tokens).sum().backward()
    optimizer.step()
    assert torch.allclose(model(tokens), before, atol=1e-5)


def test_an_optimizer_with_moments_that_comes_after_a_permutation_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network(hidden=64)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    ASP.init_model_for_pruning(model, verbosity=1)
    ASP.compute_sparse_masks()
    with caplog.at_level(logging.WARNING, "gossamer.asp"):
        ASP.init_optimizer_for_pruning(optimizer)
    assert "call init_optimizer_for_pruning before compute_sparse_masks" in caplog.text


def test_an_optimizer_that_was_known_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = network(hidden=64)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    ASP.prune_trained_model(model, optimizer)
    train(model, optimizer, 2)
    with caplog.at_level(logging.WARNING, "gossamer.asp"):
        ASP.init_optimizer_for_pruning(optimizer)
        ASP.init_model_for_pruning(model, verbosity=1)
    assert "old order" not in caplog.text
