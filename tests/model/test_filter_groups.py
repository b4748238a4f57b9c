"""Which filters belong together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v2, resnet18, resnext50_32x4d

from gossamer.model.tracing.filter_groups import FilterGroup, filter_groups
from gossamer.model.tracing.tracer import Untraceable

IMAGE = torch.zeros(1, 3, 32, 32)


def by_producer(groups: list[FilterGroup]) -> dict[str, FilterGroup]:
    return {name: group for group in groups for name in group.producers}


def test_a_residual_ties_all_layers_of_a_stage_together() -> None:
    groups = by_producer(filter_groups(resnet18(), IMAGE))
    stage = groups["conv1.weight"]
    assert stage.filters == 64
    assert stage.producers == ("conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv2.weight")
    assert stage.consumers == (
        "layer1.0.conv1.weight",
        "layer1.1.conv1.weight",
        "layer2.0.conv1.weight",
        "layer2.0.downsample.0.weight",
    )
    assert stage.held is None
    inner = groups["layer1.0.conv1.weight"]
    assert (inner.producers, inner.consumers) == (("layer1.0.conv1.weight",), ("layer1.0.conv2.weight",))


def test_what_reaches_the_output_is_held() -> None:
    last = filter_groups(resnet18(), IMAGE)[-1]
    assert last.producers == ("fc.weight",)
    assert "output" in str(last.held)


def test_a_depthwise_convolution_has_the_channels_of_its_input() -> None:
    group = filter_groups(mobilenet_v2(), IMAGE)[0]
    assert group.producers == ("features.0.0.weight", "features.1.conv.0.0.weight")
    assert group.consumers == ("features.1.conv.1.weight",)


def test_grouped_convolutions_hold_their_channels_and_let_others_go() -> None:
    groups = by_producer(filter_groups(resnext50_32x4d(), IMAGE))
    assert "group" in str(groups["layer1.0.conv1.weight"].held)
    assert groups["layer1.0.conv3.weight"].held is None


@pytest.mark.parametrize(
    ("norm", "held"),
    [
        (nn.LayerNorm(8), "averages"),
        (nn.GroupNorm(2, 8), "averages"),
        (nn.Softmax(1), "whole"),
        (nn.BatchNorm1d(8), None),
    ],
)
def test_what_counts_its_channels_cannot_lose_any(norm: nn.Module, held: str | None) -> None:
    net = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2))
    found = filter_groups(net, torch.zeros(3, 4))[0].held
    assert found is None if held is None else held in str(found)


def test_a_mean_over_channels_counts_them_and_a_sum_does_not() -> None:
    class Pooled(nn.Module):
        def __init__(self, total: bool) -> None:
            super().__init__()
            self.first, self.last, self.total = nn.Linear(4, 8), nn.Linear(8, 2), total

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return self.last(hidden) + (hidden.sum(1) if self.total else hidden.mean(1))[:, None]

    held = [filter_groups(Pooled(total), torch.zeros(3, 4))[0].held for total in (True, False)]
    assert held[0] is None
    assert "zeros count" in str(held[1])


def test_joined_channels_stay_groups_of_their_own() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 1), nn.Conv2d(10, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.cat([self.left(x), self.right(x)], 1))

    groups = filter_groups(Joined(), IMAGE)
    assert [(group.filters, group.producers, group.consumers) for group in groups[:2]] == [
        (4, ("left.weight",), ("last.weight",)),
        (6, ("right.weight",), ("last.weight",)),
    ]


def test_a_model_that_cannot_be_followed_says_so() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("never")

    with pytest.raises(Untraceable, match="never"):
        filter_groups(Stubborn(), IMAGE)
