"""The model that one word names: by a function, a torchvision name, a run, a file of weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gossamer
from gossamer.errors import GossamerError
from gossamer.export import THINNED, save, thin
from gossamer.models import load_model
from tests.runner.nets import small
from tests.runner.running_on_digits import config, evaluated, trained


def accuracy(model: nn.Module, batches) -> float:
    """In percent."""
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).float() for images, labels in batches]
    return 100 * float(torch.cat(right).mean())


def test_a_torchvision_name_is_a_model_with_a_guessed_input_and_no_data() -> None:
    loaded = load_model("squeezenet1_1")
    assert loaded.source is None
    assert loaded.example.shape == (1, 3, 224, 224)
    assert loaded.batches("test") is None
    assert not loaded.model.training


def test_data_decide_how_many_classes_a_model_has() -> None:
    loaded = load_model("squeezenet1_1", data="tiny")
    train = loaded.batches("train")
    assert train is not None
    images, labels = next(iter(train))
    assert loaded.num_classes == 10
    assert loaded.model(images[:2]).shape == (2, 10)
    assert len(labels.unique()) > 5, "calibration batches hold many classes"


def test_weights_for_another_number_of_classes_are_recognised(tmp_path: Path) -> None:
    torch.save(small(num_classes=3).state_dict(), tmp_path / "three.pt")
    loaded = load_model("tests.runner.nets:small", weights=tmp_path / "three.pt")
    assert loaded.model(torch.zeros(1, 3, 8, 8)).shape == (1, 3)
    assert loaded.num_classes == 3


def test_the_model_of_a_run_has_the_accuracy_that_the_run_found(tmp_path: Path) -> None:
    path = config(tmp_path, "gmp")
    trained(path)
    loaded = load_model(str(tmp_path / "run"))
    assert accuracy(loaded.model, loaded.batches("test")) == pytest.approx(evaluated(path).metrics["top1"], abs=1e-4)
    assert loaded.example.shape == (1, 3, 8, 8)
    weights = [loaded.model[index].weight for index in (0, 3, 9)]
    assert all(round(weight.numel() * 0.8) == int((weight == 0).sum()) for weight in weights)


def test_a_run_takes_other_weights_by_name(tmp_path: Path) -> None:
    trained(config(tmp_path))
    torch.save(small().state_dict(), tmp_path / "other.pt")
    loaded = load_model(str(tmp_path / "run"), weights=tmp_path / "other.pt")
    assert loaded.source == tmp_path / "other.pt"


def test_a_file_of_weights_that_says_its_model_is_a_model(tmp_path: Path) -> None:
    made = load_model("squeezenet1_1", data="tiny")
    save(made.model, tmp_path / "squeezed.safetensors", "safetensors", about=made.describe())
    again = load_model(str(tmp_path / "squeezed.safetensors"))
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(again.model(images), made.model(images))
    assert again.example.shape == (1, 3, 32, 32)
    assert load_model(str(tmp_path / "squeezed.safetensors"), data="tiny").batches("test") is not None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("resnet19", "no such torchvision model; nearest: 'resnet1"),
        ("model.onnx", "an exported program is not a PyTorch model; name the run"),
        ("weights.safetensors", "does not describe its model; name the model"),
        ("odd.safetensors", "its description of the model cannot be read"),
        ("empty", "a folder without config.yaml"),
        ("tests.runner.nets:Interrupt", "Interrupt() failed: TypeError"),
    ],
)
def test_a_word_that_names_no_model_is_explained_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    save_file({"weight": torch.zeros(1)}, "weights.safetensors")
    save(nn.Linear(1, 1), "odd.safetensors", "safetensors", about={"net": "[]"})
    with pytest.raises(GossamerError) as error:
        load_model(word)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_wrong_shape_of_the_input_is_explained() -> None:
    with pytest.raises(GossamerError, match=r"--input: expected a shape such as 1,3,224,224, found 'big'"):
        load_model("squeezenet1_1", input_shape="big")
    with pytest.raises(GossamerError, match=r"does not run on an input of shape \(1, 4, 32, 32\)"):
        load_model("squeezenet1_1", input_shape="1,4,32,32").networks()


def test_a_detector_is_given_images_in_a_list() -> None:
    loaded = load_model("ssdlite320_mobilenet_v3_large", input_shape="1,3,64,64")
    assert loaded.kind == "detection"
    assert [tuple(image.shape) for image in loaded.example[0]] == [(3, 64, 64)]
    assert list(loaded.networks()) == ["network"]


def test_a_file_of_a_thinned_network_is_a_model_again(tmp_path: Path) -> None:
    made = load_model("squeezenet1_1", data="tiny")
    made.model.features[3].squeeze.weight.data[:4] = 0
    made.model.features[3].squeeze.bias.data[:4] = 0
    smaller, _ = thin(made.model, made.example)
    assert smaller.features[3].squeeze.out_channels == 12
    save(smaller, tmp_path / "thin.safetensors", "safetensors", about={**made.describe(), **THINNED})
    again = load_model(str(tmp_path / "thin.safetensors"))
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(again.model(images), made.model(images))
    on_data = load_model(str(tmp_path / "thin.safetensors"), data="tiny")
    assert torch.equal(on_data.model(images), again.model(images))
    whole = load_model("squeezenet1_1", data="tiny").model
    assert torch.equal(gossamer.load(tmp_path / "thin.safetensors", whole)(images), again.model(images))


def test_a_file_in_16_bits_stays_in_16_bits_and_one_without_classes_has_those_of_its_network(tmp_path: Path) -> None:
    made = load_model("squeezenet1_1", input_shape="1,3,64,64").half()
    save(made.model, tmp_path / "half.safetensors", "bitmask", about=made.describe())
    again = load_model(str(tmp_path / "half.safetensors"))
    assert {weight.dtype for weight in again.model.parameters()} == {torch.float16}
    assert again.model.classifier[1].out_channels == 1000


def test_what_a_file_says_of_its_model_is_under_its_digest(tmp_path: Path) -> None:
    made, path = load_model("squeezenet1_1"), tmp_path / "changed.safetensors"
    save(made.model, path, "safetensors", about=made.describe())
    path.write_bytes(path.read_bytes().replace(b"squeezenet1_1", b"squeezenet1_0"))
    with pytest.raises(GossamerError, match=r"changed.safetensors: .*(damaged|changed)"):
        load_model(str(path))


# How many classes


def test_a_function_that_needs_num_classes_is_given_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "asking_nets.py").write_text(ASKING)
    sys.path.insert(0, str(tmp_path))
    try:
        word, image = "asking_nets:asking", torch.zeros(1, 3, 8, 8)
        asked = load_model(word, num_classes=7)
        assert (asked.model(image).shape, asked.assumed_classes) == ((1, 7), None)
        on_data = load_model(word, data="tiny")
        assert (on_data.model(on_data.example).shape, on_data.assumed_classes) == ((1, 10), None)
        assumed = load_model(word)
        assert (assumed.model(image).shape, assumed.assumed_classes) == ((1, 1000), 1000)
        torch.save(asked.model.state_dict(), tmp_path / "seven.pt")
        by_weights = load_model(word, weights=tmp_path / "seven.pt")
        assert (by_weights.num_classes, by_weights.assumed_classes) == (7, None)
    finally:
        sys.path.remove(str(tmp_path))


ASKING = """
from torch import nn

def asking(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
"""


def test_classes_are_said_once(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"--num-classes: tiny defines the number of classes; remove the option"):
        load_model("squeezenet1_1", data="tiny", num_classes=3)
    with pytest.raises(GossamerError, match="--num-classes: expected a positive number, found 0"):
        load_model("squeezenet1_1", num_classes=0)
