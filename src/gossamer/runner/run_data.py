"""The data of a run: what it trains and tests on, and how many classes there are."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from gossamer.errors import GossamerError
from gossamer.runner.config import Config
from gossamer.runner.data import ImageData, build_dataset

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
