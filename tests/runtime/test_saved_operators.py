"""Files hold every operator that usual networks leave to torch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

from gossamer import runtime
from gossamer.runtime.file import _check_operator
from gossamer.runtime.graph import simplify, trace
from tests.runtime.models import pruned

ACTIVATIONS = [
    *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid),
    *(nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign),
    *(nn.Tanh, nn.Tanhshrink),
]
FAMILIES = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t"),
    *("mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5"),
    *("squeezenet1_0", "swin_t", "swin_v2_t", "vgg11", "vit_b_32"),
]


class Several(nn.Module):
    """Every activation of the same convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.activations = nn.ModuleList([activation() for activation in ACTIVATIONS])
        self.activations += [nn.Softmax(1), nn.LogSoftmax(1), nn.GELU("tanh"), nn.GLU(1), nn.Threshold(0.1, 0.2)]

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        y = self.first(x)
        return {"results": [activation(y) for activation in self.activations]}


def test_every_activation_can_be_saved_and_computes_the_same(tmp_path: Path) -> None:
    model, x = pruned(Several(), 0.5), torch.randn(2, 3, 7, 9)
    runtime.compile(copy.deepcopy(model), x, threads=1, tuned=False).save(tmp_path / "model.gossamer")
    found = runtime.load(tmp_path / "model.gossamer", threads=1)(x)
    with torch.inference_mode():
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_operators_of_torchvisions_classifiers_can_be_saved(name: str) -> None:
    size = 224 if name.startswith(("vit", "swin", "maxvit")) else 299 if name == "inception_v3" else 64
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    for node in simplify(trace(model, (torch.randn(2, 3, size, size),))).nodes:
        _check_operator(node.op)


class Network(nn.Module):
    """A detector up to the outputs of its head."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.head(list(self.backbone(x).values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"])
def test_the_network_of_a_detector_compiles_and_can_be_saved(name: str, tmp_path: Path) -> None:
    detector = torchvision.models.get_model(name, weights=None, weights_backbone=None)
    model, x = pruned(Network(detector)), torch.randn(1, 3, 128, 128)
    runtime.compile(model, x, threads=1, tuned=False).save(tmp_path / "model.gossamer")
    found = runtime.load(tmp_path / "model.gossamer", threads=1)(x)
    with torch.inference_mode():
        expected = model(x)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-4 * value.abs().max()
