"""Losses of classifiers and detectors, their modes, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Config, Net, Trainer
from gossamer.runner.tasks import Classification, ObjectDetection, build_task
from tests.runner.nets import build_net


def batch(images, targets):
    return SimpleNamespace(images=images, targets=targets)


def config(**more):
    return Config(net=Net(type="resnet18"), **more)


class WithLogits(nn.Module):
    """A model that answers with an object, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, images):
        return SimpleNamespace(logits=self.fc(images.flatten(1)))


class Remembering(nn.Module):
    """A detector that keeps what it was called with."""

    def __init__(self, losses=None, found=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.losses, self.found = losses, found
        self.calls = []

    def network(self, images):
        return {"network": (self, images)}

    def forward(self, images, targets=None):
        self.calls.append((images, targets, self.training, torch.is_grad_enabled()))
        return (self.losses or {"a": self.scale * 2}) if self.training else (self.found or [])


def test_cross_entropy_with_label_smoothing():
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    (loss,) = Classification(3, 0.1).losses(nn.Identity(), batch(logits, targets)).values()
    shares = torch.full((4, 3), 0.1 / 3)
    shares[range(4), targets] += 0.9
    assert torch.allclose(loss, -(shares * logits.log_softmax(1)).sum(1).mean())


def test_a_model_may_return_an_object_with_logits():
    model, images, targets = WithLogits(), torch.randn(2, 6), torch.tensor([1, 3])
    (loss,) = Classification(4).losses(model, batch(images, targets)).values()
    assert torch.equal(loss, functional.cross_entropy(model.fc(images), targets))
    network = Classification(4).networks(model, images)["network"]
    assert torch.equal(network.module(*network.inputs), model.fc(images))
    assert network.names == ("fc.weight", "fc.bias")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.rand(2, 7), r"logits of shape \(2, 7\) for 4 classes"),
        ([torch.rand(2, 4)], "found list"),
    ],
)
def test_another_number_of_classes_is_reported_in_the_first_batch(output, message):
    with pytest.raises(GossamerError, match=message):
        Classification(4).losses(lambda images: output, batch(torch.rand(2, 3), torch.tensor([0, 1])))


def test_every_part_has_its_own_mode_back_after_evaluation():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[1].eval()
    modes = [part.training for part in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Classification(2).evaluator().update(model, batch(torch.rand(4, 3), torch.tensor([0, 1, 0, 1])))
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_detectors_own_losses_are_used_and_crowds_are_not_learned():
    model = Remembering()
    targets = [
        {"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 2]), "iscrowd": torch.tensor([0, 1])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    losses = ObjectDetection(2).losses(model, batch([torch.rand(3, 8, 8)] * 2, targets))
    assert losses == {"a": 2.0}
    (_, given, training, _) = model.calls[0]
    assert training
    assert [len(target["boxes"]) for target in given] == [1, 0]
    assert given[0]["labels"].tolist() == [1]


def test_predictions_are_made_in_evaluation_mode_without_gradients():
    answer = {"boxes": torch.rand(1, 4), "labels": torch.tensor([2]), "scores": torch.rand(1), "masks": torch.rand(1)}
    model = Remembering(found=[answer])
    (found,) = ObjectDetection(2).predict(model, [torch.rand(3, 8, 8)])
    assert set(found) == {"boxes", "labels", "scores"}
    assert model.calls[0][2:] == (False, False)
    assert model.training


@pytest.mark.parametrize("label", [0, 3])
def test_a_box_of_a_class_that_there_is_not_is_reported_in_the_first_batch(label):
    truth = [{"boxes": torch.rand(1, 4), "labels": torch.tensor([label])}]
    with pytest.raises(GossamerError, match=f"a box has class {label}, but classes are 1 to 2"):
        ObjectDetection(2).losses(Remembering(), batch([torch.rand(3, 8, 8)], truth))


def test_what_is_found_of_a_class_that_there_is_not_is_reported_and_background_is_left_out():
    answer = {"boxes": torch.rand(2, 4), "labels": torch.tensor([0, 2]), "scores": torch.tensor([0.9, 0.8])}
    (found,) = ObjectDetection(2).predict(Remembering(found=[answer]), [torch.rand(3, 8, 8)])
    assert found["labels"].tolist() == [2]
    assert found["scores"].tolist() == pytest.approx([0.8])
    with pytest.raises(GossamerError, match="a box has class 2, but classes are 1 to 1"):
        ObjectDetection(1).predict(Remembering(found=[answer]), [torch.rand(3, 8, 8)])


def test_a_detector_that_answers_otherwise_is_reported():
    truth = [{"boxes": torch.rand(1, 4), "labels": torch.tensor([1])}]
    with pytest.raises(GossamerError, match="expected a dict of losses from the detector in training, found list"):
        ObjectDetection(2).losses(Remembering(losses=[1]), batch([torch.rand(3, 8, 8)], truth))
    with pytest.raises(GossamerError, match="expected a list of dicts of boxes"):
        ObjectDetection(2).predict(Remembering(found={"boxes": 1}), [torch.rand(3, 8, 8)])


@pytest.mark.parametrize("name", ["retinanet_resnet18_fpn", "fasterrcnn_mobilenet_v3_large_fpn"])
def test_a_batch_of_empty_images_trains_and_evaluates(name):
    torch.manual_seed(0)
    model = build_net(Net(type=name, kwargs={"min_size": 64, "max_size": 64}), 2).train()
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    images = batch([torch.rand(3, 64, 64)] * 2, [empty, empty])
    task = ObjectDetection(2)
    loss = sum(task.losses(model, images).values())
    loss.backward()
    assert loss.isfinite()
    evaluator = task.evaluator()
    evaluator.update(model, images)
    assert evaluator.compute()["mAP"] in {-1.0, 0.0}


def test_the_task_follows_from_the_model():
    assert build_task(config(), nn.Linear(2, 2), 2).metric == "top1"
    assert build_task(config(), Remembering(), 2).metric == "mAP"


def test_label_smoothing_reaches_classifiers_and_is_refused_for_detectors():
    smooth = config(trainer=Trainer(label_smoothing=0.1))
    assert build_task(smooth, nn.Linear(2, 2), 2).label_smoothing == 0.1
    with pytest.raises(GossamerError, match=r"trainer\.label_smoothing"):
        build_task(smooth, Remembering(), 2)


def test_more_classes_in_the_data_than_in_the_config_are_refused():
    with pytest.raises(GossamerError, match="the config has 2 classes, but the data has 3"):
        build_task(config(), nn.Linear(2, 2), 2, ["a", "b", "c"])
