"""Filters and channels that are of no use leave a model, and it computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from gossamer.errors import GossamerError
from gossamer.model.thin import thin
from tests.model.thinned_networks import lively, prune, thinned_alike

SMALL = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))


class UNet(nn.Module):
    """Two scales, joined by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        shallow = self.down(x)
        return self.out(torch.cat([shallow, self.up(self.deep(shallow))], 1))


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def zero(layer: nn.Module, rows: slice) -> None:
    with torch.no_grad():
        layer.weight[rows] = 0


@pytest.mark.slow
def test_half_of_resnet18_leaves_and_the_rest_is_as_computed_by_hand() -> None:
    torch.manual_seed(0)
    model = lively(models.resnet18(num_classes=10))
    prune(model, SMALL)
    smaller, found = thinned_alike(model, SMALL)
    # Half of the filters went but one, which carries their constants on: n/2 + 1 of n.
    a, b, c, d = 33, 65, 129, 257
    blocks = [9 * (i * o + o * o) for i, o in ((a, a), (a, a), (a, b), (b, b), (b, c), (c, c), (c, d), (d, d))]
    weights = 3 * 49 * a + sum(blocks) + a * b + b * c + c * d + 10 * d
    norms = 2 * (a * 5 + b * 5 + c * 5 + d * 5)
    assert found.parameters[1] == weights + norms + 10
    assert sum(parameter.numel() for parameter in smaller.parameters()) == found.parameters[1]
    assert smaller.layer1[0].conv1.in_channels == smaller.bn1.num_features == a
    assert found.removed["fc.weight"] == (5120, 10 * d)
    assert "carries the constant" in found.kept["conv1.weight"]


@pytest.mark.parametrize(
    ("make", "at_most"),
    [
        pytest.param(lambda: models.mobilenet_v2(num_classes=10), 0.33, marks=pytest.mark.slow),
        pytest.param(lambda: models.shufflenet_v2_x0_5(num_classes=10), 0.75, marks=pytest.mark.slow),
        (UNet, 0.4),
        (lambda: models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10), 0.82),
    ],
    ids=["mobilenet", "shufflenet", "unet", "vit"],
)
def test_half_of_the_filters_leave_and_outputs_stay(make, at_most: float) -> None:
    torch.manual_seed(0)
    model = lively(make())
    prune(model, SMALL)
    _, found = thinned_alike(model, SMALL)
    before, after = found.parameters
    assert after <= at_most * before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "densenet121", "googlenet", "mobilenet_v3_small", "vgg11_bn"])
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_half_of_a_large_network_leaves_and_outputs_stay(name: str) -> None:
    torch.manual_seed(0)
    options = {"init_weights": False} if name == "googlenet" else {}
    model = models.get_model(name, num_classes=10, **options)
    if name == "vgg11_bn":
        model.classifier = nn.Sequential(nn.Linear(512 * 49, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
    lively(model)
    inputs = torch.randn(1, 3, 64, 64)
    prune(model, inputs)
    _, found = thinned_alike(model, inputs)
    before, after = found.parameters
    assert after <= 0.42 * before


@pytest.mark.slow
def test_a_detector_is_thinned_in_the_parts_that_can_be_traced() -> None:
    from gossamer.runner.detectors import retinanet_resnet18_fpn

    torch.manual_seed(0)
    model = lively(retinanet_resnet18_fpn(num_classes=3, pyramid_channels=64, min_size=64, max_size=64))
    inputs = ([torch.rand(3, 64, 64)],)
    prune(model, inputs)
    _, found = thinned_alike(model, inputs)
    assert "on their own" in str(found.note)
    assert found.parameters[1] <= 0.5 * found.parameters[0]


def test_a_channel_that_nobody_reads_leaves_whatever_its_value() -> None:
    model = chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    with torch.no_grad():
        model[2].weight[:, 2:7] = 0
    smaller, found = thinned_alike(model, SMALL)
    assert found.removed == {"0.weight": (216, 81), "2.weight": (144, 54)}
    assert smaller[0].out_channels == smaller[2].in_channels == 3


def test_zeros_that_carry_nothing_leave_without_a_trace() -> None:
    model = chain(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 2, 3))
    zero(model[0], slice(0, 5))
    smaller, found = thinned_alike(model, SMALL)
    assert smaller[0].out_channels == 3
    assert found.kept == {}
    assert torch.equal(smaller[2].weight, model[2].weight[:, 5:])


def test_one_filter_carries_the_constants_of_the_others_also_at_padded_borders() -> None:
    model = chain(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 5, padding=2))
    zero(model[0], slice(2, 8))
    smaller, found = thinned_alike(model, SMALL)
    assert smaller[0].out_channels == 3
    assert "carries the constant" in found.kept["0.weight"]


def test_a_layer_that_is_zero_as_a_whole_keeps_one_channel() -> None:
    model = chain(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3))
    zero(model[0], slice(None))
    smaller, found = thinned_alike(model, SMALL)
    assert smaller[0].out_channels == 1
    assert found.kept["0.weight"] == "one channel has to stay"


def test_flattened_channels_leave_a_linear_layer_pixel_by_pixel() -> None:
    model = chain(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 2))
    zero(model[0], slice(0, 4))
    smaller, _ = thinned_alike(model, SMALL)
    assert smaller[4].in_features == 27


def test_a_constant_that_padding_breaks_stays_with_the_reason() -> None:
    model = chain(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 2, 1))
    zero(model[0], slice(0, 3))
    _, found = thinned_alike(model, SMALL)
    assert found.removed == {}
    assert "not constant where it is read" in found.kept["0.weight"]


def test_a_depthwise_filter_of_zeros_takes_its_channel_along() -> None:
    model = chain(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), nn.Conv2d(6, 2, 1))
    zero(model[1], slice(0, 3))
    smaller, _ = thinned_alike(model, SMALL)
    assert smaller[1].groups == smaller[1].in_channels == smaller[1].out_channels == smaller[0].out_channels == 3


def test_sizes_that_are_written_in_code_keep_their_channels() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(functional.relu(self.middle(self.first(x))).mean((2, 3)).view(-1, 8))

    torch.manual_seed(0)
    model = Stubborn()
    zero(model.first, slice(0, 4))
    zero(model.middle, slice(0, 4))
    smaller, found = thinned_alike(model, SMALL)
    assert smaller.first.out_channels == 5
    assert smaller.middle.out_channels == 8
    assert "does not run without them" in found.kept["middle.weight"]


def test_a_residual_keeps_channels_that_one_branch_still_fills() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.one(x) + self.two(x))

    torch.manual_seed(0)
    model = Block()
    zero(model.one, slice(0, 4))
    _, found = thinned_alike(model, SMALL)
    assert found.removed == {}
    assert "another weight" in found.kept["one.weight"]
    zero(model.two, slice(2, 8))
    smaller, _ = thinned_alike(model, SMALL)
    assert smaller.one.out_channels == smaller.two.out_channels == 7


def test_layers_that_only_training_uses_are_cut_too() -> None:
    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.helper = nn.Conv2d(3, 8, 3), nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            hidden = functional.relu(self.body(x)).mean((2, 3))
            return (self.head(hidden), self.helper(hidden)) if self.training else (self.head(hidden),)

    torch.manual_seed(0)
    model = Helped().train()
    zero(model.body, slice(0, 5))
    smaller, _ = thinned_alike(model, SMALL)
    assert smaller.training
    assert smaller.helper.in_features == smaller.head.in_features == 4


def test_a_tied_weight_that_is_used_both_ways_stays() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(self.first(x)) @ self.first.weight

    torch.manual_seed(0)
    model = Tied()
    zero(model.first, slice(0, 4))
    _, found = thinned_alike(model, torch.randn(3, 6))
    assert found.removed == {}
    assert "no rule covers" in found.kept["first.weight"]


def test_a_model_without_zeros_is_left_to_the_bit_with_its_mode_gradients_and_random_state() -> None:
    model = lively(chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Conv2d(4, 2, 3))).train()
    model[0].requires_grad_(False)
    model(SMALL).sum().backward()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradient = model[4].weight.grad
    found = thin(model, SMALL)
    assert found.parameters[0] == found.parameters[1]
    assert not found.cuts
    assert model.training
    assert not model[0].weight.requires_grad
    assert model[4].weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_memory_formats_and_parameters_stay_what_they_were(dtype: torch.dtype) -> None:
    model = chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype=dtype, memory_format=torch.channels_last)
    zero(model[0], slice(0, 6))
    own = list(model.parameters())
    thin(model, SMALL.to(dtype))
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
    assert model[2].weight.dtype == dtype
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
    model(SMALL.to(dtype)).sum().backward()
    assert model[0].weight.grad.shape == (3, 3, 3, 3)


def test_a_thinned_model_has_nothing_more_to_lose() -> None:
    model = lively(chain(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    prune(model, SMALL)
    thin(model, SMALL)
    assert thin(model, SMALL).removed == {}


def test_a_model_that_does_not_run_on_its_example_says_so() -> None:
    with pytest.raises(GossamerError, match="could not be traced"):
        thin(chain(nn.Linear(4, 8), nn.Linear(8, 2)), torch.zeros(3, 5))


class RandomGraph(nn.Module):
    """Layers drawn from a few kinds: each reads one or two of the tensors before it, all of the same size."""

    def __init__(self, kinds: list[tuple[str, int, int]], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kinds = kinds
        self.layers = nn.ModuleList()
        widths = [4]
        for kind, first, second in kinds:
            a, b = widths[first % len(widths)], widths[second % len(widths)]
            match kind:
                case "conv":
                    layer: nn.Module = nn.Conv2d(a, 6, 3, padding=1)
                case "add":
                    layer = nn.ModuleList([nn.Conv2d(a, 6, 1), nn.Conv2d(b, 6, 3, padding=1)])
                case "depthwise":
                    layer = nn.Conv2d(a, a, 3, padding=1, groups=a)
                case "norm":
                    layer = nn.BatchNorm2d(a)
                case _:
                    layer = nn.Identity()
            self.layers.append(layer)
            widths.append({"conv": 6, "add": 6, "cat": a + b}.get(kind, a))
        self.last = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for (kind, first, second), layer in zip(self.kinds, self.layers, strict=True):
            a, b = made[first % len(made)], made[second % len(made)]
            if kind == "add":
                made.append(layer[0](a) + layer[1](b))
            elif kind == "cat":
                made.append(torch.cat([a, b], 1))
            elif kind == "act":
                made.append(functional.silu(a))
            else:
                made.append(layer(a))
        return self.last(made[-1])


LAYERS = st.tuples(
    st.sampled_from(["conv", "add", "cat", "depthwise", "norm", "act"]), st.integers(0, 7), st.integers(0, 7)
)


@settings(max_examples=12, deadline=None)
@given(st.lists(LAYERS, min_size=2, max_size=7), st.integers(0, 99), st.sampled_from([0.3, 0.5, 1.0]))
def test_random_networks_compute_the_same_without_what_left(kinds, seed: int, share: float) -> None:
    model = lively(RandomGraph(kinds, seed), seed)
    inputs = torch.randn(2, 4, 6, 6)
    prune(model, inputs, share, seed)
    smaller, found = thinned_alike(model.double(), inputs.double(), 1e-9)
    assert found.parameters[1] <= found.parameters[0]
    other = 30 * torch.randn(3, 4, 11, 9).double()
    with torch.no_grad():
        wanted = model(other)
        assert torch.allclose(smaller(other), wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))
