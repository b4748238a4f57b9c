"""From a tree to settings, or to all that is wrong with it, each with its place and the nearest name.

Knows the schema, and nothing of where the tree came from.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gossamer.errors import MAX_PROBLEMS, nearest
from gossamer.recipe.wording import complaint_words, found_words
from gossamer.runner.config.schema import Config, Part
from gossamer.runner.config.tree import Place, Problems, Tree, plain

Steps = tuple[str | int, ...]


@dataclass(frozen=True)
class _Complaint:
    """`expected` completes "expected …"; else `sentence` says it all."""

    path: Steps
    place: Place
    expected: str | None
    sentence: str
    found: str


def checked(tree: Tree, problems: Problems) -> Config | None:
    """The settings; None when there are problems, which are then among `problems`."""
    tree, known_faults = set_aside(tree, problems)
    try:
        config = Config.model_validate(plain(tree))
    except ValidationError as error:
        complaints = [_complaint(details, tree) for details in error.errors(include_url=False)[:MAX_PROBLEMS]]
        _report([complaint for complaint in complaints if complaint.path not in known_faults], problems)
        return None
    return None if problems.found else config


def _report(complaints: Sequence[_Complaint], problems: Problems) -> None:
    """One sentence for each place; of the branches of a union, those count that went deepest."""
    paths = {complaint.path for complaint in complaints}
    grouped: dict[Steps, list[_Complaint]] = {}
    for complaint in complaints:
        inside = any(
            len(path) > len(complaint.path) and path[: len(complaint.path)] == complaint.path for path in paths
        )
        if complaint.expected is None:
            problems.add(complaint.place, complaint.sentence)
        elif not inside:
            grouped.setdefault(complaint.path, []).append(complaint)
    for path, group in grouped.items():
        wanted = " or ".join(dict.fromkeys(str(complaint.expected) for complaint in group))
        close = nearest(group[0].found.strip("'"), re.findall(r"'([^']*)'", wanted))
        problems.add(group[0].place, f"{dotted(path)}: expected {wanted}, found {group[0].found}{close}")


def _complaint(details: ErrorDetails, tree: Tree) -> _Complaint:
    path, here = _followed(details["loc"], tree)
    kind, context = details["type"], details.get("ctx", {})
    found = found_words(details["input"])
    place, name, expected = here.told_at, dotted(path), None
    if kind == "union_tag_invalid":
        types = re.findall(r"'([^']*)'", context["expected_tags"])
        place = (here.child("type") or here).place
        unknown = str(context["tag"])
        sentence = f"{name}.type: unknown type '{unknown}'{nearest(unknown, types)}; there are {', '.join(types)}"
    elif kind == "union_tag_not_found":
        types = ", ".join(str(choice) for part in _parts(details["loc"]) for choice in _types(part))
        sentence = f"{name}: missing 'type'; there are {types}"
    elif kind == "extra_forbidden":
        known = [field for part in _parts(details["loc"][:-1]) for field in part.model_fields]
        place = here.key
        sentence = f"unknown key '{name}'{nearest(str(path[-1]), known)}"
    elif kind == "missing":
        place = (here.child("type") or here).told_at  # which asks for it
        sentence = f"{name}: missing '{details['loc'][-1]}'" if name else f"missing key '{details['loc'][-1]}'"
    elif kind == "value_error":
        _, told = complaint_words(details)
        field = here.child(told.partition(":")[0])
        place = field.key if field else place
        sentence = f"{name}.{told}" if field else f"{name}: {told}"
    else:
        expected, told = ("a path", "") if kind.startswith("path") else complaint_words(details)
        sentence = f"{name}: {told}, found {found}"
    return _Complaint(path, place, expected, sentence, found)


def _followed(location: Steps, tree: Tree) -> tuple[Steps, Tree]:
    """As far as a location leads into the tree; steps that name a branch of a union are left out."""
    path: Steps = ()
    for step in location:
        child = tree.child(step)
        if child is not None:
            path, tree = (*path, step), child
    return path, tree


def dotted(path: Steps) -> str:
    """
    >>> dotted(("dataset", "train", "transforms", 0))
    'dataset.train.transforms.0'
    """
    return ".".join(str(step) for step in path)


def _parts(location: Steps) -> list[type[Part]]:
    """The classes of settings that a location of pydantic's leads to; several where a type was not chosen."""
    parts: list[type[Part]] = [Config]
    for step in location:
        if len(parts) == 1:
            field = parts[0].model_fields.get(str(step))
            parts = list(_parts_in(field.annotation)) if field else parts
        else:
            parts = [part for part in parts if step in _types(part)]
    return parts


def _parts_in(annotation: Any) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts_in(inner)


def _types(part: type[Part]) -> tuple[object, ...]:
    """What `type` may be, where it tells one class of settings from others."""
    annotation = part.model_fields["type"].annotation if "type" in part.model_fields else None
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


INSTEAD = {
    "net": "name one model: 'net: {type: resnet18}'; a backbone, neck and heads come together under one name",
    "dataset.*.dataset": "name the data right here: 'type: coco' with 'path' and 'images', 'type: image_list', …",
    "dataset.dataloader": "give 'batch_size' and 'num_workers' under dataset.train and dataset.test",
    "dataset.*.batch_sampler": "give 'batch_size' right here; its kwargs are not needed",
    "dataset.*.sampler": "leave it out: training is shuffled and shared by processes, testing goes in order",
    "trainer.optimizer.register_type": "leave it out; 'type' names a class of torch.optim",
    "trainer.lr_scheduler.warmup_register_type": "leave it out; 'warmup_type' is linear, exp or constant",
    "trainer.max_epochs": "write 'max_epoch'",
    "trainer.max_iters": "write 'max_iter'",
    "saver.results_dir": "leave it out; results go into the run folder, saver.save_dir",
    "saver.save_cfg": "leave it out; the resolved config goes into the run folder",
    "ema.ema_type": "leave it out; there is one kind, with 'enable' and 'decay'",
    "ema.kwargs": "write 'decay' right below 'ema'",
    "runtime.task_names": "write 'task: classification' or 'task: detection' at the top, or leave it out",
    "runtime.random_seed": "write 'seed'",
    "runtime.special_bn_init": "leave it out",
    "runtime.aligned": "leave it out",
    "runtime.async_norm": "leave it out",
    "to_kestrel": "leave it out; saver.export writes safetensors and onnx",
    "quant": "leave it out; quantization is a recipe: 'sparsity: {recipe: file.yaml}'",
    "flip": "leave it out",
}
"""By path, with `*` for one step; `net` is so only when it is a list."""


def set_aside(tree: Tree, problems: Problems) -> tuple[Tree, set[tuple[str | int, ...]]]:
    """The tree without such settings, and the paths at which something else is therefore amiss."""
    faults: set[tuple[str | int, ...]] = set()
    for path in list(tree.paths()):
        name = ".".join(path)
        instead = next((text for pattern, text in INSTEAD.items() if _matches(name, pattern)), None)
        found = tree.at(*path)
        if instead is None or found is None or (name == "net" and not isinstance(found.content, list)):
            continue
        problems.add(found.key, f"{name} is of United Perception's form; {instead}")
        tree = tree.without(*path)
        faults |= {path, path[:-1]}
    return tree, faults


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)
