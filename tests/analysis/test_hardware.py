"""What hardware can use: rules held against torch's own, the eligibility of 2:4, and real networks."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from gossamer.analysis.hardware import COLUMNS, ROWS, Support, eligibility, hardware_support
from gossamer.export import semi_structured
from gossamer.sparse import NM

IMAGE = torch.zeros(1, 3, 64, 64)


def found(model: nn.Module, example: torch.Tensor | None = IMAGE) -> dict[str, Support]:
    return {support.runtime.key: support for support in hardware_support(model.eval(), example)}


@pytest.fixture(scope="module")
def resnet() -> dict[str, Support]:
    return found(torchvision.models.resnet18())


def test_every_layer_is_able_or_has_a_reason(resnet: dict[str, Support]) -> None:
    for support in resnet.values():
        assert len(support.able) + len(support.unable) == 21
        assert all(support.unable.values())


def test_two_of_four_agrees_with_the_check_of_eligibility(resnet: dict[str, Support]) -> None:
    able = [layer.name for layer in eligibility(torchvision.models.resnet18(), NM(2, 4)) if layer.reason is None]
    assert list(resnet["tensorrt"].able) == able
    assert resnet["tensorrt"].unable == {"conv1.weight": "3 input channels do not divide by 16"}


def test_semi_structured_tensors_are_for_linear_layers_and_torchs_own_shapes(resnet: dict[str, Support]) -> None:
    from torch.sparse.semi_structured import SparseSemiStructuredTensorCUSPARSELT

    rule = SparseSemiStructuredTensorCUSPARSELT._DTYPE_SHAPE_CONSTRAINTS[torch.float16]
    assert (rule.sparse_min_rows, rule.sparse_min_cols) == (ROWS, COLUMNS)
    assert "linear layers only" in resnet["torch"].unable["layer1.0.conv1.weight"]
    assert "1000 output channels do not divide by 16" in resnet["torch"].unable["fc.weight"]
    fits = found(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)), torch.zeros(1, 64))
    assert fits["torch"].able == ("0.weight", "2.weight")


def test_semi_structured_layers_are_those_that_the_export_turns() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64), nn.Linear(32, 48), nn.Linear(48, 10)).eval()
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.dim() == 2):
            weight.mul_(NM(2, 4).keep_largest(weight))
    turned = [layer.name for layer in semi_structured(model, dry_run=True) if layer.eligible]
    assert (
        list(found(model, torch.zeros(1, 5, 32))["torch"].able)
        == turned
        == [
            "0.linear1.weight",
            "0.linear2.weight",
            "1.weight",
        ]
    )


def test_only_what_reaches_the_output_keeps_its_channels_in_a_residual_network(resnet: dict[str, Support]) -> None:
    assert list(resnet["thin"].unable) == ["fc.weight"]
    assert "output" in resnet["thin"].unable["fc.weight"]


def test_a_model_that_cannot_be_followed_says_why_for_each_layer() -> None:
    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x))[x.sum() > 0])

    support = found(Undecided(), torch.ones(2, 5))["thin"]  # five numbers where four are wanted
    assert support.able == ()
    assert all("could not be traced" in reason for reason in support.unable.values())


def test_block4_wants_four_input_channels_and_pointwise_kernels_one_position() -> None:
    mobile = found(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)))
    assert mobile["deepsparse"].able == ("2.weight",)
    assert "1 input channel" in mobile["deepsparse"].unable["1.weight"]
    assert mobile["xnnpack"].able == ("2.weight",)
