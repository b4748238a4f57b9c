"""`--data`: other data than a config names, as changes to its settings.

`tiny` is the data that comes with the package, with matching settings. A folder is recognized by its files and replaces
the sources only. Reads no image and no annotation.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from gossamer.errors import GossamerError, Location, Problems, within
from gossamer.runner.config.schema import Config, Source
from gossamer.runner.config.settings import Settings, read_settings

Task = Literal["classification", "detection"]

TINY = "tiny"
DETECTORS = ("retinanet", "fasterrcnn", "fcos", "ssd", "maskrcnn", "keypointrcnn")
"""Prefixes of torchvision's names of detectors."""
BOXES = ("coco", "json_lines", "scenes")
"""The types of data with boxes."""
SHARED = frozenset(Source.model_fields) - {"type"}
"""The settings of all sources, which stay when a source is replaced by another one."""

_TINY_LOCATION = Location(f"--data {TINY}")
_IDX = re.compile(r"(?P<family>.*?)(?P<part>train|t10k|test|val)-images[-.]idx3-ubyte(?P<packed>\.gz)?")
_LAYOUTS = (
    "IDX files (train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, plain or .gz), train/ and val/ or "
    "test/ with a folder for each class, train.npz and test.npz, or train.json and val.json or test.json with images/"
)
Sources = list[dict[str, str]]
"""The settings of the training data and of the test data."""


def use_data(settings: Settings, data: str, early: Settings, name: str, problems: Problems) -> None:
    """Give a config other data: `tiny`, or a folder.

    `early` are the settings with the overrides of the net and the task, `name` is that of the config.
    """
    task = _task_in(early)
    if data == TINY:
        _use_tiny(settings, str(early.get("net", "type") or ""), task, name, problems)
        return
    folder, location = Path(data), Location(f"--data {data}")
    with within(location=location):
        if not folder.is_dir():
            raise GossamerError(f"expected '{TINY}' or an existing folder")
        sources = _recognize(folder, task)
    for source, part in zip(sources, ("train", "test"), strict=True):
        settings.put(("dataset", part), {**source, **_shared(settings.get("dataset", part))}, location)
    settings.remove("num_classes")


def use_source_type(settings: Settings, part: str, kind: object) -> None:
    """Remove settings of `dataset.train` or `dataset.test` that a source of another type may lack."""
    old = settings.get("dataset", part, "type")
    if old is not None and old != kind:
        source = settings.get("dataset", part)
        settings.put(("dataset", part), _shared(source), settings.locate("dataset", part))


def task_of(config: Config) -> Task:
    """The task of a config: the given one, else that of its net, else that of its data."""
    kinds = [source.type for source in (config.dataset.train, config.dataset.test) if source is not None]
    return config.task or _task(config.net.type, kinds)


def _task_in(settings: Settings) -> str:
    """The same before a config is checked."""
    kinds = [settings.get("dataset", part, "type") for part in ("train", "test")]
    return str(settings.get("task") or _task(str(settings.get("net", "type") or ""), kinds))


def _task(net: str, kinds: Sequence[object]) -> Task:
    if net and _is_torchvision(net):
        return "detection" if net.startswith(DETECTORS) else "classification"
    return "detection" if any(kind in BOXES for kind in kinds) else "classification"


def _is_torchvision(net: str) -> bool:
    return ":" not in net and "/" not in net


def _shared(source: Any) -> dict[str, Any]:
    return {name: source[name] for name in SHARED & source.keys()} if isinstance(source, dict) else {}


# The data that comes with the package


def _use_tiny(settings: Settings, net: str, task: str, name: str, problems: Problems) -> None:
    family = next((family for family in ("retinanet", "fasterrcnn") if net.startswith(family)), task)
    with importlib.resources.as_file(importlib.resources.files("gossamer.runner.config") / TINY) as folder:
        file = folder / f"{family}.yaml"
        if not file.is_file():
            with within("task", location=_TINY_LOCATION):
                raise GossamerError(f"expected classification or detection, found {task!r}")
        overlay = read_settings(file, problems)
    if not _is_torchvision(net):
        overlay.remove("net")
    # Of the recipe variables those that the config sets, and no lr_scheduler beside a recipe without one.
    for variable in list(overlay.get("sparsity", "recipe_variables") or ()):
        if settings.get("sparsity", "recipe_variables", variable) is None:
            overlay.remove("sparsity", "recipe_variables", variable)
    if settings.get("sparsity", "recipe") is None:
        overlay.remove("sparsity")
    elif settings.get("trainer", "lr_scheduler") is None:
        overlay.remove("trainer", "lr_scheduler")
    settings.merge(overlay)
    settings.put(("saver", "save_dir"), f"runs/{name}-{TINY}", _TINY_LOCATION)
    pretrained = settings.get("saver", "pretrain_model")
    if isinstance(pretrained, str):
        settings.put(("saver", "pretrain_model"), str(_tiny_run(Path(pretrained))), _TINY_LOCATION)


def remove_missing_weights(settings: Settings, warnings: list[str]) -> None:
    """With `tiny`, remove weights of a tiny run that does not exist yet."""
    weights = settings.get("saver", "pretrain_model")
    is_tiny = settings.locate("saver", "pretrain_model") == _TINY_LOCATION
    if is_tiny and weights is not None and not os.path.exists(weights):
        warnings.append(
            f"{_TINY_LOCATION}: starting from random weights because {weights} does not exist; train the float "
            f"config with {_TINY_LOCATION} first, or name weights with --set saver.pretrain_model=FILE"
        )
        settings.remove("saver", "pretrain_model")


def _tiny_run(pretrained: Path) -> Path:
    """The path of the weights in the corresponding run on tiny data."""
    steps = pretrained.parts
    if "runs" in steps[:-1]:
        at = steps.index("runs") + 1
        return Path(*steps[:at], f"{steps[at]}-{TINY}", *steps[at + 1 :])
    return pretrained.with_name(f"{pretrained.stem}-{TINY}{pretrained.suffix}")


# Folders


def _recognize(folder: Path, task: str) -> Sources:
    layouts = {
        "idx": _idx(folder),
        "class folders": _train_and_test(folder, "image_folder", "", _has_folders),
        "npz": _train_and_test(folder, "npz", ".npz", Path.is_file),
        "coco": _train_and_test(folder, "coco", ".json", Path.is_file),
    }
    layouts = {layout: sources for layout, sources in layouts.items() if sources}
    fitting = {layout: sources for layout, sources in layouts.items() if (layout == "coco") == (task == "detection")}
    if len(fitting) > 1:
        raise GossamerError(f"the folder holds data of several kinds: {' and '.join(fitting)}; keep one of them")
    if layouts and not fitting:
        raise GossamerError(f"the folder holds data of the kind {next(iter(layouts))}, but the config is for {task}")
    if not layouts:
        raise GossamerError(f"the folder holds no data of a known kind; expected {_LAYOUTS}")
    ((layout, sources),) = fitting.items()
    if layout == "coco":
        if not (folder / "images").is_dir():
            raise GossamerError("train.json is there, but the folder images/ is missing")
        sources = [{**source, "images": str(folder / "images")} for source in sources]
    return sources


def _train_and_test(folder: Path, kind: str, suffix: str, exists: Callable[[Path], bool]) -> Sources:
    """`train` and `val`, else `test`, with a suffix."""
    train, *tests = (folder / f"{name}{suffix}" for name in ("train", "val", "test"))
    test = next((path for path in tests if exists(path)), None)
    return [{"type": kind, "path": str(path)} for path in (train, test)] if test and exists(train) else []


def _has_folders(path: Path) -> bool:
    return path.is_dir() and any(entry.is_dir() for entry in path.iterdir())


def _idx(folder: Path) -> Sources:
    families: dict[str, dict[str, dict[str, str]]] = {}
    for name in sorted(os.listdir(folder), reverse=True):  # plain files come after packed ones and replace them
        if (match := _IDX.fullmatch(name)) is None:
            continue
        labels = name.replace("-images", "-labels").replace("idx3", "idx1")
        if not (folder / labels).is_file():
            raise GossamerError(f"{name} is there, but {labels} is missing")
        source = {"type": "idx", "images": str(folder / name), "labels": str(folder / labels)}
        families.setdefault(match["family"], {})["train" if match["part"] == "train" else "test"] = source
    complete = {name: pair for name, pair in families.items() if len(pair) == 2}
    if len(complete) > 1:
        names = ", ".join(f"'{name}'" for name in complete)
        raise GossamerError(f"the folder holds several sets of IDX files: {names}; keep one of them")
    return [pair[part] for pair in complete.values() for part in ("train", "test")]
