"""What is network and what is post-processing: followed by torch.fx, exported, made of the model's own layers."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import fx, nn

from gossamer.errors import GossamerError
from gossamer.export import to_onnx
from gossamer.msbench.tracing import as_graph_module
from gossamer.runner.config.schema import Net
from gossamer.runner.detectors import detector_networks, is_detector
from tests.runner.nets import build_net

SMALL = {"min_size": 64, "max_size": 64}
NAMES = {
    "retinanet_resnet18_fpn": {"network"},
    "retinanet_resnet50_fpn_v2": {"network"},
    "fasterrcnn_resnet18_fpn": {"proposals", "boxes"},
    "fasterrcnn_resnet50_fpn": {"proposals", "boxes"},
    "fasterrcnn_mobilenet_v3_large_fpn": {"proposals", "boxes"},
    "fcos_resnet50_fpn": {"network"},
}


def detector(name, **kwargs):
    torch.manual_seed(0)
    return build_net(Net(type=name, kwargs={**SMALL, **kwargs}), 3)


def images(count=2, size=64):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_torch_fx_follows_the_networks_of_a_detector(name):
    model = detector(name)
    networks = detector_networks(model, images())
    assert set(networks) == NAMES[name]
    for network in networks.values():
        graph = as_graph_module(network.module, [])
        assert isinstance(graph, fx.GraphModule)
        for training in (False, True):
            model.train(training)
            with torch.no_grad():
                for ours, theirs in zip(network.module(*network.inputs), graph(*network.inputs), strict=True):
                    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large"])
def test_torch_fx_follows_ssd(name):
    (network,) = detector_networks(build_net(Net(type=name), 3).eval(), images()).values()
    with torch.no_grad():
        for ours, theirs in zip(
            network.module(*network.inputs), fx.symbolic_trace(network.module)(*network.inputs), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_networks_have_the_parameters_of_the_model_under_their_names(name):
    model = detector(name)
    own = dict(model.named_parameters())
    used = Counter()
    for network in detector_networks(model, images()).values():
        found = dict(network.module.named_parameters())
        assert set(found) == set(network.names)
        assert all(found[key] is own[key] for key in found)
        used.update(network.names)
    assert used == Counter(own.keys())


def test_the_network_of_retinanet_computes_what_its_head_computes():
    model = detector("retinanet_resnet18_fpn").eval()
    network = detector_networks(model, images())["network"]
    with torch.no_grad():
        head = model.head(list(model.backbone(*network.inputs).values()))
        found = network.module(*network.inputs)
    assert network.outputs == tuple(head)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, head.values(), strict=True))


def test_the_two_networks_of_faster_rcnn_compute_what_its_heads_compute():
    model = detector("fasterrcnn_mobilenet_v3_large_fpn").eval()
    networks = detector_networks(model, images())
    with torch.no_grad():
        features = list(model.backbone(*networks["proposals"].inputs).values())
        objectness, deltas = model.rpn.head(features)
        found = networks["proposals"].module(*networks["proposals"].inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, [*features, *objectness, *deltas], strict=True))
        pooled = networks["boxes"].inputs[0]
        boxes = model.roi_heads.box_predictor(model.roi_heads.box_head(pooled))
        assert all(torch.equal(a, b) for a, b in zip(networks["boxes"].module(pooled), boxes, strict=True))


def test_inputs_are_what_the_detector_makes_of_images():
    model = detector("retinanet_resnet18_fpn", image_mean=[0.5] * 3, image_std=[0.5] * 3).train()
    state = torch.get_rng_state()
    (given,) = detector_networks(model, images(size=96))["network"].inputs
    assert given.shape == (2, 3, 64, 64)
    assert given.min() < 0
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.transform.training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retinanet_resnet18_fpn", "fasterrcnn_mobilenet_v3_large_fpn"])
def test_networks_run_in_onnxruntime_with_the_same_numbers(name, tmp_path):
    import onnxruntime

    model = detector(name).eval()
    for key, network in detector_networks(model, images(1)).items():
        path = to_onnx(network.module, tmp_path / f"{key}.onnx", network.inputs)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = session.run(None, {session.get_inputs()[0].name: network.inputs[0].numpy()})
        with torch.no_grad():
            for ours, theirs in zip(network.module(*network.inputs), found, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-3, atol=1e-4)


class Own(nn.Module):
    """A detector of the user's, with post-processing that has a parameter of its own."""

    def __init__(self, answer=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        self.temperature = nn.Linear(1, 1)
        self.answer = answer

    def network(self, images):
        return {"network": (self.layers, images)} if self.answer is None else self.answer


def test_a_detector_of_ones_own_says_what_its_network_is():
    model = Own()
    network = detector_networks(model, images())["network"]
    assert network.module is model.layers
    assert network.names == ("layers.0.weight", "layers.0.bias")


def test_a_wrapped_detector_is_still_one():
    wrapped = nn.DataParallel(Own())
    assert is_detector(wrapped)
    assert set(detector_networks(wrapped, images())) == {"network"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "expected a dict of name to"),
        ({}, "expected a dict of name to"),
        ({"a": nn.Identity()}, "'a': expected .module, inputs. with tensors"),
        ({"a": (nn.Identity(), "images")}, "'a': expected .module, inputs. with tensors"),
        ({"a": (nn.Identity(), images())}, "has no parameters"),
        ({"a": (nn.Linear(2, 2), images())}, "has parameters that the model lacks"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(answer, message):
    with pytest.raises(GossamerError, match=message):
        detector_networks(Own(answer), images())


def test_a_model_that_does_not_say_is_no_detector():
    assert not is_detector(nn.Linear(2, 2))
    with pytest.raises(GossamerError, match="Linear: the network of this detector is unknown"):
        detector_networks(nn.Linear(2, 2), images())
