"""Whole runs on digits: they reach the end, go on to the bit after an interrupt, and end with the model in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.running_on_digits import LENGTH, SPARSITIES, config, final_state, interrupted, resumed, same, trained


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_an_interrupted_run_goes_on_to_the_bit(sparsity: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = trained(config(tmp_path / "whole", sparsity))
    assert whole.complete
    assert whole.iteration == LENGTH
    for stop in (1, 8, 15):
        folder = tmp_path / str(stop)
        folder.mkdir()
        interrupted(config(folder, sparsity), stop)
        result = resumed(folder / "run")
        assert result.complete
        same(final_state(folder / "run"), final_state(tmp_path / "whole" / "run"))
        assert result.metrics == whole.metrics
