"""`--data WORD`: other data than a config names, as a tree to lay over it.

`tiny` is the data that comes with the package, with settings to match. A folder is recognised by the files in it,
and takes the place of the source alone. Reads no image and no annotation.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Config, Source
from gossamer.runner.config.tree import Place, Problems, Tree, merged, planted, read_tree

Task = Literal["classification", "detection"]

TINY = "tiny"
DETECTORS = ("retinanet", "fasterrcnn", "fcos", "ssd", "maskrcnn", "keypointrcnn")
"""How torchvision's names of detectors start."""

BOXES = ("coco", "json_lines", "scenes")
"""The types of data that have boxes."""

SETTINGS = frozenset(Source.model_fields)
"""What all sources share, and what stays when another one takes a source's place."""

_IDX = re.compile(r"(?P<family>.*?)(?P<part>train|t10k|test|val)-images[-.]idx3-ubyte(?P<packed>\.gz)?")
_TESTS = ("val", "test")
_LAYOUTS = (
    "IDX files (train-images-idx3-ubyte, t10k-images-idx3-ubyte and their labels, plain or .gz), train/ and val/ or "
    "test/ with a folder for each class, train.npz and test.npz, or train.json and val.json or test.json with images/"
)
Sources = tuple[Mapping[str, str], Mapping[str, str]]
"""The settings that name the data for training and for tests."""


def with_data(tree: Tree, word: str, naming: Tree, name: str, problems: Problems) -> Tree:
    """The tree of a config, with the data that a word or a folder names.

    `naming` is a tree that names the net and the task, `name` is the config's.
    """
    task = _told_task(naming)
    if word == TINY:
        net = naming.at("net", "type")
        return _tiny(tree, "" if net is None else str(net.content), task, name, problems)
    folder = Path(word)
    place = Place(f"--data {word}")
    if not folder.is_dir():
        raise GossamerError(f"{place}: expected '{TINY}' or a folder, and there is no folder of that name")
    for source, target in zip(_recognised(folder, task, place), ("train", "test"), strict=True):
        tree = _sourced(tree, target, source, place)
    return tree.without("num_classes")


def retyped(tree: Tree, target: str, kind: object) -> Tree:
    """The tree without what belongs to another type of data than the one that `target` is to have."""
    source = tree.at("dataset", target)
    old = tree.at("dataset", target, "type")
    if source is None or old is None or old.content == kind:
        return tree
    dataset = Tree({target: replace(source, content=_shared(source))}, source.place, source.key)
    return merged(tree.without("dataset", target), Tree({"dataset": dataset}, tree.place, tree.key))


def task_of(config: Config) -> Task:
    """What a config trains for: what it says, else what its net is for, else what its data are for."""
    kinds = [source.type for source in (config.dataset.train, config.dataset.test) if source is not None]
    return config.task or _task(config.net.type, kinds)


def _told_task(tree: Tree) -> str:
    """The same before a config is known to be right."""
    told, net = tree.child("task"), tree.at("net", "type")
    if told is not None and isinstance(told.content, str):
        return told.content
    kinds = [kind.content for part in ("train", "test") if (kind := tree.at("dataset", part, "type")) is not None]
    return _task(str(net.content) if net else "", kinds)


def _task(net: str, kinds: Sequence[object]) -> Task:
    if net and _is_torchvision(net):
        return "detection" if net.startswith(DETECTORS) else "classification"
    return "detection" if any(kind in BOXES for kind in kinds) else "classification"


def _is_torchvision(net: str) -> bool:
    return ":" not in net and "/" not in net


# The data that comes with the package


def _tiny(tree: Tree, net: str, task: str, name: str, problems: Problems) -> Tree:
    place = Place(f"--data {TINY}")
    family = next((family for family in ("retinanet", "fasterrcnn") if net.startswith(family)), task)
    with importlib.resources.as_file(importlib.resources.files("gossamer.runner.config") / TINY) as folder:
        file = folder / f"{family}.yaml"
        if not file.is_file():
            raise GossamerError(f"{place}: task: expected classification or detection, found {task!r}")
        overlay = read_tree(file, problems)
    if not _is_torchvision(net):
        overlay = overlay.without("net")
    overlay = _for_recipe(overlay, tree)
    tree = merged(tree, replace(overlay, place=tree.place, key=tree.key))
    saver = {"save_dir": f"runs/{name}-{TINY}"}
    pretrained = tree.at("saver", "pretrain_model")
    if pretrained is not None and isinstance(pretrained.content, str):
        saver["pretrain_model"] = str(_tiny_run(Path(pretrained.content)))
    return merged(tree, planted({"saver": saver}, place))


def _for_recipe(overlay: Tree, tree: Tree) -> Tree:
    """The overlay with those of its recipe variables that the config sets, and no scheduler beside a recipe's own."""
    names = overlay.at("sparsity", "recipe_variables")
    for name in names.content if names is not None and isinstance(names.content, dict) else ():
        if tree.at("sparsity", "recipe_variables", name) is None:
            overlay = overlay.without("sparsity", "recipe_variables", name)
    if tree.at("sparsity", "recipe") is None:
        return overlay.without("sparsity")
    return overlay if tree.at("trainer", "lr_scheduler") is not None else overlay.without("trainer", "lr_scheduler")


def without_missing_weights(tree: Tree, warnings: list[str]) -> Tree:
    """The tree, for `tiny`, without weights of a tiny run that there is not yet: it can begin from random ones."""
    place = Place(f"--data {TINY}")
    found = tree.at("saver", "pretrain_model")
    if found is None or found.place != place or os.path.exists(str(found.content)):
        return tree
    warnings.append(
        f"{place}: training starts from random weights because there is no {found.content}; train the float config "
        f"with {place} first, or name weights by --set saver.pretrain_model=FILE"
    )
    return tree.without("saver", "pretrain_model")


def _tiny_run(pretrained: Path) -> Path:
    """Where a run on tiny data stands for one on the config's own data."""
    steps = pretrained.parts
    if "runs" in steps[:-1]:
        at = steps.index("runs") + 1
        return Path(*steps[:at], f"{steps[at]}-{TINY}", *steps[at + 1 :])
    return pretrained.with_name(f"{pretrained.stem}-{TINY}{pretrained.suffix}")


# Folders


def _sourced(tree: Tree, target: str, source: Mapping[str, str], place: Place) -> Tree:
    named = {name: planted(value, place) for name, value in source.items()} | _shared(tree.at("dataset", target))
    dataset = Tree({target: Tree(named, place, place)}, place, place)
    return merged(tree.without("dataset", target), Tree({"dataset": dataset}, tree.place, tree.key))


def _shared(source: Tree | None) -> dict[str, Tree]:
    """The settings of a source that any other has too."""
    entries = source.content if source is not None else None
    return {name: value for name, value in entries.items() if name in SETTINGS} if isinstance(entries, dict) else {}


def _recognised(folder: Path, task: str, place: Place) -> Sources:
    found = {layout: sources for layout, read in _READERS.items() if (sources := read(folder, place)) is not None}
    fitting = {layout: sources for layout, sources in found.items() if (layout == "coco") == (task == "detection")}
    if len(fitting) > 1:
        raise GossamerError(
            f"{place}: the folder holds data of several kinds, {' and '.join(fitting)}; keep one of them"
        )
    if found and not fitting:
        kind = "boxes for detection" if task == "classification" else "images in classes"
        raise GossamerError(f"{place}: the folder holds {kind}, but the config is for {task}")
    if not found:
        raise GossamerError(f"{place}: the folder holds no data of a known kind; that would be {_LAYOUTS}")
    return next(iter(fitting.values()))


def _idx(folder: Path, place: Place) -> Sources | None:
    pairs: dict[str, dict[str, Mapping[str, str]]] = {}
    for name in sorted(os.listdir(folder), reverse=True):  # plain files after packed ones, which they displace
        if (match := _IDX.fullmatch(name)) is None:
            continue
        labels = name.replace("-images", "-labels").replace("idx3", "idx1")
        if not (folder / labels).is_file():
            raise GossamerError(f"{place}: {name} is there and {labels} is not")
        part = "train" if match["part"] == "train" else "test"
        pairs.setdefault(match["family"], {})[part] = {
            "type": "idx",
            "images": str(folder / name),
            "labels": str(folder / labels),
        }
    families = [(pair["train"], pair["test"]) for pair in pairs.values() if len(pair) == 2]
    if len(families) > 1:
        names = ", ".join(f"'{name}'" for name, pair in pairs.items() if len(pair) == 2)
        raise GossamerError(
            f"{place}: the folder holds several sets of IDX files, {names}; keep one in a folder of its own"
        )
    return families[0] if families else None


def _class_folders(folder: Path, _: Place) -> Sources | None:
    tests = [folder / name for name in _TESTS if _has_folders(folder / name)]
    if not tests or not _has_folders(folder / "train"):
        return None
    return _of_type("image_folder", folder / "train", tests[0])


def _npz(folder: Path, _: Place) -> Sources | None:
    tests = [folder / f"{name}.npz" for name in _TESTS if (folder / f"{name}.npz").is_file()]
    return _of_type("npz", folder / "train.npz", tests[0]) if tests and (folder / "train.npz").is_file() else None


def _coco(folder: Path, place: Place) -> Sources | None:
    tests = [folder / f"{name}.json" for name in _TESTS if (folder / f"{name}.json").is_file()]
    if not tests or not (folder / "train.json").is_file():
        return None
    if not (folder / "images").is_dir():
        raise GossamerError(f"{place}: train.json and {tests[0].name} are there, and the folder images/ is not")
    train, test = _of_type("coco", folder / "train.json", tests[0])
    images = {"images": str(folder / "images")}
    return {**train, **images}, {**test, **images}


_READERS: dict[str, Callable[[Path, Place], Sources | None]] = {
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
