"""From a source in a config to its dataset: which reader reads it, and whether what it found can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gossamer.errors import GossamerError
from gossamer.runner.config import Config
from gossamer.runner.config.schema import Coco, Digits, Idx, ImageFolder, ImageList, JsonLines, Npz, Scenes, Source
from gossamer.runner.data.annotations import read_coco, read_json_lines
from gossamer.runner.data.dataset import ImageData, Task
from gossamer.runner.data.digits import read_digits
from gossamer.runner.data.examples import Examples
from gossamer.runner.data.labelled import read_idx, read_image_folder, read_image_list, read_npz
from gossamer.runner.data.readers import Expected, Problems
from gossamer.runner.data.scenes import read_scenes
from gossamer.runner.data.transforms import Pipeline


@dataclass(frozen=True)
class Reader:
    task: Task
    read: Callable[[Any, Expected, Problems], tuple[Examples, list[str]]]


READERS: dict[type[Source], Reader] = {
    ImageFolder: Reader("classification", read_image_folder),
    ImageList: Reader("classification", read_image_list),
    Coco: Reader("detection", read_coco),
    JsonLines: Reader("detection", read_json_lines),
    Idx: Reader("classification", read_idx),
    Npz: Reader("classification", read_npz),
    Digits: Reader("classification", read_digits),
    Scenes: Reader("detection", read_scenes),
}


def build_dataset(
    source: Source,
    *,
    task: str,
    seed: int = 0,
    classes: list[str] | None = None,
    num_classes: int | None = None,
) -> ImageData:
    """Read what a source names; a test set is given the training set's `classes`.

    `num_classes` bounds the labels of sources that have only numbers.
    """
    reader = READERS[type(source)]
    kind: str = getattr(source, "type", type(source).__name__)
    if reader.task != task:
        fitting = ", ".join(_kind(each) for each, other in READERS.items() if other.task == task)
        holds = "boxes" if reader.task == "detection" else "one class for each image"
        raise GossamerError(f"a dataset of type '{kind}' has {holds}, which is not for {task}; use one of {fitting}")
    pipeline = Pipeline(source.transforms)
    problems = Problems(refuse=source.on_error == "refuse")
    examples, found = reader.read(source, Expected(classes, num_classes), problems)
    notes = problems.notes
    if not len(examples):
        origin = getattr(source, "path", None) or getattr(source, "images", kind)
        raise GossamerError(f"{origin}: no image can be used{'; ' if notes else ''}{'; '.join(notes)}")
    if num_classes is not None and len(found) > num_classes:
        raise GossamerError(
            f"the dataset of type '{kind}' has {len(found)} classes, but num_classes is {num_classes}; "
            f"set 'num_classes: {len(found)}'"
        )
    if source.limit is not None and source.limit < len(examples):
        examples = examples.first(source.limit)
    return ImageData(
        examples, pipeline, task=reader.task, classes=found, notes=notes, seed=seed, refuse=problems.refuse
    )


def _kind(source: type[Source]) -> str:
    """The text that a config has for it."""
    (name,) = get_args(source.model_fields["type"].annotation)
    return name


logger = logging.getLogger("gossamer")
Purpose = Literal["train", "test", "export"]


@dataclass(frozen=True)
class RunData:
    """`classes` are the names, as far as the data know them; `num_classes` is what the model needs."""

    train: ImageData | None
    test: ImageData | None
    classes: list[str]
    num_classes: int


def read_run_data(
    config: Config,
    task: Literal["classification", "detection"],
    seed: int,
    purpose: Purpose = "train",
    classes: list[str] | None = None,
) -> RunData:
    """Read what a config names for a purpose; an export wants an example from either.

    Where only tests are wanted, the training data are read if nothing else says the classes. `classes` are those of a
    checkpoint. What was left out of the data is told to the log.
    """
    train, test = config.dataset.train, config.dataset.test
    training = purpose == "train"
    if (train if training else test or (train if purpose == "export" else None)) is None:
        raise GossamerError(f"dataset.{'train' if training else 'test'}: is missing; name the data, or try --data tiny")
    wanted = config.num_classes
    train_data = test_data = None
    if train is not None and (training or test is None or (wanted is None and classes is None)):
        with _told("dataset.train"):
            train_data = build_dataset(train, task=task, seed=seed, num_classes=wanted)
        if training and classes and classes != train_data.classes:
            raise GossamerError(
                f"dataset.train: has other classes than the run was begun with: {_some(train_data.classes)} and not "
                f"{_some(classes)}; resume with the same data, or begin a new run from its weights"
            )
        classes = train_data.classes
    if test is not None:
        with _told("dataset.test"):
            test_data = build_dataset(test, task=task, seed=seed, num_classes=wanted, classes=classes)
        classes = classes or test_data.classes
    if wanted is not None and classes and wanted > len(classes) and training:
        logger.warning("num_classes is %d, and the training data have %d classes", wanted, len(classes))
    for data, name in ((train_data, "train"), (test_data, "test")):
        for note in data.notes if data is not None else ():
            logger.warning("dataset.%s: %s", name, note)
    return RunData(train_data, test_data, classes or [], wanted or len(classes or []))


def _some(classes: list[str]) -> str:
    return ", ".join(classes[:5]) + (f", … ({len(classes)})" if len(classes) > 5 else "")


@contextmanager
def _told(place: str) -> Generator[None]:
    """Put the place in the config before what is wrong with the data."""
    try:
        yield
    except GossamerError as error:
        told = str(error)
        raise GossamerError(told if told.startswith("dataset") else f"{place}: {told}") from error
