"""The model that one word on the command line names."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.runner.trust import import_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from gossamer.runner.subjects import Subject

__all__ = [
    "Classes",
    "Data",
    "Imports",
    "Input",
    "ModelWord",
    "Sets",
    "Weights",
    "import_module",
    "load_model",
    "subject",
    "untrained",
]

ModelWord = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:function, a torchvision model, a run folder, or model.safetensors of a run.",
    ),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", "-w", metavar="FILE|RUN", help="Trained weights: .safetensors, .pt, a run.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a value of the config, as trainer.max_epoch=5; repeatable."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="tiny|FOLDER", help="Other data: the embedded ones, or a folder of known form."),
]
Input = Annotated[
    str | None, typer.Option("--input", metavar="SHAPE", help="Shape of the model's input, as 1,3,224,224.")
]

Classes = Annotated[
    int | None,
    typer.Option("--num-classes", metavar="N", help="Passed to the function that makes the model, as num_classes."),
]

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="PACKAGE",
        help="Run code of this package where a run folder or a file of others names it; repeatable.",
    ),
]


def subject(
    word: str,
    weights: Path | None = None,
    data: str | None = None,
    shape: str | None = None,
    sets: Sequence[str] = (),
    classes: int | None = None,
    imports: Sequence[str] | None = None,
) -> Subject:
    """The model that a word names, with what is known of it."""
    from gossamer.runner.subjects import open_subject

    with redirect_stdout(sys.stderr):  # whatever the user's code prints is not our output
        return open_subject(
            word,
            weights=weights,
            data=data,
            input_shape=shape,
            sets=sets,
            num_classes=classes,
            imports=imports or (),
        )


def load_model(word: str, weights: Path | None = None, imports: Sequence[str] | None = None) -> nn.Module:
    """The model alone."""
    return subject(word, weights, imports=imports).model


def untrained(found: Subject) -> list[str]:
    """Warnings about a model that was not given its weights, its quantization or its number of classes."""
    assumed = found.assumed_classes
    warnings = [] if assumed is None else [f"num_classes not given; assuming {assumed}. Override with --num-classes"]
    warnings += [] if found.float_weights is None else [found.float_weights]
    if found.trained or ":" in found.word:  # a function of the user's own may have loaded weights
        return warnings
    return [*warnings, f"{found.word} has the weights it is initialised with; --weights gives it trained ones"]
