"""`gossamer compile` writes an engine that runs without the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gossamer import runtime
from gossamer.cli import app
from gossamer.export import to_onnx
from gossamer.models import load_model

MODEL = """
import torch
from torch import nn

def tiny():
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *head)
    model[0].weight.data[torch.rand_like(model[0].weight) < 0.9] = 0
    return model
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "models_to_compile.py").write_text(MODEL)
    return tmp_path


def test_a_model_and_its_onnx_file_compile_to_the_same_outputs(folder: Path) -> None:
    model = import_module("models_to_compile").tiny().eval()
    to_onnx(model, "tiny.onnx", torch.randn(2, 3, 16, 16))
    for name, output in (("models_to_compile:tiny", "a.gossamer"), ("tiny.onnx", "b.gossamer")):
        arguments = ["compile", name, "-o", output, "--json", *(["--input", "1,3,16,16"] if ":" in name else [])]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["bytes"] == Path(output).stat().st_size
        assert found["times"]["gain"] == pytest.approx(found["times"]["dense_seconds"] / found["times"]["seconds"])
    x = torch.randn(5, 3, 16, 16)
    with torch.inference_mode():
        expected = model(x)
    assert torch.allclose(runtime.load("a.gossamer")(x), expected, atol=1e-5)
    assert torch.allclose(runtime.load("b.gossamer")(x)[0], expected, atol=1e-5)


def test_layers_are_measured_again_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    arguments = ["compile", "models_to_compile:tiny", "--input", "1,3,16,16"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (file,) = (folder / "gossamer" / "tuning").iterdir()
    first = file.stat().st_mtime_ns
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert file.stat().st_mtime_ns == first
    assert CliRunner().invoke(app, [*arguments, "--again"]).exit_code == 0
    assert file.stat().st_mtime_ns > first


def test_an_error_is_one_sentence(folder: Path) -> None:
    result = CliRunner().invoke(app, ["compile", "nope.onnx"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: nope.onnx: file not found")


def test_what_is_gained_is_printed_once_and_progress_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def progress(title: str, quiet: bool) -> Generator[Callable[[str, float], None]]:
        yield lambda label, share: shown.append(label)

    monkeypatch.setattr("gossamer.cli.compile.progress", progress)
    result = CliRunner().invoke(app, ["compile", "models_to_compile:tiny", "--input", "1,3,16,16"])
    assert result.exit_code == 0, result.output
    assert result.output.count("One call with 1×3×16×16") == 1
    expected = ["loading the model", "tracing the model", "measuring 0", "measuring 4", "comparing with dense torch"]
    assert list(dict.fromkeys(shown)) == expected
    summary = CliRunner().invoke(app, ["compile", "models_to_compile:tiny", "--input", "1,3,16,16", "--summary"]).output
    assert "computed by" in summary
    assert summary.count("One call with") == 1


DETECTORS = """
import torch
from gossamer.runner.detectors import fasterrcnn_resnet18_fpn, retinanet_resnet18_fpn

def two_stages():
    torch.manual_seed(0)
    return fasterrcnn_resnet18_fpn(num_classes=3, pyramid_channels=32, min_size=64, max_size=64)

def one_stage():
    torch.manual_seed(0)
    return retinanet_resnet18_fpn(num_classes=3, pyramid_channels=64, min_size=64, max_size=64)
"""


@pytest.mark.parametrize(
    ("name", "files"), [("one_stage", ["d.gossamer"]), ("two_stages", ["d-proposals.gossamer", "d-boxes.gossamer"])]
)
def test_the_networks_of_a_detector_compile_to_one_file_each(folder: Path, name: str, files: list[str]) -> None:
    (folder / "detectors_to_compile.py").write_text(DETECTORS)
    model = f"detectors_to_compile:{name}"
    result = CliRunner().invoke(app, ["compile", model, "-o", "d.gossamer", "--input", "1,3,64,64", "--json"])
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["files"]) == files
    networks = load_model(model, input_shape="1,3,64,64").networks()
    for file, network in zip(files, networks.values(), strict=True):
        inputs = [torch.cat([value, value / 2]) for value in network.inputs]
        with torch.inference_mode():
            expected = network.module(*inputs)
        found = runtime.load(file)(*inputs)
        assert len(found) == len(expected)
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(found), leaves(expected), strict=True):
            assert float((one - other).abs().max()) < 1e-4 * float(other.abs().max())
