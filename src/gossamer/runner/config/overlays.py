"""`--data`: other data than a config names, as changes to its tree.

`tiny` is the data that comes with the package, with matching settings. A folder is recognized by its files and replaces
the sources only. Reads no image and no annotation.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gossamer.errors import GossamerError, Location, Problems, within
from gossamer.runner.config.schema import Config, Source
from gossamer.runner.config.tree import Tree, merged, read_tree

Task = Literal["classification", "detection"]

TINY = "tiny"
DETECTORS = ("retinanet", "fasterrcnn", "fcos", "ssd", "maskrcnn", "keypointrcnn")
"""Prefixes of torchvision's names of detectors."""
BOXES = ("coco", "json_lines", "scenes")
"""The types of data with boxes."""
SHARED = frozenset(Source.model_fields)
"""The settings of all sources, which stay when a source is replaced by another one."""

_TINY_LOCATION = Location(f"--data {TINY}")
_IDX = re.compile(r"(?P<family>.*?)(?P<part>train|t10k|test|val)-images[-.]idx3-ubyte(?P<packed>\.gz)?")
_TESTS = ("val", "test")
_LAYOUTS = (
    "IDX files (train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, plain or .gz), train/ and val/ or "
    "test/ with a folder for each class, train.npz and test.npz, or train.json and val.json or test.json with images/"
)
Sources = tuple[Mapping[str, str], Mapping[str, str]]
"""The settings of the training data and of the test data."""


def with_data(tree: Tree, data: str, early: Tree, name: str, problems: Problems) -> Tree:
    """The tree of a config with other data: `tiny`, or a folder.

    `early` is the tree with the overrides of the net and the task, `name` is that of the config.
    """
    task = _task_in(early)
    if data == TINY:
        net = early.at("net", "type")
        return _with_tiny(tree, "" if net is None else str(net.content), task, name, problems)
    folder, location = Path(data), Location(f"--data {data}")
    with within(location=location):
        if not folder.is_dir():
            raise GossamerError(f"expected '{TINY}' or an existing folder")
        sources = _recognize(folder, task)
    for source, part in zip(sources, ("train", "test"), strict=True):
        entries = Tree.of(dict(source), location).content
        assert isinstance(entries, dict)
        tree = _with_source(tree, part, entries | _shared_settings(tree.at("dataset", part)), location)
    return tree.without("num_classes")


def with_source_type(tree: Tree, part: str, kind: object) -> Tree:
    """The tree without settings of `dataset.train` or `dataset.test` that a source of another type lacks."""
    source = tree.at("dataset", part)
    old = tree.at("dataset", part, "type")
    if source is None or old is None or old.content == kind:
        return tree
    return _with_source(tree, part, _shared_settings(source), source.location)


def task_of(config: Config) -> Task:
    """The task of a config: the given one, else that of its net, else that of its data."""
    kinds = [source.type for source in (config.dataset.train, config.dataset.test) if source is not None]
    return config.task or _task(config.net.type, kinds)


def _task_in(tree: Tree) -> str:
    """The same before a config is checked."""
    given, net = tree.child("task"), tree.at("net", "type")
    if given is not None and isinstance(given.content, str):
        return given.content
    kinds = [kind.content for part in ("train", "test") if (kind := tree.at("dataset", part, "type")) is not None]
    return _task(str(net.content) if net else "", kinds)


def _task(net: str, kinds: Sequence[object]) -> Task:
    if net and _is_torchvision(net):
        return "detection" if net.startswith(DETECTORS) else "classification"
    return "detection" if any(kind in BOXES for kind in kinds) else "classification"


def _is_torchvision(net: str) -> bool:
    return ":" not in net and "/" not in net


def _with_source(tree: Tree, part: str, entries: dict[str, Tree], location: Location) -> Tree:
    dataset = Tree({part: Tree(entries, location)}, location)
    return merged(tree.without("dataset", part), Tree({"dataset": dataset}, tree.location))


def _shared_settings(source: Tree | None) -> dict[str, Tree]:
    entries = source.content if source is not None else None
    return {name: value for name, value in entries.items() if name in SHARED} if isinstance(entries, dict) else {}


# The data that comes with the package


def _with_tiny(tree: Tree, net: str, task: str, name: str, problems: Problems) -> Tree:
    family = next((family for family in ("retinanet", "fasterrcnn") if net.startswith(family)), task)
    with importlib.resources.as_file(importlib.resources.files("gossamer.runner.config") / TINY) as folder:
        file = folder / f"{family}.yaml"
        if not file.is_file():
            with within("task", location=_TINY_LOCATION):
                raise GossamerError(f"expected classification or detection, found {task!r}")
        overlay = read_tree(file, problems)
    if not _is_torchvision(net):
        overlay = overlay.without("net")
    overlay = _for_recipe(overlay, tree)
    tree = merged(tree, replace(overlay, location=tree.location))
    saver = {"save_dir": f"runs/{name}-{TINY}"}
    pretrained = tree.at("saver", "pretrain_model")
    if pretrained is not None and isinstance(pretrained.content, str):
        saver["pretrain_model"] = str(_tiny_run(Path(pretrained.content)))
    return merged(tree, Tree.of({"saver": saver}, _TINY_LOCATION))


def _for_recipe(overlay: Tree, tree: Tree) -> Tree:
    """The overlay with the recipe variables that the config sets, and no lr_scheduler beside a recipe without one."""
    names = overlay.at("sparsity", "recipe_variables")
    for name in names.content if names is not None and isinstance(names.content, dict) else ():
        if tree.at("sparsity", "recipe_variables", name) is None:
            overlay = overlay.without("sparsity", "recipe_variables", name)
    if tree.at("sparsity", "recipe") is None:
        return overlay.without("sparsity")
    return overlay if tree.at("trainer", "lr_scheduler") is not None else overlay.without("trainer", "lr_scheduler")


def without_missing_weights(tree: Tree, warnings: list[str]) -> Tree:
    """With `tiny`, the tree without weights of a tiny run that does not exist yet."""
    weights = tree.at("saver", "pretrain_model")
    if weights is None or weights.location != _TINY_LOCATION or os.path.exists(str(weights.content)):
        return tree
    warnings.append(
        f"{_TINY_LOCATION}: starting from random weights because {weights.content} does not exist; train the float "
        f"config with {_TINY_LOCATION} first, or name weights with --set saver.pretrain_model=FILE"
    )
    return tree.without("saver", "pretrain_model")


def _tiny_run(pretrained: Path) -> Path:
    """The path of the weights in the corresponding run on tiny data."""
    steps = pretrained.parts
    if "runs" in steps[:-1]:
        at = steps.index("runs") + 1
        return Path(*steps[:at], f"{steps[at]}-{TINY}", *steps[at + 1 :])
    return pretrained.with_name(f"{pretrained.stem}-{TINY}{pretrained.suffix}")


# Folders


def _recognize(folder: Path, task: str) -> Sources:
    layouts = {layout: sources for layout, read in _READERS.items() if (sources := read(folder)) is not None}
    fitting = {layout: sources for layout, sources in layouts.items() if (layout == "coco") == (task == "detection")}
    if len(fitting) > 1:
        raise GossamerError(f"the folder holds data of several kinds: {' and '.join(fitting)}; keep one of them")
    if layouts and not fitting:
        content = "boxes for detection" if task == "classification" else "images in classes"
        raise GossamerError(f"the folder holds {content}, but the config is for {task}")
    if not layouts:
        raise GossamerError(f"the folder holds no data of a known kind; expected {_LAYOUTS}")
    return next(iter(fitting.values()))


def _idx(folder: Path) -> Sources | None:
    pairs: dict[str, dict[str, Mapping[str, str]]] = {}
    for name in sorted(os.listdir(folder), reverse=True):  # plain files come after packed ones and replace them
        if (match := _IDX.fullmatch(name)) is None:
            continue
        labels = name.replace("-images", "-labels").replace("idx3", "idx1")
        if not (folder / labels).is_file():
            raise GossamerError(f"{name} is there, but {labels} is missing")
        part = "train" if match["part"] == "train" else "test"
        pairs.setdefault(match["family"], {})[part] = {
            "type": "idx",
            "images": str(folder / name),
            "labels": str(folder / labels),
        }
    families = {name: (pair["train"], pair["test"]) for name, pair in pairs.items() if len(pair) == 2}
    if len(families) > 1:
        names = ", ".join(f"'{name}'" for name in families)
        raise GossamerError(f"the folder holds several sets of IDX files: {names}; keep one of them")
    return next(iter(families.values()), None)


def _class_folders(folder: Path) -> Sources | None:
    tests = [folder / name for name in _TESTS if _has_folders(folder / name)]
    if not tests or not _has_folders(folder / "train"):
        return None
    return _of_type("image_folder", folder / "train", tests[0])


def _npz(folder: Path) -> Sources | None:
    tests = [folder / f"{name}.npz" for name in _TESTS if (folder / f"{name}.npz").is_file()]
    return _of_type("npz", folder / "train.npz", tests[0]) if tests and (folder / "train.npz").is_file() else None


def _coco(folder: Path) -> Sources | None:
    tests = [folder / f"{name}.json" for name in _TESTS if (folder / f"{name}.json").is_file()]
    if not tests or not (folder / "train.json").is_file():
        return None
    if not (folder / "images").is_dir():
        raise GossamerError(f"train.json and {tests[0].name} are there, but the folder images/ is missing")
    train, test = _of_type("coco", folder / "train.json", tests[0])
    images = {"images": str(folder / "images")}
    return {**train, **images}, {**test, **images}


_READERS: dict[str, Callable[[Path], Sources | None]] = {
    "idx": _idx,
    "class folders": _class_folders,
    "npz": _npz,
    "coco": _coco,
}


def _of_type(kind: str, train: Path, test: Path) -> Sources:
    return {"type": kind, "path": str(train)}, {"type": kind, "path": str(test)}


def _has_folders(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(entry.is_dir() for entry in entries)
