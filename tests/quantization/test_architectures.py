"""Real networks: every layer computes with integers, sums and joins take integers, and the result stays close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import convnext, densenet, detection, resnet

from tests.quantization.watching import calibrated, convolutions, emulated, layers, sums, watched


def images(size: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10)


def small_densenet(memory_efficient: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return densenet.DenseNet(4, (2, 2), 8, bn_size=2, num_classes=5, memory_efficient=memory_efficient)


def googlenet(aux_logits: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.GoogLeNet(num_classes=5, init_weights=False, aux_logits=aux_logits)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "resnet18": (small_resnet, images(64)),
    "densenet": (small_densenet, images(64)),
    "googlenet": (googlenet, images(64)),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(num_classes=5, width_mult=0.35), images(64)),
    "mobilenet_v3": (lambda: torchvision.models.mobilenet_v3_small(num_classes=5), images(64)),
    "efficientnet": (lambda: torchvision.models.efficientnet_b0(num_classes=5), images(64)),
    "shufflenet": (lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=5), images(64)),
    "squeezenet": (lambda: torchvision.models.squeezenet1_1(num_classes=5), images(64)),
    "convnext": (
        lambda: convnext.ConvNeXt([convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]),
        images(32),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_of_a_network_takes_integers_and_the_result_stays_close(name: str) -> None:
    make, inputs = NETWORKS[name]
    torch.manual_seed(0)
    model = make().train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.cat([inputs, inputs * 0.7, inputs + 0.3]))
    model.eval()
    plain = model(inputs)
    calibrated(model, inputs, scheme="vnni")
    seen = watched(model, inputs)
    found = layers(seen)
    assert len(found) >= sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in model.modules())
    assert all(seen.is_rounded(value) for call in found for value in call.args[:2])
    error = (model(inputs) - plain).norm() / plain.norm()
    assert 0 < float(error.detach()) < 0.25


def test_resnet18_is_rounded_once_wherever_a_runtime_wants_it() -> None:
    model = small_resnet()
    calibrated(model, images(64))
    seen = watched(model, images(64))
    additions = list(sums(seen))
    assert len(additions) == 8
    assert all(seen.is_rounded(value) for addition in additions for value in addition.args[:2])
    # Image, stem; per block the inner ReLU and the second convolution; shortcuts; results of sums; the classifier.
    assert len(seen.places) == 1 + 1 + 8 + 8 + 3 + 8 + 1
    assert len(convolutions(seen)) == 20


def test_a_squeeze_and_excitation_product_takes_integers_on_both_sides() -> None:
    model, inputs = NETWORKS["mobilenet_v3"][0](), NETWORKS["mobilenet_v3"][1]
    calibrated(model, inputs)
    seen = watched(model, inputs)
    products = [call for call in seen.of(Tensor.mul, torch.mul) if isinstance(call.args[1], Tensor)]
    gates = [call for call in products if call.args[0].dim() == 4]
    assert len(gates) == 9
    assert all(seen.is_rounded(value) for call in gates for value in call.args[:2])


# Training


def detector() -> nn.Module:
    torch.manual_seed(0)
    body = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
    backbone = detection.backbone_utils.BackboneWithFPN(
        body, {"layer2": "0", "layer3": "1", "layer4": "2"}, [128, 256, 512], 16
    )
    anchors = detection.anchor_utils.AnchorGenerator(((16,), (32,), (64,), (128,)), ((1.0,),) * 4)
    return detection.RetinaNet(backbone, 3, min_size=64, max_size=64, anchor_generator=anchors)


def test_a_detector_trains_and_detects() -> None:
    model, emulation = emulated(detector().train())
    pictures = list(images(64).unbind())
    boxes = [{"boxes": torch.tensor([[4.0, 4, 30, 30]]), "labels": torch.tensor([1])}] * 2
    losses = model(pictures, boxes)
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    heads = [key for key in emulation.ranges if key.startswith("head.classification_head.cls_logits")]
    assert len(heads) == 4
    known = set(emulation.ranges)
    with torch.no_grad():
        found = model.eval()(pictures)
    assert set(found[0]) == {"boxes", "scores", "labels"}
    assert set(emulation.ranges) == known
    seen = watched(model, pictures)
    assert all(seen.is_rounded(value) for call in convolutions(seen) for value in call.args[:2])
    assert {call.args[1].shape for call in convolutions(seen)}


# Attention


def encoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)


SENTENCES = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_attention_computes_in_integers_in_training_and_in_evaluation_alike(options: dict[str, Any]) -> None:
    model, emulation = emulated(encoder(**options).train())
    trained = model(SENTENCES)
    emulation.frozen = True
    seen = watched(model, SENTENCES)
    assert len(layers(seen)) == 4
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])
    with torch.no_grad():
        seen = watched(model.eval(), SENTENCES)
        assert len(layers(seen)) == 4
        assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])
        torch.testing.assert_close(model(SENTENCES), trained.detach(), rtol=1e-5, atol=1e-5)


def test_attention_over_other_keys_with_masks_and_weights_computes_close_to_floats() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, kdim=8, vdim=8, batch_first=True)
    keys, mask = torch.randn(3, 7, 8), torch.rand(3, 7) < 0.2
    plain, shares = model(SENTENCES, keys, keys, key_padding_mask=mask)

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, keys, keys, key_padding_mask=mask)

    asks = Asks()
    calibrated(asks, SENTENCES, scheme="vnni")
    seen = watched(asks, SENTENCES)
    assert len(layers(seen)) == 4
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])
    assert all(seen.is_rounded(value) for call in seen.of(torch.bmm) for value in call.args[:2])
    found, weights = asks(SENTENCES)
    torch.testing.assert_close(found, plain, rtol=0, atol=0.05)
    torch.testing.assert_close(weights, shares, rtol=0, atol=0.05)


def test_a_vision_transformer_takes_integers_in_every_layer() -> None:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)
    inputs = images(16)
    nn.init.normal_(model.heads.head.weight, std=0.3)
    plain = model.eval()(inputs)
    calibrated(model, inputs, scheme="vnni")
    seen = watched(model, inputs)
    assert len(layers(seen)) == 1 + 2 * 4 + 1
    assert all(seen.is_rounded(value) for call in layers(seen) for value in call.args[:2])
    torch.testing.assert_close(model(inputs), plain, rtol=0, atol=0.15)


# Outputs


class Shapes(nn.Module):
    """Outputs of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.kind = nn.Conv2d(3, 4, 3), kind

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        out = functional.relu(self.body(x)) * scale
        kinds: dict[str, Any] = {"dict": {"out": out, "none": None}, "tuple": (out, 3), "list": [out, [out]]}
        return kinds[self.kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "list"])
def test_outputs_keep_their_kind(kind: str) -> None:
    model = Shapes(kind)
    plain = model(images(), scale=2.0)
    calibrated(model, images())
    found = model(images(), scale=2.0)
    assert type(found) is type(plain)

    def tensor(value: Any) -> Tensor:
        return value["out"] if kind == "dict" else value[0]

    assert not torch.equal(tensor(found), tensor(plain))
    torch.testing.assert_close(tensor(found), tensor(plain), rtol=0, atol=0.2)
