"""From a source in a config to its dataset: which reader reads it, and whether what it found can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Coco, Digits, Idx, ImageFolder, ImageList, JsonLines, Npz, Scenes, Source
from gossamer.runner.data.arrays import read_idx, read_npz
from gossamer.runner.data.classes import Expected
from gossamer.runner.data.coco import read_coco
from gossamer.runner.data.dataset import ImageData, Task
from gossamer.runner.data.digits import read_digits
from gossamer.runner.data.examples import Examples
from gossamer.runner.data.json_lines import read_json_lines
from gossamer.runner.data.labelled import read_image_folder, read_image_list
from gossamer.runner.data.problems import Problems
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
