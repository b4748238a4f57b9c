"""`export_sparse_onnx`: the file computes what the model does, with the zeros in it, and the model stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.msbench.sparsers import fake_sparse_modules
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
    assert bool(fake_sparse_modules(model)) == (method != "levels")
    with torch.no_grad():
        expected = model.eval()(inputs)
    assert torch.allclose(computed(written, inputs), expected, atol=1e-5)
    held = {tensor.shape: int((tensor == 0).sum()) for tensor in initializers(written)}
    scheduler.export_sparse_model(model)
    for name in ("0.weight", "3.weight"):
        weight = model.get_parameter(name)
        assert held[tuple(weight.shape)] == int((weight == 0).sum()) > 10


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
    assert "the file supports only the batch size of the example" in caplog.text
    assert torch.allclose(computed(written, inputs), model(inputs).detach(), atol=1e-6)


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
