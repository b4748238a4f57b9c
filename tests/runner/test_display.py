"""What a person sees of a run: a live display that fits its terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import itertools
import re
import sys

import pytest
from rich.console import Console

from gossamer.runner.display import Display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def display(
    width: int = 80, *, terminal: bool = True, step: float = 1.0, **more: object
) -> tuple[Display, io.StringIO]:
    stream = Terminal() if terminal else io.StringIO()
    console = Console(
        file=stream, force_terminal=terminal, width=width, height=20, color_system=None, legacy_windows=False
    )
    return Display(console=console, clock=itertools.count(0.0, step).__next__, **more), stream


def screen(stream: io.StringIO) -> list[str]:
    """The lines that a terminal would show in the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", stream.getvalue()):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(re.sub(r"\D", "", part) or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def train(shown: Display, until: int = 120) -> None:
    for iteration in range(10, until + 1, 10):
        shown.update(iteration, loss=0.5, lr=0.0125, sparsity=0.412, target=0.5, images_per_s=812.3)


NUMBERS = ["epoch 3/10", "iteration 120/400", "loss 0.5000", "lr 0.0125", "sparsity 41.2 of 50.0 %", "812 images/s"]


@pytest.mark.parametrize("width", [60, 120])
def test_bars_and_numbers_fit_the_terminal(width: int) -> None:
    shown, stream = display(width)
    with shown.training(400, 40):
        train(shown)
        shown.tested({"top5": 99.1, "top1": 91.2}, 120)
        with shown.testing(4) as show:
            show(1)
            test, training, testing, *numbers = screen(stream)
    assert test == "test at iteration 120: top1 91.20, top5 99.10"
    assert re.fullmatch(r"training ━+[╸╺ ━]* +30%", training)
    assert re.fullmatch(r"testing +━+[╸╺ ━]* +25%", testing)
    assert [number for line in numbers for number in re.split(r" {3,}", line)] == [*NUMBERS, "ETA 0:54"]
    assert all(len(line) <= width for line in (training, testing, *numbers))


def test_only_one_display_is_left_at_the_end() -> None:
    shown, stream = display(200)
    with shown.training(120, 40):
        train(shown)
        with shown.testing(1) as show:
            show(1)
    bar, numbers = screen(stream)
    assert bar.endswith("100%")
    assert numbers.startswith("epoch 3/3   iteration 120/120")


def test_drawing_happens_a_few_times_a_second_at_most() -> None:
    shown, stream = display(step=0.001)
    with shown.training(1000, 100):
        first = len(stream.getvalue())
        for iteration in range(1, 101):
            shown.update(iteration, loss=1.0, lr=0.1)
        drawn = stream.getvalue()[first:].count("training")
    assert drawn <= 2


def test_the_time_left_counts_from_where_the_run_went_on() -> None:
    ticks = iter([0.0, *[10.0] * 50])
    console = Console(file=io.StringIO(), width=200)
    shown = Display(console=console, clock=ticks.__next__)
    with shown.training(300, 100, start=100):
        shown.update(200, loss=1.0, lr=0.1)
    assert "ETA 0:10" in console.file.getvalue()


def test_without_a_terminal_there_is_a_line_for_each_epoch_and_test() -> None:
    shown, stream = display(40, terminal=False, step=0.0)
    with shown.training(100, 50):
        for iteration in (20, 40, 60, 80, 100):
            shown.update(iteration, loss=0.5, lr=0.1, images_per_s=3.25)
        shown.tested({"mAP": 0.4, "mAP50": 0.612, "mAP_small": 0.1, "mAP75": 0.3}, 100)
        shown.message("warning: [b] and a long line that is not broken into several")
    assert stream.getvalue().splitlines() == [
        "epoch 2/2  iteration 60/100  loss 0.5000  lr 0.1  3.25 images/s  ETA 0:00",
        "epoch 2/2  iteration 100/100  loss 0.5000  lr 0.1  3.25 images/s",
        "test at iteration 100: mAP 0.400, mAP50 0.612, mAP75 0.300",
        "warning: [b] and a long line that is not broken into several",
    ]


def test_an_evaluation_alone_is_shown_too() -> None:
    shown, stream = display()
    with shown.testing(2) as show:
        show(1)
        show(2)
    shown.tested({"top1": 91.2})
    assert screen(stream)[0].startswith("testing  ━")
    assert screen(stream)[-1] == "test: top1 91.20"


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_show_nothing(terminal: bool) -> None:
    shown, stream = display(terminal=terminal, shown=False)
    with shown.training(120, 40):
        train(shown)
        with shown.testing(1) as show:
            show(1)
        shown.tested({"top1": 1.0})
        shown.message("hello")
    assert stream.getvalue() == ""


def test_messages_and_the_standard_error_come_above_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, stream = display(200)
    monkeypatch.setattr(sys, "stderr", stream)
    with shown.training(400, 40):
        train(shown, 50)
        sys.stderr.write("from the stream\n")
        shown.message("from a message [x]")
        train(shown, 80)
    seen = screen(stream)
    assert seen[:2] == ["from the stream", "from a message [x]"]
    assert [line.split()[0] for line in seen[2:]] == ["training", "epoch"]


def test_an_error_ends_the_display_and_passes() -> None:
    shown, stream = display()
    with pytest.raises(KeyboardInterrupt), shown.training(400, 40):
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h"), "the cursor is back"
    with shown.training(400, 40, 50):
        train(shown)
    assert screen(stream)[0].startswith("training")


def test_letters_that_a_stream_cannot_encode_are_replaced() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    Display(console=Console(file=stream, width=60)).message("größer")
    assert stream.buffer.getvalue() == b"gr??er\n"


def test_a_long_epoch_is_not_silent_for_long() -> None:
    seconds = 0.0
    stream = io.StringIO()
    shown = Display(console=Console(file=stream, width=100), clock=lambda: seconds)
    with shown.training(1000, 1000):
        for iteration in (10, 20, 30, 40):
            shown.update(iteration, loss=1.0, lr=0.1)
            seconds += 12
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["iteration 30/1000"]
