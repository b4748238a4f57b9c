"""Detectors: RetinaNet and Faster R-CNN on ResNet-18, which torchvision lacks, and anchors for objects of any size.

Detectors here and in torchvision count the background as class 0, so that
`num_classes` is one more than in a config. Knows nothing of configs, data or
training.
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
"""The sides of anchors for each level of features: a number, or several."""


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
    """RetinaNet on ResNet-18-FPN with P6 and P7, as torchvision's second version on ResNet-50.

    BatchNorm trains, the head has GroupNorm, boxes learn by GIoU. `returned_layers` are the stages of ResNet that
    feed the pyramid (1 has stride 4); `anchor_sizes` has an entry for each of them and two more for P6 and P7. Most of
    the work is in the head, and goes with the square of `pyramid_channels`.
    """
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.retinanet import RetinaNetHead
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    if pyramid_channels < 2 * GROUPS or pyramid_channels % GROUPS:  # a group of one channel has no spread
        raise GossamerError(
            f"pyramid_channels: expected a multiple of {GROUPS} from {2 * GROUPS} on, found {pyramid_channels}"
        )
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
    """Faster R-CNN on ResNet-18-FPN, as torchvision's on ResNet-50, except that BatchNorm trains.

    `returned_layers` are the stages of ResNet that feed the pyramid and that boxes are pooled from (1 has stride 4);
    `anchor_sizes` has an entry for each of them and one more for the coarsest level. The cost of the proposal head
    grows with the square of `pyramid_channels`, that of the box head in proportion to it.
    """
    from torchvision.models.detection import FasterRCNN
    from torchvision.ops import MultiScaleRoIAlign
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    if pyramid_channels < 1:
        raise GossamerError(f"pyramid_channels: expected a positive number, found {pyramid_channels}")
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
    """Give torchvision's RetinaNet or Faster R-CNN other anchors; for another number of them its last layers are new.

    In RetinaNet a number stands for three sizes within an octave, in Faster R-CNN for one.
    """
    from torchvision.models.detection import FasterRCNN, RetinaNet

    if isinstance(model, RetinaNet):
        octaves = 3
    elif isinstance(model, FasterRCNN):
        octaves = 1
    else:
        raise GossamerError(f"anchor_sizes: {type(model).__name__} does not take them; RetinaNet and Faster R-CNN do")
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
        raise GossamerError("trainable_backbone_layers: without weights_backbone all layers train; leave it out")
    body = resnet18(weights=ResNet18_Weights.verify(weights))
    _freeze(body, 5 if weights is None else (3 if trainable is None else trainable))
    return body


def _pyramid(body: ResNet, stages: Sequence[int], channels: int, coarser: ExtraFPNBlock) -> BackboneWithFPN:
    """A feature pyramid on these stages of ResNet-18; `coarser` adds the levels above them."""
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    levels = {f"layer{stage}": str(level) for level, stage in enumerate(stages)}
    return BackboneWithFPN(body, levels, [_channels(stage) for stage in stages], channels, extra_blocks=coarser)


def _stages(returned_layers: Sequence[int]) -> list[int]:
    stages = sorted(returned_layers)
    if not stages or len(set(stages)) < len(stages) or stages[0] < 1 or stages[-1] > 4:
        raise GossamerError(f"returned_layers: expected stages of ResNet from 1 to 4, found {list(returned_layers)}")
    return stages


def _channels(stage: int) -> int:
    """Channels of a stage of ResNet-18."""
    return 64 * 2 ** (stage - 1)


def _stride(stage: int) -> int:
    """Pixels of the image for one of a stage of ResNet."""
    return 4 * 2 ** (stage - 1)


def _generator(sizes: Any, ratios: Any, levels: int, octaves: int) -> AnchorGenerator:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    rows = [_octave(row[0], octaves) if single else row for row, single in _rows("anchor_sizes", sizes)]
    if len(rows) != levels:
        raise GossamerError(
            f"anchor_sizes: expected an entry for each of {levels} levels of features, found {len(rows)}"
        )
    if len({len(row) for row in rows}) > 1:
        raise GossamerError("anchor_sizes: all levels of features must have the same number of sizes")
    shapes = _rows("aspect_ratios", ratios)
    if not all(single for _, single in shapes):
        raise GossamerError("aspect_ratios: expected numbers, which all levels share")
    return AnchorGenerator(tuple(rows), (tuple(row[0] for row, _ in shapes),) * levels)


def _octave(size: float, count: int) -> tuple[float, ...]:
    """`count` sizes from `size` up to below its double."""
    return tuple(float(int(size * 2 ** (step / count))) for step in range(count)) if count > 1 else (size,)


def _rows(field: str, given: Any) -> list[tuple[tuple[float, ...], bool]]:
    """Each entry as a row of positive numbers, and whether it was a single number."""
    rows: list[tuple[tuple[float, ...], bool]] = []
    for entry in cast(Sequence[Any], given) if isinstance(given, list | tuple) else ():
        row = tuple(cast(Sequence[Any], entry)) if isinstance(entry, list | tuple) else (entry,)
        if not row or not all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in row):
            rows = []
            break
        rows.append((row, not isinstance(entry, list | tuple)))
    if not rows:
        raise GossamerError(f"{field}: expected a list of positive numbers, found {given!r}")
    return rows


def _resize_heads(head: nn.Module, before: int, after: int) -> None:
    """New last convolutions for another number of anchors, begun as torchvision begins them."""
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
    """Leave the last `trainable` of five parts of a ResNet to training."""
    if not 0 <= trainable <= 5:
        raise GossamerError(f"trainable_backbone_layers: expected a number from 0 to 5, found {trainable}")
    parts = ["layer4", "layer3", "layer2", "layer1", "conv1"][:trainable] + (["bn1"] if trainable == 5 else [])
    for name, parameter in body.named_parameters():
        if name.split(".")[0] not in parts:
            parameter.requires_grad_(False)
