"""`gossamer create`: a recipe made for a model, on stdout or in a file."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.console import AsJson, out, progress, reports_errors, show_json, show_warnings
from gossamer.cli.models import Classes, Imports, load_model
from gossamer.errors import GossamerError, Problem, nearest
from gossamer.runner.trust import import_module

if TYPE_CHECKING:
    from gossamer.create import Design

_OPTIONS = {
    **{name: f"--{name}" for name in ("sparsity", "target", "hardness", "temperature", "pruning", "lr", "data")},
    "num_epochs": "--epochs",
    "mask_type": "--mask-type",
    "init_lr": "--init-lr",
    "final_lr": "--final-lr",
    "global_sparsity": "--layer-wise",
    "example_inputs": "--data",
}
"""The options that set arguments and variables of `gossamer.create`."""
_OFF = ("false", "off", "no")


@reports_errors
def create(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="package.module:function, or the name of a torchvision model.")
    ],
    sparsity: Annotated[
        float | None,
        typer.Option("--sparsity", metavar="SHARE", help="The share of zeros in the end.", show_default="0.8"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="NAME", help="The hardware: vnni (blocks of four) or tensorrt (2:4)."),
    ] = None,
    mask_type: Annotated[
        str | None,
        typer.Option("--mask-type", metavar="NAME", help="unstructured, block4, 2:4, filter, channel or rows,cols."),
    ] = None,
    pruning: Annotated[
        str,
        typer.Option(
            "--pruning", metavar="METHOD", help="A method; constant holds zeros, off does in quantization, none never."
        ),
    ] = "magnitude",
    quantization: Annotated[
        bool, typer.Option("--quantization/--no-quantization", help="Train the last epochs as the 8-bit version.")
    ] = True,
    lr: Annotated[
        str,
        typer.Option(
            "--lr", metavar="NAME", help="linear, cosine, cyclic_linear, constant, stepped, exponential or none."
        ),
    ] = "linear",
    distillation: Annotated[bool, typer.Option("--distillation", help="Learn from a teacher as well.")] = False,
    hardness: Annotated[
        float | None,
        typer.Option("--hardness", metavar="SHARE", help="How much the teacher counts.", show_default="0.5"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="T", help="How soft outputs are compared.", show_default="2"),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", metavar="N", help="How many epochs to train.", show_default="20")
    ] = None,
    init_lr: Annotated[
        float | None,
        typer.Option("--init-lr", metavar="RATE", help="The learning rate at the beginning.", show_default="0.001"),
    ] = None,
    final_lr: Annotated[
        float | None,
        typer.Option("--final-lr", metavar="RATE", help="The learning rate at the end.", show_default="1e-7"),
    ] = None,
    layer_wise: Annotated[
        bool, typer.Option("--layer-wise", help="A share for each layer in place of one threshold for all.")
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Trained weights: .safetensors, or a .pt state dict."),
    ] = None,
    classes: Classes = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FUNCTION", help="package.module:function that gives batches to measure layers by."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the recipe: .yaml or .md.")
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Write a recipe made for a model, with the reason for every choice in its comments.

    Without -o the recipe is printed, and nothing else is. With --data layers that matter more give less, by how far
    pruning them moves the outputs; without it their sizes and their places in the network decide.
    """
    from gossamer.create.choices import choose
    from gossamer.create.generator import design

    given = {
        "sparsity": sparsity,
        "target": target,
        "mask_type": _mask_type(mask_type),
        "num_epochs": epochs,
        "init_lr": init_lr,
        "final_lr": final_lr,
        "global_sparsity": False if layer_wise else None,
        "hardness": hardness,
        "temperature": temperature,
    }
    variables = {name: value for name, value in given.items() if value is not None}
    with _option_errors():
        choices = choose(_named(pruning), quantization, _named(lr), distillation, variables)
    with redirect_stdout(sys.stderr):  # whatever the user's code prints is not our output
        opened = load_model(model, weights, classes=classes, imports=imports)
        batches = None if data is None else batches_of(data)
        with progress("measuring", as_json or batches is None) as show, _option_errors():
            made = design(opened.model, choices, batches, progress=show)
    problems = [*choices.without_effect, *made.warnings]
    if batches is not None and (problem := choices.check_data()) is not None:
        problems.append(problem)
    warnings = [str(_with_option(problem)) for problem in problems]
    if (batches is not None and choices.uses_data) or opened.assumed_classes is not None:
        warnings += opened.warnings
    if output is not None:
        made.recipe.save(output)
    if as_json:
        show_json(_as_data(model, made, output, warnings))
        return
    show_warnings(warnings)
    if output is None:
        typer.echo(made.recipe.text, nl=False)
        return
    names = ", ".join(modifier.name for modifier in made.recipe.modifiers)
    out.print(f"{output}: {names}, {made.recipe.max_epochs} epochs", highlight=False, soft_wrap=True)


def _named(word: str) -> str | bool | None:
    """A name; False for a word that switches off, None for none."""
    if word.lower() == "none":
        return None
    return False if word.lower() in _OFF else word


@contextmanager
def _option_errors() -> Generator[None]:
    """Errors name options of the command line in place of arguments."""
    try:
        yield
    except GossamerError as error:
        raise GossamerError(_with_option(problem) for problem in error.problems) from None


def _with_option(problem: Problem) -> Problem:
    """The problem with the option that sets the argument or variable of its key.

    >>> str(_with_option(Problem("expected a number < 1", ("recipe_variables", "sparsity"))))
    '--sparsity: expected a number < 1'
    """
    key = problem.key[1:] if problem.key[:1] == ("recipe_variables",) else problem.key
    return replace(problem, key=(_OPTIONS.get(str(key[0]), str(key[0])), *key[1:])) if key else problem


def _mask_type(word: str | None) -> str | list[int] | None:
    """`1,4` and `[1, 4]` are blocks of rows by columns."""
    if word is None or not set(word) <= set("[]0123456789, ") or "," not in word:
        return word
    return [int(part) for part in word.strip("[] ").split(",") if part.strip()]


def batches_of(word: str) -> Iterable[Any]:
    """What the function that `word` names gives, called without arguments."""
    module_name, _, function_name = word.partition(":")
    if not module_name or not function_name:
        raise GossamerError(f"--data: expected package.module:function, found '{word}'")
    module = import_module(module_name)
    make: Any = getattr(module, function_name, None)
    if make is None:
        close = nearest(function_name, dir(module))
        raise GossamerError(f"--data: '{module_name}' has no '{function_name}'{close}")
    try:
        found: Any = make() if callable(make) else make
    except Exception as error:
        raise GossamerError(f"--data: {word}: calling it failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, Iterable) or isinstance(found, str):
        raise GossamerError(f"--data: {word}: expected batches, found {type(found).__name__}")
    return found  # pyright: ignore[reportUnknownVariableType]


def _as_data(model: str, made: Design, output: Path | None, warnings: list[str]) -> dict[str, object]:
    return {
        "model": model,
        "recipe": made.recipe.text,
        "epochs": made.recipe.max_epochs,
        "modifiers": [modifier.name for modifier in made.recipe.modifiers],
        "adapted": list(made.choices.adapted),
        "layers": [
            {
                "name": layer.name,
                "shape": list(layer.shape),
                "weights": layer.weights,
                "takes_part": layer.takes_part,
                "sparsity": layer.sparsity,
                "max_sparsity": layer.bound,
                "why": layer.why,
            }
            for layer in made.layers
        ],
        "warnings": warnings,
        "output": None if output is None else str(output),
    }
