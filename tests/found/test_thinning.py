"""Networks that `thin` changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from gossamer.export import thin


def differs(model: nn.Module, example: object, *inputs: object) -> float:
    smaller, _ = thin(model.eval(), example)
    with torch.no_grad():
        before, after = model(*inputs), smaller(*inputs)
    return float((before - after).abs().max() / before.abs().max())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def norm(channels: int) -> nn.BatchNorm2d:
    found = nn.BatchNorm2d(channels)
    nn.init.normal_(found.bias, 0.5)
    return found


def test_a_padded_depthwise_convolution_that_sees_one_pixel_of_the_example_computes_the_same_on_larger_images() -> None:
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), norm(16), nn.ReLU(), depthwise, norm(16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )
    model[0].weight.data[:8] = 0
    assert differs(model, torch.zeros(1, 3, 1, 1), torch.randn(2, 3, 8, 8)) < 1e-4


def test_a_mobilenet_thinned_on_a_small_example_computes_the_same_on_larger_images() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.mobilenet_v2(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, 0.3)
    for block in (14, 15, 16, 17):
        model.features[block].conv[0][0].weight.data[:100] = 0
    assert differs(model, torch.zeros(1, 3, 32, 32), torch.randn(1, 3, 96, 96)) < 1e-4


def test_a_padded_average_that_sees_one_pixel_of_the_example_computes_the_same_on_larger_images() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), norm(16), nn.ReLU(), nn.AvgPool2d(3, 1, 1), norm(16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )
    model[0].weight.data[:8] = 0
    assert differs(model, torch.zeros(1, 3, 1, 1), torch.randn(2, 3, 8, 8)) < 1e-4


class _Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second, self.head = nn.Conv2d(3, 16, 3), norm(16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        nn.init.normal_(self.second.bias)
        self.conv.weight.data[:8] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.second(relu(self.first(self.conv(x))).sum((2, 3)))))


def test_a_constant_that_depends_on_the_size_of_the_image_is_no_constant() -> None:
    assert differs(_Sums(), torch.zeros(1, 3, 8, 8), torch.randn(2, 3, 24, 24)) < 1e-4


class _Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shift, self.head = nn.Conv2d(3, 16, 3), nn.Parameter(torch.randn(5, 16)), nn.Conv2d(16, 4, 1)
        self.conv.weight.data[:8] = 0

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.head(relu(self.conv(x) + self.shift[kind][:, :, None, None]))


def test_shifts_that_are_looked_up_by_class_are_not_taken_for_those_of_the_class_in_the_example() -> None:
    example = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    assert differs(_Conditional(), example, torch.randn(2, 3, 8, 8), torch.tensor([3, 4])) < 1e-4


class _Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(20, 16), nn.Parameter(torch.randn(1, 32, 16)), nn.Linear(16, 3)
        self.words.weight.data[:, :8] = 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(relu(self.words(ids) + self.places[:, : ids.shape[1]]))


def test_places_of_words_are_not_taken_for_constants_after_an_example_of_one_word() -> None:
    assert differs(_Places(), torch.zeros(1, 1, dtype=torch.long), torch.randint(20, (2, 6))) < 1e-4


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 1, 1), nn.Conv2d(16, 4, 1)
        self.conv.weight.data[:8] = 0
        self.conv.bias.data[:8] = 0  # pyright: ignore
        self.gate.bias.data.fill_(-12.0)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.conv(x) + relu(self.gate(x))))


def test_a_map_added_to_all_channels_that_is_silent_on_normal_noise_counts_on_larger_inputs() -> None:
    assert differs(_Gated(), torch.zeros(1, 3, 8, 8), 50 * torch.randn(2, 3, 8, 8)) < 1e-4


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.trunk.weight.data[:8] = 0
        self.trunk.bias.data[:8] = 0

    def forward(self, x: Tensor, head: str = "a") -> Tensor:
        return getattr(self, head)(relu(self.trunk(x)))


def test_a_head_that_the_example_does_not_use_still_runs() -> None:
    assert differs(_TwoHeads(), torch.zeros(1, 4), torch.randn(2, 4), "b") < 1e-4


class _BothSigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.layer.weight.data[:8] = 0
        self.layer.bias.data[:8] = 6.5 * torch.tensor([1.0, -1.0] * 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.a(gelu(y)) + self.b(gelu(-y))


def test_a_constant_that_is_nearly_zero_and_inexact_in_float32_carries_no_others() -> None:
    assert differs(_BothSigns(), torch.zeros(1, 4), torch.randn(2, 4)) < 1e-4


class _PreActivation(nn.Module):
    """As a residual stream that two blocks normalise each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one, self.two = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        self.a, self.b = nn.Linear(16, 3), nn.Linear(16, 3)
        self.layer.weight.data[:8] = 0
        self.layer.bias.data[:8] = 0
        self.one.bias.data[:8] = torch.tensor([1, 1, 1, 1, -1, -1, -1, 0.5])
        self.two.bias.data[:8] = torch.tensor([-1, -1, -1, -1, 1, 1, 1, 1e-40])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.a(relu(self.one(y))) + self.b(relu(self.two(y)))


def test_weights_that_carry_constants_stay_finite_in_the_models_own_numbers() -> None:
    assert differs(_PreActivation(), torch.zeros(1, 4), torch.randn(2, 4)) < 1e-4
