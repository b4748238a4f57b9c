"""`gossamer oneshot`: prune or quantize a trained model in one pass over a text or a few batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from gossamer.cli.console import (
    amount,
    option_errors,
    percent,
    progress,
    reports_errors,
    say,
    show_json,
)
from gossamer.cli.options import AsJson, Classes, Imports, Weights, load_batches, load_model
from gossamer.errors import GossamerError, file_error

_OPTIONS = {
    "recipe": "--recipe",
    "data": "--data",
    "output": "--output",
    "stage": "--stage",
    "num_calibration_samples": "--samples",
    "max_seq_length": "--length",
}


@reports_errors
def oneshot(
    model: Annotated[str, Argument(metavar="MODEL", help="A folder of Transformers, or as for the other commands.")],
    recipe: Annotated[str, Option("--recipe", "-r", metavar="RECIPE", help="The recipe, with one-shot modifiers.")],
    output: Annotated[
        Path, Option("--output", "-o", metavar="OUT", help="The folder, or .safetensors file, to write.")
    ],
    data: Annotated[
        str | None, Option("--data", metavar="FILE", help="A text file, or package.module:function for batches.")
    ] = None,
    samples: Annotated[int | None, Option("--samples", metavar="N", help="Samples to use; 512.")] = None,
    length: Annotated[int | None, Option("--length", metavar="N", help="Tokens of a sample of text.")] = None,
    stage: Annotated[str | None, Option("--stage", metavar="NAME", help="The stage of the recipe to run.")] = None,
    format: Annotated[
        Literal["safetensors", "bitmask"], Option("--format", help="bitmask also writes the small file.")
    ] = "safetensors",
    weights: Weights = None,
    classes: Classes = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Prune or quantize a trained model without training.

    A folder is read and written block by block, so that the model need not fit into memory; the same command continues
    after an interruption.
    """
    from gossamer.calibration.streaming import is_model_folder

    if is_model_folder(model):
        result = _folder(model, recipe, output, data, samples, length, stage, format, as_json)
    elif Path(model).is_dir() and not (Path(model) / "config.yaml").exists():
        raise file_error(model, "holds no config.json of Transformers, and is not a run folder")
    else:
        result = _module(model, recipe, output, data, samples, stage, format, weights, classes, imports, as_json)
    if as_json:
        show_json(result)
    else:
        zeros, size = result["zeros"], result["weights"]
        assert isinstance(zeros, int)
        assert isinstance(size, int)
        say(f"{output}: {percent(zeros / max(size, 1))} of {amount(size)} weights are zero")


def _folder(
    model: str,
    recipe: str,
    output: Path,
    data: str | None,
    samples: int | None,
    length: int | None,
    stage: str | None,
    format: str,
    quiet: bool,
) -> dict[str, object]:
    from gossamer.calibration import oneshot as run
    from gossamer.calibration.checkpoint import Checkpoint
    from gossamer.calibration.streaming import empty_model
    from gossamer.model import embedding_tables, prunable

    batches = data is not None and ":" in data and not Path(data).exists()
    given = load_batches(data) if data is not None and batches else data
    with progress("", quiet, remaining=True) as show, option_errors(_OPTIONS):
        run(
            model,
            recipe=recipe,
            data=given,
            output=output,
            num_calibration_samples=samples,
            max_seq_length=length,
            stage=stage,
            progress=show,
        )
    checkpoint, module = Checkpoint(output), empty_model(output)
    tables = set(embedding_tables(module))
    zeros = size = 0
    for name in prunable(module):
        if name not in tables:
            tensor = checkpoint.read(name)
            zeros, size = zeros + int((tensor == 0).sum()), size + tensor.numel()
    files = [str(output)]
    if format == "bitmask":
        from gossamer import export

        state = {name: checkpoint.read(name) for name in checkpoint.entries}
        files.append(str(export.save(state, output / "model-bitmask.safetensors", "bitmask").path))
    return {"model": model, "output": str(output), "files": files, "weights": size, "zeros": zeros}


def _module(
    model: str,
    recipe: str,
    output: Path,
    data: str | None,
    samples: int | None,
    stage: str | None,
    format: str,
    weights: Path | None,
    classes: int | None,
    imports: list[str] | None,
    quiet: bool,
) -> dict[str, object]:
    from gossamer import export
    from gossamer.calibration import oneshot as run
    from gossamer.model.counting import count_weights

    if output.exists():
        raise GossamerError(f"{output} exists; choose another file", "--output")
    loaded = load_model(model, weights, classes=classes, imports=imports)
    with progress("", quiet, remaining=True) as show, option_errors(_OPTIONS):
        run(
            loaded.model,
            recipe=recipe,
            data=None if data is None else load_batches(data),
            num_calibration_samples=samples,
            stage=stage,
            progress=show,
        )
    export.save(loaded.model, output, format)
    counts = count_weights(loaded.model)
    return {
        "model": model,
        "output": str(output),
        "files": [str(output)],
        "weights": sum(count.weights for count in counts.values()),
        "zeros": sum(count.zeros for count in counts.values()),
    }
