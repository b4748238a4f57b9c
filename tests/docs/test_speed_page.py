"""The script on the page about speed writes what the tables there are about, on a network that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.benchmark import measure
from tests.docs.test_snippets import ROOT, snippets
from tests.runner.nets import plain

SUFFIXES = (".onnx", ".safetensors")


@pytest.mark.slow
def test_the_script_writes_every_file_that_the_commands_below_it_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = snippets(ROOT / "docs" / "speed.md")
    (script,) = (snippet.code for snippet in found if snippet.code.startswith("# variants.py"))
    (commands,) = (snippet.code for snippet in found if "python variants.py" in snippet.code)
    namespace: dict[str, Any] = {"__name__": "variants"}
    exec(compile(script, "variants.py", "exec"), namespace)
    namespace["write"](plain().eval(), torch.randn(1, 3, 8, 8))
    timed = [word for line in commands.splitlines() for word in line.split() if Path(word).suffix in SUFFIXES]
    assert sorted(timed) == sorted(path.name for path in tmp_path.iterdir())
    rows = {timing.file: timing.contents for timing in measure(timed, rounds=1, runtimes=["onnxruntime", "load"])}
    assert rows["sparse90.onnx"].sparsity == rows["sparse90.safetensors"].sparsity == pytest.approx(0.9, abs=0.01)
    assert rows["filters50.onnx"].filters == 2 * rows["filters50.onnx"].empty_filters
    assert rows["thin.onnx"].weights < rows["dense.onnx"].weights
    assert rows["int8.onnx"].integers == rows["int8.onnx"].weights
