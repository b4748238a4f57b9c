"""Detectors learn to find digits in the embedded scenes, dense, and nearly as well sparse; minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.detection_accuracy import FASTER_RCNN, RETINANET, Detector, train_backbone, train_on_scenes


@pytest.mark.slow
@pytest.mark.parametrize("detector", [RETINANET, FASTER_RCNN], ids=lambda detector: detector.backbone)
def test_a_detector_reaches_its_map_dense_and_nine_tenths_of_it_sparse(detector: Detector, tmp_path: Path) -> None:
    train_backbone(detector, tmp_path)
    dense = train_on_scenes(detector, tmp_path)
    assert dense >= 0.6
    assert train_on_scenes(detector, tmp_path, "ampere") >= 0.9 * dense
    assert train_on_scenes(detector, tmp_path, "amba") >= 0.9 * dense
