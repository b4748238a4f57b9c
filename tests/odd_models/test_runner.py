"""Runs from config files on networks with layers that compute their weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.odd_models import nets
from tests.runner.running_on_digits import config, trained

COMPUTED = ("weight_norm", "weight_norm_by_hook", "spectral_norm_by_hook", "pruned_by_torch")
TARGETS = {"gmp": 0.8, "amba": 0.8, "ampere": 0.5, "qat": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize("net", COMPUTED)
@pytest.mark.parametrize("sparsity", TARGETS)
def test_a_run_reaches_its_sparsity(sparsity: str, net: str, tmp_path: Path) -> None:
    result = trained(config(tmp_path, sparsity, net={"type": f"{nets.__name__}:{net}"}))
    assert result.sparsity == TARGETS[sparsity]


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [*TARGETS, "str", "probmask"])
def test_a_run_warns_of_a_layer_that_cannot_be_pruned(sparsity: str, tmp_path: Path) -> None:
    trained(config(tmp_path, sparsity, net={"type": f"{nets.__name__}:orthogonal"}))
    assert "it is computed by the parametrization Orthogonal" in (tmp_path / "run" / "log.txt").read_text()
