"""Runs from a config whose recipe removes filters: they go on after an interruption, and evaluate to what they said."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.runner.checkpoint import Checkpoints
from tests.runner import running_on_digits as digits

RECIPE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}
  - !StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.1, final_sparsity: 0.5,
                                start_epoch: 0, end_epoch: 1, update_frequency: 0.5}
  - !LayerThinningModifier {start_epoch: 1}
"""


@pytest.mark.slow
def test_a_run_that_removes_filters_goes_on_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(digits.SPARSITIES, "thin", {"recipe": "thin.yaml"})
    monkeypatch.setitem(digits.RECIPES, "thin.yaml", RECIPE)
    (tmp_path / "whole").mkdir()
    path = digits.config(tmp_path / "whole", "thin")
    whole = digits.trained(path)
    state = digits.final_state(tmp_path / "whole" / "run")
    for stop in (4, 9):  # before and after filters went
        folder = tmp_path / str(stop)
        folder.mkdir()
        digits.interrupted(digits.config(folder, "thin"), stop)
        assert digits.resumed(folder / "run").metrics == whole.metrics
        digits.same(digits.final_state(folder / "run"), state)
    assert whole.sparsity is not None
    assert whole.sparsity >= 0.5, "what was removed counts as zeros"
    latest = str(Checkpoints(tmp_path / "whole" / "run" / "checkpoints", 3).latest())
    assert digits.evaluated(path, weights=latest).metrics == whole.metrics
