"""Arguments and options that several commands share, and the model and the batches that they name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gossamer.errors import GossamerError, nearest

if TYPE_CHECKING:
    from gossamer.models import LoadedModel

_MODEL = "package.module:function, a torchvision model, a run folder, or an exported model.safetensors."
_IMPORT = "Trust this package: its code may run if a run folder or a file names it; repeatable."

ModelArgument = Annotated[str, Argument(metavar="MODEL", help=_MODEL)]
Weights = Annotated[
    Path | None,
    Option("--weights", "-w", metavar="FILE|RUN", help="Trained weights: .safetensors, .pt or a run folder."),
]
Sets = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Set a value of the config, such as trainer.max_epoch=5; repeatable."),
]
Data = Annotated[
    str | None, Option(metavar="tiny|FOLDER", help="Replace the data by the built-in data set or a folder.")
]
Input = Annotated[
    str | None, Option("--input", metavar="SHAPE", help="Shape of the model's input, such as 1,3,224,224.")
]
Classes = Annotated[
    int | None,
    Option("--num-classes", metavar="N", help="Number of classes, passed as num_classes to the model's function."),
]
Imports = Annotated[list[str] | None, Option("--import", metavar="PACKAGE", help=_IMPORT)]
PatternName = Annotated[str, Option("--pattern", metavar="N:M", help="The pattern, such as 2:4.")]
RecipeOutput = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write the recipe: .yaml or .md.")]
AsJson = Annotated[bool, Option("--json", help="Print only JSON.")]


def load_model(
    argument: str,
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
            argument,
            weights=weights,
            data=data,
            input_shape=shape,
            sets=sets,
            num_classes=classes,
            imports=imports or (),
        )


def load_batches(name: str) -> Iterable[Any]:
    """The batches that `package.module:function` returns, for `--data`."""
    from gossamer.runner.trust import import_module

    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise GossamerError(f"expected package.module:function, found '{name}'", "--data")
    module = import_module(module_name)
    make: Any = getattr(module, function_name, None)
    if make is None:
        raise GossamerError(f"'{module_name}' has no '{function_name}'{nearest(function_name, dir(module))}", "--data")
    try:
        batches: Any = make() if callable(make) else make
    except Exception as error:
        raise GossamerError(f"{name}: calling it failed: {type(error).__name__}: {error}", "--data") from error
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise GossamerError(f"{name}: expected batches, found {type(batches).__name__}", "--data")
    return batches  # pyright: ignore[reportUnknownVariableType]
