"""`report.html` of real runs: what they note, what the page says of them, and that they are not disturbed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.errors import GossamerError
from gossamer.export import to_onnx
from gossamer.runner import reporting
from gossamer.runner.display import Display
from gossamer.runner.notes import WeightsNote, read_note, weights_of, write_note
from gossamer.runner.records import read_records
from gossamer.runner.reporting import report, run_content
from gossamer.runner.runs import measure_sensitivity, run
from tests.runner.nets import small
from tests.runner.running_on_digits import (
    SPARSITIES,
    config,
    copied_run,
    final_state,
    interrupted,
    resumed,
    same,
    trained,
)


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that became sparse by levels; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("levels")
    trained(config(folder, "amba"))
    return folder / "run"


def copied(run: Path, folder: Path) -> Path:
    return copied_run(run, folder / run.name)


def test_a_run_ends_with_its_page(levels: Path) -> None:
    text = (levels / "report.html").read_text()
    content = run_content(levels, "run")
    assert all(f'id="{part}"' in text for part in ("summary", "schedule", "layers", "weights", "masks", "settings"))
    assert content.notes == ()
    assert content.plan is not None
    assert content.plan.y[-1] == 0.8
    assert content.histograms[0].before is not None
    assert {layer.target is None for layer in content.layers} == {False}


def test_train_lines_tell_the_target_beside_the_sparsity(levels: Path) -> None:
    lines = [record for record in read_records(levels) if record["kind"] == "train"]
    assert {line["target"] for line in lines} == {0.3, 0.6, 0.8}
    assert all(abs(line["sparsity"] - line["target"]) < 0.01 for line in lines)


def test_the_start_is_noted_before_anything_is_pruned(levels: Path) -> None:
    start, end = (read_note(levels, name, WeightsNote) for name in ("start", "end"))
    assert start is not None
    assert end is not None
    assert sum(found.zeros for found in start.layers.values()) == 0
    assert sum(found.zeros for found in end.layers.values()) > 0


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in ("dense", "gmp", "str") else pytest.mark.slow)
        for name in SPARSITIES
        if name != "qat"
    ],
)
def test_the_page_counts_the_zeros_of_every_method(tmp_path: Path, method: str) -> None:
    result = trained(config(tmp_path, method))
    content = run_content(result.folder, "run")
    pruned = [layer for layer in content.layers if layer.dense is None]
    share = sum(layer.zeros for layer in pruned) / sum(layer.parameters for layer in pruned)
    assert share == pytest.approx(result.sparsity or 0.0, abs=0.02)
    assert bool(content.masks) == (method != "dense")
    assert "masks" in content.missing if method == "dense" else "masks" not in content.missing


def test_the_report_changes_nothing_in_the_training(tmp_path: Path) -> None:
    states = []
    for name, sets in (("on", ["runtime.report.sensitivity=true"]), ("off", ["runtime.report.enable=false"])):
        (tmp_path / name).mkdir()
        trained(config(tmp_path / name, "amba"), *sets)
        states.append(final_state(tmp_path / name / "run"))
    same(*states)
    assert (tmp_path / "on" / "run" / "report.html").is_file()
    assert not (tmp_path / "off" / "run" / "report.html").exists()
    assert not (tmp_path / "off" / "run" / "analysis").exists()


def test_a_stopped_run_has_a_page_and_a_resumed_one_keeps_its_start(tmp_path: Path) -> None:
    folder = interrupted(config(tmp_path, "gmp"), 9).folder
    assert "stopped at iteration 9 of 18" in (folder / "report.html").read_text()
    start = (folder / "analysis" / "start.json").read_text()
    resumed(folder)
    assert "incomplete" not in (folder / "report.html").read_text()
    assert (folder / "analysis" / "start.json").read_text() == start
    assert run_content(folder, "run").histograms[0].before is not None


def test_a_run_that_fails_has_a_page(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="lower trainer"):
        trained(config(tmp_path), "trainer.optimizer.kwargs.lr=1e9", "trainer.lr_scheduler=null", "trainer.log_freq=1")
    assert "incomplete" in (tmp_path / "run" / "report.html").read_text()


def test_a_page_that_cannot_be_made_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("nothing works")

    monkeypatch.setattr(reporting, "run_content", fail)
    monkeypatch.setattr(reporting, "note_plan", fail)
    result = trained(config(tmp_path))
    assert result.complete
    assert (
        caplog.messages.count(
            f"The report is incomplete: nothing works; write it again with gossamer report {result.folder}"
        )
        == 2
    )


def test_an_interrupt_goes_through_and_leaves_the_page_as_it_was(
    levels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(levels, tmp_path)
    files = {path: path.read_bytes() for path in folder.rglob("*.html")}
    write = Path.write_text

    def half(path: Path, text: str, **more: Any) -> int:
        if path.suffix != ".html":
            return write(path, text, **more)
        write(path, text[: len(text) // 2], **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        resumed(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*.html")} == files
    reported = f"The report is incomplete: it was interrupted; write it again with gossamer report {folder}"
    assert caplog.messages.count(reported) == 1


def test_a_folder_from_before_notes_has_a_page_that_says_so(levels: Path, tmp_path: Path) -> None:
    folder = copied(levels, tmp_path)
    shutil.rmtree(folder / "analysis")
    text = report([folder]).read_text()
    assert "the run is from an earlier version" in text
    assert "was not recorded" in text
    assert f"gossamer report {folder} --sensitivity" in text
    assert run_content(folder, "run").layers


def test_the_command_on_the_page_works_where_the_page_was_made(
    levels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copied_run(levels, Path("runs/my first"))
    reported = re.search(r"Measure it with: gossamer (report .* --sensitivity)", unescape(report([folder]).read_text()))
    assert reported is not None
    words = shlex.split(reported[1])
    assert words == ["report", "runs/my first", "--sensitivity"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert run_content(folder, "run").sensitivity is not None


def test_without_weights_the_notes_still_have_layers_and_histograms(levels: Path, tmp_path: Path) -> None:
    folder = copied(levels, tmp_path)
    before = run_content(folder, "run")
    (folder / "model.safetensors").unlink()
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    found = run_content(folder, "run")
    assert (found.layers, found.histograms) == (before.layers, before.histograms)
    assert found.masks == ()
    assert "gossamer export" in found.missing["masks"]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 9}'])
def test_a_note_that_cannot_be_used_is_left_out_and_reported(levels: Path, tmp_path: Path, text: str) -> None:
    folder = copied(levels, tmp_path)
    (folder / "analysis" / "plan.json").write_text(text)
    assert "analysis/plan.json: is not a note of this version" in "".join(run_content(folder, "run").notes)


@pytest.mark.parametrize("kind", ["start", "plan", "end", "sensitivity"])
def test_a_note_that_makes_no_sense_takes_only_its_own_part_from_the_page(
    levels: Path, tmp_path: Path, kind: str
) -> None:
    folder = copied(levels, tmp_path)
    measure_sensitivity(folder)
    before = run_content(folder, "run")
    (folder / "analysis" / f"{kind}.json").write_text(
        '{"format": 1, "iteration": 18, "layers": {"a": 3}, "course": 7, "rows": []}'
    )
    found = run_content(folder, "run")
    assert [layer.zeros for layer in found.layers] == [layer.zeros for layer in before.layers]
    assert (found.plan is None) == ("plan" in found.missing) == (kind == "plan")
    assert (found.sensitivity is None) == ("sensitivity" in found.missing) == (kind == "sensitivity")
    assert {histogram.before is None for histogram in found.histograms} == {kind == "start"}
    page = report([folder]).read_text()
    assert all(sentence in page for sentence in found.missing.values())


@pytest.mark.parametrize("value", [None, float("nan"), "text"])
@pytest.mark.parametrize("key", ["epoch", "top1", "sparsity", "images_per_s"])
def test_a_value_that_is_no_number_leaves_a_gap_and_ends_no_report(tmp_path: Path, key: str, value: object) -> None:
    lines = [
        {
            "kind": "train",
            "iteration": 4,
            "epoch": 1.0,
            "seconds": 0.5,
            "loss": 2.0,
            "sparsity": 0.5,
            "images_per_s": 9.0,
        },
        {"kind": "test", "iteration": 4, "epoch": 1.0, "seconds": 0.6, "top1": 6.25},
    ]
    changed = [line | ({key: value} if key in line else {}) for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert ("6.25" in report([tmp_path]).read_text()) == (key != "top1")


def test_several_runs_are_set_side_by_side(levels: Path, tmp_path: Path) -> None:
    path = report([levels, copied(levels, tmp_path)], tmp_path / "both.html")
    text = path.read_text()
    assert "run (2)" in text
    assert 'id="run-2"' in text


def test_a_file_that_is_no_report_is_not_written_over(levels: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    with pytest.raises(GossamerError, match="is not a report and is not overwritten; choose another file with -o"):
        report([levels], tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<html>mine</html>"
    with pytest.raises(GossamerError, match="is a folder; give a file with -o"):
        report([levels], tmp_path)


def test_a_benchmark_of_its_files_is_shown_with_the_runs(levels: Path, tmp_path: Path) -> None:
    folder = copied(levels, tmp_path)
    example = torch.zeros(1, 3, 8, 8)
    for name in ("dense.onnx", "model.onnx"):
        to_onnx(small().eval(), folder / name, example)
    results = tmp_path / "speed.json"
    files = [str(tmp_path / "run" / name) for name in ("dense.onnx", "model.onnx")]
    done = CliRunner().invoke(
        app, ["benchmark", *files, "--rounds", "6", "--runtime", "onnxruntime", "-o", str(results)]
    )
    assert done.exit_code == 0, done.output
    other = tmp_path / "other.json"
    done = CliRunner().invoke(app, ["benchmark", files[0], "--rounds", "3", "--runtime", "gossamer", "-o", str(other)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["report", str(folder), "--benchmark", str(results), "--benchmark", str(other)])
    assert done.exit_code == 0, done.output
    part = unescape((folder / "report.html").read_text().split('id="speed"')[1].split("</section>")[0])
    found = json.loads(results.read_text())
    assert all(sentence in part for sentence in found["sentences"])
    ratio = found["timings"][1]["speed"]
    assert f"{ratio['value']:.2f}×<small>{ratio['low']:.2f}–{ratio['high']:.2f}</small>" in part
    assert part.count('class="dot"') == 3  # all files are in the folder of the run
    assert part.index("onnxruntime ") < part.index("gossamer ")
    assert part.count("1×3×8×8, threads: 1") >= 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("[]", "is not a benchmark result"),
        ('{"threads": 1, "sentences": [], "timings": []}', "contains no timings"),
        ('{"threads": 1, "sentences": [], "timings": [{"runtime": "torch"}]}', "is not a benchmark result"),
    ],
)
def test_a_file_that_is_not_of_a_benchmark_is_refused(
    levels: Path, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "speed.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(GossamerError, match=message):
        report([levels], tmp_path / "page.html", path)
    assert not (tmp_path / "page.html").exists()


def test_sensitivity_is_left_out_of_a_short_run_and_measured_on_request(levels: Path, tmp_path: Path) -> None:
    folder = copied(levels, tmp_path)
    assert "too many forward passes" in run_content(folder, "run").missing["sensitivity"]
    reported: list[float] = []
    measure_sensitivity(folder, lambda label, share: reported.append(share))
    heat = run_content(folder, "run").sensitivity
    assert heat is not None
    assert [name for name, _ in heat.rows] == [layer.name for layer in run_content(folder, "run").layers]
    assert reported[-1] == 1.0
    assert reported == sorted(reported)


def test_sensitivity_of_another_iteration_is_not_shown(levels: Path, tmp_path: Path) -> None:
    folder = copied(levels, tmp_path)
    measure_sensitivity(folder)
    path = folder / "analysis" / "sensitivity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "iteration": 7}))
    assert "another iteration" in run_content(folder, "run").missing["sensitivity"]


def test_notes_of_weights_come_back_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = weights_of(small())
    write_note(tmp_path, "start", WeightsNote(layers=weights))
    assert read_note(tmp_path, "start", WeightsNote) == WeightsNote(layers=weights)


def test_the_command_writes_a_page_and_refuses_other_folders(levels: Path, tmp_path: Path) -> None:
    folder = copied(levels, tmp_path)
    result = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert result.exit_code == 0
    reported = json.loads(result.stdout)
    assert reported["file"] == str(folder / "report.html")
    assert reported["bytes"] == (folder / "report.html").stat().st_size
    result = CliRunner().invoke(app, ["report", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "no such folder; give the folder of a run" in result.stderr


@pytest.mark.slow
def test_a_detector_has_a_page_with_its_losses_and_the_sensitivity_of_its_network(tmp_path: Path) -> None:
    result = run(
        Path(__file__).parents[2] / "configs/det/retinanet/retinanet-r18-improve_ampere_sparse.yaml",
        [
            f"saver.save_dir={json.dumps(str(tmp_path / 'run'))}",
            "saver.pretrain_model=null",
            "trainer.max_epoch=1",
            "dataset.train.count=8",
            "dataset.test.count=4",
            "runtime.report.sensitivity=true",
        ],
        "tiny",
        display=Display(shown=False),
    )
    content = run_content(result.folder, "run")
    assert content.metric == "mAP"
    assert len(content.loss) >= 3
    assert content.sensitivity is not None
    assert {name for name, _ in content.sensitivity.rows} <= {layer.name for layer in content.layers}
    assert (result.folder / "report.html").stat().st_size < 500_000
