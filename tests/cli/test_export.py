"""`gossamer export` and `quantize-qat-export`: files of every format, what is printed, how mistakes are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import gossamer
from gossamer.export import integer_weights
from gossamer.sparse import NM, magnitude
from tests.cli.conftest import Run
from tests.export.graphs import Graph, symmetric
from tests.runner.nets import small
from tests.runner.running_on_digits import config, trained

NET = "tests.runner.nets:small"
SHAPE = ("--input", "1,3,8,8")


def sparse(pattern: Any, sparsity: float) -> nn.Sequential:
    torch.manual_seed(0)
    model = small().eval()
    for index in (3, 9):
        weight = model[index].weight.data
        weight *= pattern.mask(magnitude(weight), sparsity)
    return model


@pytest.fixture
def two_of_four(tmp_path: Path) -> nn.Sequential:
    """A model whose weights are in weights.pt."""
    model = sparse(NM(2, 4), 0.5)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    return model


def in_onnxruntime(path: str, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(scores)


def words(text: str) -> str:
    return " ".join(text.split())


def test_each_format_is_written_under_a_name_of_its_own_and_holds_the_same_model(
    run: Run, two_of_four: nn.Sequential
) -> None:
    formats = ["onnx", "pt2", "safetensors", "bitmask", "sparse24"]
    done = run(
        "export", NET, "-w", "weights.pt", *(word for name in formats for word in ("-f", name)), *SHAPE, "--json"
    )
    assert done.exit_code == 0, done.output
    files = {Path(entry["path"]).name: entry for entry in json.loads(done.stdout)["files"]}
    packed = ["small-bitmask.safetensors", "small-sparse24.safetensors"]
    assert list(files) == ["small.onnx", "small.pt2", "small.safetensors", *packed]
    zeros = sum(int((two_of_four[index].weight == 0).sum()) for index in (0, 3, 9))
    assert {entry["zeros"] for entry in files.values()} == {zeros}
    images = torch.rand(3, 3, 8, 8)
    expected = two_of_four(images).detach()
    torch.testing.assert_close(in_onnxruntime("small.onnx", images), expected)
    for name in ("small.safetensors", *packed):
        assert torch.equal(gossamer.load(name, small()).eval()(images), expected)


def test_what_was_written_is_shown_with_sizes_zeros_and_differences(run: Run, two_of_four: nn.Sequential) -> None:
    done = run("export", NET, "-w", "weights.pt", "-f", "sparse24", "-f", "semi-structured", "--half", "-o", "out")
    assert done.exit_code == 0, done.output
    told = words(done.output)
    assert "weights from weights.pt" in told
    assert "small-sparse24.safetensors" in told
    assert "not 2:4, written as dense (3 input channels do not divide by 4): 0.weight" in told
    assert "0 of 3 layers become semi-structured tensors on CUDA" in told
    assert "10 output features are not a multiple of 16: 9.weight" in told
    assert gossamer.load("out/small-sparse24.safetensors")["3.weight"].dtype == torch.float16
    assert two_of_four[3].weight.dtype == torch.float32


def test_a_run_is_written_into_its_folder_and_its_file_is_a_model_again(run: Run, tmp_path: Path) -> None:
    trained(config(tmp_path, "gmp", net={"type": "squeezenet1_1"}, dataset=_large()), "trainer.max_iter=2")
    done = run("export", "run", "--format", "bitmask", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["files"][0]["path"] == "run/model-bitmask.safetensors"
    again = run("export", "run/model-bitmask.safetensors", "--format", "onnx", "-o", "out")
    assert again.exit_code == 0, again.output
    assert Path("out/run.onnx").is_file()


def _large() -> dict[str, Any]:
    source = {"type": "digits", "batch_size": 4, "limit": 8, "transforms": [{"Resize": {"size": [32, 32]}}]}
    return {"train": {**source, "split": "train"}, "test": {**source, "split": "test"}}


def test_filters_that_are_zero_are_gone_in_a_thin_file(run: Run, tmp_path: Path) -> None:
    model = small().eval()
    model[0].weight.data[4:] = 0
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    done = run("export", NET, "-w", "weights.pt", "-f", "thin", "-f", "onnx", *SHAPE)
    assert done.exit_code == 0, done.output
    assert Path("small-thin.onnx").stat().st_size < 0.5 * Path("small.onnx").stat().st_size
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(in_onnxruntime("small-thin.onnx", images), model(images).detach())


def test_a_fixed_batch_and_another_opset_can_be_asked_for(run: Run, two_of_four: nn.Sequential) -> None:
    done = run("export", NET, "-w", "weights.pt", "--static-batch", "--opset", "20")
    assert done.exit_code == 0, done.output
    session = onnxruntime.InferenceSession("small.onnx")
    assert session.get_inputs()[0].shape == [1, 3, 224, 224]
    assert "input shape not given; assuming 1×3×224×224; override with --input" in words(done.output)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (NET, "-f", "tflite"),
            "--format: unknown format 'tflite'; choose from onnx, pt2, safetensors",
        ),
        ((NET, "-w", "none.pt"), "none.pt: no such file of weights"),
        ((NET, "--input", "1,4,8,8"), "does not run on an input of shape (1, 4, 8, 8)"),
        ((NET, "-f", "safetensors", "-o", "/proc/none"), "cannot be written"),
        (("runs/seven",), "no such run folder"),
    ],
)
def test_what_cannot_be_written_is_explained_in_one_sentence(
    run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    done = run("export", *arguments)
    assert done.exit_code == 1
    assert sentence in words(done.output)
    assert "Traceback" not in done.output


def test_a_program_that_computes_something_else_is_never_left(
    run: Run, monkeypatch: pytest.MonkeyPatch, two_of_four: nn.Sequential
) -> None:
    """The input that a model is tried on tells weights apart, though nobody gave one."""
    from gossamer.export import programs

    true = programs.as_onnx

    def other(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrong = copy.deepcopy(model)
        wrong[3].weight.data.mul_(1.5)
        return true(wrong, *args, **kwargs)

    monkeypatch.setattr(programs, "as_onnx", other)
    done = run("export", NET, "-w", "weights.pt")
    assert done.exit_code == 1, done.output
    assert not Path("small.onnx").exists()


def test_thin_with_nothing_to_remove_says_so_and_writes_nothing(run: Run, two_of_four: nn.Sequential) -> None:
    done = run("export", NET, "-w", "weights.pt", "-f", "thin", "-f", "bitmask", *SHAPE)
    assert done.exit_code == 1, done.output
    told = "thin: nothing to remove, so no file is written: no filter or channel is zero as a whole"
    assert told in words(done.output)
    assert [path.name for path in Path().glob("small*")] == ["small-bitmask.safetensors"], "other formats are written"
    done = run("export", NET, "-w", "weights.pt", "-f", "thin", *SHAPE, "--json")
    assert (done.exit_code, json.loads(done.stdout)["left_out"]) == (1, [told])


# quantize-qat-export

WEIGHT = np.random.RandomState(0).randn(64, 32, 3, 3).astype(np.float32)
WEIGHT[np.abs(WEIGHT) < 0.5] = 0


@pytest.fixture
def quantize(run: Run) -> Run:
    """`gossamer quantize-qat-export`, in a folder with model.onnx."""
    graph = Graph()
    x = graph.emulate("x", 0.03, np.uint8(128))
    name = graph.emulate(graph.constant("conv.weight", WEIGHT), symmetric(WEIGHT, 0), np.zeros(64, np.int8), 0)
    model = graph.build(graph.emulate(graph.add("Conv", x, name), 0.1, np.uint8(120)), (1, 32, 7, 7))
    onnx.save(model, "model.onnx")
    return lambda *words: run("quantize-qat-export", *words)


def test_it_writes_beside_the_file_and_tells_what_it_did(quantize: Run) -> None:
    result = quantize("model.onnx")
    assert result.exit_code == 0, result.output
    first, second, third = result.stdout.splitlines()
    after, before = (Path(name).stat().st_size / 1e3 for name in ("model-quantized.onnx", "model.onnx"))
    assert first == f"model-quantized.onnx: {after:.1f} kB; model.onnx: {before:.1f} kB"
    assert after < before / 3.5
    zeros = float((integer_weights("model-quantized.onnx")["conv.weight"] == 0).mean())
    assert zeros >= float((WEIGHT == 0).mean()) > 0.3
    assert second == f"integers: 18,432 weights, {zeros:.1%} zero"
    assert third == "onnxruntime computes 1 of 1 products in integers: 1 QLinearConv"


def test_json_has_the_same_and_nothing_else_is_printed(quantize: Run) -> None:
    result = quantize("model.onnx", "-o", "new/int8.onnx", "--json")
    found = json.loads(result.stdout)
    assert (found["input"], found["output"]) == ("model.onnx", "new/int8.onnx")
    assert found["bytes_after"] == Path("new/int8.onnx").stat().st_size < found["bytes_before"] / 3
    assert found["operators"] == {"QLinearConv": 1}
    zeros = int((integer_weights("new/int8.onnx")["conv.weight"] == 0).sum())
    assert found["layers"] == [{"name": "conv.weight", "weights": 18432, "zeros": zeros}]
    assert result.stderr == ""


def test_an_error_is_one_sentence_and_exit_code_1(quantize: Run) -> None:
    result = quantize("none.onnx")
    assert result.exit_code == 1
    assert result.stderr == "error: none.onnx: file not found; give an ONNX model\n"
    assert result.stdout == ""


def _unknown_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def _missing_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    entry = model.graph.initializer[0].external_data.add()
    entry.key, entry.value = "location", "weights.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unknown_type, "not a valid ONNX model (99 is not a valid DataType); export it again"),
        (_missing_weights, "its weights are in 'weights.bin', which is missing; put it into the same folder"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    quantize: Run, change: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = onnx.load("model.onnx")
    change(model)
    Path("changed.onnx").write_bytes(model.SerializeToString())
    result = quantize("changed.onnx")
    assert (result.exit_code, result.stderr) == (1, f"error: changed.onnx: {message}\n")
    Path("changed.onnx").write_bytes(b"\xff" * 10)
    assert "not an ONNX model" in quantize("changed.onnx").stderr


def test_a_file_whose_weights_stay_floats_is_warned_about(quantize: Run) -> None:
    graph = Graph()
    y = graph.add("Conv", graph.emulate("x", 0.03, np.uint8(128)), graph.constant("w", WEIGHT))
    onnx.save(graph.build(y, (1, 32, 7, 7)), "activations.onnx")
    result = quantize("activations.onnx")
    assert result.exit_code == 0
    sentence = "warning: activations.onnx: no weight uses QuantizeLinear, so none is converted\n"
    assert result.stderr == sentence
    assert "0 of 1 products in integers: 1 Conv" in result.stdout
