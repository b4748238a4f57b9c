"""What `metrics.jsonl` and the TensorBoard events hold, also after a run was killed and resumed."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner import records as module
from gossamer.runner.records import FULL, OFTEN, Records, downsampled, read_records


def lines(folder: Path) -> list[dict]:
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def iterations(folder: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["iteration"]) for line in read_records(folder)]


def test_each_line_is_on_the_disk_when_it_is_written(tmp_path: Path) -> None:
    with Records(tmp_path, tensorboard=False, clock=itertools.count(5.0).__next__) as records:
        records.write("train", 10, 0.5, {"loss": 2.5, "lr": 0.1})
        records.write("test", 20, 1.0, {"top1": 50.0})
        assert lines(tmp_path) == [
            {"kind": "train", "iteration": 10, "epoch": 0.5, "seconds": 1.0, "loss": 2.5, "lr": 0.1},
            {"kind": "test", "iteration": 20, "epoch": 1.0, "seconds": 2.0, "top1": 50.0},
        ]


def test_numbers_that_json_lacks_are_written_as_text_and_read_as_numbers(tmp_path: Path) -> None:
    with Records(tmp_path, tensorboard=False) as records:
        records.write("train", 1, 0.1, {"loss": math.nan, "a": math.inf, "b": -math.inf})
    (line,) = lines(tmp_path)
    assert (line["loss"], line["a"], line["b"]) == ("NaN", "Infinity", "-Infinity")
    (found,) = read_records(tmp_path)
    assert math.isnan(found["loss"])
    assert (found["a"], found["b"]) == (math.inf, -math.inf)


def test_lines_behind_the_resumed_iteration_and_half_a_line_go(tmp_path: Path) -> None:
    with Records(tmp_path, tensorboard=False, clock=itertools.count(0.0).__next__) as records:
        for iteration in (10, 20, 30):
            records.write("train", iteration, iteration / 10, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iteration": 4')
    assert iterations(tmp_path) == [("train", 10), ("train", 20), ("train", 30)]
    with Records(tmp_path, resumed=20, tensorboard=False, clock=itertools.count(100.0).__next__) as records:
        assert iterations(tmp_path) == [("train", 10), ("train", 20)]
        records.write("train", 25, 2.5, {"loss": 1.0})
    assert iterations(tmp_path) == [("train", 10), ("train", 20), ("train", 25)]
    assert [line["seconds"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0], "seconds go on where they were"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_has_only_its_own_lines(tmp_path: Path) -> None:
    with Records(tmp_path, tensorboard=False) as records:
        records.write("test", 0, 0.0, {"top1": 1.0})
    with Records(tmp_path, tensorboard=False):
        assert lines(tmp_path) == []


def test_of_two_tests_at_one_iteration_the_later_counts(tmp_path: Path) -> None:
    with Records(tmp_path, tensorboard=False) as records:
        records.write("test", 5, 1.0, {"top1": 1.0})
        records.write("test", 5, 1.0, {"top1": 2.0})
    assert [line["top1"] for line in read_records(tmp_path)] == [2.0]


def test_events_behind_the_resumed_iteration_count_no_more(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Records(tmp_path) as records:
        for iteration in (10, 20, 30):
            records.write("train", iteration, iteration / 10, {"loss": float(iteration)})
    with Records(tmp_path, resumed=20) as records:
        records.write("train", 25, 2.5, {"loss": 25.0})
        records.write("test", 25, 2.5, {"top1": 50.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(10, 10), (20, 20), (25, 25)]
    assert [event.value for event in events.Scalars("test/top1")] == [50.0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    records = Records(tmp_path, tensorboard=False)
    records._file.close()
    records._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(GossamerError, match=r"metrics.jsonl: cannot be written: No space left on device; free"):
        records.write("train", 1, 0.1, {"loss": 1.0})
    with pytest.raises(GossamerError, match="No space left"):
        records.close()


def test_lost_events_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with Records(tmp_path) as records:
        records.write("train", 1, 0.1, {"loss": 1.0})
    assert len(lines(tmp_path)) == 1
    assert "no TensorBoard events are written" in caplog.text


# Long runs


def long_run(length: int, every: int = 10) -> list[dict]:
    """The lines of a run, with tests, levels and a learning rate that changes all the time."""
    found: list[dict] = [{"kind": "set", "iteration": 0, "lr": 0.1, "sparsity": 0.0}]
    for iteration in range(every, length + 1, every):
        found.append({"kind": "train", "iteration": iteration, "loss": 1.0})
        found.append({"kind": "set", "iteration": iteration, "lr": iteration / 7})
        if iteration % 50_000 == 0:
            found.append({"kind": "test", "iteration": iteration, "top1": 50.0})
            found.append({"kind": "set", "iteration": iteration + 1, "sparsity": iteration / length})
    return found


def test_the_last_iterations_tests_levels_and_ends_of_a_long_run_stay(tmp_path: Path) -> None:
    now = 1_000_000
    before = long_run(now)
    after = downsampled(before, now)
    assert [line for line in after if line["iteration"] > now - FULL] == [
        line for line in before if line["iteration"] > now - FULL
    ]
    for key in ("top1", "sparsity"):
        assert [line for line in after if key in line] == [line for line in before if key in line]
    assert before[1] in after, "the first losses"
    assert after == sorted(after, key=lambda line: line["iteration"])
    assert len(after) < len(before) / 5


def test_thinning_often_or_once_comes_to_the_same_and_an_interruption_leaves_no_trace() -> None:
    lines, kept = long_run(1_000_000, 50), list[dict]()
    for start, stop in ((-1, 333_333), (203_333, 700_020), (570_001, 2_000_000)):  # each goes on from a checkpoint
        kept = downsampled([line for line in kept if line["iteration"] <= start], start - start % OFTEN)
        for line in lines:
            if start < line["iteration"] <= stop:
                kept.append(line)
                if line["kind"] == "train" and line["iteration"] % OFTEN == 0:
                    kept = downsampled(kept, line["iteration"])
    assert downsampled(kept, 1_000_000) == downsampled(lines, 1_000_000)


def test_the_file_of_a_long_run_stays_small_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL", 1000)
    monkeypatch.setattr(module, "OFTEN", 500)
    monkeypatch.setattr(module, "WINDOW", 10)
    with Records(tmp_path, tensorboard=False) as records:
        for iteration in range(1, 20_001):
            records.write("train", iteration, iteration / 100, {"loss": 1.0})
            if iteration % 1000 == 0:
                records.write("test", iteration, iteration / 100, {"top1": 50.0})
    kept = [line["iteration"] for line in lines(tmp_path) if line["kind"] == "train"]
    assert kept[0] == 1
    assert kept[-1000:] == list(range(19_001, 20_001))
    assert len(kept) < 3000
    assert [line["iteration"] for line in lines(tmp_path) if line["kind"] == "test"] == list(range(1000, 20_001, 1000))
    with Records(tmp_path, resumed=19_990, tensorboard=False) as records:
        records.write("train", 19_991, 199.91, {"loss": 1.0})
    assert [line["iteration"] for line in lines(tmp_path)][-2:] == [19_990, 19_991]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "iteration": 1e3}',
        '{"kind": "train", "iteration": 1' + "0" * 400 + "}",
        "[" * 100_000,
        "1",
    ],
)
def test_what_no_run_writes_is_left_out(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + '\n{"kind": "test", "iteration": 2, "top1": "NaN"}\n')
    assert iterations(tmp_path) == [("test", 2)]


@pytest.mark.parametrize("value", ['"loss": [1]', '"loss": "x"', '"loss": null', '"\\u001b": 1'])
def test_a_value_that_is_no_number_is_left_out_of_its_line(value: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "train", "iteration": 1, "lr": 0.5, {value}}}\n')
    assert read_records(tmp_path) == [{"kind": "train", "iteration": 1, "lr": 0.5}]
