"""Detectors learn to find digits in the embedded scenes, dense, and nearly as well sparse; this takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.detection_accuracy import FASTER_RCNN, RETINANET, Detector, train_backbone, train_dense, train_sparse


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "backbone"
    train_backbone(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("detector", [RETINANET, FASTER_RCNN], ids=lambda detector: detector.name)
def test_a_detector_reaches_its_map_dense_and_nine_tenths_of_it_sparse(
    detector: Detector, backbone: Path, tmp_path: Path
) -> None:
    dense = train_dense(detector, backbone, tmp_path)
    assert dense >= 0.6
    assert train_sparse(detector, tmp_path, "ampere") >= 0.9 * dense
    assert train_sparse(detector, tmp_path, "amba") >= 0.9 * dense
