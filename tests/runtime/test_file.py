"""A saved engine loads to the same results, and a damaged or invalid file is one error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.io import bytes_of, header_of, read_header, write_sealed
from gossamer.runtime.file import KIND, VERSION
from tests.runtime.models import Residual, pruned

SIZE = (3, 21, 18)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "model.gossamer"
    runtime.compile(pruned(Residual()), torch.randn(2, *SIZE), threads=1).save(path)
    return path


def test_a_saved_engine_computes_the_same_bits_without_the_model(saved: Path, tmp_path: Path) -> None:
    engine = runtime.compile(pruned(Residual()), torch.randn(2, *SIZE), threads=1)
    engine.save(tmp_path / "own.gossamer")
    x = torch.randn(3, *SIZE)
    before = engine(x)
    assert torch.equal(runtime.load(tmp_path / "own.gossamer", threads=1)(x), before)
    engine.save(tmp_path / "again.gossamer")  # after the kernels took the weights over
    assert (tmp_path / "again.gossamer").read_bytes() == (tmp_path / "own.gossamer").read_bytes()
    assert saved.stat().st_size < sum(4 * p.numel() for p in Residual().parameters()) / 2


def test_a_file_loads_in_a_process_that_does_not_know_the_model(saved: Path) -> None:
    program = f"""
import torch
from gossamer import runtime
assert runtime.load({str(saved)!r})(torch.ones(2, {", ".join(map(str, SIZE))})).shape == (2, 10)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def rewritten(saved: Path, path: Path, change: object) -> Path:
    """A copy with a valid digest whose graph was changed."""
    with saved.open("rb") as file:
        metadata, parts = read_header(file, KIND, VERSION)
        data = {n: torch.frombuffer(bytearray(file.read(p.end - p.start)), dtype=p.dtype) for n, p in parts.items()}
    graph = json.loads(metadata.pop("graph"))
    change(graph, data)
    metadata = {key: value for key, value in metadata.items() if key not in ("digest", "content")}
    metadata["graph"] = json.dumps(graph)
    shapes = {
        name: parts[name].shape if data[name].numel() == np.prod(parts[name].shape) else data[name].shape
        for name in data
    }
    header = header_of(metadata, [(name, data[name].dtype, shapes[name]) for name in data])
    with path.open("wb") as file:
        write_sealed(file, header, (bytes_of(tensor) for tensor in data.values()))
    return path


def node(graph: dict, op: str) -> dict:
    return next(entry for entry in graph["nodes"] if entry["op"] == op)


CHANGES = {
    "an unknown operator": lambda graph, _: node(graph, "aten.mean.dim").update(op="aten.from_file.default"),
    "another namespace": lambda graph, _: node(graph, "aten.mean.dim").update(op="os.system"),
    "a value that nothing computes": lambda graph, _: node(graph, "convolution").update(args=[{"ref": "nope"}, None]),
    "a stride of zero": lambda graph, _: node(graph, "convolution").update(stride=[0, 0]),
    "a negative padding": lambda graph, _: node(graph, "convolution").update(padding=[-5, -5]),
    "a huge size": lambda graph, _: graph["shapes"].update(x=["s0", 3, 2**40, 18]),
    "a tile without a kernel": lambda graph, _: graph["choices"].update(
        {name: [999, 1, 1] for name in graph["choices"]}
    ),
    "fewer values than bits": lambda graph, data: data.update({n: data[n][:-1] for n in data if n.endswith("#values")}),
    "other bits": lambda graph, data: data.update({n: data[n] ^ 255 for n in data if n.endswith("#bits")}),
    "no choices": lambda graph, _: graph.pop("choices"),
    "text for a number": lambda graph, _: node(graph, "convolution").update(groups="two"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_invalid_graph_with_a_valid_digest_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path / "changed.gossamer", CHANGES[name])
    with pytest.raises(GossamerError):
        runtime.load(path, threads=1)


LEAF = {"type": None, "context": None, "children_spec": []}
FACTORY = {"default_factory_module": "imported_by_a_file", "default_factory_name": "list", "dict_context": ["a"]}
ENUM = json.dumps([{"__enum__": True, "fqn": "imported_by_a_file:Kind", "name": "A"}])


@pytest.mark.parametrize(("kind", "context"), [("collections.defaultdict", FACTORY), ("builtins.dict", ENUM)])
def test_the_structure_of_outputs_imports_nothing(
    kind: str, context: object, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch imports the modules that such structures name."""
    (tmp_path / "imported_by_a_file.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    structure = json.dumps([1, {"type": kind, "context": context, "children_spec": [LEAF]}])
    path = rewritten(saved, tmp_path / "a.gossamer", lambda graph, _: graph.update(output_structure=structure))
    with pytest.raises(GossamerError, match=r"there is a (collections\.defaultdict|builtins\.dict) in it"):
        runtime.load(path, threads=1)
    assert "imported_by_a_file" not in sys.modules


def test_outputs_that_a_file_does_not_support_are_one_error(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return defaultdict(list, y=x.relu())

    engine = runtime.compile(Counts(), torch.randn(2, 3), threads=1, tuned=False)
    with pytest.raises(
        GossamerError,
        match=r"the structure of the outputs is not supported in engine files: there is a collections\.defaultdict",
    ):
        engine.save(tmp_path / "a.gossamer")


@pytest.mark.parametrize(
    "change",
    [
        lambda graph, _: graph["shapes"].update(
            {name: [*s[:1], *[64] * (len(s) - 1)] for name, s in graph["shapes"].items()}
        ),
        lambda graph, _: [entry.update(groups=3) for entry in graph["nodes"] if entry["op"] == "convolution"],
        lambda graph, _: [entry.update(padding=[40, 40]) for entry in graph["nodes"] if entry["op"] == "convolution"],
        lambda graph, _: [entry.update(size=[1, 1]) for entry in graph["nodes"] if entry["op"] == "convolution"],
    ],
    ids=["shapes", "groups", "padding", "window"],
)
def test_sizes_that_contradict_each_other_never_reach_a_kernel(change: object, saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path / "changed.gossamer", change)
    program = f"""
import torch
from gossamer import runtime
from gossamer.errors import GossamerError
try:
    runtime.load({str(path)!r}, threads=1)(torch.ones(1, {", ".join(map(str, SIZE))}))
except (GossamerError, RuntimeError) as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Error" in done.stdout


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_or_changed_file_is_refused(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:position]
    else:
        content[position] ^= 1 + data.draw(st.integers(0, 254))
    path = tmp_path / "damaged.gossamer"
    path.write_bytes(content)
    with pytest.raises(GossamerError, match="damaged"):
        runtime.load(path)


def test_a_missing_file_and_a_folder_are_one_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.gossamer", tmp_path):
        with pytest.raises(GossamerError, match="cannot be read"):
            runtime.load(path)
