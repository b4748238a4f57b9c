"""Whole filters and channels: those that belong together go together, and take along what belongs to them."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from gossamer import Manager
from gossamer.export import thin
from gossamer.msbench import build_sparse_scheduler
from tests.msbench.configs import levels

INPUT = torch.zeros(2, 3, 8, 8)
SPAN = "init_sparsity: 0.25, start_epoch: 0, end_epoch: 1, update_frequency: 0.5"
HALF = f"final_sparsity: 0.5, {SPAN}"


def recipe(fields: str, modifier: str = "GMPruningModifier") -> str:
    return f"modifiers: [!{modifier} {{{fields}}}]"


FILTERS = recipe(f"params: __ALL_PRUNABLE__, mask_type: filter, {HALF}")
CHANNELS = recipe(f"params: 're:(?!stem).*weight', mask_type: channel, {HALF}")


class Residual(nn.Module):
    """Two blocks, the second with a convolution in its shortcut; biases in front of batch norm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.a, self.b = self.block(width, width), self.block(width, 2 * width)
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width))
        self.head = nn.Linear(2 * width, 5)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.a(x) + x)
        return self.head(torch.relu(self.b(x) + self.down(x)).mean((2, 3)))


class Inverted(nn.Module):
    """Two convolutions side by side, a depthwise one over both, and a residual around all, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.left, self.right = nn.Conv2d(8, 12, 1), nn.Conv2d(8, 4, 1)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU6())
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        wide = torch.relu(self.norm(torch.cat([self.left(x), self.right(x)], 1)))
        return self.head((x + self.project(self.depthwise(wide))).mean((2, 3)))


def made(kind: type[nn.Module] = Residual, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = kind()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    model.train()
    for step in steps:
        source = torch.Generator().manual_seed(step)
        images, labels = torch.randn(8, 3, 8, 8, generator=source), torch.randint(5, (8,), generator=source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def removed(model: nn.Module, name: str, dim: int = 0) -> list[int]:
    weight = model.get_parameter(name).detach().movedim(dim, 0)
    return (weight == 0).reshape(len(weight), -1).all(1).nonzero().flatten().tolist()


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet18", 3_055_880), ("resnet50", 6_917_640), ("mobilenet_v2", 1_221_768)],  # as Torch-Pruning 1.6.1
)
def test_half_of_the_filters_is_half_of_the_width_of_common_networks(name: str, count: int) -> None:
    torch.manual_seed(0)
    model, image = getattr(torchvision.models, name)(), torch.randn(1, 3, 64, 64)
    Manager(FILTERS).apply(model, example_inputs=image)
    smaller, found = thin(model.eval(), image)
    assert (parameters(smaller), found.kept) == (count, {})


def test_the_built_in_recipe_thins_a_residual_network() -> None:
    model = made()
    Manager("builtin:filters-50").apply(model)
    assert parameters(thin(model.eval(), INPUT)[0]) == parameters(Residual(4))


def test_filters_of_a_residual_are_the_same_in_every_layer_whatever_its_scale() -> None:
    found: list[list[int]] = []
    for scale in (1.0, 1000.0):
        model = made()
        model.stem[0].weight.data *= scale
        Manager(FILTERS).apply(model, example_inputs=INPUT)
        assert removed(model, "stem.0.weight") == removed(model, "a.3.weight")
        assert removed(model, "b.3.weight") == removed(model, "down.0.weight")
        assert len(removed(model, "stem.0.weight")) == 4
        assert len(removed(model, "a.0.weight")) == 4
        found.append(removed(model, "stem.0.weight"))
    assert found[0] == found[1]


def test_layers_that_read_the_same_channels_lose_the_same_ones() -> None:
    model = made()
    Manager(CHANNELS).apply(model, example_inputs=INPUT)
    assert removed(model, "b.0.weight", 1) == removed(model, "down.0.weight", 1)
    assert len(removed(model, "b.0.weight", 1)) == 4
    assert parameters(thin(model.eval(), INPUT)[0]) < 0.5 * parameters(model)


def test_channels_of_the_input_stay_and_layers_that_are_left_alone_are_reported_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = CHANNELS.replace("'re:(?!stem).*weight'", "__ALL_PRUNABLE__")
    model = made()
    Manager(text).apply(model, example_inputs=INPUT)
    assert removed(model, "stem.0.weight", 1) == []
    assert "leaves 'stem.0.weight' alone: it reads the model's input" in caplog.text
    Manager(text.replace("__ALL_PRUNABLE__", "stem.0.weight")).apply(model, example_inputs=INPUT)
    assert len(removed(model, "stem.0.weight", 1)) == 2
    caplog.clear()
    layers = [nn.Conv2d(3, 8, 1), *(nn.Conv2d(8, 8, 3, groups=8) for _ in range(2)), nn.Conv2d(8, 4, 1)]
    Manager(text).apply(nn.Sequential(*layers), example_inputs=INPUT)
    assert "leaves '1.weight', '2.weight' alone: a depthwise convolution" in caplog.text


def test_a_depthwise_convolution_follows_its_producers() -> None:
    model, manager = made(Inverted), Manager(FILTERS)
    optimizer = manager.modify(model, adam(model), 4, example_inputs=INPUT)
    train(model, optimizer, range(5))
    assert set(manager.sparsity().values()) == {0.5}
    left, right = removed(model, "left.weight"), removed(model, "right.weight")
    assert (len(left), len(right)) == (6, 2)
    assert removed(model, "depthwise.0.weight") == left + [12 + row for row in right]
    smaller, found = thin(model.eval(), INPUT)
    assert found.kept == {}
    assert smaller.depthwise[0].out_channels == 8
    assert smaller.stem[0].out_channels == 4


def test_channels_behind_a_flattening_go_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    Manager(recipe(f"params: ['3.weight'], mask_type: channel, {HALF}")).apply(model, example_inputs=INPUT)
    assert thin(model.eval(), INPUT)[0][0].out_channels == 4


def test_weights_with_sparsities_of_their_own_in_the_recipe_are_pruned_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = made()
    final = "final_sparsity: {0.5: [stem.0.weight], 0.75: [a.3.weight]}"
    with caplog.at_level(logging.WARNING, "gossamer"):
        Manager(recipe(f"mask_type: filter, {final}, {SPAN}")).apply(model, example_inputs=INPUT)
    assert "'a.3.weight' produces the same channels and is pruned separately" in caplog.text
    assert [len(removed(model, name)) for name in ("stem.0.weight", "a.3.weight")] == [4, 6]


def test_one_threshold_over_all_layers_counts_a_channel_once() -> None:
    model = made()
    fields = f"params: __ALL_PRUNABLE__, mask_type: filter, {HALF}, global_sparsity: true, max_layer_sparsity: 0.75"
    Manager(recipe(fields)).apply(model, example_inputs=INPUT)
    pools = {"stem.0.weight": 8, "a.0.weight": 8, "b.0.weight": 16, "b.3.weight": 16}
    assert removed(model, "stem.0.weight") == removed(model, "a.3.weight")
    assert sum(len(removed(model, name)) for name in pools) == 24
    assert all(len(removed(model, name)) <= 0.75 * size for name, size in pools.items())


def test_depthwise_filters_do_not_weigh_in_under_one_threshold() -> None:
    found: list[list[int]] = []
    for scale in (1.0, 100.0):
        model = made(Inverted)
        model.depthwise[0].weight.data *= scale
        fields = f"params: __ALL_PRUNABLE__, mask_type: filter, {HALF}, global_sparsity: true"
        Manager(recipe(fields)).apply(model, example_inputs=INPUT)
        assert removed(model, "depthwise.0.weight") == [
            *removed(model, "left.weight"),
            *(12 + row for row in removed(model, "right.weight")),
        ]
        found.append(removed(model, "depthwise.0.weight"))
    assert found[0] == found[1]


def test_levels_give_coupled_layers_the_mean_of_their_shares() -> None:
    model = made()
    fields = "levels: [0.3, 0.5], start_epoch: 0, end_epoch: 2, mask_type: filter, allocation: erk"
    Manager(recipe(fields, "LevelPruningModifier")).apply(model, example_inputs=INPUT)
    assert removed(model, "stem.0.weight") == removed(model, "a.3.weight") != []


def test_filters_under_an_msbench_config_belong_together_too(tmp_path: Path) -> None:
    config = levels("FPGMMaskGenerator", sparsity_table=[25, 50], total_iters=4, save_dir=str(tmp_path))
    scheduler = build_sparse_scheduler(config)
    model = scheduler.prepare_sparse_model(made(), example_inputs=INPUT)
    optimizer = adam(model)
    for step in range(4):
        scheduler.prune_model(model, step)
        train(model, optimizer, range(step, step + 1))
    exported = scheduler.export_sparse_model(model)
    assert scheduler.compute_sparse_rate(exported) == 0.5
    train(exported, optimizer, range(4, 6))
    assert removed(exported, "stem.0.bias") == removed(exported, "a.4.bias") == removed(exported, "stem.0.weight") != []
    assert parameters(thin(exported.eval(), INPUT)[0]) == parameters(Residual(4))


class Features(Residual):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.a(x) + x)
        return x, super().forward(INPUT[: len(x)])


def test_what_the_model_returns_keeps_its_filters() -> None:
    model, manager = made(Features), Manager(FILTERS)
    manager.apply(model, example_inputs=INPUT, finalize=False)
    skipped = manager.skipped["GMPruningModifier.0"]
    assert skipped["a.3.weight"] == (
        "its filters are outputs of the model, or of a part that was traced separately; name it exactly to prune it"
    )
    assert "the last layer" in skipped["head.weight"]
    assert removed(model, "stem.0.weight") == []
    assert len(removed(model, "a.0.weight")) == 4


class Deciding(Residual):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x + other) if float(x.sum()) < 0 else super().forward(x)


def test_a_model_that_cannot_be_followed_is_pruned_layer_by_layer_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = made(Deciding)
    with caplog.at_level(logging.WARNING, "gossamer"):
        Manager(FILTERS).apply(model)
    assert "each layer is pruned on its own: the model could not be traced" in caplog.text
    assert [len(removed(model, name)) for name in ("stem.0.weight", "a.3.weight", "head.weight")] == [4, 4, 0]
    assert removed(model, "stem.0.weight") != removed(model, "a.3.weight")
    assert removed(model, "stem.0.bias") == removed(model, "stem.0.weight")


@pytest.mark.parametrize(
    ("text", "left_out", "sentence"),
    [
        (
            FILTERS,
            "stem.0",
            "pruned channels of 'a.3.weight' cannot be removed from the model: 'stem.0.weight' produces the same",
        ),
        (
            CHANNELS,
            "down.0",
            "pruned channels of 'a.0.weight' cannot be removed from the model: 'down.0.weight' reads the same",
        ),
    ],
)
def test_a_layer_that_keeps_channels_alive_is_named(
    text: str, left_out: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        Manager(text.replace("mask_type", f"exclude: [{left_out}], mask_type")).apply(made(), example_inputs=INPUT)
    assert f"{sentence} channels and is not pruned" in caplog.text


# Along


@pytest.mark.parametrize("training", [True, False])
def test_a_removed_channel_is_zero_at_once_in_both_modes(training: bool) -> None:
    model, seen = made(), dict[str, Tensor]()
    model.stem[0].bias.data.add_(1)
    Manager(FILTERS).apply(model, example_inputs=INPUT)
    for name in ("stem.1", "a.4", "b.4", "down.1"):
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    model.train(training)(torch.randn(4, 3, 8, 8))
    for name, output in seen.items():
        silent = removed(model, f"{name}.weight")
        assert len(silent) == output.shape[1] // 2
        assert not output[:, silent].any()


def test_what_is_held_along_is_in_no_report_but_in_copies() -> None:
    text = FILTERS.removesuffix("]") + ", !TrainableParamsModifier {params: __ALL__, trainable: true}]"
    model, manager = made(), Manager(text)
    average = copy.deepcopy(model)
    manager.modify(model, adam(model), 4, example_inputs=INPUT)
    weights = {f"{name}.weight" for name in ("stem.0", "a.0", "a.3", "b.0", "b.3", "down.0")}
    assert manager.masks().keys() == manager.sparsity().keys() == manager.targets().keys() == weights
    manager.apply_masks(average)
    for name in ("stem.0.bias", "stem.1.weight", "stem.1.bias", "a.4.bias"):
        assert removed(average, name) == removed(model, "stem.0.weight") != []
    assert removed(model, "head.bias") == []


def test_single_zeros_and_channels_hold_nothing_along() -> None:
    for text in (CHANNELS, recipe(f"params: __ALL_PRUNABLE__, final_sparsity: 0.99, {SPAN}")):
        model = made()
        Manager(text).apply(model, example_inputs=INPUT)
        assert not any(bool((p == 0).any()) for p in model.parameters() if p.dim() == 1)


@pytest.mark.parametrize(
    ("fields", "modifier"),
    [
        (f"params: __ALL_PRUNABLE__, mask_type: filter, leave_enabled: false, {HALF}", "GMPruningModifier"),
        (
            "params: __ALL_PRUNABLE__, mask_type: filter, compression_sparsity: 0.5, start_epoch: 0, end_epoch: 2, "
            "update_frequency: 0.5",
            "ACDCPruningModifier",
        ),
    ],
)
def test_what_was_held_along_gets_its_values_back_when_filters_come_back(fields: str, modifier: str) -> None:
    model, manager = made(), Manager(recipe(fields, modifier))
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    manager.modify(model, still, 4, example_inputs=INPUT)
    train(model, still, range(3))
    before = {name: p.detach().clone() for name, p in made().named_parameters() if p.dim() == 1}
    assert removed(model, "stem.1.bias")
    train(model, still, range(3, 5))
    assert all(torch.equal(model.get_parameter(name), values) for name, values in before.items())


@pytest.mark.parametrize(("state_first", "stop"), [(True, 2), (False, 5)])
def test_a_run_goes_on_to_the_bit_with_what_is_held_along(state_first: bool, stop: int) -> None:
    text = FILTERS.replace("mask_type", "leave_enabled: false, mask_type").replace("end_epoch: 1", "end_epoch: 2")
    whole, manager = made(), Manager(text)
    optimizer = manager.modify(whole, adam(whole), 4, example_inputs=INPUT)
    train(whole, optimizer, range(stop))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), manager.state_dict()))
    train(whole, optimizer, range(stop, 10))

    again, second = made(seed=1), Manager(text)
    fresh = adam(again)
    if state_first:
        second.load_state_dict(saved[2])
    else:
        again.load_state_dict(saved[0])
        fresh.load_state_dict(saved[1])
    second.modify(again, fresh, 4, example_inputs=INPUT)
    if state_first:
        again.load_state_dict(saved[0])
        fresh.load_state_dict(saved[1])
    else:
        assert second.load_state_dict(saved[2]) == []
        again.load_state_dict(saved[0])
    train(again, fresh, range(stop, 10))
    mine, other = whole.state_dict(), again.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_constant_mask_of_filters_holds_what_is_zero_and_changes_nothing() -> None:
    model = made()
    Manager(FILTERS).apply(model, example_inputs=INPUT)
    model.stem[1].bias.data.fill_(0.5)
    before = copy.deepcopy(model.state_dict())
    manager = Manager("modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__, mask_type: filter}]")
    optimizer = manager.modify(model, adam(model), 4, example_inputs=INPUT)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    train(model, optimizer, range(3))
    assert removed(model, "stem.1.bias") == []
    assert removed(model, "a.4.bias") == removed(model, "a.3.weight") != []


class Raw(nn.Module):
    """Without a layer: its weights are plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first.T) @ self.second.T


def test_filters_of_plain_parameters_are_pruned_too() -> None:
    model = Raw()
    Manager(recipe(f"params: ['re:first'], mask_type: filter, {HALF}")).apply(model)
    assert len(removed(model, "first")) == 4


def test_no_layer_loses_all_its_filters_under_one_threshold(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    model[3].weight.data.mul_(1e-3)
    Manager(recipe(f"params: __ALL_PRUNABLE__, mask_type: filter, global_sparsity: true, {HALF}")).apply(model)
    assert (len(removed(model, "3.weight")), len(removed(model, "0.weight"))) == (7, 1)
    assert "prunes every filter" not in caplog.text


def test_a_layer_that_loses_all_its_filters_under_one_threshold_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    text = FILTERS.replace("final_sparsity: 0.5", "global_sparsity: true, final_sparsity: 0.99")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    Manager(text).apply(model)
    assert "GMPruningModifier prunes every filter of '0.weight', '2.weight'" in caplog.text
    assert caplog.text.count("set max_layer_sparsity") == 1


class Heads(nn.Module):
    """Two heads behind a decision, so that only parts of the model can be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.classes = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.boxes = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        x = x if float(x.sum()) < 1e9 else x.clamp(max=1)
        return self.classes(x), self.boxes(x)


def test_heads_of_a_model_that_is_followed_in_parts_keep_their_filters_and_biases() -> None:
    model = made(Heads)
    Manager(FILTERS).apply(model, example_inputs=INPUT)
    for name in ("body.0", "classes.0", "boxes.0"):
        assert len(removed(model, f"{name}.weight")) == len(removed(model, f"{name}.bias")) == 4
    for name in ("classes.2", "boxes.2"):
        assert removed(model, f"{name}.weight") == removed(model, f"{name}.bias") == []
    model = made(Heads)
    Manager(FILTERS.replace("__ALL_PRUNABLE__", "classes.2.weight")).apply(model, example_inputs=INPUT)
    assert len(removed(model, "classes.2.weight")) == 2
    assert removed(model, "classes.2.bias") == []


def test_values_come_back_after_two_modifiers_that_removed_filters_in_turn() -> None:
    fields = "params: __ALL_PRUNABLE__, mask_type: filter, init_sparsity: 0.1, update_frequency: 0.5"
    first = f"!GMPruningModifier {{{fields}, final_sparsity: 0.3, start_epoch: 0, end_epoch: 1}}"
    second = f"!GMPruningModifier {{{fields}, final_sparsity: 0.5, start_epoch: 1, end_epoch: 2, leave_enabled: false}}"
    model, manager = made(), Manager(f"modifiers: [{first}, {second}]")
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    manager.modify(model, still, 4, example_inputs=INPUT)
    train(model, still, range(9))
    for name, values in made().named_parameters():
        assert values.dim() > 1 or torch.equal(model.get_parameter(name), values), name
