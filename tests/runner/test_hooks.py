"""Signals and hooks at the turns of a run, and what a run gives back to the process that it was in."""

from __future__ import annotations

import logging
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner import checkpoint as checkpoint_module
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.runs import Result
from tests.runner.running_on_digits import LENGTH, config, final_state, interrupted, resumed, same, trained

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def given_back() -> Generator[None]:
    """Whatever a test does: signal handlers and the handlers of `logging` are as they were."""
    before = [signal.getsignal(number) for number in SIGNALS], list(logging.getLogger("gossamer").handlers)
    level = logging.getLogger("gossamer").level
    yield
    assert before == ([signal.getsignal(number) for number in SIGNALS], logging.getLogger("gossamer").handlers)
    assert logging.getLogger("gossamer").level == level


def hooked(path: Path, turn: str, *signals: str, error: bool = False) -> Result:
    kwargs = f"{{turn: '{turn}', signals: [{', '.join(signals)}], error: {str(error).lower()}}}"
    return trained(path, f"hooks=[{{type: 'tests.runner.nets:At', kwargs: {kwargs}}}]")


def names(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "run" / "checkpoints", 3).all()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    trained(config(folder))
    return final_state(folder / "run")


@pytest.mark.parametrize(
    ("turn", "name", "iteration"),
    [
        ("begins", "SIGINT", 1),
        ("iteration 3", "SIGTERM", 3),
        ("tested 6", "SIGINT", 6),
        ("saved 6", "SIGTERM", 6),
    ],
)
def test_a_signal_at_any_turn_saves_and_the_run_continues_to_the_bit(
    turn: str, name: str, iteration: int, tmp_path: Path, whole: dict[str, Any]
) -> None:
    result = hooked(config(tmp_path), turn, name)
    assert not result.complete
    assert result.iteration == iteration
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert resumed(tmp_path / "run").complete
    same(final_state(tmp_path / "run"), whole)


@pytest.mark.parametrize("turn", [f"iteration {LENGTH}", "ends"])
def test_a_signal_behind_the_last_iteration_does_not_keep_a_run_from_its_end(turn: str, tmp_path: Path) -> None:
    result = hooked(config(tmp_path), turn, "SIGINT")
    assert result.complete
    assert result.files == [tmp_path / "run" / "model.safetensors"]


def test_a_second_interrupt_ends_at_once_and_leaves_earlier_checkpoints(tmp_path: Path) -> None:
    path = config(tmp_path)
    interrupted(path, 2)
    hook = "hooks=[{type: 'tests.runner.nets:At', kwargs: {turn: 'iteration 4', signals: [SIGINT, SIGINT]}}]"
    with pytest.raises(KeyboardInterrupt):
        trained(path, "saver.auto_resume=true", hook)
    assert names(tmp_path) == ["iter_00000002.safetensors"]


@pytest.mark.parametrize("count", [1, 2])
def test_interrupts_while_a_checkpoint_is_written_leave_whole_files_only(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_module.write_sealed

    def disturbed(*args: Any) -> None:
        for _ in range(count):
            signal.raise_signal(signal.SIGINT)
        write(*args)

    path = config(tmp_path)
    interrupted(path, 6)
    monkeypatch.setattr(checkpoint_module, "write_sealed", disturbed)
    if count == 1:
        assert trained(path, "saver.auto_resume=true").iteration == 12
        assert names(tmp_path) == ["iter_00000006.safetensors", "iter_00000012.safetensors"]
    else:
        with pytest.raises(KeyboardInterrupt):
            trained(path, "saver.auto_resume=true")
        assert names(tmp_path) == ["iter_00000006.safetensors"]
    monkeypatch.undo()
    assert not [entry for entry in (tmp_path / "run").rglob("*") if entry.name.startswith(".")]
    assert resumed(tmp_path / "run").complete


@pytest.mark.parametrize("turn", ["iteration 8", "saved 6", "ends"])
def test_a_mistake_in_a_hook_is_not_hidden_and_the_run_can_go_on(turn: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a hook's own mistake, {turn}"):
        hooked(config(tmp_path), turn, error=True)
    result = resumed(tmp_path / "run")
    assert result.complete
    assert result.iteration == LENGTH


@pytest.mark.parametrize(
    ("hook", "reported"),
    [
        ("{type: auto_save_bst}", r"hooks\[0\]\.type: no 'auto_save_bst'; nearest: 'auto_save_best'"),
        (
            "{type: 'tests.runner.nets:Diry'}",
            r"hooks\[0\]\.type: .*'tests\.runner\.nets' has no 'Diry'; nearest: 'Diary'",
        ),
        ("{type: 'tests.runner.nope:Diary'}", r"hooks\[0\]\.type: cannot import 'tests\.runner\.nope'"),
        ("{type: 'tests.runner.nets:small'}", r"is not a subclass of gossamer\.runner\.Hook"),
        ("{type: 'tests.runner.nets:At', kwargs: {at: 1}}", r"hooks\[0\]\.kwargs: .*'at'"),
    ],
)
def test_a_hook_that_cannot_be_made_is_reported_before_anything_is_written(
    hook: str, reported: str, tmp_path: Path
) -> None:
    with pytest.raises(GossamerError, match=reported):
        trained(config(tmp_path), f"hooks=[{hook}]")
    assert not (tmp_path / "run").exists()


def test_two_runs_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    for name, sparsity in (("one", "amba"), ("between", "qat"), ("other", "amba")):
        (tmp_path / name).mkdir()
        trained(config(tmp_path / name, sparsity), f"runtime.deterministic={str(name == 'between').lower()}")
    same(final_state(tmp_path / "one" / "run"), final_state(tmp_path / "other" / "run"))
    assert torch.are_deterministic_algorithms_enabled() == before
    log = (tmp_path / "one" / "run" / "log.txt").read_text()
    assert str(tmp_path / "one") in log
    assert str(tmp_path / "between") not in log
    assert str(tmp_path / "other") not in log


def test_a_run_gives_back_the_settings_of_torch(tmp_path: Path) -> None:
    benchmark, before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trained(config(tmp_path), "trainer.max_iter=1")
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.benchmark == benchmark
    finally:
        torch.use_deterministic_algorithms(before)
