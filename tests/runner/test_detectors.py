"""RetinaNet and Faster R-CNN on ResNet-18, and anchors that fit small images."""

import pytest
import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Net
from tests.runner.nets import build_net

SMALL = {"min_size": 64, "max_size": 64}


def retinanet(**kwargs):
    return build_net(Net(type="retinanet_resnet18_fpn", kwargs={**SMALL, **kwargs}), 3)


def faster(**kwargs):
    return build_net(Net(type="fasterrcnn_mobilenet_v3_large_fpn", kwargs={**SMALL, **kwargs}), 3)


def faster18(**kwargs):
    return build_net(Net(type="fasterrcnn_resnet18_fpn", kwargs={**SMALL, "pyramid_channels": 32, **kwargs}), 3)


def targets(*boxes):
    found = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": found, "labels": torch.arange(1, len(boxes) + 1)}


def trained_once(model):
    """The losses on an image with two boxes and one with none, after which all parameters have finite gradients."""
    torch.manual_seed(0)
    model.train()
    losses = model(
        [torch.rand(3, 64, 64), torch.rand(3, 64, 48)], [targets([4, 4, 30, 40], [30, 8, 60, 60]), targets()]
    )
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return losses


def test_batch_norm_trains_and_the_head_has_group_norm_and_giou():
    model = retinanet()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(model.backbone.body.bn1, nn.BatchNorm2d)
    assert any(isinstance(part, nn.GroupNorm) for part in model.head.modules())
    assert model.head.regression_head._loss_type == "giou"


def test_the_pyramid_has_five_levels_from_stride_eight_or_finer_ones():
    levels = retinanet().eval().backbone(torch.rand(1, 3, 64, 64))
    assert [level.shape[-1] for level in levels.values()] == [8, 4, 2, 1, 1]
    model = retinanet(returned_layers=[1, 2]).eval()
    levels = model.backbone(torch.rand(1, 3, 64, 64))
    assert [level.shape[-1] for level in levels.values()] == [16, 8, 4, 2]
    assert [row[0] for row in model.anchor_generator.sizes] == [16, 32, 64, 128]


def test_anchors_are_those_of_the_paper_unless_others_are_given():
    from torchvision.models.detection.retinanet import _default_anchorgen

    assert retinanet().anchor_generator.sizes == _default_anchorgen().sizes


def test_a_narrow_pyramid_has_a_narrow_head():
    model = retinanet(pyramid_channels=64)
    assert model.head.regression_head.bbox_reg.in_channels == 64
    trained_once(model)


def test_a_number_stands_for_three_sizes_in_an_octave():
    model = retinanet(anchor_sizes=[8, 16, 32, 64, 96])
    assert model.anchor_generator.sizes[0] == (8.0, 10.0, 12.0)
    assert set(trained_once(model)) == {"classification", "bbox_regression"}


def test_anchors_have_the_sizes_and_ratios_asked_for():
    model = retinanet(anchor_sizes=[[8], [16], [24], [32], [48]], aspect_ratios=[1.0, 2.0])
    assert model.anchor_generator.num_anchors_per_location() == [2] * 5
    assert model.head.regression_head.bbox_reg.out_channels == 2 * 4
    trained_once(model)


@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn_v2", "retinanet_resnet50_fpn"])
def test_torchvisions_retinanet_takes_anchors_too(name):
    kwargs = {**SMALL, "anchor_sizes": [[8], [16], [24], [32], [48]]}
    model = build_net(Net(type=name, kwargs=kwargs), 3)
    head = model.head.classification_head
    assert (head.num_anchors, head.cls_logits.out_channels) == (3, 3 * 4)
    assert head.cls_logits.bias.unique().item() == pytest.approx(-4.595, abs=1e-3)
    assert len(model.eval()([torch.rand(3, 64, 64)])) == 1


def test_faster_rcnn_takes_anchors():
    model = faster(anchor_sizes=[8, 16, 32])
    assert model.rpn.anchor_generator.sizes == ((8,), (16,), (32,))
    assert model.rpn.head.cls_logits.out_channels == 3
    trained_once(model)


def test_faster_rcnn_on_resnet18_trains_batch_norm_and_all_of_its_layers():
    model = faster18()
    assert isinstance(model.backbone.body.bn1, nn.BatchNorm2d)
    assert set(trained_once(model)) == {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}


def test_faster_rcnn_on_resnet18_has_the_levels_and_anchors_of_torchvisions():
    from torchvision.models.detection.faster_rcnn import _default_anchorgen

    model = faster18().eval()
    levels = model.backbone(torch.rand(1, 3, 64, 64))
    assert [level.shape[1:] for level in levels.values()] == [(32, side, side) for side in (16, 8, 4, 2, 1)]
    anchors = model.rpn.anchor_generator
    assert (anchors.sizes, anchors.aspect_ratios) == (_default_anchorgen().sizes, _default_anchorgen().aspect_ratios)
    assert model.roi_heads.box_predictor.cls_score.out_features == 4


def test_faster_rcnn_on_resnet18_pools_boxes_from_the_stages_asked_for():
    model = faster18(returned_layers=[2, 3], anchor_sizes=[16, 32, 48], aspect_ratios=[1.0])
    assert model.rpn.anchor_generator.sizes == ((16,), (32,), (48,))
    assert model.roi_heads.box_roi_pool.featmap_names == ["0", "1"]
    trained_once(model)
    assert model.roi_heads.box_roi_pool.scales == [1 / 8, 1 / 16]


def test_aspect_ratios_alone_keep_the_sizes():
    model = faster(aspect_ratios=[1.0])
    assert model.rpn.anchor_generator.sizes[0] == (32, 64, 128, 256, 512)
    assert model.rpn.head.bbox_pred.out_channels == 5 * 4


@pytest.mark.parametrize(
    ("build", "kwargs", "message"),
    [
        (retinanet, {"anchor_sizes": [8, 16]}, "anchor_sizes: expected an entry for each of 5 feature levels"),
        (retinanet, {"anchor_sizes": [8, 16, -4, 32, 64]}, "anchor_sizes: expected a list of positive numbers"),
        (retinanet, {"anchor_sizes": 8}, "anchor_sizes: expected a list of positive numbers"),
        (retinanet, {"anchor_sizes": [[8, 9], [16], [24], [32], [48]]}, "with the same number of sizes"),
        (retinanet, {"aspect_ratios": [[1.0], [2.0]]}, "aspect_ratios: expected a list of positive numbers"),
        (retinanet, {"returned_layers": [0, 1]}, "returned_layers: expected different stages of the ResNet"),
        (retinanet, {"pyramid_channels": 100}, "pyramid_channels: expected a multiple of 32, at least 64, found 100"),
        (retinanet, {"trainable_backbone_layers": 2}, "trainable_backbone_layers: all layers are trained without"),
        (faster18, {"anchor_sizes": [8, 16]}, "anchor_sizes: expected an entry for each of 5 feature levels"),
        (faster18, {"pyramid_channels": 0}, "pyramid_channels: expected a positive number, found 0"),
        (faster18, {"min_sise": 64}, "min_sise"),
    ],
)
def test_arguments_that_do_not_fit_are_reported_by_their_place(build, kwargs, message):
    with pytest.raises(GossamerError, match=r"^net\.kwargs\..*" + message):
        build(**kwargs)


def test_a_detector_without_such_anchors_says_so():
    with pytest.raises(GossamerError, match=r"^net\.kwargs\.anchor_sizes: not supported for FCOS"):
        build_net(Net(type="fcos_resnet50_fpn", kwargs={"anchor_sizes": [8]}), 3)
