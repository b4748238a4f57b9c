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
    float_config: str
    last_layers: str
    iterations: int
    rate: float
    on_photographs: int
    net: tuple[str, ...] = ()
    """What is set of the network, beside what `--data tiny` sets."""

    def config(self, method: str) -> Path:
        if method == "dense":
            return CONFIGS / self.float_config
        stem = self.float_config.removesuffix(".yaml").removesuffix("_1x")
        return CONFIGS / f"{stem}_{method}_sparse.yaml"


RETINANET = Detector(
    "RetinaNet, ResNet-18",
    "det/retinanet/retinanet-r18-improve.yaml",
    "[head.classification_head.cls_logits.]",
    iterations=900,
    rate=1e-3,
    on_photographs=200,
)
FASTER_RCNN = Detector(
    "Faster R-CNN, ResNet-18",
    "det/faster_rcnn/faster_rcnn_r50_fpn_1x.yaml",
    "[roi_heads.box_predictor.]",
    iterations=300,
    rate=1e-3,
    on_photographs=200,
    net=("net.type=fasterrcnn_resnet18_fpn", "net.kwargs.pyramid_channels=64"),
)


def detection_accuracy(watch: Watch, photographs: Path | None) -> Iterator[Row]:
    """`photographs` is a folder with train.json, val.json and images/ (COCO)."""
    with tempfile.TemporaryDirectory() as folder:
        backbone = Path(folder) / "backbone"
        for _ in watch("training of the backbone", 1):
            train_backbone(backbone)
        for detector in (RETINANET, FASTER_RCNN):
            yield from _of(detector, backbone, Path(folder) / detector.name, watch, photographs)


def _of(detector: Detector, backbone: Path, folder: Path, watch: Watch, photographs: Path | None) -> Iterator[Row]:
    steps = ["dense", "ampere", "amba"] + (["photographs", "2:4 photographs"] if photographs else [])
    found: dict[str, float] = {}
    for number in watch(f"trainings of {detector.name}", len(steps)):
        name = steps[number]
        if name == "dense":
            found[name] = train_dense(detector, backbone, folder)
        elif photographs is not None and "photographs" in name:
            found[name] = train_on_photographs(detector, folder, photographs, sparse="2:4" in name)
        else:
            found[name] = train_sparse(detector, folder, name)
    for name, words in (("ampere", "2:4"), ("amba", "80 % by levels")):
        note = f"mAP50 on embedded scenes, from digits; {detector.iterations} iterations dense"
        yield Row(f"{detector.name}: dense / {words}", 100 * found["dense"], 100 * found[name], "%", 1 / 0.9, note=note)
    if photographs is not None:
        note = f"mAP50 on 87 photographs of blood cells, from scenes; {detector.on_photographs} iterations dense"
        values = 100 * found["photographs"], 100 * found["2:4 photographs"]
        yield Row(f"{detector.name}: dense / 2:4", *values, "%", None, note=note)


def train_backbone(folder: Path) -> None:
    """A ResNet-18 that classifies digits, light on dark and dark on light."""
    _run(
        CONFIGS / "cls/resnet/res18.yaml",
        [
            f"saver.save_dir={folder}",
            "trainer.max_epoch=14",
            "trainer.label_smoothing=0",
            "trainer.optimizer.kwargs.lr=0.02",
            "trainer.lr_scheduler.warmup_iter=20",
            f"dataset.train.transforms=[{_RESIZE}, {_VARIED}, {_STATISTICS}]",
            f"dataset.test.transforms=[{_RESIZE}, {_STATISTICS}]",
        ],
    )


def train_dense(detector: Detector, backbone: Path, folder: Path) -> float:
    """mAP50 on scenes of the dense detector on this backbone."""
    sets = [f"net.kwargs.weights_backbone={backbone}", *_lengths(detector.iterations, warm_up=50)]
    return _train_on_scenes(detector, folder, "dense", detector.rate, sets)


def train_sparse(detector: Detector, folder: Path, method: str) -> float:
    """mAP50 on scenes of a sparse detector (`ampere`, `amba`) that continues from the dense one in this folder."""
    length = detector.iterations * (2 if method == "amba" else 1) // 3
    sets = [f"saver.pretrain_model={folder / 'dense'}", *_lengths(length, warm_up=20)]
    return _train_on_scenes(detector, folder, method, detector.rate / 2, sets)


def _train_on_scenes(detector: Detector, folder: Path, method: str, rate: float, sets: Sequence[str]) -> float:
    return _run(
        detector.config(method),
        [
            *detector.net,
            f"saver.save_dir={folder / method}",
            f"trainer.optimizer.kwargs.lr={rate}",
            "dataset.train.count=2000",
            "dataset.test.count=100",
            *sets,
        ],
    )


def train_on_photographs(detector: Detector, folder: Path, photographs: Path, *, sparse: bool = False) -> float:
    """mAP50 of the detector of scenes, after it has seen photographs; then of a 2:4 one on that."""
    length = detector.on_photographs // (2 if sparse else 1)
    start = "photographs" if sparse else "dense"
    sets = [
        *detector.net,
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
    return _run(detector.config("ampere" if sparse else "dense"), sets)


def _lengths(length: int, warm_up: int) -> list[str]:
    times = [f"trainer.{key}={length}" for key in ("max_iter", "test_freq", "save_freq")]
    return [*times, f"trainer.lr_scheduler.warmup_iter={warm_up}", "trainer.log_freq=20"]


def _run(config: Path, sets: Sequence[str]) -> float:
    result = run(config, sets, "tiny", display=Display(shown=False))
    return result.metrics.get("mAP50", 0.0)
