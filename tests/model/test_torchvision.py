"""Every torchvision model computes the same after permutation, and most of its weights take part in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model import permute as permutation
from gossamer.model.parameters import get_parameter, get_tensor, prunable
from gossamer.model.permute import Permutation, find_permutation
from tests.model.keeping import LIMIT, distance, random_search, randomised, tensors_in

models = pytest.importorskip("torchvision.models")

SMALL = {
    "efficientnet_b0": 0.99,
    "mnasnet0_5": 0.99,
    "mobilenet_v2": 0.99,
    "mobilenet_v3_small": 0.99,
    "regnet_y_400mf": 0.99,
    "resnet18": 0.99,
    "shufflenet_v2_x0_5": 0.6,
    "squeezenet1_1": 0.99,
}
"""Models that are quick to run, with the least share of the weights that fit 2:4 on hardware whose inputs can move."""
FLOORS = {
    "alexnet": 0.35,
    "vgg": 0.2,
    "googlenet": 0.67,
    "shufflenet": 0.5,
    "resnext": 0.99,
}
"""The others, by the beginning of their names; 0.99 where none is given."""
SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit": 224}


@pytest.fixture(autouse=True)
def _every_channel_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "search_each", random_search)


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Models leave out their initialisation, which takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "normal_", "uniform_", "xavier_uniform_"):
            patch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        yield


def built(name: str) -> nn.Module:
    options: dict[str, Any] = {"init_weights": False} if name in {"googlenet", "inception_v3"} else {}
    with _uninitialised():
        return randomised(models.get_model(name, weights=None, **options))


def small(name: str) -> nn.Module:
    """A family whose models are all large, built small."""
    convnext, swin = models.convnext, models.swin_transformer
    match name:
        case "resnext":
            return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], 16, groups=4, width_per_group=16)
        case "densenet":
            return models.DenseNet(16, (2, 2, 2), 32, num_classes=16)
        case "convnext":
            return models.ConvNeXt([convnext.CNBlockConfig(32, 64, 2), convnext.CNBlockConfig(64, None, 2)], 0.0)
        case "vit":
            return models.VisionTransformer(64, 16, 2, 2, 64, 128, num_classes=16)
        case "swin":
            return models.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=16)
        case _:
            block = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
            return models.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=16, **block)


def permuted(model: nn.Module, example_inputs: Any = None, parts: bool = False) -> tuple[Permutation, float]:
    """The permutation, and the share of weights that fit hardware whose input channels can move."""
    shapes = {name: get_parameter(model, name).shape for name in prunable(model)}
    found = find_permutation(
        model,
        [name for name, shape in shapes.items() if shape[0] % 8 == 0 and shape[1] % 16 == 0],
        example_inputs=example_inputs,
        parts=parts,
    )
    moving = sum(layer.weights for layer in found.layers if layer.reason is None)
    return found, moving / sum(layer.weights for layer in found.layers)


@torch.no_grad()
def check(name: str, least: float, training: bool, model: nn.Module | None = None) -> None:
    model = model or built(name)
    size = next((size for start, size in SIZES.items() if name.startswith(start)), 64)
    x = torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _calibrate(model, x)
    found, share = permuted(model, torch.zeros_like(x))
    assert found.untraceable is None
    assert found.note is None
    assert share >= least, {layer.name: layer.reason for layer in found.layers if layer.reason}
    statistics = copy.deepcopy(dict(model.named_buffers()))
    before = {mode: _run(model, x, mode, statistics) for mode in ((False, True) if training else (False,))}
    found.apply(model)
    statistics = {name: found.of(name, buffer) for name, buffer in statistics.items()}
    for mode, expected in before.items():
        assert distance(expected, _run(model, x, mode, statistics)) < LIMIT
    wrong = next(name for name in reversed(found.moves) if get_tensor(model, name).dim() > 1)
    get_tensor(model, wrong).copy_(found.inverse.of(wrong, get_tensor(model, wrong)))
    assert distance(before[False], _run(model, x, False, statistics)) > 1e-6, "a wrong order is noticed"


def _calibrate(model: nn.Module, x: Tensor) -> None:
    """Statistics that fit the random weights, lest a deep network blow rounding up."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _run(model: nn.Module, x: Tensor, training: bool, statistics: dict[str, Tensor]) -> list[Tensor]:
    model.train(training)
    for module in model.modules():
        if type(module).__name__ == "StochasticDepth":
            module.eval()
    found = [tensor.clone() for tensor in tensors_in(model(x))]
    for name, buffer in model.named_buffers():
        buffer.copy_(statistics[name])
    return found


@pytest.mark.parametrize(("name", "least"), SMALL.items())
def test_small_models_compute_the_same_and_move(name: str, least: float):
    check(name, least, training=True)


@pytest.mark.parametrize("name", ["resnext", "densenet", "convnext", "vit", "swin", "swin_v2"])
def test_small_models_of_large_families_compute_the_same_and_move(name: str):
    check("small", 0.99, training=True, model=randomised(small(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in models.list_models(module=models) if name not in SMALL])
def test_every_classification_model_computes_the_same_and_moves(name: str):
    least = next((floor for start, floor in FLOORS.items() if name.startswith(start)), 0.99)
    check(name, least, training=not name.startswith(("regnet_y_128gf", "vit_h", "vit_l")))


# Detection


def detector(name: str) -> nn.Module:
    options: dict[str, Any] = {} if "ssd" in name else {"min_size": 96, "max_size": 128}
    with _uninitialised():
        model = models.get_model(name, weights=None, weights_backbone=None, **options)
    return randomised(model).eval()


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, 90, 100, dtype=torch.float64, generator=generator) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("retinanet_resnet50_fpn", 0.8),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", 0.8),
        ("ssdlite320_mobilenet_v3_large", 0.7),  # each of its maps is returned, and read by the next layer too
    ],
)
def test_backbones_of_detectors_compute_the_same_and_move(name: str, least: float):
    backbone = detector(name).backbone
    x = torch.stack(images())
    with torch.no_grad():
        before = list(tensors_in(dict(backbone(x))))
        found, share = permuted(backbone, x)
        found.apply(backbone)
        assert distance(before, list(tensors_in(dict(backbone(x))))) < LIMIT
    assert found.note is None
    assert share > least


@torch.no_grad()
def check_detector(model: nn.Module, parts: list[str], least: float) -> None:
    """What its parts compute on the way is the same; boxes are too, up to the order of equal scores."""
    found, share = permuted(model, (images(),), parts=True)
    assert found.untraceable is None
    assert "could not be traced as a whole" in (found.note or "")
    assert share > least, found.note
    seen: list[Tensor] = []
    for part in parts:
        model.get_submodule(part).register_forward_hook(lambda _, __, output: seen.extend(tensors_in(output)))
    model(images())
    before = list(seen)
    seen.clear()
    found.apply(model)
    model(images())
    assert len(before) > 1
    assert distance(before, seen) < LIMIT


def test_a_small_detector_is_permuted_in_parts():
    backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 4), nn.ReLU())
    backbone.add_module("last", nn.Conv2d(64, 32, 1))
    backbone.out_channels = 32
    anchors = models.detection.anchor_utils.AnchorGenerator(((16,),), ((1.0,),))
    pool = models.detection.faster_rcnn.MultiScaleRoIAlign(["0"], 3, 2)
    with _uninitialised():
        model = models.detection.FasterRCNN(
            backbone, None, 96, 128, rpn_anchor_generator=anchors, box_roi_pool=pool,
            box_head=models.detection.faster_rcnn.TwoMLPHead(32 * 9, 64),
            box_predictor=models.detection.faster_rcnn.FastRCNNPredictor(64, 5),
        )  # fmt: skip
    check_detector(randomised(model).eval(), ["backbone", "rpn.head", "roi_heads.box_predictor"], 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts", "least"),
    [
        ("ssdlite320_mobilenet_v3_large", ["backbone", "head"], 0.5),
        ("fasterrcnn_resnet50_fpn", ["backbone", "rpn.head", "roi_heads.box_predictor"], 0.6),
        # Most of its weights read the regions that are cut out of the backbone's maps, which are held in place.
        ("fasterrcnn_mobilenet_v3_large_fpn", ["backbone", "rpn.head", "roi_heads.box_predictor"], 0.25),
        ("retinanet_resnet50_fpn", ["backbone", "head"], 0.9),
        ("fcos_resnet50_fpn", ["backbone", "head"], 0.5),
        ("ssd300_vgg16", ["backbone", "head"], 0.5),
        ("maskrcnn_resnet50_fpn", ["backbone", "rpn.head", "roi_heads.mask_predictor"], 0.6),
        ("keypointrcnn_resnet50_fpn", ["backbone", "rpn.head", "roi_heads.box_predictor"], 0.5),
    ],
)
def test_every_detector_is_permuted_in_parts(name: str, parts: list[str], least: float):
    check_detector(detector(name), parts, least)
