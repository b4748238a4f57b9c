"""The settings of a config: one class for each part, strict about names and types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gossamer.errors import FieldError
from gossamer.quantities import Count, CountOrZero, PartialShare, PeriodOrZero, PositiveFactor, PositiveShare, Seed

FileName = Annotated[Path, Field(strict=False)]
"""A path, given as text."""

BatchSize = Annotated[int, Field(ge=1, le=2**20)]
ClassCount = Annotated[int, Field(ge=1, le=2**20)]

Transform = str | dict[str, dict[str, Any] | None]
"""A class of torchvision.transforms.v2 by name, or `{Name: {arguments}}`."""


class Part(BaseModel):
    """Settings that refuse unknown names and do not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Named(Part):
    """A class by name, with its arguments."""

    type: str
    kwargs: dict[str, Any] = {}


# Data


class Source(Part):
    """Settings of all datasets."""

    type: Any
    batch_size: BatchSize = 32
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    transforms: list[Transform] = []
    on_error: Literal["skip", "refuse"] = "skip"
    """An image or box that cannot be used: skip and count it, or raise an error with its file and line."""
    limit: Count | None = None
    """Use only this many images, the first ones."""


class ImageFolder(Source):
    """A folder for each class, as in torchvision's ImageFolder."""

    type: Literal["image_folder"]
    path: FileName


class ImageList(Source):
    """Lines `path label`, as in ImageNet's list files."""

    type: Literal["image_list"]
    path: FileName
    """The file with the lines."""
    images: FileName | None = None
    """The folder that paths are relative to; by default that of the list."""


class Coco(Source):
    """A COCO JSON file of boxes."""

    type: Literal["coco"]
    path: FileName
    images: FileName | None = None


class JsonLines(Source):
    """A JSON object in each line: filename, image_height, image_width, instances of bbox, label, is_ignored."""

    type: Literal["json_lines"]
    path: FileName
    images: FileName | None = None
    first_label: Literal[0, 1] = 1
    """The label of the first class: United Perception counts from 1."""


class Idx(Source):
    """Two IDX files as of MNIST, plain or gzip."""

    type: Literal["idx"]
    images: FileName
    labels: FileName


class Npz(Source):
    """An NPZ file with arrays of images (N, H, W) or (N, H, W, C) and labels (N,)."""

    type: Literal["npz"]
    path: FileName
    image_key: str = "images"
    label_key: str = "labels"


class Digits(Source):
    """scikit-learn's 1,797 digits of 8 × 8 pixels; the last fifth of each class is the test split."""

    type: Literal["digits"]
    split: Literal["train", "test"]


class Scenes(Source):
    """Scenes composed of the digits, with exact boxes; train and test share no digit."""

    type: Literal["scenes"]
    split: Literal["train", "test"]
    count: Annotated[int, Field(ge=1, le=10**6)] = 200
    size: Annotated[int, Field(ge=32, le=4096)] = 128
    seed: Seed = 0


AnySource = Annotated[
    ImageFolder | ImageList | Coco | JsonLines | Idx | Npz | Digits | Scenes, Field(discriminator="type")
]


class Dataset(Part):
    train: AnySource | None = None
    test: AnySource | None = None


# Training


class Optimizer(Named):
    """A class of torch.optim by name, with its arguments."""

    type: str = "SGD"
    kwargs: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


class LRScheduler(Named):
    """A class of torch.optim.lr_scheduler by name; lengths in `kwargs` are epochs, or iterations with max_iter."""

    type: str = "CosineAnnealingLR"
    warmup_iter: CountOrZero = 0
    warmup_epochs: PeriodOrZero = 0
    warmup_type: Literal["linear", "exp", "constant"] = "linear"
    warmup_ratio: PositiveShare = 0.1
    """The fraction of the learning rate at the start of the warm-up."""

    @model_validator(mode="after")
    def _one_warm_up(self) -> Self:
        if self.warmup_iter and self.warmup_epochs:
            raise FieldError("warmup_iter is given too; keep one of the two", "warmup_epochs")
        return self


class Trainer(Part):
    max_epoch: Count | None = None
    max_iter: Count | None = None
    test_freq: Count | None = None
    """In epochs, or in iterations with max_iter; by default once at the end."""
    save_freq: Count | None = None
    """In epochs, or in iterations with max_iter; by default every epoch. The end and each new best are saved too."""
    only_save_latest: bool = False
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler | None = None
    fp16: bool = False
    """Mixed precision: fp16 with loss scaling on an accelerator, bf16 on a CPU."""
    accumulate: Count = 1
    """Batches per optimizer step, which is one iteration."""
    clip_grad_norm: PositiveFactor | None = None
    label_smoothing: PartialShare = 0.0
    log_freq: Count = 10

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_epoch and self.max_iter:
            raise FieldError("max_epoch is given too; keep one of the two", "max_iter")
        return self


class Saver(Part):
    save_dir: FileName | None = None
    """The run folder; by default runs/ and the config's name."""
    pretrain_model: FileName | None = None
    pretrain_except: list[str] = []
    """Prefixes of names that are not loaded from pretrain_model, as `fc.` for another number of classes."""
    resume_model: FileName | None = None
    auto_resume: bool = False
    keep: Count = 3
    """Checkpoints kept besides the best."""
    export: list[Literal["safetensors", "bitmask", "sparse24", "onnx", "pt2", "thin"]] = ["safetensors"]


class Ema(Part):
    enable: bool = False
    decay: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.999


class RunnerType(Part):
    type: str = "base"
    """`base`, `sparse`, or a class of your own as package.module:Class."""


class ReportPage(Part):
    enable: bool = True
    """Whether a run writes report.html at its end."""
    sensitivity: bool | Literal["auto"] = "auto"
    """Whether each layer's sensitivity is measured at the end; `auto` limits it to a small part of the time."""


class Runtime(Part):
    runner: RunnerType = RunnerType()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"
    """`auto`, or a name for torch.device."""
    deterministic: bool = False
    channels_last: bool | Literal["auto"] = "auto"
    tensorboard: bool = True
    report: ReportPage = ReportPage()


class Net(Named):
    """A torchvision model by name, `timm/name`, `transformers/name`, or `package.module:function` of your own."""


class Sparsity(Part):
    """An MSBench config, or a recipe."""

    recipe: Path | str | None = None
    recipe_variables: dict[str, Any] = {}
    mask_generator: dict[str, Any] | None = None
    fake_sparse: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    leaf_module: list[str] = []
    sparsity: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        msbench = [name for name in ("mask_generator", "fake_sparse", "scheduler", "sparsity") if getattr(self, name)]
        if self.recipe is not None and msbench:
            raise FieldError(f"{msbench[0]} is given too; keep the recipe or the MSBench config", "recipe")
        if self.recipe is None and self.scheduler is None:
            raise ValueError("set 'recipe: file.yaml', or an MSBench config with 'scheduler'")
        return self


class Config(Part):
    """A whole config."""

    num_classes: ClassCount | None = None
    """Without the background; by default that of the training data."""
    task: Literal["classification", "detection"] | None = None
    """By default that of the net; a custom model is a classifier unless it has a method `network`."""
    dataset: Dataset = Dataset()
    trainer: Trainer = Trainer()
    saver: Saver = Saver()
    net: Net
    ema: Ema = Ema()
    hooks: list[Named] = []
    runtime: Runtime = Runtime()
    sparsity: Sparsity | None = None
