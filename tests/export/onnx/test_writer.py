"""`to_onnx`: the file computes what the model evaluates to, for any batch, and the model stays as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.export import to_onnx
from tests.loops import batch, network


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def computed(path: Path, *inputs: Tensor) -> list[Tensor]:
    running = session(path)
    names = [entry.name for entry in running.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(found) for found in running.run(None, feeds)]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(x))


class Several(nn.Module):
    """Arguments in a list, by name and with a default; a table without a batch; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, pair: list[Tensor], table: Tensor, *, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return self.fc(pair[0] + pair[1]) * scale, pair[0] @ table


def test_a_batch_of_one_gives_a_file_for_any_batch_and_nothing_is_printed_or_changed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = network()
    inputs = batch(0)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = to_onnx(model, tmp_path / "new" / "model.onnx", inputs[:1])
    assert path == tmp_path / "new" / "model.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    assert capfd.readouterr() == ("", "")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        expected = model.eval()(inputs)
    assert torch.allclose(computed(path, inputs)[0], expected, atol=1e-5)
    assert session(path).get_inputs()[0].shape[0] == "batch"
    assert onnx.load(path).opset_import[0].version == 18
    assert b".py" not in path.read_bytes()  # No lines of anybody's source.


@pytest.mark.slow
def test_names_and_a_fixed_batch_are_as_given(tmp_path: Path) -> None:
    path = to_onnx(
        Plain(),
        tmp_path / "model.onnx",
        torch.randn(3, 8),
        dynamic_batch=False,
        input_names=["image"],
        output_names=["scores"],
        opset=20,
    )
    running = session(path)
    assert [(entry.name, entry.shape) for entry in running.get_inputs()] == [("image", [3, 8])]
    assert [entry.name for entry in running.get_outputs()] == ["scores"]
    assert onnx.load(path).opset_import[0].version == 20


@pytest.mark.slow
def test_arguments_in_lists_and_by_name_are_taken(tmp_path: Path) -> None:
    model = Several()
    inputs = {"pair": [torch.randn(1, 8), torch.randn(1, 8)], "table": torch.randn(8, 2), "scale": 3.0}
    path = to_onnx(model, tmp_path / "model.onnx", inputs)
    pair, table = [torch.randn(5, 8), torch.randn(5, 8)], torch.randn(8, 2)
    expected = model(pair, table, scale=3.0)
    for found, wanted in zip(computed(path, *pair, table), expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["compiled", "DataParallel"])
def test_a_wrapped_model_is_written_as_the_model_inside(tmp_path: Path, wrapped: str) -> None:
    model = Plain()
    inputs = torch.randn(4, 8)
    path = tmp_path / "model.onnx"
    outer: Any = torch.compile(model, backend="eager") if wrapped == "compiled" else nn.DataParallel(model)
    to_onnx(outer, path, inputs)
    assert torch.allclose(computed(path, inputs)[0], model.fc(inputs), atol=1e-5)
    assert {tensor.name for tensor in onnx.load(path).graph.initializer} >= {"fc.weight", "fc.bias"}


def refused(model: nn.Module, inputs: Any, path: Path, **options: Any) -> str:
    with pytest.raises(GossamerError) as error:
        to_onnx(model, path, inputs, **options)
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)
    assert not path.exists()
    return str(error.value)


def test_inputs_that_the_model_does_not_take_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    start = f"{path}: the model does not accept example_inputs: "
    found = refused(Plain(), torch.randn(2, 7), path)
    assert found.startswith(start)
    assert "mat1 and mat2 shapes cannot be multiplied (2x7 and 8x4)" in found
    assert "takes 2 positional arguments but 3 were given" in refused(Plain(), (torch.randn(2, 8), 1), path)
    assert "missing 1 required positional argument: 'x'" in refused(Plain(), (), path)
    found = refused(Plain(), 3, path)
    assert found == "example_inputs: expected a tensor, a list of arguments or a dict of them, found int"


def test_a_model_for_one_image_at_a_time_needs_a_fixed_batch(tmp_path: Path) -> None:
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(1, 8) * 2

    found = refused(One(), torch.randn(1, 8), tmp_path / "model.onnx")
    assert "the model accepts only a batch of 1 (use dynamic_batch=False): shape '[1, 8]' is invalid" in found


@pytest.mark.slow
def test_a_model_whose_path_depends_on_values_is_reported_with_the_first_line_of_the_reason(tmp_path: Path) -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    path = tmp_path / "model.onnx"
    found = refused(Chooses(), torch.randn(2, 8), path)
    assert found.startswith(f"{path}: torch.onnx cannot export the model: ")
    assert "data-dependent" in found


@pytest.mark.slow
def test_integers_of_more_than_8_bits_are_reported(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fake_quantize_per_tensor_affine(x, 0.01, 0, -2047, 2047)

    path = tmp_path / "model.onnx"
    assert refused(Wide(), torch.randn(2, 8), path) == (
        f"{path}: an ONNX file holds integers of at most 8 bits, and the model uses 12 (from -2047 to 2047); train "
        "with 8 bits or fewer"
    )


class Rounds(nn.Module):
    """Fewer than 8 bits, tensors for numbers, and another type than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("zero", torch.tensor(3, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, 0, 7)
        weight = torch.fake_quantize_per_tensor_affine(self.fc.weight, 0.1, 0, -3, 3)
        return nn.functional.linear(x, weight, self.fc.bias)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 20])
def test_fewer_than_8_bits_are_clipped_as_in_torch(tmp_path: Path, opset: int) -> None:
    model = Rounds()
    inputs = torch.randn(64, 8) * 2
    path = to_onnx(model, tmp_path / "model.onnx", inputs, opset=opset)
    assert torch.allclose(computed(path, inputs)[0], model(inputs).detach(), atol=0.02)


@pytest.mark.slow
def test_a_quantized_model_is_written_up_to_opset_20(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    found = refused(Rounds(), torch.randn(2, 8), path, opset=21)
    assert found == f"{path}: opset 21 is above 20, the limit for a quantized model"


@pytest.mark.slow
def test_an_opset_that_torch_does_not_write_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    found = refused(Plain(), torch.randn(2, 8), path, opset=11)
    assert found.startswith(f"{path}: torch.onnx")


def test_a_path_that_cannot_be_written_to_is_reported_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(torch.onnx, "export", None)
    found = refused(Plain(), torch.randn(2, 8), tmp_path / "taken" / "model.onnx")
    assert found.startswith(f"{tmp_path}/taken/model.onnx: cannot be written: ")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else found(name, *rest))
    message = refused(Plain(), torch.randn(2, 8), tmp_path / "model.onnx")
    assert message == "to_onnx needs onnx: pip install 'gossamer[onnx]'"
