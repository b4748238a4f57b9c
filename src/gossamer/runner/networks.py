"""The networks of a model: its parts with tensors as inputs and outputs, without post-processing.

torch.fx traces a network and export writes it; anchors, non-maximum suppression and other post-processing are not part
of it. A network consists of the model's own layers, under their names in the model.

A custom detector defines its network by one method:

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
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.model import named_parameters, unwrap


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
    for key, entry in cast(Mapping[Any, Any], given).items():
        pair = cast(Sequence[Any], entry) if isinstance(entry, tuple | list) else ()
        inputs: Any = pair[1] if len(pair) == 2 else None
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        if not (
            len(pair) == 2
            and isinstance(pair[0], nn.Module)
            and isinstance(inputs, tuple | list)
            and inputs
            and all(isinstance(value, Tensor) for value in cast(Sequence[Any], inputs))
        ):
            raise GossamerError(f"{name}.network: '{key}': expected (module, inputs) with tensors as inputs")
        networks[str(key)] = _network(model, pair[0], tuple(cast(Sequence[Tensor], inputs)))
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
