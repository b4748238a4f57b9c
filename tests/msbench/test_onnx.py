"""`export_sparse_onnx`: the file computes what the model does, with the zeros in it, and the model stays as it is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.msbench.sparsers import nodes
from tests.loops import batch, sgd
from tests.msbench.configs import ampere, levels, loop, prepared, probmask, str_config, trained
from tests.msbench.test_resume import wide_network

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

CONFIGS: dict[str, Any] = {
    "levels": levels,
    "STR": lambda: str_config(-3.0),
    "ProbMask": probmask,
}


def initializers(path: str) -> list[np.ndarray[Any, Any]]:
    return [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]


def computed(path: str, inputs: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])


@pytest.mark.parametrize(
    "method", ["levels", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("STR", "ProbMask"))]
)
def test_the_file_computes_what_the_model_evaluates_to(method: str) -> None:
    scheduler, model = trained(CONFIGS[method]())
    inputs = batch(50)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    written = scheduler.export_sparse_onnx(model, inputs, "deploy/sub/model")
    assert Path(written) == Path("deploy/sub/model.onnx")
    assert [file.name for file in Path("deploy/sub").iterdir()] == ["model.onnx"]
    assert model.training
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert bool(nodes(model)) == (method != "levels")
    with torch.no_grad():
        expected = model.eval()(inputs)
    assert torch.allclose(computed(written, inputs), expected, atol=1e-5)
    held = {tensor.shape: int((tensor == 0).sum()) for tensor in initializers(written)}
    scheduler.export_sparse_model(model)
    for name in ("0.weight", "3.weight"):
        weight = model.get_parameter(name)
        assert held[tuple(weight.shape)] == int((weight == 0).sum()) > 10


@pytest.mark.parametrize("given", [1, 3])
def test_the_batch_dimension_is_open(given: int) -> None:
    scheduler, model = prepared(levels(), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    scheduler.prune_model(model, 0)
    written = scheduler.export_sparse_onnx(model, torch.randn(given, 8), "model")
    for size in (1, 2, 5):
        inputs = torch.randn(size, 8)
        assert torch.allclose(computed(written, inputs), model(inputs).detach(), atol=1e-6)


def test_a_model_for_one_batch_size_is_written_for_that_one(caplog: pytest.LogCaptureFixture) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).reshape(3, 2, 2)

    scheduler, model = prepared(levels(), Fixed())
    scheduler.prune_model(model, 0)
    inputs = torch.randn(3, 8)
    written = scheduler.export_sparse_onnx(model, inputs, "model")
    assert "the file supports only batches of 3" in caplog.text
    assert torch.allclose(computed(written, inputs), model(inputs).detach(), atol=1e-6)


@pytest.mark.slow
def test_training_goes_on_after_it() -> None:
    scheduler, model = trained(levels(), iterations=6)
    scheduler.export_sparse_onnx(model, batch(0)[0], "model")
    loop(scheduler, model, sgd(model), range(6, 12))
    assert int((model.get_parameter("3.weight") == 0).sum()) == round(576 * 0.9)


@pytest.mark.slow
def test_ampere_writes_two_of_four_and_none_of_its_masks() -> None:
    scheduler, model = prepared(ampere(), wide_network())
    optimizer = sgd(model)
    scheduler.init_optimizer(optimizer)
    loop(scheduler, model, optimizer, range(2))
    inputs = batch(50)[0]
    written = scheduler.export_sparse_onnx(model, inputs, "model.onnx")
    assert Path(written).name == "model.onnx"
    with torch.no_grad():
        assert torch.allclose(computed(written, inputs), model.eval()(inputs), atol=1e-5)
    assert all(tensor.dtype != np.bool_ for tensor in initializers(written))
    assert any("mma_mask" in name for name in model.state_dict())


@pytest.mark.slow
def test_several_inputs_are_given_as_a_tuple() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.left(x) + self.right(y)

    scheduler, model = prepared(levels(), Pair())
    scheduler.prune_model(model, 0)
    inputs = (torch.randn(2, 8), torch.randn(2, 8))
    session = onnxruntime.InferenceSession(
        scheduler.export_sparse_onnx(model, inputs, "pair"), providers=["CPUExecutionProvider"]
    )
    names = [entry.name for entry in session.get_inputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})[0]
    assert torch.allclose(torch.from_numpy(found), model(*inputs).detach(), atol=1e-5)


@pytest.mark.slow
def test_a_path_is_a_name_a_dot_in_it_stays_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    scheduler, model = prepared(levels())
    assert scheduler.export_sparse_onnx(model, batch(0)[0], Path("v1.2")) == "v1.2.onnx"
    assert Path("v1.2.onnx").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", [list, torch.Size])
def test_a_list_of_whole_numbers_is_the_shape_of_the_input(kind: Any) -> None:
    scheduler, model = prepared(levels(), nn.Sequential(nn.Linear(8, 4)).double())
    scheduler.prune_model(model, 0)
    written = scheduler.export_sparse_onnx(model, kind([3, 8]), "shape")
    inputs = torch.randn(3, 8, dtype=torch.float64)
    assert torch.allclose(computed(written, inputs), model(inputs).detach())


def test_a_list_that_is_not_a_shape_is_refused() -> None:
    scheduler, model = prepared(levels())
    with pytest.raises(GossamerError, match=r"export_sparse_onnx: \[1, -1\] is not a shape"):
        scheduler.export_sparse_onnx(model, [1, -1], "model")


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_a_missing_package_is_reported_with_the_way_to_install_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, model = prepared(levels())
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest)
    )
    with pytest.raises(GossamerError, match=rf"needs {missing}: pip install 'gossamer\[onnx\]'"):
        scheduler.export_sparse_onnx(model, batch(0)[0], "model")
    assert not Path("model.onnx").exists()


@pytest.mark.slow
def test_inputs_that_the_model_does_not_take_are_refused_and_leave_no_file() -> None:
    scheduler, model = prepared(levels())
    with pytest.raises(GossamerError, match=r"model\.onnx: torch\.onnx cannot export the model: ") as error:
        scheduler.export_sparse_onnx(model, torch.randn(2, 3), "model")
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)
    assert "input to conv2d, but got input of size: [2, 3]" in str(error.value)
    assert list(Path().glob("*.onnx")) == []
    assert list(Path().glob(".*.onnx")) == []


def test_a_path_that_cannot_be_written_to_is_refused() -> None:
    scheduler, model = prepared(levels())
    Path("taken").write_text("a file")
    with pytest.raises(GossamerError, match=r"taken/model\.onnx: cannot be written"):
        scheduler.export_sparse_onnx(model, batch(0)[0], os.path.join("taken", "model"))
