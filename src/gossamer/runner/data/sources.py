"""From the `dataset` of a config to its data: which reader reads a source, and the data of a whole run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gossamer.errors import GossamerError, Location, Problem, format_value, within
from gossamer.runner.config.schema import Config, Source
from gossamer.runner.data.annotations import read_coco, read_json_lines
from gossamer.runner.data.dataset import ImageData, TaskName
from gossamer.runner.data.digits import read_digits, read_scenes
from gossamer.runner.data.examples import DataProblems, Examples, KnownClasses
from gossamer.runner.data.labelled import read_idx, read_image_folder, read_image_list, read_npz
from gossamer.runner.data.transforms import Pipeline

logger = logging.getLogger("gossamer")
Purpose = Literal["train", "test", "export"]
Reader = Callable[[Any, KnownClasses, DataProblems], tuple[Examples, list[str]]]
"""Returns the examples and the names of all classes."""

READERS: dict[str, tuple[TaskName, Reader]] = {
    "image_folder": ("classification", read_image_folder),
    "image_list": ("classification", read_image_list),
    "coco": ("detection", read_coco),
    "json_lines": ("detection", read_json_lines),
    "idx": ("classification", read_idx),
    "npz": ("classification", read_npz),
    "digits": ("classification", read_digits),
    "scenes": ("detection", read_scenes),
}
"""By the `type` of a source in a config."""


def build_dataset(
    source: Source,
    *,
    task: str,
    seed: int = 0,
    classes: list[str] | None = None,
    num_classes: int | None = None,
) -> ImageData:
    """Read a source; for a test set, `classes` are those of the training set.

    `num_classes` bounds the labels of sources whose classes are numbers.
    """
    source_task, read = READERS[source.type]
    if source_task != task:
        fitting = ", ".join(kind for kind, (other, _) in READERS.items() if other == task)
        raise GossamerError(Problem(f"'{source.type}' data is not for {task}", ("type",), fix=f"use one of {fitting}"))
    pipeline = Pipeline(source.transforms)
    problems = DataProblems(refuse=source.on_error == "refuse")
    examples, names = read(source, KnownClasses(classes, num_classes), problems)
    notes = problems.notes
    if not len(examples):
        origin = getattr(source, "path", None) or getattr(source, "images", source.type)
        raise GossamerError(Problem("; ".join(["no image can be used", *notes]), location=Location(str(origin))))
    if num_classes is not None and len(names) > num_classes:
        message = f"the '{source.type}' data has {len(names)} classes, but num_classes is {num_classes}"
        raise GossamerError(Problem(message, fix=f"set 'num_classes: {len(names)}'"))
    return ImageData(examples, pipeline, source, task=source_task, classes=names, notes=notes, seed=seed)


@dataclass(frozen=True)
class RunData:
    """The data of a run; `classes` are the class names, as far as the data has names."""

    train: ImageData | None
    test: ImageData | None
    classes: list[str]
    num_classes: int


def read_run_data(
    config: Config, task: TaskName, seed: int, purpose: Purpose = "train", classes: list[str] | None = None
) -> RunData:
    """Read the data that a purpose needs; an export takes an example from the test or the training data.

    `classes` are those of a checkpoint. A test reads the training data only if nothing else defines the classes.
    Logs a warning for what is skipped in the data.
    """
    train, test = config.dataset.train, config.dataset.test
    training = purpose == "train"
    if (train if training else test or (train if purpose == "export" else None)) is None:
        key = ("dataset", "train" if training else "test")
        raise GossamerError(Problem("missing", key, fix="name the data, or try --data tiny"))
    count = config.num_classes
    train_data = test_data = None
    if train is not None and (training or test is None or (count is None and classes is None)):
        with within("dataset", "train"):
            train_data = build_dataset(train, task=task, seed=seed, num_classes=count)
            if training and classes and classes != train_data.classes:
                shown = f"{format_value(classes)}, now {format_value(train_data.classes)}"
                message = f"the run started with other classes: {shown}"
                fix = "resume with the same data, or start a new run from its weights"
                raise GossamerError(Problem(message, fix=fix))
        classes = train_data.classes
    if test is not None:
        with within("dataset", "test"):
            test_data = build_dataset(test, task=task, seed=seed, num_classes=count, classes=classes)
        classes = classes or test_data.classes
    if count is not None and classes and count > len(classes) and training:
        logger.warning("num_classes is %d, but the training data has %d classes", count, len(classes))
    for data, name in ((train_data, "train"), (test_data, "test")):
        for note in data.notes if data is not None else ():
            logger.warning("dataset.%s: %s", name, note)
    return RunData(train_data, test_data, classes or [], count or len(classes or []))
