"""mAP50 of detectors, dense and sparse: on the embedded scenes, and on photographs of blood cells where they are.

A backbone learns to tell digits apart, a detector on it finds them in scenes,
and the sparse configs go on from there. On the photographs the detector goes
on from the scenes, with a new last layer. All of it is `gossamer train` on the
configs of the documentation; only lengths, sizes and learning rates are set.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import Row, Watch
from gossamer.runner import run
from gossamer.runner.display import Display

CONFIGS = Path(__file__).parents[1] / "configs"
_STATISTICS = "{Normalize: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}"
_RESIZE = "{Resize: {size: [32, 32]}}"
_VARIED = "{RandomAffine: {degrees: 5, translate: [0.1, 0.1], scale: [0.7, 1.1]}}, {RandomInvert: {p: 0.5}}"


@dataclass(frozen=True)
class Detector:
    """A family of configs, and how long and fast each of its trainings is."""

    name: str
    backbone: str
    backbone_optimizer: str
    float_config: str
    last_layers: str
    iterations: int
    rate: float
    on_photographs: int

    def config(self, method: str) -> Path:
        if method == "dense":
            return CONFIGS / self.float_config
        stem = self.float_config.removesuffix(".yaml").removesuffix("_1x")
        return CONFIGS / f"{stem}_{method}_sparse.yaml"


RETINANET = Detector(
    "RetinaNet, ResNet-18",
    "resnet18",
    "{type: SGD, kwargs: {lr: 0.02, momentum: 0.9, nesterov: true, weight_decay: 5.0e-4}}",
    "det/retinanet/retinanet-r18-improve.yaml",
    "[head.classification_head.cls_logits.]",
    iterations=900,
    rate=1e-3,
    on_photographs=200,
)
FASTER_RCNN = Detector(
    "Faster R-CNN, ResNet-50",
    "resnet50",
    "{type: AdamW, kwargs: {lr: 1.0e-3, weight_decay: 0.05}}",  # SGD takes too long to move so deep a network
    "det/faster_rcnn/faster_rcnn_r50_fpn_1x.yaml",
    "[roi_heads.box_predictor.]",
    iterations=450,
    rate=3e-4,
    on_photographs=100,
)


def detection_accuracy(watch: Watch, photographs: Path | None) -> Iterator[Row]:
    """`photographs` is a folder with train.json, val.json and images/ (COCO)."""
    with tempfile.TemporaryDirectory() as folder:
        for detector in (RETINANET, FASTER_RCNN):
            yield from _of(detector, Path(folder) / detector.backbone, watch, photographs)


def _of(detector: Detector, folder: Path, watch: Watch, photographs: Path | None) -> Iterator[Row]:
    steps = ["backbone", "dense", "ampere", "amba"] + (["photographs", "2:4 photographs"] if photographs else [])
    found: dict[str, float] = {}
    for number in watch(f"trainings of {detector.name}", len(steps)):
        name = steps[number]
        if name == "backbone":
            train_backbone(detector, folder)
        elif photographs is not None and "photographs" in name:
            found[name] = train_on_photographs(detector, folder, photographs, sparse="2:4" in name)
        else:
            found[name] = train_on_scenes(detector, folder, name)
    for name, words in (("ampere", "2:4"), ("amba", "80 % by levels")):
        note = f"mAP50 on embedded scenes, from digits; {detector.iterations} iterations dense"
        yield Row(f"{detector.name}: dense / {words}", 100 * found["dense"], 100 * found[name], "%", 1 / 0.9, note=note)
    if photographs is not None:
        note = f"mAP50 on 87 photographs of blood cells, from scenes; {detector.on_photographs} iterations dense"
        values = 100 * found["photographs"], 100 * found["2:4 photographs"]
        yield Row(f"{detector.name}: dense / 2:4", *values, "%", None, note=note)


def train_backbone(detector: Detector, folder: Path) -> None:
    """A classifier of digits, light on dark and dark on light."""
    _run(
        CONFIGS / "cls/resnet/res18.yaml",
        [
            f"net.type={detector.backbone}",
            f"saver.save_dir={folder / 'backbone'}",
            "trainer.max_epoch=14",
            "trainer.label_smoothing=0",
            f"trainer.optimizer={detector.backbone_optimizer}",
            "trainer.lr_scheduler.warmup_iter=20",
            f"dataset.train.transforms=[{_RESIZE}, {_VARIED}, {_STATISTICS}]",
            f"dataset.test.transforms=[{_RESIZE}, {_STATISTICS}]",
        ],
        "tiny",
    )


def train_on_scenes(detector: Detector, folder: Path, method: str = "dense") -> float:
    """mAP50 of the dense detector on its backbone, or of a sparse one (`ampere`, `amba`) on the dense one."""
    length = detector.iterations if method == "dense" else detector.iterations * (2 if method == "amba" else 1) // 3
    rate = detector.rate if method == "dense" else detector.rate / 2
    start = "net.kwargs.weights_backbone" if method == "dense" else "saver.pretrain_model"
    sets = [
        f"{start}={folder / ('backbone' if method == 'dense' else 'dense')}",
        f"saver.save_dir={folder / method}",
        f"trainer.optimizer.kwargs.lr={rate}",
        "dataset.train.count=2000",
        "dataset.test.count=100",
        *_lengths(length, warm_up=50 if method == "dense" else 20),
    ]
    return _run(detector.config(method), sets, "tiny")


def train_on_photographs(detector: Detector, folder: Path, photographs: Path, *, sparse: bool = False) -> float:
    """mAP50 of the detector of scenes, after it has seen photographs; then of a 2:4 one on that."""
    length = detector.on_photographs // (2 if sparse else 1)
    start = "photographs" if sparse else "dense"
    sets = [
        f"saver.pretrain_model={folder / start}",
        f"saver.pretrain_except={'[]' if sparse else detector.last_layers}",
        f"saver.save_dir={folder / ('sparse-photographs' if sparse else 'photographs')}",
        f"trainer.optimizer.kwargs.lr={detector.rate / 2}",
        "num_classes=null",
        "net.kwargs.min_size=160",
        "net.kwargs.max_size=214",
        *_lengths(length, warm_up=20),
    ]
    for part, name in (("train", "train"), ("test", "val")):
        source = f"{{type: coco, path: '{photographs / name}.json', images: '{photographs / 'images'}', batch_size: 4}}"
        sets.append(f"dataset.{part}={source}")
    return _run(detector.config("ampere" if sparse else "dense"), sets, "tiny")


def _lengths(length: int, warm_up: int) -> list[str]:
    times = [f"trainer.{key}={length}" for key in ("max_iter", "test_freq", "save_freq")]
    return [*times, f"trainer.lr_scheduler.warmup_iter={warm_up}", "trainer.log_freq=20"]


def _run(config: Path, sets: Sequence[str], data: str) -> float:
    result = run(config, sets, data, display=Display(shown=False))
    return result.metrics.get("mAP50", 0.0)
