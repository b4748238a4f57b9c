"""`gossamer benchmark`: a table that 80 columns hold, sentences below it, JSON, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gossamer.benchmark.timing import Ratio
from gossamer.cli.console import err, out
from gossamer.export import to_onnx
from tests.cli.conftest import Run
from tests.export.graphs import Graph

WEIGHT = np.random.RandomState(0).randn(64, 8, 3, 3).astype(np.float32)


@pytest.fixture(autouse=True)
def _files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that `run` makes: a network, the same with zeros, and one with another input."""
    monkeypatch.setattr(out, "_width", 80)
    monkeypatch.setattr(err, "_width", 80)
    for name, weight, size in (
        ("dense-network-with-a-long-name.onnx", WEIGHT, 9),
        ("sparse.onnx", np.where(np.abs(WEIGHT) < 1.6, 0, WEIGHT), 9),
        ("other.onnx", WEIGHT, 7),
    ):
        graph = Graph()
        y = graph.add("Conv", "x", graph.constant("weight", weight.astype(np.float32)))
        onnx.save(graph.build(y, ("batch", 8, size, size)), name)


SAID = {
    "faster": "runs faster than",
    "slower": "runs slower than",
    "same": "as fast as",
    "unclear": "no significant difference from",
}
DENSE, SPARSE = "dense-network-with-a-long-name.onnx", "sparse.onnx"


def test_the_table_has_a_row_for_each_file_and_fits_80_columns(run: Run) -> None:
    result = run("benchmark", DENSE, SPARSE, "--rounds", 4, "--batch", 2, "--runtime", "onnxruntime")
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    dense, sparse, first, *_ = result.stdout.splitlines()
    assert (dense, sparse) == (f"1: {DENSE}", f"2: {SPARSE}")
    assert first.startswith("onnxruntime ")
    assert ": batch 2, 1 thread, 4 rounds, times in " in first
    words = " ".join(result.stdout.split())
    share = float((np.abs(WEIGHT) < 1.6).mean())
    assert f"{share:.1%}" in words
    assert "median 5–95 % per s speed" in words
    assert "• sparse.onnx in onnxruntime: " in words
    assert result.stderr == ""


def test_results_are_written_beside_the_table(run: Run) -> None:
    words = "benchmark", DENSE, SPARSE, "--rounds", 3, "--runtime", "onnxruntime"
    result = run(*words, "-o", "results/speed.json")
    assert result.exit_code == 0, result.output
    assert "• sparse.onnx in onnxruntime: " in result.stdout
    found = json.loads(Path("results/speed.json").read_text(), parse_constant=pytest.fail)
    assert set(found) == {"threads", "timings", "sentences"}
    assert [timing["name"] for timing in found["timings"]] == [DENSE, SPARSE]
    refused = run(*words, "-o", SPARSE)
    assert refused.stderr == f"error: --output: expected a .json file, found '{SPARSE}'\n"
    assert Path(SPARSE).stat().st_size > 10_000


def test_json_holds_every_figure_and_the_sentences(run: Run) -> None:
    result = run("benchmark", DENSE, SPARSE, "--rounds", 3, "--runtime", "onnxruntime", "--json")
    found = json.loads(result.stdout)
    dense, sparse = found["timings"]
    assert (found["threads"], dense["file"], sparse["first"]) == (1, DENSE, DENSE)
    assert sparse["contents"]["zeros"] == int((np.abs(WEIGHT) < 1.6).sum())
    assert sparse["contents"]["bytes"] == Path(SPARSE).stat().st_size
    assert sparse["speed"]["low"] <= sparse["speed"]["high"]
    ratio, itself = (Ratio(**sparse[name]) for name in ("speed", "itself"))
    assert dense["verdict"] is None
    assert sparse["verdict"] == ratio.verdict(itself.doubt)
    assert dense["throughput"] == pytest.approx(1 / dense["median"])
    assert found["sentences"][0].startswith("sparse.onnx in onnxruntime: ")
    assert f"{SAID[sparse['verdict']]} {DENSE}" in found["sentences"][0]


def test_one_round_is_told_to_prove_nothing(run: Run) -> None:
    words = "benchmark", DENSE, SPARSE, "--rounds", 1, "--runtime", "onnxruntime"
    told = f"• sparse.onnx in onnxruntime: no significant difference from {DENSE}, "
    assert told in " ".join(run(*words).stdout.split())
    _, sparse = json.loads(run(*words, "--json").stdout, parse_constant=pytest.fail)["timings"]
    assert (sparse["verdict"], sparse["speed"]["low"], sparse["speed"]["high"]) == ("unclear", None, None)


def test_a_model_by_its_name_is_timed_in_torch(run: Run) -> None:
    words = "benchmark", "torchvision.models:squeezenet1_1", "--input", "1,3,32,32", "--rounds", 1, "--json"
    result = run(*words)
    assert result.exit_code == 0, result.output
    (timing,) = json.loads(result.stdout)["timings"]
    assert (timing["runtime"], timing["batch"]) == ("torch", 1)
    assert timing["contents"]["weights"] > 1_000_000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.onnx"], "none.onnx: file not found; write it with gossamer export"),
        (
            [DENSE, "other.onnx"],
            "other.onnx: takes float32 (1, 8, 7, 7), but dense-network-with-a-long-name.onnx takes",
        ),
        ([DENSE, "--runtime", "onyxruntime"], "--runtime: there is no 'onyxruntime'; nearest: 'onnxruntime'"),
        (
            [DENSE, "--input", "x=1,8,nine,9"],
            "--input: expected a shape such as 1,3,224,224, or NAME=1,3,224,224, found",
        ),
        ([DENSE, "--batch", str(10**12)], "--batch, --input: an input 'x' of float32 (1000000000000, 8, 9, 9)"),
        (
            ["notes.txt"],
            "notes.txt: expected a file of gossamer export or compile: .onnx, .gossamer, .pt2, .safetensors",
        ),
        (["my.pt2"], "my.pt2: loading a .pt2 can run code from the file; pass --trust if you trust it"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(run: Run, words: list[str], sentence: str) -> None:
    for name in ("text.onnx", "notes.txt", "my.pt2"):
        Path(name).write_text("no model")
    result = run("benchmark", *words, "--rounds", 1)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1


def test_files_of_one_name_are_told_apart_by_their_folders(run: Run) -> None:
    for folder in ("dense", "sparse"):
        Path(folder).mkdir()
        to_onnx(torch.nn.Linear(8, 4), Path(folder) / "model.onnx", torch.randn(1, 8))
    done = run("benchmark", "dense/model.onnx", "sparse/model.onnx", "--rounds", "3")
    assert done.exit_code == 0, done.output
    assert "sparse/model.onnx in onnxruntime" in done.output.replace("\n", " ")


def test_long_names_are_never_broken(run: Run) -> None:
    long = [f"a-network-with-a-rather-long-name-{kind}-at-224x224.onnx" for kind in ("dense", "sparse")]
    for name, source in zip(long, (DENSE, SPARSE), strict=True):
        Path(name).write_bytes(Path(source).read_bytes())
    done = run("benchmark", *long, "--rounds", 3, "--runtime", "onnxruntime")
    assert done.exit_code == 0, done.output
    first, second, *lines = done.stdout.splitlines()
    assert (first, second) == (f"1: {long[0]}", f"2: {long[1]}")
    rows = [line.split() for line in lines if line.strip()[:2] in ("1 ", "2 ")]
    assert [row[0] for row in rows] == ["1", "2"]
    assert max(len(line) for line in lines) <= 80
    short = run("benchmark", SPARSE, "--rounds", 3, "--runtime", "onnxruntime").stdout
    assert "\n1: " not in f"\n{short}"
    assert any(line.strip().startswith(SPARSE) for line in short.splitlines())


def test_an_engine_beside_an_onnx_file_says_what_runs_where(run: Run) -> None:
    compiled = run("compile", SPARSE, "-o", "model.gossamer")
    assert compiled.exit_code == 0, compiled.output
    done = run("benchmark", "model.gossamer", DENSE, "--rounds", 3)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "model.gossamer runs in gossamer"
    assert lines[1].startswith(f"{DENSE} runs in onnxruntime and ")
    assert "gossamer" in lines[1].removeprefix(DENSE)
    told = " ".join(done.stdout.split())
    assert "• fastest: " in told
    assert "× as long" in told
