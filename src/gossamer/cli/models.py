"""The MODEL argument and the options that go with it."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gossamer.models import LoadedModel

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:function, a torchvision model, a run folder, or an exported model.safetensors.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", "-w", metavar="FILE|RUN", help="Trained weights: .safetensors, .pt or a run folder."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a value of the config, as trainer.max_epoch=5; repeatable."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="tiny|FOLDER", help="Other data: the embedded data set, or a folder."),
]
Input = Annotated[
    str | None, typer.Option("--input", metavar="SHAPE", help="Shape of the model's input, as 1,3,224,224.")
]
Classes = Annotated[
    int | None,
    typer.Option("--num-classes", metavar="N", help="Passed as num_classes to the function that makes the model."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="PACKAGE",
        help="Trust this package: its code may run if a run folder or a file names it; repeatable.",
    ),
]


def load_model(
    word: str,
    weights: Path | None = None,
    data: str | None = None,
    shape: str | None = None,
    sets: Sequence[str] = (),
    classes: int | None = None,
    imports: Sequence[str] | None = None,
) -> LoadedModel:
    """The model that MODEL names; whatever the user's code prints goes to stderr."""
    from gossamer import models

    with redirect_stdout(sys.stderr):
        return models.load_model(
            word,
            weights=weights,
            data=data,
            input_shape=shape,
            sets=sets,
            num_classes=classes,
            imports=imports or (),
        )
