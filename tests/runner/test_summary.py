"""What came out of runs, from their records and what their checkpoints say of themselves."""

from __future__ import annotations

import io
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console, RenderableType

from gossamer.errors import GossamerError
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.records import Records
from gossamer.runner.summary import comparison, comparison_table, metrics_table, run_summary, run_table

DENSE = "runtime: {runner: {type: base}}\nsparsity: {recipe: unused.yaml}\n"
LEVELS = "runtime: {runner: {type: sparse}}\nsparsity: {scheduler: {type: AmbaLevelPruneScheduler}}\n"
RECIPE = "runtime: {runner: {type: sparse}}\nsparsity: {recipe: 'builtin:gmp-90'}\n"


def run(
    folder: Path,
    tests: list[float],
    *,
    zeros: float = 0.0,
    reported: float | None = None,
    config: str = DENSE,
    metric: str = "top1",
) -> Path:
    """A run folder of 100 iterations for each test."""
    weight = torch.ones(10, 10, 1, 1)
    weight.view(-1)[: round(zeros * 100)] = 0
    state = {"model": {"conv.weight": weight, "fc.weight": torch.ones(10, 10), "bn.weight": torch.ones(3)}}
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    with Records(folder, tensorboard=False, clock=itertools.count(0.0, 10.0).__next__) as records:
        for index, value in enumerate(tests, 1):
            sparsity = {} if reported is None else {"sparsity": reported}
            records.write("train", 100 * index, index, {"loss": 1.0, "images_per_s": 100.0 * index, **sparsity})
            records.write("test", 100 * index, index, {"other": 1.0, metric: value})
            best = value == max(tested for tested in tests if not math.isnan(tested))
            state["config"] = config
            checkpoints.save(
                state,
                iteration=100 * index,
                epoch=index,
                metrics={metric: value},
                best=best,
                weights={"convolution": (100, 100 - round(zeros * 100)), "linear": (100, 100)},
            )
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def shown(renderable: RenderableType, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    folder = run(tmp_path / "res18", [50.0, 70.0, 60.0], zeros=0.5, reported=0.5, config=LEVELS)
    found = run_summary(folder)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["metric"] == "top1"
    assert found["metrics"]["top1"] == {
        "first": 50.0,
        "best": 70.0,
        "best_iteration": 200,
        "last": 60.0,
        "model": 70.0,
    }
    assert found["model"]["title"] == "best checkpoint, iteration 200: top1 70.00"
    assert (found["weights"], found["nonzero"], found["sparsity"]) == (200, 150, 0.25)
    assert found["kinds"]["convolution"] == {"weights": 100, "nonzero": 50}
    assert (found["iterations"], found["epochs"], found["seconds"], found["images_per_s"]) == (300, 3, 60.0, 200.0)
    assert found["files"] == [str(folder / "model.safetensors"), str(folder / "metrics.jsonl")]


def test_the_table_of_a_run_says_it_in_few_lines(tmp_path: Path) -> None:
    folder = run(tmp_path / "res18", [50.0, 70.0, 60.0], zeros=0.5, reported=0.5, config=LEVELS)
    console = Console(file=io.StringIO(), width=100, soft_wrap=True)
    console.print(run_table(folder))
    assert [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.strip(" ─")] == [
        "res18: AmbaLevel",
        "first best at iteration last",
        "top1 50.00 70.00 200 60.00",
        "other 1.000 1.000 200 1.000",
        "sparsity 25.0 %; 150 of 200 weights are not zero",
        "trained 300 iterations to epoch 3 in 1:00, 200 images/s",
        *[" ".join(line.split()) for line in shown(run_table(folder)) if line.startswith("folder")],
        "model best checkpoint, iteration 200: top1 70.00",
        "latest checkpoints/iter_00000300.safetensors",
        "best checkpoints/best.safetensors",
        "files model.safetensors, metrics.jsonl",
    ]


def test_runs_are_compared_with_the_first_by_their_models(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / "res18", [92.0]),
        run(tmp_path / "levels", [91.9, 91.5], zeros=0.5, reported=0.5, config=LEVELS),
        run(tmp_path / "gmp", [90.25], zeros=0.9, reported=0.9, config=RECIPE),
    ]
    rows = comparison(folders)
    assert [(row["name"], row["method"], row["value"], row["difference"]) for row in rows] == [
        ("res18", "dense", 92.0, None),
        ("levels", "AmbaLevel", 91.9, pytest.approx(-0.1)),
        ("gmp", "gmp-90", 90.25, -1.75),
    ]
    assert [(row["sparsity"], row["nonzero"], row["iterations"]) for row in rows] == [
        (0.0, 200, 100),
        (0.25, 150, 200),
        (pytest.approx(0.45), 110, 100),
    ]
    head, _, *body = shown(comparison_table(folders))
    assert head.split() == ["run", "method", "top1", "change", "sparsity", "non-zero", "model"]
    assert body[1].split() == ["levels", "AmbaLevel", "91.90", "-0.10", "25.0", "%", "150", "best", "100"]


@pytest.mark.parametrize("width", [60, 120])
def test_numbers_in_tables_stay_whole_in_narrow_terminals(tmp_path: Path, width: int) -> None:
    folders = [run(tmp_path / name, [92.0]) for name in ("a_run_with_a_rather_long_name", "b")]
    text = "\n".join(shown(comparison_table(folders), width))
    assert "…" not in text
    first, second = (line.split() for line in text.splitlines() if "92.00" in line)
    assert first[1:] == ["dense", "92.00", "0.0", "%", "200", "best", "100"]
    assert second == ["b", "dense", "92.00", "+0.00", "0.0", "%", "200", "best", "100"]
    assert max(map(len, shown(run_table(folders[0]), width))) <= width


def test_runs_of_several_tasks_name_their_metric(tmp_path: Path) -> None:
    folders = [run(tmp_path / "cls", [92.0]), run(tmp_path / "det", [0.4], metric="mAP")]
    rows = comparison(folders)
    assert rows[1]["difference"] is None
    text = " ".join(" ".join(shown(comparison_table(folders))).split())
    assert "top1 92.00" in text
    assert "mAP 0.400" in text


def test_runs_of_one_name_are_reported_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [run(tmp_path / part / "res18", [1.0]) for part in ("a", "b")]
    assert [row["name"] for row in comparison(folders)] == [str(folder) for folder in folders]


def test_weights_are_not_counted_where_zeros_come_at_the_end(tmp_path: Path) -> None:
    (row,) = comparison([run(tmp_path / "str", [1.0], zeros=0.0, reported=0.8, config=LEVELS)])
    assert (row["sparsity"], row["nonzero"]) == (0.8, None)


def test_numbers_that_json_lacks_are_unknown(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", [math.nan, 50.0, math.nan])
    assert run_summary(folder)["metrics"]["top1"] == {
        "first": None,
        "best": 50.0,
        "best_iteration": 200,
        "last": None,
        "model": 50.0,
    }
    assert "–" in " ".join(shown(run_table(folder)))


def test_a_run_is_summed_up_from_what_is_left_of_it(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", [50.0, 60.0])
    last = folder / "checkpoints" / "iter_00000200.safetensors"
    last.unlink()  # the best is a link to the same file
    last.write_bytes(b"damaged")
    assert run_summary(folder)["checkpoints"]["latest"].endswith("iter_00000100.safetensors")
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    assert run_summary(folder)["metrics"]["top1"]["last"] == 60.0
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(GossamerError, match=r"a: has neither metrics.jsonl nor checkpoints; give the folder of a run"):
        run_table(folder)
    with pytest.raises(GossamerError, match="none: no such folder"):
        comparison_table([tmp_path / "none"])


def test_a_test_alone_is_a_short_table() -> None:
    lines = [line.split() for line in shown(metrics_table({"top5": 99.0, "top1": 91.234}, 0.5))]
    assert lines == [["top1", "91.23"], ["top5", "99.00"], ["sparsity", "50.0", "%"]]
