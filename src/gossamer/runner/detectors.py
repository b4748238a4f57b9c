"""Detectors that torchvision lacks, RetinaNet and Faster R-CNN on ResNet-18, and anchors for objects of any size.

As in torchvision, the background is class 0 and counts in `num_classes`, which is therefore one more than in a config.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from gossamer.errors import GossamerError

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
    from torchvision.models import ResNet18_Weights, resnet18

    if weights is None and trainable is not None:
        message = "all layers are trained without weights_backbone; remove it"
        raise GossamerError(message, "trainable_backbone_layers")
    body = resnet18(weights=ResNet18_Weights.verify(weights))
    _freeze(body, 5 if weights is None else (3 if trainable is None else trainable))
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

    rows = [_octave(row[0], octaves) if single else row for row, single in _rows("anchor_sizes", sizes)]
    if len(rows) != levels:
        message = f"expected an entry for each of {levels} feature levels, found {len(rows)}"
        raise GossamerError(message, "anchor_sizes")
    if len({len(row) for row in rows}) > 1:
        raise GossamerError("all feature levels need the same number of sizes", "anchor_sizes")
    shapes = _rows("aspect_ratios", ratios)
    if not all(single for _, single in shapes):
        raise GossamerError("expected a list of numbers, which all levels share", "aspect_ratios")
    return AnchorGenerator(tuple(rows), (tuple(row[0] for row, _ in shapes),) * levels)


def _octave(size: float, count: int) -> tuple[float, ...]:
    """`count` sizes, from `size` to less than twice that."""
    return tuple(float(int(size * 2 ** (step / count))) for step in range(count)) if count > 1 else (size,)


def _rows(field: str, given: Any) -> list[tuple[tuple[float, ...], bool]]:
    """Each entry as a row of positive numbers, and whether it is a single number."""
    rows: list[tuple[tuple[float, ...], bool]] = []
    for entry in cast(Sequence[Any], given) if isinstance(given, list | tuple) else ():
        row = tuple(cast(Sequence[Any], entry)) if isinstance(entry, list | tuple) else (entry,)
        if not row or not all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in row):
            rows = []
            break
        rows.append((row, not isinstance(entry, list | tuple)))
    if not rows:
        raise GossamerError(f"expected a list of positive numbers, found {given!r}", field)
    return rows


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


def _freeze(body: nn.Module, trainable: int) -> None:
    """Freeze a ResNet except for the last `trainable` of its five parts."""
    if not 0 <= trainable <= 5:
        message = f"expected a number from 0 to 5, found {trainable}"
        raise GossamerError(message, "trainable_backbone_layers")
    parts = ["layer4", "layer3", "layer2", "layer1", "conv1"][:trainable] + (["bn1"] if trainable == 5 else [])
    for name, parameter in body.named_parameters():
        if name.split(".")[0] not in parts:
            parameter.requires_grad_(False)
