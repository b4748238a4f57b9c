"""`measure`: files in the runtimes that take them, each against the first; and what may not be run or compared."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet18

from gossamer.benchmark import InMemory, Timing, explain, measure, runtimes
from gossamer.benchmark.timing import Ratio
from gossamer.errors import GossamerError
from gossamer.export import to_onnx
from gossamer.quantization import SCHEMES, Emulation, Rules
from tests.benchmark.timed import Clock, timed
from tests.export.graphs import Graph

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def network(zeros: float = 0.0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)]
    model = nn.Sequential(*parts).eval()
    with torch.no_grad():
        for weight in (model[0].weight, model[4].weight):
            weight.view(-1)[weight.abs().view(-1).argsort()[: round(zeros * weight.numel())]] = 0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a sparse network in ONNX, pt2 and safetensors."""
    folder = tmp_path_factory.mktemp("files")
    for name, zeros in (("dense", 0.0), ("sparse", 0.75)):
        model = network(zeros)
        batch = {"input": {0: torch.export.Dim("batch")}}
        torch.export.save(torch.export.export(model, (IMAGES,), dynamic_shapes=batch), folder / f"{name}.pt2")
        save_file(model.state_dict(), folder / f"{name}.safetensors")
    to_onnx(network(), folder / "dense.onnx", IMAGES)
    sparse = onnx.load(folder / "dense.onnx")
    for tensor in sparse.graph.initializer:
        weight = network(0.75).state_dict().get(tensor.name)
        if weight is not None:
            tensor.CopyFrom(numpy_helper.from_array(weight.numpy(), tensor.name))
    onnx.save(sparse, folder / "sparse.onnx")
    return folder


def write(path: Path, graph: Graph, output: str, shape: tuple[Any, ...]) -> Path:
    onnx.save(graph.build(output, shape), path)
    return path


def relu(path: Path, shape: tuple[Any, ...], operator: str = "Relu") -> Path:
    graph = Graph()
    return write(path, graph, graph.add(operator, "x"), shape)


def test_every_file_has_a_row_in_every_runtime_that_takes_it(folder: Path) -> None:
    files = [folder / name for name in ("dense.onnx", "dense.pt2", "sparse.onnx", "sparse.pt2", "sparse.safetensors")]
    found = measure([*files, InMemory("mine", network(), IMAGES)], rounds=3, batch=4, trust=True)
    rows = [(timing.runtime, Path(timing.file).name) for timing in found if timing.runtime != "openvino"]
    assert rows == [
        *(("onnxruntime", "dense.onnx"), ("onnxruntime", "sparse.onnx")),
        *(("gossamer", "dense.onnx"), ("gossamer", "sparse.onnx")),
        *(("torch", "dense.pt2"), ("torch", "sparse.pt2"), ("torch", "mine")),
        ("load", "sparse.safetensors"),
    ]
    for timing in found:
        assert 0 < timing.low <= timing.median <= timing.high
        assert timing.rounds == 3 <= timing.runs
        assert timing.notes == ()
        assert timing.contents.weights == 16 * 27 + 80
        assert timing.contents.zeros == (324 + 60 if "sparse" in timing.file else 0)
        if timing.file != "mine":
            assert timing.contents.bytes == Path(timing.file).stat().st_size
        if timing.runtime == "load":
            assert timing.batch is timing.throughput is None
        else:
            assert timing.throughput == pytest.approx(4 / timing.median)
        is_first = timing.file == next(one.file for one in found if one.runtime == timing.runtime)
        assert (timing.speed is None) == (timing.first is None) == (timing.verdict is None) == is_first
    assert {one.itself is None for one in found} == {True, False}, "a file on its own has nothing to differ from"


def test_the_ratio_is_that_of_the_times_that_the_clock_showed() -> None:
    clock = Clock()
    files = [timed(clock, "dense", 0.4), timed(clock, "half", 0.2, width=10), timed(clock, "worse", 0.8)]
    dense, half, worse = measure(files, rounds=5, clock=clock)
    assert (dense.median, half.median, worse.median) == pytest.approx((0.4, 0.2, 0.8))
    assert half.speed is not None
    assert half.speed.value == pytest.approx(2)
    assert (half.verdict, worse.verdict) == ("faster", "slower")
    assert half.itself is not None
    assert half.itself.value == pytest.approx(1)
    assert half.throughput == pytest.approx(5)


def test_many_zeros_without_speed_are_explained_with_the_numbers_measured() -> None:
    clock = Clock()
    first, second = explain(
        measure([timed(clock, "dense", 0.5), timed(clock, "sparse", 0.5, zeros=0.9)], rounds=5, clock=clock)
    )
    assert first == (
        "sparse in torch: runs as fast as dense, 1.00× (1.00–1.00); 90.0% of its weights are zero, "
        "but torch does not skip zeros"
    )
    for remedy in ("thin", "8-bit integers", "2:4 on an NVIDIA GPU since Ampere", "skips zeros"):
        assert remedy in second


def test_a_thin_network_is_faster_for_its_fewer_weights_and_dense_ones_are_not_lectured() -> None:
    clock = Clock()
    thin = [timed(clock, "dense", 0.6), timed(clock, "thin", 0.2, width=10)]
    assert (
        explain(measure(thin, rounds=5, clock=clock))
        == [
            "thin in torch: runs faster than dense, 3.00× (3.00–3.00); it has 50% of the weights",
            "thin: its outputs have shape (1, 10), those of dense (1, 20)",
        ][::-1]
    )
    same = [timed(clock, "dense", 0.6), timed(clock, "again", 0.6, zeros=0.1)]
    assert explain(measure(same, rounds=5, clock=clock)) == ["again in torch: runs as fast as dense, 1.00× (1.00–1.00)"]


def a_timing(**other: Any) -> Timing:
    clock = Clock()
    plain = measure([timed(clock, "dense", 0.5), timed(clock, "sparse", 0.5, zeros=0.9)], rounds=3, clock=clock)[1]
    return Timing(**{**vars(plain), **other})


@pytest.mark.parametrize(
    ("speed", "verdict", "message"),
    [
        (
            Ratio(1.0, 0.7, 1.4),
            "unclear",
            "no significant difference from dense, 1.00× (0.70–1.40); measure longer, or on an idle machine",
        ),
        (Ratio(0.998, 0.96, 1.02), "same", "runs as fast as dense, 1.00× (0.96–1.02);"),
        (Ratio(1.5, 1.4, 1.6), "faster", "which torch is not known to use: repeat the measurement"),
        (
            Ratio(0.7, 0.6, 0.8),
            "slower",
            "runs slower than dense, 0.70× (0.60–0.80); 90.0% of its weights are zero, but",
        ),
    ],
)
def test_no_more_is_said_than_the_interval_proves(speed: Ratio, verdict: Any, message: str) -> None:
    dense = a_timing(
        file="dense", first=None, speed=None, verdict=None, contents=a_timing().contents.__class__(840, 160)
    )
    found = explain([dense, a_timing(speed=speed, verdict=verdict, itself=Ratio(1, 0.9, 1.1))])
    assert message in found[0]
    assert ("does not skip zeros" in found[0]) == (speed.high < 1.15)
    assert any("What makes a sparse model faster" in message for message in found) == (verdict != "faster")


def test_filters_that_are_zero_whole_are_said_to_be_removable(tmp_path: Path) -> None:
    def saved(name: str, zero: int) -> Path:
        weight = np.ones((8, 2, 3, 3), np.float32)
        weight[:zero] = 0
        graph = Graph()
        return write(tmp_path / name, graph, graph.add("Conv", "x", graph.constant("w", weight)), (1, 2, 5, 5))

    ticks = iter(range(10**6))
    found = explain(
        measure([saved("a.onnx", 0), saved("b.onnx", 4)], rounds=3, runtimes=["onnxruntime"], clock=lambda: next(ticks))
    )
    message = "b.onnx: 4 of its 8 filters are all zero; thinning removes them, which makes it faster"
    assert found[1] == message


def test_numbers_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    path = relu(tmp_path / "log.onnx", (2, 50), "Log")
    (timing,) = measure([path], rounds=1, runtimes=["onnxruntime"])
    assert timing.notes == (
        f"{path}: it computes NaN or infinite values on random inputs, so its times may be misleading",
    )


def test_files_with_different_inputs_are_not_compared(tmp_path: Path) -> None:
    files = [relu(tmp_path / "a.onnx", (1, 4)), relu(tmp_path / "b.onnx", (1, 5))]
    with pytest.raises(GossamerError, match=r"b\.onnx: takes float32 \(1, 5\), but .*a\.onnx takes float32 \(1, 4\)"):
        measure(files, rounds=1)


def tampered(good: Path, bad: Path, ran: Path) -> None:
    """The same program, one of whose weights is a pickle that creates a file when it is loaded."""

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    pickle = io.BytesIO()
    torch.save(Bomb(), pickle)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("weights_config.json"):
                config = json.loads(content)
                config["config"]["0.weight"]["use_pickle"] = True
                content = json.dumps(config).encode()
            target.writestr(name, pickle.getvalue() if name.endswith("weight_0") else content)


def test_a_pt2_which_can_hold_code_is_not_loaded_unless_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    bad, ran = tmp_path / "bad.pt2", tmp_path / "ran"
    tampered(folder / "dense.pt2", bad, ran)
    with pytest.raises(GossamerError, match=r"bad\.pt2: loading a \.pt2 can run code from the file; pass --trust"):
        measure([bad], rounds=1)
    assert not ran.exists()
    with pytest.raises(GossamerError, match=r"bad\.pt2: not a program of torch\.export, or damaged; export it again"):
        measure([bad], rounds=1, trust=True)
    assert ran.exists(), "torch no longer runs what a .pt2 holds: --trust can go"


@pytest.mark.parametrize("name", ["dense.onnx", "dense.pt2", "dense.safetensors"])
def test_a_truncated_file_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    path = tmp_path / name
    for share in (0.0, 0.3, 0.9):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(GossamerError, match=name) as error:
            measure([path], rounds=1, trust=True)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtimes": ["onnxruntim"]}, "--runtime: there is no 'onnxruntim'; nearest: 'onnxruntime'; there are onnxr"),
        (
            {"runtimes": ["load"]},
            "a.onnx: no selected runtime supports it; add --runtime onnxruntime",
        ),
        ({"rounds": 0}, "--rounds: expected a number of 1 or more, found 0"),
        ({"rounds": 2, "seconds": 1.0}, "--rounds: --seconds is given too; give one of them"),
        ({"seconds": float("nan")}, "--seconds: expected a number above 0, found nan"),
        ({"threads": -1}, "--threads: expected a number of 1 or more, found -1"),
        ({"batch": 2}, "a.onnx: its batch size is fixed, not 2; export it with a dynamic batch"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = relu(tmp_path / "a.onnx", (1, 4))
    with pytest.raises(GossamerError) as error:
        measure([path], **options)
    assert message in str(error.value)


def test_a_runtime_that_is_missing_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = relu(tmp_path / "a.onnx", (1, 4))
    missing = ("onnxruntime", "openvino", "gossamer")
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(GossamerError, match=r"a\.onnx: no runtime for it is installed: pip install 'gossamer\[onnx\]'"):
        measure([path], rounds=1)
    with pytest.raises(GossamerError, match="--runtime: openvino is not installed: pip install openvino"):
        measure([path], rounds=1, runtimes=["openvino"])


def test_what_is_no_exported_file_is_refused(tmp_path: Path) -> None:
    for name, message in (
        ("a.tflite", "expected a file of gossamer export or compile: .onnx, .gossamer, .pt2 or .safetensors"),
        ("a.onnx", "file not found; write it with gossamer export"),
        ("a.safetensors", "file not found; write it with gossamer export"),
    ):
        with pytest.raises(GossamerError, match=f"{name}: {message}"):
            measure([tmp_path / name], rounds=1)
    with pytest.raises(GossamerError, match="there is nothing to measure; give one file or more"):
        measure([])


def test_torch_has_as_many_threads_afterwards_as_before(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(input)

    before = torch.get_num_threads()
    measure([InMemory("mine", Watching(3, 4), torch.randn(1, 3))], rounds=1, threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_arguments_by_name_and_in_lists_reach_a_model_in_memory() -> None:
    class Named(nn.Module):
        def forward(self, ids: torch.Tensor, others: list[torch.Tensor], scale: float) -> torch.Tensor:
            assert (ids.shape, others[1].shape) == ((3, 6), (3, 2))
            return ids.sum(1) * scale + others[0].sum(1) + others[1].sum(1)

    given = {"ids": torch.zeros(1, 6, dtype=torch.long), "others": [torch.zeros(1, 2), torch.zeros(1, 2)], "scale": 2.0}
    (timing,) = measure([InMemory("named", Named(), given)], rounds=1, batch=3)
    assert (timing.batch, timing.contents.weights, timing.notes) == (3, 0, ())


def test_openvino_runs_the_same_files(folder: Path) -> None:
    pytest.importorskip("openvino")
    found = measure([folder / "dense.onnx", folder / "sparse.onnx"], rounds=2, batch=3, runtimes=["openvino"])
    assert [(timing.runtime, timing.batch) for timing in found] == [("openvino", 3)] * 2
    (folder / "cut.onnx").write_bytes((folder / "dense.onnx").read_bytes()[:500])
    with pytest.raises(GossamerError, match="not an ONNX model"):
        measure([folder / "cut.onnx"], rounds=1, runtimes=["openvino"])


@pytest.mark.slow
def test_a_quantized_resnet_is_counted_in_integers_and_compared_with_its_float_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64)
    model = resnet18(num_classes=10)
    with torch.no_grad():
        model.train()(images)
        model.eval().layer4[1].conv2.weight.view(-1)[::2] = 0
    to_onnx(model, tmp_path / "dense.onnx", images)
    emulation = Emulation(model, Rules(SCHEMES["default"]).schemes(model), {})
    with emulation.calibration(), torch.no_grad():
        model(images)
    to_onnx(model, tmp_path / "int8.onnx", images)
    dense, int8 = measure([tmp_path / "dense.onnx", tmp_path / "int8.onnx"], rounds=2, runtimes=["onnxruntime"])
    assert dense.contents.weights == int8.contents.weights == int8.contents.integers > 11_000_000
    assert dense.contents.integers == 0
    assert int8.contents.zeros >= dense.contents.zeros >= 512 * 512 * 9 // 2
    assert int8.contents.bytes < 0.3 * dense.contents.bytes
    assert int8.notes == ()


def test_the_fastest_program_is_named_across_runtimes(folder: Path) -> None:
    files = [folder / name for name in ("dense.onnx", "sparse.onnx")]
    lines = explain(measure(files, rounds=3, batch=4, runtimes=["onnxruntime", "gossamer"]))
    expected = re.compile(r"fastest: (dense|sparse)\.onnx in (onnxruntime|gossamer), [\d.e-]+ ms")
    assert any(expected.match(line) for line in lines)
    assert not any(line.startswith("fastest") for line in explain(measure(files, rounds=3, runtimes=["onnxruntime"])))
