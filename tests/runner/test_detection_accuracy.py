"""A detector learns to find digits in the embedded scenes, dense, and nearly as well sparse; this takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.detection_accuracy import RETINANET, train_backbone, train_on_scenes


@pytest.mark.slow
def test_retinanet_reaches_its_map_dense_and_nine_tenths_of_it_sparse(tmp_path: Path) -> None:
    train_backbone(RETINANET, tmp_path)
    dense = train_on_scenes(RETINANET, tmp_path)
    assert dense >= 0.6
    assert train_on_scenes(RETINANET, tmp_path, "ampere") >= 0.9 * dense
    assert train_on_scenes(RETINANET, tmp_path, "amba") >= 0.9 * dense
