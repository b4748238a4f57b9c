"""Any records and notes in a run folder give a report, or are left out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from gossamer.runner.notes import Origin, PlanNote, SensitivityNote, WeightsNote, weights_of, write_note
from gossamer.runner.reporting import report
from tests.fuzz.harness import attempt, fuzz
from tests.fuzz.values import mutated

KINDS = ("start", "plan", "end", "sensitivity")


def made(folder: Path) -> dict[str, Any]:
    """A run folder without checkpoints, and its documents by path."""
    torch.manual_seed(0)
    weights = weights_of(nn.Sequential(nn.Linear(8, 4)))
    origin = Origin(name="dense", metrics={"top1": 80.0})
    write_note(folder, "start", WeightsNote(layers=weights, origin=origin))
    write_note(folder, "end", WeightsNote(layers=weights, iteration=4))
    layers = {"0.weight": {"target": 0.8, "dense": None, "transposed": False}}
    course = [[0.0, 0.1], [2.0, 0.5], [4.0, 0.8]]
    write_note(folder, "plan", PlanNote(length=4, steps_per_epoch=2, sparse=True, layers=layers, course=course))
    rows = {"0.weight": [0.1, 0.9]}
    write_note(folder, "sensitivity", SensitivityNote(iteration=4, sparsities=[0.5, 0.9], images=32, rows=rows))
    lines: list[dict[str, Any]] = []
    for at in range(5):
        frame = {"iteration": at, "epoch": at / 2, "seconds": 0.1 * at}
        lines.append({"kind": "set", **frame, "lr": 0.1, "sparsity": 0.2 * at})
        lines.append({"kind": "train", **frame, "loss": 2.0 / (at + 1), "lr": 0.1, "images_per_s": 100.0})
        lines.append({"kind": "test", **frame, "top1": 10.0 * at, "top5": 50.0})
    notes = {kind: json.loads((folder / "analysis" / f"{kind}.json").read_text()) for kind in KINDS}
    return {"metrics": lines, **notes}


def reported(folder: Path, documents: Any) -> None:
    found = documents if isinstance(documents, dict) else {}
    lines = found.get("metrics")
    text = "\n".join(json.dumps(line) for line in (lines if isinstance(lines, list) else [lines]))
    (folder / "metrics.jsonl").write_text(text)
    for kind in KINDS:
        (folder / "analysis" / f"{kind}.json").write_text(json.dumps(found.get(kind)))
    assert report([folder]).read_text().endswith("</html>\n")


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_records_and_notes_give_a_report_or_are_refused(examples: int, tmp_path: Path) -> None:
    documents = made(tmp_path)
    extreme = st.sampled_from([10**400, 2**70, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -1, 0, [], {}, "NaN"])
    inputs = st.one_of(mutated(documents), mutated(documents, extreme, 6))
    outcome = fuzz(inputs, examples, lambda changed: reported(tmp_path, changed), tmp_path)
    assert outcome.accepted >= examples // 2, outcome


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("start", "layers", "0.weight", "shape", 0), float("inf")),
        (("start", "layers", "0.weight", "zeros"), float("inf")),
        (("end", "layers", "0.weight", "counts", 100), 10**400),
        (("end", "layers", "0.weight", "counts"), []),
        (("plan", "course", 1, 0), 10**400),
        (("plan", "length"), 10**400),
        (("plan", "steps_per_epoch"), 10**400),
        (("sensitivity", "images"), float("inf")),
        (("sensitivity", "rows", "0.weight", 0), 10**400),
        (("metrics", 0, "sparsity"), 1e308),
        (("metrics", 1, "loss"), 1e308),
        (("metrics", 1, "epoch"), 1e308),
        (("metrics", 2, "top1"), -1e308),
        (("metrics", 1, "loss"), 1e-320),
    ],
    ids=str,
)
def test_a_number_out_of_range_is_left_out(keys: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    documents = made(tmp_path)
    holder: Any = documents
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    assert attempt(lambda: reported(tmp_path, documents), tmp_path)
