"""`gossamer create` and `gossamer convert`: recipes generated for a model, or from configs of MSBench and ASP."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from gossamer.cli.console import (
    option_errors,
    progress,
    reports_errors,
    say,
    show_json,
    show_warnings,
    with_option,
)
from gossamer.cli.options import AsJson, Classes, Imports, RecipeOutput, load_batches, load_model

if TYPE_CHECKING:
    from gossamer.create import Design
    from gossamer.recipe import Recipe

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
    model: Annotated[str, Argument(metavar="MODEL", help="package.module:function or a torchvision model.")],
    sparsity: Annotated[float | None, Option(help="Final share of zeros.", show_default="0.8")] = None,
    target: Annotated[str | None, Option(help="Hardware: vnni (blocks of four) or tensorrt (2:4).")] = None,
    mask_type: Annotated[str | None, Option(help="unstructured, block4, 2:4, filter, channel or rows,cols.")] = None,
    pruning: Annotated[
        str, Option(metavar="METHOD", help="Method; constant keeps existing zeros, off only with quantization.")
    ] = "magnitude",
    quantization: Annotated[bool, Option(help="Train the last epochs with 8-bit quantization.")] = True,
    lr: Annotated[
        str, Option(help="linear, cosine, cyclic_linear, constant, stepped, exponential or none.")
    ] = "linear",
    distillation: Annotated[bool, Option("--distillation", help="Add knowledge distillation.")] = False,
    hardness: Annotated[float | None, Option(help="Weight of the distillation loss.", show_default="0.5")] = None,
    temperature: Annotated[float | None, Option(help="Distillation temperature.", show_default="2")] = None,
    epochs: Annotated[float | None, Option(help="Number of epochs.", show_default="20")] = None,
    init_lr: Annotated[float | None, Option(help="Initial learning rate.", show_default="0.001")] = None,
    final_lr: Annotated[float | None, Option(help="Final learning rate.", show_default="1e-7")] = None,
    layer_wise: Annotated[
        bool, Option("--layer-wise", help="A sparsity for each layer instead of a global threshold.")
    ] = False,
    weights: Annotated[
        Path | None, Option(metavar="FILE", help="Trained weights: .safetensors, or a .pt state dict.")
    ] = None,
    classes: Classes = None,
    data: Annotated[
        str | None, Option(metavar="FUNCTION", help="package.module:function that returns batches.")
    ] = None,
    output: RecipeOutput = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Generate a recipe for a model, with the reason for every choice in its comments.

    Prints only the recipe without -o. With --data, more sensitive layers get a lower sparsity; without it, their sizes
    and positions in the network decide.
    """
    from gossamer.create.choices import choose
    from gossamer.create.generator import design

    given = {
        "sparsity": sparsity,
        "target": target,
        "mask_type": _parse_mask_type(mask_type),
        "num_epochs": epochs,
        "init_lr": init_lr,
        "final_lr": final_lr,
        "global_sparsity": False if layer_wise else None,
        "hardness": hardness,
        "temperature": temperature,
    }
    variables = {name: value for name, value in given.items() if value is not None}
    with option_errors(_OPTIONS):
        choices = choose(_parse_name(pruning), quantization, _parse_name(lr), distillation, variables)
    with redirect_stdout(sys.stderr):  # keep output of the user's code out of ours
        loaded = load_model(model, weights, classes=classes, imports=imports)
        batches = None if data is None else load_batches(data)
        with progress("measuring", as_json or batches is None) as show, option_errors(_OPTIONS):
            made = design(loaded.model, choices, batches, progress=show)
    problems = [*choices.without_effect, *made.warnings]
    if batches is not None and (problem := choices.check_data()) is not None:
        problems.append(problem)
    warnings = [str(with_option(problem, _OPTIONS)) for problem in problems]
    if (batches is not None and choices.uses_data) or loaded.assumed_classes is not None:
        warnings += loaded.warnings
    if output is not None:
        made.recipe.save(output)
    if as_json:
        show_json(_as_data(model, made, output, warnings))
        return
    show_warnings(warnings)
    _show(made.recipe, output)


@reports_errors
def convert(
    config: Annotated[
        Path, Argument(metavar="CONFIG", help="An MSBench config, or arguments of ASP: .yaml, .json or a .py script.")
    ],
    output: RecipeOutput = None,
    steps_per_epoch: Annotated[
        float, Option(metavar="N", help="Iterations per epoch; with 1, an epoch is one iteration.")
    ] = 1.0,
    model: Annotated[
        str | None,
        Option(metavar="MODEL", help="For 2:4 configs: package.module:function or a torchvision model."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert an MSBench config to an equivalent recipe.

    Iterations become epochs of N steps: attach the recipe with modify(model, optimizer, steps_per_epoch=N). Prints the
    recipe without -o.
    """
    from gossamer.msbench.conversion import read_config, to_recipe

    given = read_config(config)
    recipe, left_out = to_recipe(given, steps_per_epoch, load_model(model).model if model is not None else None)
    if output is not None:
        recipe.save(output)
    if as_json:
        show_json({"recipe": recipe.text, "output": str(output) if output else None, "left_out": left_out})
        return
    if steps_per_epoch == 1.0 and recipe.max_epochs > 1:
        left_out = [*left_out, "one epoch of the recipe is one iteration; change that with --steps-per-epoch"]
    show_warnings(left_out)
    _show(recipe, output)


def _show(recipe: Recipe, output: Path | None) -> None:
    """Print the recipe, or a line about the file that has it."""
    if output is None:
        typer.echo(recipe.text, nl=False)
    else:
        say(f"{output}: {', '.join(modifier.name for modifier in recipe.modifiers)}, {recipe.max_epochs} epochs")


def _parse_name(text: str) -> str | bool | None:
    """A name; False for `off` and the like, None for `none`."""
    if text.lower() == "none":
        return None
    return False if text.lower() in _OFF else text


def _parse_mask_type(text: str | None) -> str | list[int] | None:
    """A name, or rows and columns of a block from `1,4` or `[1, 4]`."""
    if text is None or not set(text) <= set("[]0123456789, ") or "," not in text:
        return text
    return [int(part) for part in text.strip("[] ").split(",") if part.strip()]


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
