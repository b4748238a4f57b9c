"""Detectors that torchvision lacks (RetinaNet and Faster R-CNN on ResNet-18), anchors, and the networks of a detector.

As in torchvision, the background is class 0 and counts in `num_classes`, which is therefore one more than in a config.

A network is a part of a detector with tensors as inputs and outputs, which torch.fx traces and export writes. Anchors,
non-maximum suppression and other post-processing are not part of it. A custom detector defines it by one method:

    class Detector(nn.Module):
        def forward(self, images, targets=None):
            # `images`: a list of (C, H, W), `targets`: a list of dicts of boxes (n, 4) as x1, y1, x2, y2
            # and labels (n,) from 1. In training: a dict of losses. In evaluation: a list of dicts of
            # boxes, labels and scores.
            ...

        def network(self, images):
            # `images`: (N, C, H, W). By name: a module and its inputs, which are tensors.
            return {"network": (self.layers, (images - self.mean,))}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.model import named_parameters, unwrap

if TYPE_CHECKING:
    from torchvision.models import ResNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops.feature_pyramid_network import ExtraFPNBlock


ASPECT_RATIOS = (0.5, 1.0, 2.0)
GROUPS = 32

Sizes = Sequence[float | Sequence[float]]
"""The sides of anchors for each feature level: a number, or several."""


def retinanet_resnet18_fpn(
    *,
    num_classes: int = 91,
    weights_backbone: Any = None,
    trainable_backbone_layers: int | None = None,
    returned_layers: Sequence[int] = (2, 3, 4),
    pyramid_channels: int = 256,
    anchor_sizes: Sizes | None = None,
    aspect_ratios: Sequence[float] = ASPECT_RATIOS,
    **kwargs: Any,
) -> nn.Module:
    """RetinaNet on ResNet-18-FPN with P6 and P7, like torchvision's retinanet_resnet50_fpn_v2.

    BatchNorm is trained, the head has GroupNorm, and boxes are trained with GIoU. `returned_layers` are the stages of
    the ResNet that feed the pyramid (1 has stride 4); `anchor_sizes` has an entry for each of them and two more for P6
    and P7. Most MACs are in the head and grow with the square of `pyramid_channels`.
    """
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.retinanet import RetinaNetHead
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    if pyramid_channels < 2 * GROUPS or pyramid_channels % GROUPS:  # the variance of a group of one channel is 0
        message = f"expected a multiple of {GROUPS}, at least {2 * GROUPS}, found {pyramid_channels}"
        raise GossamerError(message, "pyramid_channels")
    stages = _stages(returned_layers)
    body = _resnet18(weights_backbone, trainable_backbone_layers)
    backbone = _pyramid(body, stages, pyramid_channels, LastLevelP6P7(_channels(stages[-1]), pyramid_channels))
    strides = [_stride(stage) for stage in (*stages, stages[-1] + 1, stages[-1] + 2)]
    sizes = [4 * stride for stride in strides] if anchor_sizes is None else anchor_sizes
    anchors = _generator(sizes, aspect_ratios, len(strides), octaves=3)
    head = RetinaNetHead(
        pyramid_channels,
        anchors.num_anchors_per_location()[0],
        num_classes,
        norm_layer=partial(nn.GroupNorm, GROUPS),
    )
    head.regression_head._loss_type = "giou"  # pyright: ignore[reportPrivateUsage]
    return RetinaNet(backbone, num_classes, anchor_generator=anchors, head=head, **kwargs)


def fasterrcnn_resnet18_fpn(
    *,
    num_classes: int = 91,
    weights_backbone: Any = None,
    trainable_backbone_layers: int | None = None,
    returned_layers: Sequence[int] = (1, 2, 3, 4),
    pyramid_channels: int = 256,
    anchor_sizes: Sizes | None = None,
    aspect_ratios: Sequence[float] = ASPECT_RATIOS,
    **kwargs: Any,
) -> nn.Module:
    """Faster R-CNN on ResNet-18-FPN, like torchvision's on ResNet-50, except that BatchNorm is trained.

    `returned_layers` are the stages of the ResNet that feed the pyramid and from which boxes are pooled (1 has stride
    4); `anchor_sizes` has an entry for each of them and one more for the coarsest level. The MACs of the proposal head
    grow with the square of `pyramid_channels`, those of the box head linearly.
    """
    from torchvision.models.detection import FasterRCNN
    from torchvision.ops import MultiScaleRoIAlign
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    if pyramid_channels < 1:
        raise GossamerError(f"expected a positive number, found {pyramid_channels}", "pyramid_channels")
    stages = _stages(returned_layers)
    body = _resnet18(weights_backbone, trainable_backbone_layers)
    backbone = _pyramid(body, stages, pyramid_channels, LastLevelMaxPool())
    strides = [_stride(stage) for stage in (*stages, stages[-1] + 1)]
    sizes = [8 * stride for stride in strides] if anchor_sizes is None else anchor_sizes
    return FasterRCNN(
        backbone,
        num_classes,
        rpn_anchor_generator=_generator(sizes, aspect_ratios, len(strides), octaves=1),
        box_roi_pool=MultiScaleRoIAlign([str(level) for level in range(len(stages))], output_size=7, sampling_ratio=2),
        **kwargs,
    )


def set_anchors(
    model: nn.Module, anchor_sizes: Sizes | None = None, aspect_ratios: Sequence[float] | None = None
) -> None:
    """Give torchvision's RetinaNet or Faster R-CNN other anchors; another number of them replaces its last layers.

    A number means three sizes within an octave for RetinaNet, and one size for Faster R-CNN.
    """
    from torchvision.models.detection import FasterRCNN, RetinaNet

    if isinstance(model, RetinaNet):
        octaves = 3
    elif isinstance(model, FasterRCNN):
        octaves = 1
    else:
        message = f"not supported for {type(model).__name__}, only for RetinaNet and Faster R-CNN"
        raise GossamerError(message, "anchor_sizes")
    holder: Any = model if octaves == 3 else model.rpn
    old = holder.anchor_generator
    new = _generator(
        anchor_sizes if anchor_sizes is not None else old.sizes,
        aspect_ratios if aspect_ratios is not None else old.aspect_ratios[0],
        len(old.sizes),
        octaves,
    )
    before, after = old.num_anchors_per_location()[0], new.num_anchors_per_location()[0]
    holder.anchor_generator = new
    if before != after:
        _resize_heads(holder.head, before, after)


def _resnet18(weights: Any, trainable: int | None) -> ResNet:
    """A ResNet-18; with weights, its parts except the last `trainable` of five are frozen."""
    from torchvision.models import ResNet18_Weights, resnet18

    body = resnet18(weights=ResNet18_Weights.verify(weights))
    if weights is None:
        if trainable is not None:
            message = "all layers are trained without weights_backbone; remove it"
            raise GossamerError(message, "trainable_backbone_layers")
        return body
    trainable = 3 if trainable is None else trainable
    if not 0 <= trainable <= 5:
        raise GossamerError(f"expected a number from 0 to 5, found {trainable}", "trainable_backbone_layers")
    parts = ["layer4", "layer3", "layer2", "layer1", "conv1"][:trainable] + (["bn1"] if trainable == 5 else [])
    for name, parameter in body.named_parameters():
        if name.split(".")[0] not in parts:
            parameter.requires_grad_(False)
    return body


def _pyramid(body: ResNet, stages: Sequence[int], channels: int, coarser: ExtraFPNBlock) -> BackboneWithFPN:
    """A feature pyramid on these stages of a ResNet-18; `coarser` adds the coarser levels."""
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    levels = {f"layer{stage}": str(level) for level, stage in enumerate(stages)}
    return BackboneWithFPN(body, levels, [_channels(stage) for stage in stages], channels, extra_blocks=coarser)


def _stages(returned_layers: Sequence[int]) -> list[int]:
    stages = sorted(returned_layers)
    if not stages or len(set(stages)) < len(stages) or stages[0] < 1 or stages[-1] > 4:
        message = f"expected different stages of the ResNet from 1 to 4, found {list(returned_layers)}"
        raise GossamerError(message, "returned_layers")
    return stages


def _channels(stage: int) -> int:
    """The channels of a stage of a ResNet-18."""
    return 64 * 2 ** (stage - 1)


def _stride(stage: int) -> int:
    """The stride of a stage of a ResNet."""
    return 4 * 2 ** (stage - 1)


def _generator(sizes: Any, ratios: Any, levels: int, octaves: int) -> AnchorGenerator:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    _check_numbers("anchor_sizes", sizes)
    _check_numbers("aspect_ratios", [ratios])
    rows: list[tuple[float, ...]] = [
        tuple(cast("Sequence[float]", size)) if isinstance(size, list | tuple) else _octave(size, octaves)
        for size in sizes
    ]
    if len(rows) != levels or len({len(row) for row in rows}) > 1:
        message = f"expected an entry for each of {levels} feature levels, with the same number of sizes"
        raise GossamerError(f"{message}, found {sizes!r}", "anchor_sizes")
    return AnchorGenerator(tuple(rows), (tuple(ratios),) * levels)


def _octave(size: float, count: int) -> tuple[float, ...]:
    """`count` sizes, from `size` to less than twice that."""
    return tuple(float(int(size * 2 ** (step / count))) for step in range(count)) if count > 1 else (size,)


def _check_numbers(field: str, given: Any) -> None:
    """Raise unless `given` is a list of positive numbers, or of lists of them."""
    rows: list[Any] = list(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else []
    rows = [list(cast("Sequence[Any]", row)) if isinstance(row, list | tuple) else [row] for row in rows]
    valid = all(row and all(type(number) in (int, float) and number > 0 for number in row) for row in rows)
    if not rows or not valid:
        raise GossamerError(f"expected a list of positive numbers, found {given!r}", field)


def _resize_heads(head: nn.Module, before: int, after: int) -> None:
    """Replace the last convolutions for another number of anchors, initialized like in torchvision."""
    owners: list[Any] = list(head.modules())
    for owner in owners:
        for name, layer in list(owner.named_children()):
            if name in {"cls_logits", "bbox_reg", "bbox_pred"} and isinstance(layer, nn.Conv2d):
                size: Any = layer.kernel_size
                outputs = layer.out_channels // before * after
                new = nn.Conv2d(layer.in_channels, outputs, size, padding=layer.padding)  # pyright: ignore[reportArgumentType]
                nn.init.normal_(new.weight, std=0.01)
                if new.bias is not None and layer.bias is not None:
                    nn.init.constant_(new.bias, float(layer.bias.detach()[0]))
                setattr(owner, name, new)
        if hasattr(owner, "num_anchors"):
            owner.num_anchors = after


# The networks of a detector


@dataclass(frozen=True)
class Network:
    """A part of a model that torch.fx can trace."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    """Example inputs of `module`."""
    names: tuple[str, ...]
    """Its parameters, by their names in the whole model."""
    outputs: tuple[str, ...] | None = None
    """The names of its outputs, if known."""


@runtime_checkable
class Detector(Protocol):
    """A custom detector that defines its network."""

    def network(self, images: Tensor) -> Mapping[str, tuple[nn.Module, Any]]: ...


def detector_networks(model: nn.Module, images: Tensor) -> dict[str, Network]:
    """The networks of a detector; `images` (N, C, H, W) are example inputs of the detector, in [0, 1].

    The inputs of a torchvision detector's network are the images after its own transform. RetinaNet, SSD and FCOS have
    one network, Faster R-CNN two: `proposals`, up to the outputs of the region proposal head, and `boxes`, on pooled
    features.
    """
    model = unwrap(model)
    if isinstance(model, Detector):
        return _custom_networks(model, images)
    kind = _torchvision_kind(model)
    if kind is None:
        raise GossamerError(
            f"{type(model).__name__}: the network of this detector is unknown; "
            "give it a method network(images) that returns {name: (module, inputs)}"
        )
    whole: Any = model
    inputs: Tensor = _transformed(whole, images)
    if kind == "one stage":
        return {"network": _network(model, _OneStage(whole), (inputs,), _outputs(whole))}
    return {
        "proposals": _network(model, _Proposals(whole), (inputs,)),
        "boxes": _network(model, _Boxes(whole), (_pooled(whole, len(images)),), ("class_logits", "box_regression")),
    }


def is_detector(model: nn.Module) -> bool:
    """Whether a model is a detector of torchvision, or a custom one with a method `network`."""
    model = unwrap(model)
    return isinstance(model, Detector) or _torchvision_kind(model) is not None


def as_example(model: nn.Module, image: Tensor) -> Any:
    """An image (1, C, H, W) as input of a model: detectors take lists of images."""
    return ([image[0]],) if is_detector(model) else image


class _OneStage(nn.Module):
    """Backbone and head; returns the outputs of the head as a tuple."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.head = _backbone(model.backbone), model.head

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.head(_levels(self.backbone(images))).values())


class _Proposals(nn.Module):
    """Backbone and region proposal head; returns features, objectness and box deltas of all levels."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.rpn = _backbone(model.backbone), nn.Module()
        self.rpn.head = model.rpn.head

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = _levels(self.backbone(images))
        head: Any = self.rpn.head
        objectness, deltas = head(features)
        return (*features, *objectness, *deltas)


class _Boxes(nn.Module):
    """Box head and predictor, on the pooled features of each proposal."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.roi_heads = nn.Module()
        self.roi_heads.box_head = model.roi_heads.box_head
        self.roi_heads.box_predictor = model.roi_heads.box_predictor

    def forward(self, pooled: Tensor) -> tuple[Tensor, ...]:
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor

        head: Any = self.roi_heads.box_head
        predictor: Any = self.roi_heads.box_predictor
        features = head(pooled)
        if not isinstance(predictor, FastRCNNPredictor):
            return predictor(features)
        # Its forward depends on the number of dimensions, which torch.fx cannot trace.
        features = features.flatten(start_dim=1)
        return predictor.cls_score(features), predictor.bbox_pred(features)


def _backbone(backbone: nn.Module) -> nn.Module:
    """A backbone that torch.fx can trace."""
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    return _WithPyramid(backbone) if type(backbone) is BackboneWithFPN else backbone


class _WithPyramid(nn.Module):
    """Feature extractor and feature pyramid."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.body, self.fpn = backbone.body, _Pyramid(backbone.fpn)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(self.body(images))


class _Pyramid(nn.Module):
    """torchvision's feature pyramid (Lin et al. 2017), with its layers in the order of execution.

    A traced graph then has its parameters in this order too. Also avoids torchvision's LastLevelMaxPool, which returns
    a pair that torch.fx cannot trace.
    """

    def __init__(self, fpn: Any) -> None:
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

        super().__init__()
        order = list(reversed(range(len(fpn.inner_blocks))))
        self.inner_blocks = nn.ModuleDict({str(level): fpn.inner_blocks[level] for level in order})
        self.layer_blocks = nn.ModuleDict({str(level): fpn.layer_blocks[level] for level in order})
        self.pooled = type(fpn.extra_blocks) is LastLevelMaxPool
        self.extra_blocks = None if self.pooled else fpn.extra_blocks

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        names, maps = list(features), list(features.values())
        top: Tensor | None = None
        levels: list[Tensor] = []
        for level, inner in self.inner_blocks.items():
            lateral = inner(maps[int(level)])
            if top is not None:
                lateral = lateral + functional.interpolate(top, size=lateral.shape[-2:], mode="nearest")
            top = lateral
            levels.insert(0, self.layer_blocks[level](lateral))
        if self.pooled:
            names.append("pool")
            levels.append(functional.max_pool2d(levels[-1], kernel_size=1, stride=2))
        elif self.extra_blocks is not None:
            levels, names = self.extra_blocks(levels, maps, names)
        return dict(zip(names, levels, strict=True))


def _levels(features: Any) -> list[Tensor]:
    """The features of a backbone that returns one tensor or a dict of several."""
    return list(cast(dict[str, Tensor], features).values()) if isinstance(features, dict) else [features]


def _torchvision_kind(model: nn.Module) -> str | None:
    """Whether a torchvision detector has one stage or two; None for other models."""
    if not any(base.__module__.startswith("torchvision.models.detection.") for base in type(model).__mro__):
        return None
    if isinstance(getattr(model, "roi_heads", None), nn.Module):
        return "two stages"
    return "one stage" if isinstance(getattr(model, "head", None), nn.Module) else None


def _outputs(model: Any) -> tuple[str, ...]:
    """The names of the outputs of a one-stage head, in order."""
    from torchvision.models.detection import FCOS, RetinaNet

    if isinstance(model, FCOS):
        return ("cls_logits", "bbox_regression", "bbox_ctrness")
    return ("cls_logits", "bbox_regression") if isinstance(model, RetinaNet) else ("bbox_regression", "cls_logits")


def _transformed(model: Any, images: Tensor) -> Tensor:
    """Images after the detector's own transform in evaluation mode, which is not random."""
    transform: nn.Module = model.transform
    training = transform.training
    transform.training = False
    try:
        with torch.no_grad():
            return transform(list(images))[0].tensors
    finally:
        transform.training = training


def _pooled(model: Any, count: int) -> Tensor:
    """Fixed random numbers in the shape of pooled features."""
    like = next(model.parameters())
    shape = (count, model.backbone.out_channels, *model.roi_heads.box_roi_pool.output_size)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(like.device, like.dtype)


def _custom_networks(model: Any, images: Tensor) -> dict[str, Network]:
    name = type(model).__name__
    given: Any = model.network(images)
    if not isinstance(given, Mapping) or not given:
        raise GossamerError(f"{name}.network: expected a dict of name to (module, inputs), found {given!r}")
    networks: dict[str, Network] = {}
    for key, entry in cast("Mapping[str, Any]", given).items():
        try:
            module, inputs = entry
            inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        except (TypeError, ValueError):
            module, inputs = None, ()
        if not isinstance(module, nn.Module) or not inputs or not all(isinstance(value, Tensor) for value in inputs):
            raise GossamerError(f"{name}.network: '{key}': expected (module, inputs) with tensors as inputs")
        networks[key] = _network(model, module, inputs)
    return networks


def _network(
    model: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[str, ...] | None = None
) -> Network:
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    owned = {id(module) for module in model.modules()}
    for part in module.modules():
        if id(part) not in owned:  # the modules above, around the model's layers
            part.training = model.training
    used = [parameter for _, parameter in named_parameters(module)]
    if not used or any(id(parameter) not in names for parameter in used):
        raise GossamerError(
            f"{type(model).__name__}: its network must consist of the model's own layers, but has "
            + ("parameters that the model lacks" if used else "no parameters")
        )
    return Network(module, inputs, tuple(names[id(parameter)] for parameter in used), outputs)
