"""Models by name, by import path, and from libraries that may be there."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Net
from tests.runner.nets import build_net


class Plain(nn.Module):
    """A user's model."""

    def __init__(self, num_classes=4, width=8):
        super().__init__()
        self.width = width
        self.fc = nn.Linear(width, num_classes)


class OwnDetector(Plain):
    def network(self, images):
        return {"network": (self.fc, images)}


@pytest.fixture
def own(monkeypatch):
    """A module of the user's, with functions that make models."""
    module = ModuleType("own_networks")
    module.plain = Plain
    module.detector = OwnDetector
    module.fixed = lambda: nn.Linear(3, 7)
    module.number = lambda: 5
    module.broken = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "own_networks", module)


def outputs(model):
    return model.fc.out_features


def test_a_classifier_has_one_output_for_each_class():
    assert outputs(build_net(Net(type="resnet18"), 10)) == 10


def test_a_detector_has_one_class_more_for_the_background():
    model = build_net(Net(type="retinanet_resnet18_fpn"), 10)
    assert model.head.classification_head.num_classes == 11


def test_faster_rcnn_has_batch_norm_that_trains_and_no_frozen_layer():
    model = build_net(Net(type="fasterrcnn_resnet50_fpn", kwargs={"min_size": 64}), 3)
    assert any(isinstance(part, nn.BatchNorm2d) for part in model.backbone.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.roi_heads.box_predictor.cls_score.out_features == 4


def test_kwargs_reach_the_builder():
    assert build_net(Net(type="resnet18", kwargs={"width_per_group": 64, "zero_init_residual": True}), 2)
    assert build_net(Net(type="retinanet_resnet18_fpn", kwargs={"min_size": 96}), 2).transform.min_size == (96,)


def test_an_unknown_name_tells_the_nearest():
    with pytest.raises(GossamerError, match="'retinanet_resnet18_fpn'"):
        build_net(Net(type="retinanet_resnet18_fnp"), 2)


def test_an_unknown_argument_is_reported_with_the_call():
    with pytest.raises(GossamerError, match=r"net: resnet18\(num_classes=2, wdith=3\) failed: TypeError"):
        build_net(Net(type="resnet18", kwargs={"wdith": 3}), 2)


def test_num_classes_stands_in_one_place():
    with pytest.raises(GossamerError, match=r"net\.kwargs\.num_classes"):
        build_net(Net(type="resnet18", kwargs={"num_classes": 5}), 2)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deeplabv3_resnet50", "is a segmentation model"),
        ("r3d_18", "is a video model"),
        ("maskrcnn_resnet50_fpn", "is not trained on boxes alone"),
    ],
)
def test_models_for_other_things_are_refused(name, why):
    with pytest.raises(GossamerError, match=why):
        build_net(Net(type=name), 2)


def test_a_task_that_the_net_is_not_for_is_refused(own):
    with pytest.raises(GossamerError, match="is a detector"):
        build_net(Net(type="own_networks:detector"), 2, "classification")
    with pytest.raises(GossamerError, match="is not a detector"):
        build_net(Net(type="resnet18"), 2, "detection")


def test_a_function_of_ones_own_gets_kwargs_and_the_number_of_classes(own):
    model = build_net(Net(type="own_networks:plain", kwargs={"width": 5}), 3)
    assert (model.fc.in_features, model.fc.out_features) == (5, 3)


def test_a_function_that_takes_no_number_of_classes_is_called_without(own):
    assert build_net(Net(type="own_networks:fixed"), 3).out_features == 7


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("own_networks:number", "expected a torch.nn.Module, found int"),
        ("own_networks:broken", "ZeroDivisionError"),
        ("own_networks:plian", "nearest: 'plain'"),
        ("no_such_package:model", "cannot import 'no_such_package'"),
    ],
)
def test_what_is_wrong_with_ones_own_is_reported(own, word, message):
    with pytest.raises(GossamerError, match=message):
        build_net(Net(type=word), 3)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(GossamerError, match=f"needs {library}, which is not installed: pip install {library}"):
        build_net(Net(type=f"{library}/name"), 3)


def test_timm_gets_name_classes_and_kwargs(monkeypatch):
    fake = ModuleType("timm")
    fake.is_model = lambda name: name == "tiny"
    fake.list_models = lambda: ["tiny"]
    fake.create_model = lambda name, num_classes, pretrained=False: nn.Linear(2, num_classes)
    monkeypatch.setitem(sys.modules, "timm", fake)
    assert build_net(Net(type="timm/tiny", kwargs={"pretrained": True}), 6).out_features == 6
    with pytest.raises(GossamerError, match="timm has no model 'tony'; nearest: 'tiny'"):
        build_net(Net(type="timm/tony"), 6)


def test_transformers_starts_from_a_config_unless_pretrained_is_asked_for(monkeypatch):
    fake = ModuleType("transformers")
    calls = []

    def record(origin):
        def make(*arguments, **kwargs):
            calls.append((origin, arguments, kwargs))
            return nn.Identity()

        return make

    fake.AutoConfig = SimpleNamespace(from_pretrained=lambda name, **kwargs: (name, kwargs))
    fake.AutoModelForImageClassification = SimpleNamespace(
        from_config=record("config"), from_pretrained=record("weights")
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    build_net(Net(type="transformers/owner/name"), 4)
    build_net(Net(type="transformers/owner/name", kwargs={"pretrained": True}), 4)
    own_code_only = {"trust_remote_code": False}
    assert calls[0] == ("config", (("owner/name", {"num_labels": 4, **own_code_only}),), own_code_only)
    assert calls[1][0] == "weights"
    assert calls[1][1] == ("owner/name",)
    assert calls[1][2] == {"num_labels": 4, "ignore_mismatched_sizes": True, **own_code_only}
    with pytest.raises(GossamerError, match="trust_remote_code: code of a repository is never run"):
        build_net(Net(type="transformers/owner/name", kwargs={"trust_remote_code": True}), 4)


def test_equal_seeds_make_equal_weights():
    torch.manual_seed(3)
    first = build_net(Net(type="retinanet_resnet18_fpn"), 2).state_dict()
    torch.manual_seed(3)
    second = build_net(Net(type="retinanet_resnet18_fpn"), 2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_argument_that_a_detector_would_take_and_forget_is_reported() -> None:
    for kind in ("retinanet_resnet18_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn"):
        with pytest.raises(GossamerError, match=r"^net\.kwargs\.min_sise: unknown argument; nearest: 'min_size'"):
            build_net(Net(type=kind, kwargs={"min_sise": 64}), 3)


def test_a_detector_of_ones_own_with_another_number_of_classes_is_refused(monkeypatch):
    module = ModuleType("own_detector")
    module.make = lambda: build_net(Net(type="retinanet_resnet18_fpn"), 7)
    monkeypatch.setitem(sys.modules, "own_detector", module)
    with pytest.raises(GossamerError, match="has 7 classes, but the config has 3"):
        build_net(Net(type="own_detector:make"), 3)
