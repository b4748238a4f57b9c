"""A thinned model computes the same on inputs that differ from the example in size, number, batch and meaning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from gossamer.export import thin
from gossamer.model.thin import Thinned

IMAGE, LARGER = torch.zeros(1, 3, 8, 8), torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))
ROW, ROWS = torch.zeros(1, 4), torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


def thinned_alike(model: nn.Module, example: object, *inputs: object) -> Thinned:
    smaller, found = thin(model.eval(), example)
    with torch.no_grad():
        before, after = model(*inputs), smaller(*inputs)
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def norm(channels: int) -> nn.BatchNorm2d:
    found = nn.BatchNorm2d(channels)
    nn.init.normal_(found.bias, 0.5)
    return found


class Half(nn.Module):
    """Half of the filters of its first layer are zero; `between` is done before the last one reads them."""

    def __init__(self, between: Callable[..., Tensor], *more: nn.Module, flat: bool = False) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(4, 16) if flat else nn.Conv2d(3, 16, 3, padding=1)
        self.last: nn.Module = nn.Linear(16, 3) if flat else nn.Conv2d(16, 4, 1)
        self.shift, self.more, self.between = nn.Parameter(torch.randn(5, 16)), nn.ModuleList(more), between
        self.first.weight.data[:8] = 0

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x), x, *others))


@pytest.mark.parametrize("middle", [nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.AvgPool2d(3, 1, 1)])
def test_borders_count_that_an_example_of_one_pixel_does_not_have(middle: nn.Module) -> None:
    head = (nn.Conv2d(3, 16, 1), norm(16), nn.ReLU())
    model = nn.Sequential(*head, middle, norm(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
    model[0].weight.data[:8] = 0
    found = thinned_alike(model, torch.zeros(1, 3, 1, 1), LARGER)
    assert "not constant where it is read" in found.kept["0.weight"]


@pytest.mark.slow
def test_a_mobilenet_thinned_on_a_small_example_computes_the_same_on_larger_images() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.mobilenet_v2(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias, 0.3)
    for block in (14, 15, 16, 17):
        model.features[block].conv[0][0].weight.data[:100] = 0
    thinned_alike(model, torch.zeros(1, 3, 32, 32), torch.randn(1, 3, 96, 96))


def test_a_sum_over_the_image_depends_on_its_size() -> None:
    def between(self: Half, y: Tensor, x: Tensor) -> Tensor:
        return relu(relu(y).sum((2, 3), keepdim=True) + self.shift[0, :, None, None])

    found = thinned_alike(Half(between), IMAGE, LARGER)
    assert "not constant where it is read" in found.kept["first.weight"]


def test_a_sum_over_the_batch_depends_on_its_size() -> None:
    thinned_alike(Half(lambda self, y, x: relu(y).sum(0, keepdim=True), flat=True), ROW, ROWS)


@pytest.mark.parametrize("kinds", [[3, 4], [1, 2]])
def test_what_is_looked_up_by_class_differs_from_that_of_the_class_in_the_example(kinds: list[int]) -> None:
    def between(self: Half, y: Tensor, x: Tensor, kind: Tensor) -> Tensor:
        return relu(y + self.shift[kind][:, :, None, None])

    example = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    thinned_alike(Half(between), example, torch.randn(2, 3, 8, 8), torch.tensor(kinds))


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(20, 16), nn.Linear(16, 3)
        self.places = nn.Parameter(torch.randn(1, 32, 16))
        self.words.weight.data[:, :8] = 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(relu(self.words(ids) + self.places[:, : ids.shape[1]]))


def test_places_of_words_are_no_constants_after_an_example_of_one_word() -> None:
    thinned_alike(Places(), torch.zeros(1, 1, dtype=torch.long), torch.randint(20, (2, 6)))


def _late(self: Half, y: Tensor, x: Tensor) -> Tensor:
    return relu(y + relu(x.mean(1, keepdim=True) - 1000))


def _compared(self: Half, y: Tensor, x: Tensor) -> Tensor:
    return relu(torch.where(x.mean(1, keepdim=True) > 1000, self.shift[0], y))


def _multiplied(self: Half, y: Tensor, x: Tensor) -> Tensor:
    return relu(y + self.shift[0] * (x.mean(1, keepdim=True) > 1000))


@pytest.mark.parametrize("between", [_late, _compared, _multiplied])
def test_what_only_unusual_inputs_add_is_not_overlooked(between: Callable[..., Tensor]) -> None:
    found = thinned_alike(Half(between, flat=True), ROW, ROWS + 2000)
    assert "not constant where it is read" in found.kept["first.weight"]


@pytest.mark.parametrize(
    "between",
    [
        lambda self, y, x: torch.where(y > 0, y, 0.1 * y),
        lambda self, y, x: y * (y > 0),
        lambda self, y, x: relu(y) * relu(y).clamp(max=1),
    ],
)
def test_constants_go_through_comparisons_of_their_own(between: Callable[..., Tensor]) -> None:
    assert thinned_alike(Half(between, flat=True), ROW, ROWS).removed["last.weight"] == (48, 27)


def test_a_gate_that_depends_on_the_input_leaves_zeros_zero() -> None:
    def between(self: Half, y: Tensor, x: Tensor) -> Tensor:
        return relu(y) * torch.sigmoid(x.mean(1, keepdim=True))

    model = Half(between, flat=True)
    model.first.bias.data[:8] = -1
    assert thinned_alike(model, ROW, ROWS).removed["last.weight"] == (48, 24)


def test_words_go_into_a_layer_whose_zeros_leave() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    model[1].weight.data[:8] = 0
    found = thinned_alike(model, torch.zeros(1, 1, dtype=torch.long), torch.randint(20, (2, 6)))
    assert found.removed["3.weight"] == (48, 27)


class Heads(nn.Module):
    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(wide, 3)
        self.trunk.weight.data[:8] = 0
        self.trunk.bias.data[:8] = 0

    def forward(self, x: Tensor, head: str = "a") -> Tensor:
        return getattr(self, head)(relu(self.trunk(x)))


def test_a_head_that_the_example_does_not_use_holds_what_it_may_read() -> None:
    found = thinned_alike(Heads(), ROW, ROWS, "b")
    assert "'b.weight', which takes no part in this example, may read them" in found.kept["trunk.weight"]
    assert "parameters that this example does not use stay (b.weight, b.bias)" in str(found.note)


def test_a_weight_that_cannot_read_them_holds_nothing_and_is_told_of() -> None:
    found = thinned_alike(Heads(wide=7), ROW, ROWS)
    assert found.removed["a.weight"] == (48, 24)
    assert "give one that uses them" in str(found.note)


class TwoSided(nn.Module):
    """Two readers see the same channels, each in its own way."""

    def __init__(self, one: nn.Module, two: nn.Module, constants: Tensor) -> None:
        super().__init__()
        self.layer, self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.one, self.two = one, two
        self.layer.weight.data[:8] = 0
        self.layer.bias.data[:8] = constants

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.a(self.one(y)) + self.b(self.two(y))


class Mirrored(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(-x)


def test_a_constant_that_is_nearly_zero_and_inexact_in_float32_carries_no_others() -> None:
    found = thinned_alike(TwoSided(nn.GELU(), Mirrored(), 6.5 * torch.tensor([1.0, -1.0] * 4)), ROW, ROWS)
    assert found.removed["a.weight"] == (48, 30)  # 8, and one carrier for each reader


def test_weights_that_carry_constants_stay_finite_in_the_models_own_numbers() -> None:
    one, two = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    one.bias.data[:8] = torch.tensor([1, 1, 1, 1, -1, -1, -1, 0.5])
    two.bias.data[:8] = torch.tensor([-1, -1, -1, -1, 1, 1, 1, 1e-40])
    model = TwoSided(nn.Sequential(one, nn.ReLU()), nn.Sequential(two, nn.ReLU()), torch.zeros(8))
    assert thinned_alike(model, ROW, ROWS).removed["a.weight"] == (48, 30)


def test_a_sum_that_half_precision_cannot_hold_keeps_its_filters() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].weight.data[:8] = 0
    model[0].bias.data[:8] = 1e-3
    model[2].weight.data[:, :8] = 3e4
    smaller, found = thin(model.half(), ROW.half())
    assert "rounding" in found.kept["0.weight"]
    assert torch.equal(smaller(ROWS.half()), model(ROWS.half()))
