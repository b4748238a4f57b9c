"""`gossamer analyze`: what a network is, what a recipe makes of it, what hardware can use, which layers matter."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.console import AsJson, Show, out, progress, reports_errors, show_json, show_warnings
from gossamer.cli.models import Classes, Imports, Input, ModelArgument, Weights, load_model
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from torch import nn

    from gossamer.analysis.hardware import Support
    from gossamer.analysis.model_table import ModelTable
    from gossamer.analysis.proposal import Proposal
    from gossamer.analysis.sensitivity import SensitivityMap
    from gossamer.models import LoadedModel

EPOCHS = 20.0
"""How long a proposed recipe trains, unless a recipe or a run says."""
PARTS = {"train": "the training part", "test": "the test part"}


@dataclass
class Analysis:
    """Everything that was found out."""

    loaded: LoadedModel
    table: ModelTable
    hardware: list[Support]
    sensitivity: SensitivityMap | None = None
    proposal: Proposal | None = None
    part: str | None = None
    """What layers were measured on: `train`, `test`, or the function that gave batches."""
    epochs: float = EPOCHS
    """How long a recipe for the proposal trains."""
    left_out: list[str] = field(default_factory=list[str])
    """What is missing, and how to get it."""
    warnings: list[str] = field(default_factory=list[str])

    @property
    def samples(self) -> int:
        """How many samples layers were measured on."""
        return 0 if self.sensitivity is None else self.sensitivity.samples

    @property
    def measured_on(self) -> str:
        """Those samples in words."""
        return f"{self.samples} samples of {PARTS.get(self.part or '', self.part)}"


@reports_errors
def analyze(
    model: ModelArgument,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="tiny|FOLDER|FUNCTION",
            help="Data to measure layers by; package.module:function gives batches. A run has its own.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="FILE", help="Show what this recipe would make of the model.")
    ] = None,
    weights: Weights = None,
    shape: Input = None,
    classes: Classes = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            metavar="SHARE",
            help="Propose how layers share this sparsity, as 0.9; needs labelled data. Takes minutes: 4 for a "
            "ResNet-18 on one thread.",
        ),
    ] = None,
    pattern: Annotated[
        str,
        typer.Option(
            "--pattern",
            metavar="unstructured|filter|channel|block4|2:4",
            help="How layers are pruned when they are measured; layers that share filters or channels go together.",
        ),
    ] = "unstructured",
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", help="Samples to measure by, of the training part.", show_default="256"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out sensitivity, for which the model runs many times.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write analysis.json, layers.csv, pictures, a recipe."),
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Say what a network is, what a recipe makes of it, what hardware can use, and which layers matter.

    Parameters, MACs and zeros of each layer, now and at the end of --recipe; which layers can be 2:4, block4 or lose
    channels, where, and why not; with data the accuracy when each layer alone is pruned, and with --target a proposal
    how layers share a sparsity. The model is not changed.
    """
    from gossamer.cli import analyze_view as view
    from gossamer.cli.analyze_files import folder_for, write

    _check(target, samples, quick, pattern)
    if output is not None:
        folder_for(output)
    with progress("", as_json) as show:
        show("opening the model", 0.0)
        own = data is not None and ":" in data
        found = load_model(model, weights, None if own else data, shape, classes=classes, imports=imports)
        batches = _own_batches(data) if own and data is not None else None
        show("following the model", 0.0)
        analysis = Analysis(*_table_and_hardware(found, recipe), part=data if own else None)
        analysis.warnings += found.warnings
        analysis.epochs = _epochs(analysis)
        if found.example is None:
            analysis.left_out.append("MACs: nobody knows what the model's input is like; --input 1,3,224,224 says it")
        if quick:
            analysis.left_out.append("sensitivity: --quick leaves it out")
        else:
            _measure(analysis, batches, target, samples, pattern, show)
    files = [] if output is None else write(analysis, output)
    if as_json:
        show_json(view.as_data(analysis) | {"files": [str(path) for path in files]})
        return
    view.show(out, analysis)
    show_warnings(analysis.warnings)
    for path in files:
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _check(target: float | None, samples: int | None, quick: bool, pattern: str) -> None:
    from gossamer.sparse import Unstructured, parse_pattern

    try:
        shape = parse_pattern(pattern)
    except GossamerError as error:
        raise GossamerError(f"--pattern: {error}") from error
    if target is not None and shape != Unstructured():
        raise GossamerError(f"--target: a proposal shares single zeros, not {pattern}; drop --pattern or --target")
    if target is not None and not 0 < target < 1:
        raise GossamerError(f"--target: expected a share between 0 and 1, such as 0.9, found {target:g}")
    if samples is not None and samples < 1:
        raise GossamerError(f"--samples: expected a positive number, found {samples}")
    if quick and target is not None:
        raise GossamerError("--quick leaves out what --target needs; drop one of the two")


def _table_and_hardware(found: LoadedModel, recipe: str | None) -> tuple[LoadedModel, ModelTable, list[Support]]:
    from gossamer.analysis.hardware import hardware_support
    from gossamer.analysis.model_table import model_table
    from gossamer.analysis.projection import project
    from gossamer.recipe import load

    projection = None if recipe is None else project(load(recipe), found.model)
    with redirect_stdout(sys.stderr), _in_options():
        table = model_table(found.model, found.example, projection)
        return found, table, hardware_support(found.model, found.example)


def _measure(
    analysis: Analysis, batches: Any, target: float | None, samples: int | None, pattern: str, show: Show
) -> None:
    """Fill in sensitivity and proposal as far as there are data; say what is left out."""
    from gossamer.analysis.sensitivity import MAP_SAMPLES, first_samples, has_labels, sensitivity_map

    found = analysis.loaded
    show("reading data", 0.0)
    known = _labelled_part(analysis, target) if batches is None else batches
    if known is None:
        analysis.left_out.append(
            "sensitivity: detectors have no accuracy here; --data package.module:function with batches of their inputs "
            "compares layers by the outputs"
            if found.kind == "detection"
            else "sensitivity: there are no data; --data tiny, a folder, or package.module:function gives some"
        )
        if target is not None:
            raise GossamerError("--target: a proposal needs labelled data; give --data, or a run, which has its own")
        return
    with redirect_stdout(sys.stderr), _in_options():
        few = first_samples(known, samples or MAP_SAMPLES)
        if target is not None and not has_labels(few):
            raise GossamerError("--target: a proposal needs labels, and the batches of --data have none")
        analysis.sensitivity = sensitivity_map(
            found.model,
            few,
            pattern=pattern,
            example_inputs=found.example,
            samples=samples or MAP_SAMPLES,
            progress=lambda name, share: show(f"pruning {name}", share),
        )
        analysis.warnings += _poor(analysis.sensitivity, few)
        if target is not None:
            analysis.proposal = _proposed(found.model, few, target, show)
        elif has_labels(few):
            analysis.left_out.append("a proposal: --target 0.9 says how layers should share that sparsity")
        else:
            analysis.left_out.append("accuracy: the data have no labels; layers are compared by the model's outputs")


def _labelled_part(analysis: Analysis, target: float | None) -> Any:
    """Labelled batches of the training part, else of the test part, on which nothing may be chosen."""
    train = analysis.loaded.batches("train")
    if train is not None:
        analysis.part = "train"
        return train
    test = analysis.loaded.batches("test")
    if test is None:
        return None
    if target is not None:
        raise GossamerError(
            "--target: there is a test part only, and what is chosen on it cannot be judged by it any more; "
            "give dataset.train in the config, or other images by --data"
        )
    analysis.part = "test"
    analysis.warnings.append(
        "layers were measured on the test part because there is no other: choose nothing by these numbers that the "
        "same images will judge"
    )
    return test


def _poor(found: SensitivityMap, batches: Sequence[Any]) -> list[str]:
    """A sentence when the model itself is hardly better than chance."""
    if found.dense is None:
        return []
    classes = len({int(label) for _, labels in batches for label in labels.unique()})
    if found.dense.accuracy > 2 / classes:
        return []
    return [
        f"the model as it is has an accuracy of {100 * found.dense.accuracy:.1f} %: what pruning costs says little "
        "before it is trained"
    ]


def _proposed(model: nn.Module, batches: Sequence[Any], target: float, show: Show) -> Proposal:
    from gossamer.analysis.proposal import propose

    doing = f"sharing {target:.4g}:"
    return propose(model, batches, target, progress=lambda name, share: show(f"{doing} {name}", share))


def _epochs(analysis: Analysis) -> float:
    projection, config = analysis.table.projection, analysis.loaded.config
    if projection is not None and projection.epochs > 0:
        return float(projection.epochs)
    return EPOCHS if config is None else float(config.trainer.max_epoch or EPOCHS)


def _own_batches(word: str) -> Any:
    from gossamer.cli.create import batches_of

    with redirect_stdout(sys.stderr):
        return batches_of(word)


@contextmanager
def _in_options() -> Generator[None]:
    """Errors in the words of the command line."""
    try:
        yield
    except GossamerError as error:
        text = str(error)
        if text.startswith("data:"):
            text = f"--{text}"
        if text.startswith("names: the model has no layer"):
            text = f"--pattern{text.removeprefix('names')}"
        if "example_inputs" in text:
            text = f"{text.partition('; give example_inputs')[0]}; --input 1,3,224,224 says what it takes"
        raise GossamerError(text) from error
