"""What a person sees of a run: a live display that fits its terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import itertools
import logging
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


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["epoch 3/10 · iteration 120/400 · loss 0.5000 · lr 0.0125",
              "sparsity 41.2 → 50.0 % · 812 images/s · ETA 1:08",
              "top1 91.20, top5 99.10 at 120"]),
        (80, ["epoch 3/10 · iteration 120/400 · loss 0.5000 · lr 0.0125",
              "sparsity 41.2 → 50.0 % · 812 images/s · ETA 1:08 · top1 91.20, top5 99.10 at 120"]),
        (120, ["epoch 3/10 · iteration 120/400 · loss 0.5000 · lr 0.0125 · sparsity 41.2 → 50.0 % · 812 images/s",
               "ETA 1:08 · top1 91.20, top5 99.10 at 120"]),
    ],
)  # fmt: skip
def test_the_live_display_fits_its_terminal(width: int, lines: list[str]) -> None:
    shown, stream = display(width)
    with shown.training(400, 40):
        train(shown)
        shown.tested({"top5": 99.1, "top1": 91.2})
        with shown.testing(4) as advance:
            advance()
            training, testing, *numbers = screen(stream)
    assert re.fullmatch(r"training ━+[╸╺ ━]* +30%", training)
    assert re.fullmatch(r"testing +━+[╸╺ ━]* +25%", testing)
    assert numbers == lines
    assert all(len(line) <= min(width, 100) for line in (training, testing, *numbers))


def test_only_one_display_is_left_at_the_end() -> None:
    shown, stream = display()
    with shown.training(120, 40):
        train(shown)
    bar, first, second = screen(stream)
    assert bar.endswith("100%")
    assert f"{first} · {second}" == (
        "epoch 3/3 · iteration 120/120 · loss 0.5000 · lr 0.0125 · sparsity 41.2 → 50.0 % · 812 images/s"
    )


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


def test_the_loss_is_shown_as_it_is() -> None:
    shown, stream = display(terminal=False, every=1)
    with shown.training(4, 4):
        for iteration, loss in enumerate([1.0, 2.0, float("nan"), 4.0], 1):
            shown.update(iteration, loss=loss, lr=0.1)
    assert re.findall(r"loss (\S+)", stream.getvalue()) == ["1.0000", "2.0000", "nan", "4.0000"]


def test_without_a_terminal_there_is_a_line_for_each_epoch_and_test() -> None:
    shown, stream = display(40, terminal=False, step=0.0)
    with shown.training(100, 50):
        for iteration in (20, 40, 60, 80, 100):
            shown.update(iteration, loss=0.5, lr=0.1, images_per_s=3.25)
        shown.tested({"mAP": 0.4, "mAP50": 0.612, "mAP_small": 0.1, "mAP75": 0.3})
        shown.message("warning: [b] and a long line that is not broken into several")
    assert stream.getvalue().splitlines() == [
        "epoch 2/2  iteration 60/100  loss 0.5000  lr 0.1  3.2 images/s  ETA 0:00",
        "epoch 2/2  iteration 100/100  loss 0.5000  lr 0.1  3.2 images/s",
        "test at iteration 100: mAP 0.400, mAP50 0.612, mAP75 0.300",
        "warning: [b] and a long line that is not broken into several",
    ]


def test_lines_can_come_more_often() -> None:
    shown, stream = display(terminal=False, every=20)
    with shown.training(100, 100):
        train(shown, 100)
    assert re.findall(r"iteration (\d+)", stream.getvalue()) == ["20", "40", "60", "80", "100"]


def test_an_evaluation_alone_is_shown_too() -> None:
    shown, stream = display()
    with shown.testing(2) as advance:
        advance()
        advance()
    shown.tested({"top1": 91.2})
    assert screen(stream)[0].startswith("testing  ━")
    assert screen(stream)[-1] == "test: top1 91.20"


@pytest.mark.parametrize("terminal", [True, False])
def test_other_processes_show_nothing(terminal: bool) -> None:
    shown, stream = display(terminal=terminal, shown=False)
    with shown.training(120, 40):
        train(shown)
        with shown.testing(1) as advance:
            advance()
        shown.tested({"top1": 1.0})
        shown.message("hello")
    assert stream.getvalue() == ""


def test_messages_and_logs_come_above_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, stream = display()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("gossamer")
    logger.addHandler(handler)
    try:
        with shown.training(400, 40):
            train(shown, 50)
            logger.warning("from a handler [x]")
            sys.stderr.write("from the stream\n")
            shown.message("from a message")
            train(shown, 80)
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)
    seen = screen(stream)
    assert seen[:3] == ["from a handler [x]", "from the stream", "from a message"]
    assert [line.split()[0] for line in seen[3:]] == ["training", "epoch", "812"]


def test_a_stream_that_is_no_terminal_keeps_its_logs() -> None:
    shown, stream = display()
    file = io.StringIO()
    handler = logging.StreamHandler(file)
    logging.getLogger("gossamer").addHandler(handler)
    try:
        with shown.training(400, 40):
            logging.getLogger("gossamer").warning("into a file")
    finally:
        logging.getLogger("gossamer").removeHandler(handler)
    assert file.getvalue() == "into a file\n"
    assert "into a file" not in stream.getvalue()


def test_an_error_ends_the_display_and_passes() -> None:
    shown, stream = display()
    with pytest.raises(KeyboardInterrupt), shown.training(400, 40):
        raise KeyboardInterrupt
    assert stream.getvalue().endswith("\x1b[?25h"), "the cursor is back"
    with shown.training(400, 40, 50):
        train(shown)
    assert screen(stream)[0].startswith("training")


def test_a_terminal_of_plain_letters_gets_plain_letters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    shown = Display(console=Console(file=stream, width=60), clock=itertools.count(0.0).__next__)
    with shown.training(40, 40):
        train(shown, 40)
        shown.message("größer")
    assert b"sparsity 41.2 -> 50.0 %" in stream.buffer.getvalue()


def test_a_long_epoch_is_not_silent_for_long() -> None:
    seconds = 0.0
    stream = io.StringIO()
    shown = Display(console=Console(file=stream, width=100), clock=lambda: seconds)
    with shown.training(1000, 1000):
        for iteration in (10, 20, 30, 40):
            shown.update(iteration, loss=1.0, lr=0.1)
            seconds += 12
    assert [line.split("  ")[1] for line in stream.getvalue().splitlines()] == ["iteration 30/1000"]
