"""The limits of the fuzz tests are limits: each is broken here on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from gossamer.errors import GossamerError
from tests.fuzz import harness
from tests.fuzz.harness import LimitError, attempt, fingerprint, fuzz
from tests.fuzz.values import mutated
from tests.loops import network


def refuse() -> None:
    raise GossamerError("no")


def test_inputs_are_counted_by_what_happens_to_them() -> None:
    outcome = fuzz(st.integers(0, 1000), 50, lambda value: refuse() if value % 2 else None)
    assert outcome.total == 50
    assert outcome.accepted > 5
    assert outcome.refused > 5


def test_any_other_error_is_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)


def test_an_input_that_computes_for_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SECONDS", 0.05)

    def forever() -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001
                continue

    with pytest.raises(LimitError, match="processor time"):
        attempt(forever)


def test_an_input_that_takes_memory_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        attempt(lambda: torch.empty(2**32, dtype=torch.uint8))
    assert torch.empty(2**31, dtype=torch.uint8).numel()


def test_an_input_that_runs_a_program_is_a_failure() -> None:
    with pytest.raises(LimitError, match="ran code"):
        attempt(lambda: subprocess.run([sys.executable, "--version"], check=False))


def test_an_input_that_imports_what_it_names_is_a_failure() -> None:
    try:
        with pytest.raises(LimitError, match="imported"):
            attempt(lambda: __import__(harness.CANARY))
    finally:
        sys.modules.pop(harness.CANARY, None)


def test_an_input_that_writes_elsewhere_is_a_failure(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    assert attempt(lambda: (inside / "a").write_text("x"), inside)
    with pytest.raises(LimitError, match="outside"):
        attempt(lambda: (tmp_path / "b").write_text("x"), inside)
    with pytest.raises(LimitError, match="outside"):
        attempt((inside / ".." / "c").mkdir, inside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]


def test_a_fingerprint_changes_with_values_modes_and_structure() -> None:
    first = fingerprint(network())
    assert first == fingerprint(network())
    changed = network()
    next(changed.parameters()).data.view(-1)[0] = 7.0
    frozen = network()
    next(frozen.parameters()).requires_grad_(False)
    assert len({first, fingerprint(changed), fingerprint(frozen), fingerprint(network().eval())}) == 4


def test_mutations_leave_the_document_alone() -> None:
    document = {"a": [1, {"b": 2}], "c": "d"}
    seen: set[str] = set()
    fuzz(mutated(document), 100, lambda value: seen.add(repr(value)))
    assert document == {"a": [1, {"b": 2}], "c": "d"}
    assert len(seen) > 60
