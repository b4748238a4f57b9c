"""Whole runs of detectors on scenes of 64 pixels: trained, interrupted, resumed, tested, exported, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from PIL import Image
from safetensors.torch import load_file

from gossamer.errors import GossamerError
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.display import Display
from gossamer.runner.runs import export
from tests.runner.running_on_digits import SPARSITIES, evaluated, final_state, interrupted, resumed, same, trained

SIDE = {"min_size": 64, "max_size": 64}
NETS: dict[str, dict[str, Any]] = {
    "own": {"type": "tests.runner.nets:OneBox"},
    "retinanet": {
        "type": "retinanet_resnet18_fpn",
        "kwargs": {**SIDE, "pyramid_channels": 64, "anchor_sizes": [10, 16, 24, 34, 64]},
    },
    "faster": {
        "type": "fasterrcnn_mobilenet_v3_large_320_fpn",
        "kwargs": {**SIDE, "rpn_pre_nms_top_n_test": 50, "rpn_pre_nms_top_n_train": 50, "box_batch_size_per_image": 16},
    },
}
METHODS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "amba": SPARSITIES["amba"],
    "ampere": {"scheduler": {"type": "AmpereScheduler", "kwargs": {"allow_permutation": False}}},
    "str": SPARSITIES["str"],
}


def scenes(folder: Path, name: str, method: str = "dense", **changed: Any) -> Path:
    """Write the config of a run of three iterations."""
    source = {"type": "scenes", "batch_size": 2, "size": 64, "count": 4}
    given = METHODS[method]
    parts: dict[str, Any] = {
        "num_classes": 10,
        "task": "detection",
        "dataset": {"train": {**source, "split": "train"}, "test": {**source, "split": "test", "count": 3}},
        "net": NETS[name],
        "trainer": {
            "max_iter": 3,
            "test_freq": 3,
            "save_freq": 3,
            "log_freq": 1,
            "optimizer": {"type": "SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}},
            "lr_scheduler": {"type": "CosineAnnealingLR", "warmup_iter": 2},
        },
        "saver": {"save_dir": str(folder / "run")},
        "runtime": {"runner": {"type": "base" if given is None else "sparse"}, "tensorboard": False},
        **({} if given is None else {"sparsity": given}),
        **changed,
    }
    path = folder / "scenes.yaml"
    path.write_text(json.dumps(parts))
    return path


def check_run(folder: Path, net: str, method: str) -> Path:
    """Interrupted and resumed to the bit, tested to the same numbers, with a picture; the folder of a whole run."""
    for name in ("whole", "parts"):
        (folder / name).mkdir()
    result = trained(scenes(folder / "whole", net, method))
    assert len(result.metrics) == 12
    interrupted(scenes(folder / "parts", net, method), 1)
    resumed(folder / "parts" / "run")
    run = folder / "whole" / "run"
    same(final_state(folder / "parts" / "run"), final_state(run))
    latest = Checkpoints(run / "checkpoints", 3).latest()
    assert evaluated(folder / "whole" / "scenes.yaml", weights=latest).metrics == result.metrics
    for name in ("iter_00000003.png", "evaluation.png"):
        with Image.open(run / "pictures" / name) as picture:
            assert min(picture.size) >= 64
    return run


@pytest.mark.parametrize("method", METHODS)
def test_a_detector_of_ones_own_goes_through_all_of_it(method: str, tmp_path: Path) -> None:
    run = check_run(tmp_path, "own", method)
    if method == "amba":
        files = export(run, formats=["onnx", "safetensors"], display=Display(shown=False)).files
        assert [path.name for path in files] == ["model.onnx", "model.safetensors"]
        assert len(onnxruntime.InferenceSession(run / "model.onnx").get_outputs()) == 1
    weights = load_file(run / "model.safetensors")
    zeros = float((weights["layers.2.weight"] == 0).float().mean())
    if method in ("amba", "ampere"):
        assert zeros == pytest.approx(0.5 if method == "ampere" else 0.8, abs=0.15)
    assert not [name for name in weights if "_mma_" in name or "fake_sparse" in name]


@pytest.mark.slow
def test_a_sparse_retinanet_goes_through_all_of_it(tmp_path: Path) -> None:
    run = check_run(tmp_path, "retinanet", "ampere")
    weights = load_file(run / "model.safetensors")
    groups = weights["backbone.body.layer1.0.conv1.weight"].movedim(1, -1).reshape(-1, 4)
    assert bool(((groups == 0).sum(1) >= 2).all())


@pytest.mark.slow
def test_a_sparse_faster_rcnn_goes_through_all_of_it(tmp_path: Path) -> None:
    run = check_run(tmp_path, "faster", "amba")
    assert evaluated(run, weights=run / "model.safetensors").iteration == 0


@pytest.mark.parametrize("way", ["pretrain_model", "resume_model"])
def test_another_number_of_classes_is_reported(way: str, tmp_path: Path) -> None:
    trained(scenes(tmp_path, "own"))
    other = (f"saver.{way}={tmp_path / 'run'}", "num_classes=12", f"saver.save_dir={tmp_path / 'other'}")
    with pytest.raises(GossamerError, match=r"14 outputs against 16.*number of classes"):
        trained(tmp_path / "scenes.yaml", *other)


def test_a_classifier_is_no_detector(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"net.type: .*is not a detector; .*network\(images\)"):
        trained(scenes(tmp_path, "own", net={"type": "tests.runner.nets:small"}))


def test_data_of_classes_are_not_for_a_detector(tmp_path: Path) -> None:
    digits = {"type": "digits", "split": "train"}
    with pytest.raises(GossamerError, match="'digits' data is not for detection"):
        trained(scenes(tmp_path, "own", dataset={"train": digits}))


# Boxes and images that cannot be used


def coco(folder: Path, *damaged: int) -> dict[str, Any]:
    """Four images with a box each, of which some cannot be read, and one box that has no area."""
    (folder / "images").mkdir()
    for index in range(4):
        path = folder / "images" / f"{index}.png"
        Image.new("RGB", (64, 64), (60 * index, 90, 30)).save(path)
        if index in damaged:
            path.write_bytes(b"\x89PNG")
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [8, 8, 20, 30]} for n in range(4)]
    boxes.append({"id": 9, "image_id": 0, "category_id": 1, "bbox": [8, 8, 0, 30]})
    images = [{"id": n, "file_name": f"{n}.png", "width": 64, "height": 64} for n in range(4)]
    found = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "boxes.json").write_text(json.dumps(found))
    return {"type": "coco", "path": str(folder / "boxes.json"), "images": str(folder / "images"), "batch_size": 2}


def test_a_damaged_image_and_an_empty_box_are_left_out_and_counted(tmp_path: Path) -> None:
    path = scenes(tmp_path, "own", num_classes=1, dataset={"train": coco(tmp_path, 2)})
    assert trained(path, "trainer.max_iter=4").complete
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "2.png" in log
    assert "dataset.train: " in log
    assert "boxes" in log


def test_a_damaged_image_among_those_that_are_drawn_does_not_end_a_run(tmp_path: Path) -> None:
    source = coco(tmp_path, 2)
    assert trained(scenes(tmp_path, "own", num_classes=1, dataset={"train": source, "test": source})).complete
    assert (tmp_path / "run" / "pictures" / "iter_00000003.png").is_file()


@pytest.mark.parametrize(("damaged", "reported"), [((), r"boxes\.json.*annotation"), ((2,), r"2\.png|annotation")])
def test_a_run_that_refuses_ends_with_the_place(damaged: tuple[int, ...], reported: str, tmp_path: Path) -> None:
    source = {**coco(tmp_path, *damaged), "on_error": "refuse"}
    with pytest.raises(GossamerError, match=reported):
        trained(scenes(tmp_path, "own", num_classes=1, dataset={"train": source}))


def test_one_damaged_image_does_not_end_a_run_of_single_images(tmp_path: Path) -> None:
    source = {**coco(tmp_path, 2), "batch_size": 1}
    assert trained(scenes(tmp_path, "own", num_classes=1, dataset={"train": source}), "trainer.max_iter=4").complete
