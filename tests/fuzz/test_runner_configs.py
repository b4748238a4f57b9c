"""Malformed runner configs: refused with a `GossamerError`, or the run that they describe can be built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gossamer import runner
from gossamer.errors import GossamerError
from gossamer.runner.config import read_config
from gossamer.runner.config.schema import Config
from gossamer.runner.data.sources import build_dataset
from gossamer.runner.data.transforms import Pipeline
from gossamer.runner.optimizer import build_lr_scheduler, build_optimizer
from tests.fuzz.documents import block_text, mangled, tweaked
from tests.fuzz.harness import attempt, fuzz
from tests.fuzz.values import hostile, mutated

CONFIGS = Path(__file__).parent.parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
TRANSFORMS = [
    {"RandomCrop": {"size": 8, "padding": 1}}, "RandomHorizontalFlip", {"Resize": {"size": [8, 8], "antialias": True}},
    {"ColorJitter": {"brightness": 0.4, "contrast": 0.2}}, {"RandomApply": {"transforms": ["RandomHorizontalFlip"],
    "p": 0.5}},
    {"Normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]}},
]  # fmt: skip
BASE: dict[str, Any] = {
    "num_classes": 10,
    "task": "classification",
    "dataset": {
        "train": {"type": "digits", "split": "train", "batch_size": 32, "limit": 64, "transforms": TRANSFORMS},
        "test": {"type": "digits", "split": "test", "batch_size": 32, "num_workers": 0, "on_error": "refuse",
        "limit": 32},
    },
    "trainer": {
        "max_epoch": 2, "test_freq": 1, "save_freq": 1, "fp16": False, "accumulate": 2, "clip_grad_norm": 1.0,
        "optimizer": {"type": "SGD", "kwargs": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}},
        "lr_scheduler": {"type": "MultiStepLR", "warmup_epochs": 0.5, "kwargs": {"milestones": [1, 1.5], "gamma": 0.1}},
    },
    "saver": {"save_dir": "runs/x", "pretrain_except": ["fc."], "keep": 3, "export": ["safetensors", "onnx"]},
    "net": {"type": "resnet18", "kwargs": {"weights": None}},
    "ema": {"enable": True, "decay": 0.999},
    "runtime": {"seed": 1, "device": "cpu", "deterministic": False, "runner": {"type": "base"}},
}  # fmt: skip
SCHEDULERS: list[dict[str, Any]] = [
    {
        "type": "CosineAnnealingLR",
        "warmup_iter": 3,
        "warmup_type": "exp",
        "warmup_ratio": 0.1,
        "kwargs": {"eta_min": 0.001},
    },
    {"type": "StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}},
    {"type": "OneCycleLR", "kwargs": {"max_lr": 0.1, "pct_start": 0.3, "div_factor": 25.0}},
    {"type": "CyclicLR", "kwargs": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 1, "cycle_momentum": False}},
    {"type": "ExponentialLR", "kwargs": {"gamma": 0.9}},
    {"type": "PolynomialLR", "kwargs": {"power": 2.0}},
    {"type": "CosineAnnealingWarmRestarts", "kwargs": {"T_0": 1, "T_mult": 2}},
    {"type": "ReduceLROnPlateau", "kwargs": {"factor": 0.1, "patience": 2}},
]
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "AdamW", "kwargs": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    {"type": "RMSprop", "kwargs": {"lr": 1e-3, "alpha": 0.99, "momentum": 0.9}},
    {"type": "Adagrad", "kwargs": {"lr": 0.01, "lr_decay": 0.1}},
]
SPARSE: dict[str, Any] = {
    "runtime": {"runner": {"type": "sparse"}},
    "sparsity": {
        "mask_generator": {"type": "NormalMaskGenerator"}, "fake_sparse": {"type": "FakeSparse"}, "leaf_module": [],
        "scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": {"sparsity_table": [30, 50], "prun_algo": 1}},
    },
}  # fmt: skip
DETECTION: dict[str, Any] = {
    "task": "detection",
    "net": {"type": "retinanet_resnet50_fpn", "kwargs": {"weights_backbone": None}},
    "dataset": {"train": {"type": "scenes", "split": "train", "count": 4, "size": 64, "seed": 3}},
}
DOCUMENTS: list[dict[str, Any]] = [
    BASE,
    {**BASE, **SPARSE},
    {**BASE, **SPARSE, "sparsity": {"recipe": "builtin:gmp-90", "recipe_variables": {"num_epochs": 2.0}}},
    {**BASE, **DETECTION},
    *({**BASE, "trainer": {**BASE["trainer"], "lr_scheduler": scheduler}} for scheduler in SCHEDULERS),
    *({**BASE, "trainer": {**BASE["trainer"], "optimizer": optimizer}} for optimizer in OPTIMIZERS),
]

values = st.one_of(
    hostile,
    st.sampled_from(
        [
            0, 1, 2, -1, 0.1, 0.5, 1.0, 1e-12, 1e4, 1e9, True, None, [1, 2], [0.9, 0.999], {}, [], "SGD", "Adam",
            "min", "max", "cpu",
            "cuda:99", "meta", "StepLR", "Grayscale", "CutMix", "Resize", {"Resize": {"size": 10**9}},
            {"Pad": {"padding": 10**6}},
            {"RandomCrop": {"size": [1, 1]}}, {"Grayscale": {"num_output_channels": 1}}, "RGB", "digits", "npz",
            "vgg11", "fc.",
        ]
    ),
)  # fmt: skip


@st.composite
def documents(draw: st.DrawFn) -> str:
    document = draw(st.sampled_from(DOCUMENTS))
    kind = draw(st.sampled_from(["tweaked", "inside", "whole"]))
    if kind == "tweaked":
        return block_text(draw(tweaked(document)))
    if kind == "whole":
        return block_text(draw(mutated(document, values)))
    part = draw(
        st.sampled_from(["dataset", "trainer", "saver", "runtime", *(["sparsity"] if "sparsity" in document else [])])
    )
    return block_text({**document, part: draw(mutated(document[part], values, 2))})


def texts() -> st.SearchStrategy[str]:
    """Mutated text of the configs that ship with the repository."""
    include = re.compile(r"!include ([\w./-]+)")
    absolute = [
        include.sub(lambda match, folder=path.parent: f"!include {folder / match[1]}", path.read_text(encoding="utf-8"))
        for path in FILES
    ]
    return st.sampled_from(absolute).flatmap(mangled)


def build(config: Config) -> None:
    """The parts of a run that need no network: data, optimizer, learning rates."""
    for source in (config.dataset.train, config.dataset.test):
        if source is not None and source.type in ("digits", "scenes"):
            task = "classification" if source.type == "digits" else "detection"
            data = build_dataset(source, task=task)
            data.read_batch([(0, index) for index in range(min(len(data), 2))], train=True)
        elif source is not None:
            Pipeline(source.transforms)
    layer = torch.nn.Linear(4, 4)
    optimizer = build_optimizer(config.trainer.optimizer, layer.parameters())
    scheduler = None
    if config.trainer.lr_scheduler is not None:
        scheduler = build_lr_scheduler(config.trainer.lr_scheduler, optimizer, per_unit=4, length=8, steps_per_epoch=4)
    for _ in range(2):
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def run(text: str, folder: Path) -> None:
    """Read a config, then build what it describes."""
    path = folder / "a.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    build(read_config(path).config)


@pytest.fixture(autouse=True, scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch and torchvision import parts of themselves, and write a file, when they are used first."""
    for document in DOCUMENTS:
        run(block_text(document), tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize("examples", [80, pytest.param(9_000, marks=pytest.mark.slow)])
def test_mutated_configs_are_refused_or_build(examples: int, tmp_path: Path) -> None:
    outcome = fuzz(documents(), examples, lambda text: run(text, tmp_path), tmp_path)
    assert outcome.accepted > examples / 20
    assert outcome.refused > examples / 20


@pytest.mark.parametrize("examples", [40, pytest.param(3_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_build(examples: int, tmp_path: Path) -> None:
    outcome = fuzz(texts(), examples, lambda text: run(text, tmp_path), tmp_path)
    assert outcome.refused > examples / 20


def changed(part: str, **settings: Any) -> str:
    return block_text({**BASE, part: {**BASE[part], **settings}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("trainer", optimizer={"type": "SGD", "kwargs": {"lr": 0.1, "weight_decay": "min"}}),
         "trainer.optimizer.kwargs.weight_decay: expected a number"),
        (changed("trainer", optimizer={"type": "SGD", "kwargs": {"lr": True}}), "kwargs.lr: expected a number"),
        (changed("trainer", optimizer={"type": "SGD", "kwargs": {"lr": 1e308}}), "kwargs.lr: expected a number"),
        (changed("trainer", optimizer={"type": "AdamW", "kwargs": {"betas": [0.9]}}), "expected a list of 2 numbers"),
        (changed("trainer", lr_scheduler={"type": "StepLR", "kwargs": {"step_size": 1, "gamma": [1]}}),
         "lr_scheduler.kwargs.gamma: expected a number"),
        (changed("trainer", lr_scheduler={"type": "StepLR", "warmup_epochs": 1e308, "kwargs": {"step_size": 1}}),
         "warmup_epochs: expected a number <= 1e+09"),
        (changed("trainer", max_epoch=10**30), "trainer.max_epoch: expected a number <= 1e+09"),
        (changed("dataset", train={**BASE["dataset"]["train"], "transforms": [{"RandomApply": {"transforms": [0]}}]}),
         "expected a name, or one name with its arguments, found 0"),
        (changed("dataset", train={**BASE["dataset"]["train"], "transforms": [{"Resize": {"size": [1e308]}}]}),
         "transforms[0].Resize.size: expected numbers between"),
        (changed("runtime", seed=2**70), "runtime.seed: expected a number"),
        (changed("trainer", lr_scheduler={"type": "ExponentialLR", "kwargs": {"gamma": -0.9}}),
         "lr_scheduler.kwargs.gamma: expected a number between 0 and 1e+09"),
        (f"<<: !include {'a' * 3000}/b.yaml\n", "a.yaml:1: !include"),
    ],
)  # fmt: skip
def test_a_config_that_once_failed_is_refused_with_its_reason(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=re.escape(message)):
        run(text, tmp_path)


def test_a_transform_that_leaves_one_channel_is_refused_before_training(tmp_path: Path) -> None:
    data = {"type": "digits", "split": "train", "limit": 8, "batch_size": 4, "transforms": [{"Grayscale": {}}]}
    path = tmp_path / "a.yaml"
    path.write_text(
        block_text(
            {
                **BASE,
                "dataset": {"train": data},
                "net": {"type": "resnet18"},
                "saver": {"save_dir": str(tmp_path / "run")},
            }
        )
    )
    with pytest.raises(GossamerError, match="images have 1 channels after the transforms, and resnet18 takes 3"):
        runner.run(path)


def test_a_config_of_many_unknown_keys_takes_little_time(tmp_path: Path) -> None:
    many = {**BASE, "trainer": {f"max_epoch{number}": 1 for number in range(3_000)}}
    assert not attempt(lambda: run(block_text(many), tmp_path), tmp_path)
