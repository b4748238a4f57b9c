"""`gossamer analyze`: size of a model, effect of a recipe, hardware support and sensitivity of layers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.padding import Padding
from typer import Option

from gossamer.cli.console import (
    Show,
    amount,
    by_reason,
    list_names,
    option_errors,
    out,
    percent,
    progress,
    reports_errors,
    shape,
    show_json,
    show_warnings,
    show_written,
    simple_table,
    without_log,
    writing,
)
from gossamer.cli.options import (
    AsJson,
    Classes,
    Imports,
    Input,
    ModelArgument,
    Weights,
    load_batches,
    load_model,
)
from gossamer.errors import GossamerError, within
from gossamer.runner.formatting import format_size

if TYPE_CHECKING:
    from gossamer.analysis.hardware import Support
    from gossamer.analysis.model_table import ModelRow, ModelTable, State
    from gossamer.analysis.proposal import Proposal
    from gossamer.analysis.sensitivity import LayerCost, SensitivityMap
    from gossamer.models import LoadedModel
    from gossamer.runtime import Engine, LayerReport

EPOCHS = 20.0
"""Length of a proposed recipe if neither a recipe nor a run sets one."""
PARTS = {"train": "the training set", "test": "the test set"}
PLOTS = ("sensitivity.svg", "sensitivity.png")
MAX_RANKED = 20
"""Layers in the table of sensitivities; --json has all."""
MIN_SPARSITY, MAX_RATIO = 0.001, 0.97
"""The summary mentions zeros from this sparsity on, and files up to this size relative to dense."""
SUMMARY = {"tensorrt": "be 2:4", "deepsparse": "be block4", "thin": "lose channels"}
"""Verbs in the summary of hardware support, by runtime."""
_OPTIONS = {"data": "--data", "pattern": "--pattern", "example_inputs": "--input"}
_FIXES = {"example_inputs": "give its shape, such as --input 1,3,224,224"}


@dataclass
class Analysis:
    """The results of the command."""

    loaded: LoadedModel
    table: ModelTable
    hardware: list[Support]
    sensitivity: SensitivityMap | None = None
    proposal: Proposal | None = None
    engine: Engine | None = None
    """The model in gossamer.runtime, with measured times."""
    part: str | None = None
    """The data for the sensitivity: `train`, `test`, or the function that returns batches."""
    omitted: list[str] = field(default_factory=list[str])
    """What is missing, and how to get it."""
    warnings: list[str] = field(default_factory=list[str])

    @property
    def epochs(self) -> float:
        """Length of the proposed recipe."""
        projection, config = self.table.projection, self.loaded.config
        if projection is not None and projection.epochs > 0:
            return float(projection.epochs)
        return EPOCHS if config is None else float(config.trainer.max_epoch or EPOCHS)

    @property
    def data(self) -> str:
        samples = 0 if self.sensitivity is None else self.sensitivity.samples
        return f"{samples} samples of {PARTS.get(self.part or '', self.part)}"


@reports_errors
def analyze(
    model: ModelArgument,
    data: Annotated[
        str | None,
        Option(
            metavar="tiny|FOLDER|FUNCTION",
            help="Data for the sensitivity; package.module:function returns batches. A run has its own data.",
        ),
    ] = None,
    recipe: Annotated[str | None, Option(metavar="FILE", help="Show what this recipe does to the model.")] = None,
    weights: Weights = None,
    input_shape: Input = None,
    classes: Classes = None,
    target: Annotated[
        float | None,
        Option(
            metavar="SHARE",
            help="Propose a sparsity for each layer that adds up to this one, such as 0.9. Needs labelled data and "
            "takes minutes: 4 for a ResNet-18 on one thread.",
        ),
    ] = None,
    pattern: Annotated[
        str,
        Option(
            metavar="unstructured|filter|channel|block4|2:4",
            help="How layers are pruned for the sensitivity; those that share filters or channels are pruned together.",
        ),
    ] = "unstructured",
    samples: Annotated[
        int | None, Option(min=1, metavar="N", help="Samples of the training set to use.", show_default="256")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Skip the sensitivity, which runs the model many times.")] = False,
    runtime: Annotated[
        bool,
        Option(
            "--runtime",
            help="Compile the model for gossamer.runtime, and show the kernel and the time of each layer beside dense "
            "torch. Takes about 20 seconds.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FOLDER", help="Write analysis.json, layers.csv, plots and a recipe."),
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Show the layers of a model, the effect of a recipe, hardware support and the sensitivity of layers.

    Lists parameters, MACs and zeros of each layer, now and after --recipe, and which layers can be 2:4, block4 or lose
    channels. With data it measures the accuracy when each layer alone is pruned, and with --target it proposes how
    layers share a sparsity. With --runtime it measures what the CPU gains from the zeros. The model does not change.
    """
    _check_target(target, quick, pattern)
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GossamerError(f"cannot create the folder {output}: {error.strerror}", "--output") from error
    with progress("", as_json) as show:
        show("loading the model", 0.0)
        function = data if data is not None and ":" in data else None
        loaded = load_model(model, weights, None if function else data, input_shape, classes=classes, imports=imports)
        with redirect_stdout(sys.stderr):
            batches = None if function is None else load_batches(function)
        show("tracing the model", 0.0)
        analysis = Analysis(loaded, *_table_and_hardware(loaded, recipe), part=function)
        analysis.warnings += loaded.warnings
        if loaded.example is None:
            analysis.omitted.append("MACs: the input shape is not known; give it with --input 1,3,224,224")
        if runtime:
            _compile(analysis, show)
        if quick:
            analysis.omitted.append("sensitivity: skipped because of --quick")
        else:
            _measure(analysis, batches, target, samples, pattern, show)
    files = [] if output is None else _write(analysis, output)
    if as_json:
        show_json(_as_data(analysis) | {"files": [str(path) for path in files]})
        return
    _show(analysis)
    show_warnings(analysis.warnings)
    show_written(files)


def _check_target(target: float | None, quick: bool, pattern: str) -> None:
    from gossamer.sparse import Unstructured, parse_pattern

    with within("--pattern"):
        units = parse_pattern(pattern)
    if target is None:
        return
    if units != Unstructured():
        raise GossamerError(f"a proposal is for unstructured zeros, not {pattern}; drop --pattern", "--target")
    if not 0 < target < 1:
        raise GossamerError(f"expected a share between 0 and 1, such as 0.9, found {target:g}", "--target")
    if quick:
        raise GossamerError("--quick skips the measurement that --target needs; drop one of the two")


def _table_and_hardware(loaded: LoadedModel, recipe: str | None) -> tuple[ModelTable, list[Support]]:
    from gossamer.analysis.hardware import hardware_support
    from gossamer.analysis.model_table import model_table
    from gossamer.analysis.projection import project
    from gossamer.recipe import load

    projection = None if recipe is None else project(load(recipe), loaded.model)
    with redirect_stdout(sys.stderr), option_errors(_OPTIONS, _FIXES):
        table = model_table(loaded.model, loaded.example, projection)
        return table, hardware_support(loaded.model, loaded.example)


def _compile(analysis: Analysis, show: Show) -> None:
    """Add the engine, or note why there is none."""
    from gossamer import runtime

    loaded = analysis.loaded
    if loaded.example is None:
        analysis.omitted.append("runtime: the input shape is not known; give it with --input 1,3,224,224")
        return
    try:
        with redirect_stdout(sys.stderr), without_log():
            analysis.engine = runtime.compile(loaded.model, loaded.example, progress=show)
    except GossamerError as error:
        analysis.omitted.append(f"runtime: {error}")


def _measure(
    analysis: Analysis, batches: Any, target: float | None, samples: int | None, pattern: str, show: Show
) -> None:
    """Add the sensitivity and the proposal if there is data, and note what is omitted."""
    from gossamer.analysis.proposal import propose
    from gossamer.analysis.sensitivity import MAP_SAMPLES, first_samples, has_labels, sensitivity_map

    loaded = analysis.loaded
    show("reading data", 0.0)
    available = _labelled_batches(analysis, target) if batches is None else batches
    if available is None:
        if target is not None:
            raise GossamerError("a proposal needs labelled data; give --data, or a run, which has its own", "--target")
        analysis.omitted.append(
            "sensitivity: not supported for the data of detectors; give batches of inputs with "
            "--data package.module:function to compare outputs"
            if loaded.kind == "detection"
            else "sensitivity: no data; give some with --data tiny, a folder, or package.module:function"
        )
        return
    with redirect_stdout(sys.stderr), option_errors(_OPTIONS, _FIXES):
        read = first_samples(available, samples or MAP_SAMPLES)
        if target is not None and not has_labels(read):
            raise GossamerError("a proposal needs labels, and the batches of --data have none", "--target")
        analysis.sensitivity = sensitivity_map(
            loaded.model,
            read,
            pattern=pattern,
            example_inputs=loaded.example,
            samples=samples or MAP_SAMPLES,
            progress=lambda name, share: show(f"pruning {name}", share),
        )
        dense = analysis.sensitivity.dense
        if dense is not None and dense.accuracy <= 2 / len({int(label) for _, labels in read for label in labels}):
            accuracy = f"the dense model has an accuracy of {percent(dense.accuracy)}"
            analysis.warnings.append(f"{accuracy}; sensitivities mean little before it is trained")
        if target is not None:
            analysis.proposal = propose(
                loaded.model, read, target, progress=lambda name, share: show(f"proposing: {name}", share)
            )
        elif has_labels(read):
            analysis.omitted.append("proposal: --target 0.9 proposes how layers share that sparsity")
        else:
            analysis.omitted.append("accuracy: the data has no labels; layers are compared by their effect on outputs")


def _labelled_batches(analysis: Analysis, target: float | None) -> Any:
    """Batches of the training set, else of the test set, which must not be used to choose anything."""
    train = analysis.loaded.batches("train")
    if train is not None:
        analysis.part = "train"
        return train
    test = analysis.loaded.batches("test")
    if test is None:
        return None
    if target is not None:
        raise GossamerError(
            "there is only a test set, and a proposal chosen on it cannot be tested on it; "
            "set dataset.train in the config, or give other images with --data",
            "--target",
        )
    analysis.part = "test"
    analysis.warnings.append(
        "the sensitivity is measured on the test set, because there is no other; do not choose anything by it that the "
        "same images will test"
    )
    return test


# Files


def _write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write `analysis.json`, `layers.csv`, plots of the sensitivity and the proposed recipe."""
    texts = {
        "analysis.json": json.dumps(_as_data(analysis), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "layers.csv": analysis.table.to_csv(),
    }
    if analysis.proposal is not None:
        texts["recipe.yaml"] = analysis.proposal.to_recipe(analysis.epochs)
    for name, text in texts.items():
        with writing(folder / name) as part:
            part.write_text(text, encoding="utf-8", newline="")
    written = [folder / name for name in texts]
    if analysis.sensitivity is not None:
        from gossamer.report.plots import plot_sensitivity

        for name in PLOTS:
            plot_sensitivity(analysis.sensitivity, folder / name, analysis.loaded.name)
            written.append(folder / name)
    return written


def _as_data(analysis: Analysis) -> dict[str, Any]:
    loaded, proposal, sensitivity = analysis.loaded, analysis.proposal, analysis.sensitivity
    return {
        "model": loaded.argument,
        "name": loaded.name,
        "kind": loaded.kind,
        "weights": None if loaded.source is None else str(loaded.source),
        "checkpoint": loaded.checkpoint,
        "input": _input_shapes(loaded.example) or None,
        **analysis.table.to_json(),
        "data": None if sensitivity is None else {"part": analysis.part, "samples": sensitivity.samples},
        "hardware": [support.to_json() for support in analysis.hardware],
        "sensitivity": None if sensitivity is None else sensitivity.to_json(),
        "proposal": None
        if proposal is None
        else {
            "target": proposal.target,
            "judged_samples": proposal.judged,
            "sparsity": dict(proposal.sparsity),
            "calibration": {
                name: {"loss": score.loss if math.isfinite(score.loss) else None, "accuracy": score.accuracy}
                for name, score in proposal.calibration.items()
            },
        },
        "runtime": None if analysis.engine is None else _runtime_as_data(analysis.engine),
        "left_out": list(analysis.omitted),
        "warnings": list(analysis.warnings),
    }


def _runtime_as_data(engine: Engine) -> dict[str, Any]:
    times = engine.times
    if times is None:
        return {"threads": engine.threads, "layers": [asdict(layer) for layer in engine.layers()]}
    return {
        "threads": engine.threads,
        "inputs": [list(dims) for dims in times.inputs],
        "seconds": times.total,
        "dense_seconds": times.dense_total,
        "gain": times.gain,
        "verdict": times.verdict(),
        "layers": [asdict(layer) | {"share": share} for layer, share in _shares(engine)],
    }


def _shares(engine: Engine) -> list[tuple[LayerReport, float]]:
    """Every operator of an engine with its share of the time that all take."""
    layers = engine.layers()
    total = sum(layer.seconds or 0.0 for layer in layers)
    return [(layer, (layer.seconds or 0.0) / total if total else 0.0) for layer in layers]


def _input_shapes(example: Any) -> list[list[int]]:
    from torch import Tensor
    from torch.utils import _pytree as pytree

    return [list(leaf.shape) for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]


# Terminal


def _show(analysis: Analysis) -> None:
    """Print a summary, and a table for each part."""
    for line in _summary(analysis):
        _print(line)
    _show_layers(analysis.table)
    _show_hardware(analysis.hardware, analysis.table)
    if analysis.engine is not None:
        _show_runtime(analysis.engine, analysis.table)
    if analysis.sensitivity is not None:
        _show_sensitivity(analysis.sensitivity, analysis.data)
    if analysis.proposal is not None:
        _show_proposal(analysis.proposal, analysis.table, analysis.data)
    if analysis.omitted:
        out.print("[bold]Not included[/]")
        for line in analysis.omitted:
            out.print(Padding(escape(line), (0, 0, 0, 2)), highlight=False)


def _print(text: str) -> None:
    """Print wrapped text."""
    out.print(text, highlight=False, markup=False)


def _summary(analysis: Analysis) -> list[str]:
    table, loaded = analysis.table, analysis.loaded
    count = len(table.rows) + len(table.dense)
    inputs = " and ".join(shape(dims) for dims in _input_shapes(loaded.example))
    macs = "" if table.macs is None else f", {amount(table.macs)} MACs for an input of {inputs}"
    lines = [
        f"{loaded.name}: {count} layers with {amount(table.parameters)} weights{macs}; "
        f"{format_size(table.now.sizes.dense)}."
    ]
    if loaded.checkpoint is not None:
        lines.append(f"Weights: {loaded.checkpoint}.")
    if now := _describe_state("Now it", "is", table, table.now):
        lines.append(now)
    by_key = {support.runtime.key: support for support in analysis.hardware}
    supported = [f"{len(by_key[key].able)} can {verb}" for key, verb in SUMMARY.items() if key in by_key]
    lines.append(f"Of {count} layers {', '.join(supported)}.")
    if table.then is not None and table.projection is not None:
        recipe = table.projection.recipe
        dense = "leaves the model dense" if table.then.zeros == 0 else "learns its sparsity and has no target"
        lines.append(_describe_state(recipe, "makes it", table, table.then) or f"{recipe} {dense}.")
        lines += [f"Note: {note}." for note in table.projection.notes]
    return lines


def _describe_state(subject: str, verb: str, table: ModelTable, state: State) -> str | None:
    """Zeros, remaining weights and file sizes; None if there are hardly any zeros, or their number is not known."""
    if state.zeros is None or state.zeros < MIN_SPARSITY * table.parameters:
        return None
    macs = "" if state.macs is None else f" and {amount(state.macs)} MACs"
    files = [
        f"{format_size(bytes_)} as a {name} file"
        for name, bytes_ in (("bitmask", state.sizes.bitmask), ("sparse24", state.sizes.sparse24))
        if bytes_ is not None and bytes_ < MAX_RATIO * state.sizes.dense
    ]
    instead = f"; {', '.join(files)} instead of {format_size(state.sizes.dense)}" if files else ""
    left = f"{amount(table.parameters - state.zeros)} weights{macs} left{instead}"
    return f"{subject} {verb} {percent(state.zeros / table.parameters)} sparse: {left}."


def _show_layers(table: ModelTable) -> None:
    now, then = table.now, table.then
    sparse = (now.zeros or 0) >= MIN_SPARSITY * table.parameters
    headings = ["shape", "weights", "MACs", *(["zeros now"] if sparse else []), *(["zeros then"] if then else [])]
    shown = simple_table("layer", *headings, title="Layers")

    def add(
        name: str, dims: Sequence[int], weights: int, macs: int | None, before: str, after: str, style: str = ""
    ) -> None:
        cells = [_short(name), shape(dims), amount(weights), "" if macs is None else amount(macs)]
        shown.add_row(*map(escape, cells), *([before] if sparse else []), *([after] if then else []), style=style)

    for row in table.rows:
        add(row.weight, row.layer.shape, row.parameters, row.layer.macs, _zeros_now(row), _zeros_then(row))
    for name, count in table.dense.items():
        zeros = percent(count.zeros / max(count.weights, 1)) if count.zeros else "–"
        add(name, count.shape, count.weights, None, zeros, "dense")
    shown.add_section()
    before, after = (
        "learned" if state is None or state.zeros is None else percent(state.zeros / table.parameters)
        for state in (now, then)
    )
    add("total", (), table.parameters, table.macs, before, after, "bold")
    out.print(shown)
    reasons = {row.weight: row.dense for row in table.rows if row.dense is not None} | dict(table.left_dense)
    for reason, names in by_reason(reasons).items():
        _print(f"{list_names(names)} stay{'s' * (len(names) == 1)} dense: {reason}")


def _short(weight: str) -> str:
    return weight.removesuffix(".weight")


def _zeros_now(row: ModelRow) -> str:
    zeros = row.layer.current_zeros
    if not zeros:
        return "–"
    if zeros == row.parameters:
        return "all"
    pattern = row.patterns[0] if row.patterns else "unstructured"
    return percent(zeros / row.parameters) + (f" {pattern}" if pattern != "unstructured" else "")


def _zeros_then(row: ModelRow) -> str:
    outlook = row.outlook
    if outlook is None:
        return "dense"
    if outlook.zeros is None:
        return "learned"
    if outlook.certainty == "removed":
        return "removed"
    about = "≈ " if outlook.certainty == "estimated" else ""
    pattern = "" if outlook.pattern == "unstructured" else f" {outlook.pattern}"
    return f"{about}{percent(outlook.zeros / row.parameters)}{pattern}"


def _show_hardware(supports: Sequence[Support], table: ModelTable) -> None:
    out.print("[bold]Hardware support[/], once the weights satisfy the pattern", highlight=False)
    sizes = {row.weight: row.parameters for row in table.rows}
    for support in supports:
        runtime = support.runtime
        share = sum(sizes[name] for name in support.able) / max(table.parameters, 1)
        count = f"{len(support.able)} of {len(sizes) + len(table.dense)} layers, {percent(share)} of the weights"
        colour = "green" if support.able else "dim"
        verdict = count if support.able else "no layer"
        out.print(f"  [{colour}]{escape(runtime.name)}[/] ({runtime.pattern}): {verdict}", highlight=False)
        lines = [f"{runtime.needs}: {runtime.fact}"]
        if support.able:
            lines += [f"not {list_names(names)}: {reason}" for reason, names in by_reason(support.unable).items()]
        for line in lines:
            out.print(Padding(escape(line), (0, 0, 0, 6)), style="dim", highlight=False)
    out.print()


def _show_runtime(engine: Engine, table: ModelTable) -> None:
    """The kernel and the time of each layer of the table, and of what else takes time."""
    times, shares = engine.times, _shares(engine)
    if times is None:
        return
    threads = f"{engine.threads} thread{'s' * (engine.threads > 1)}"
    title = f"In gossamer.runtime and dense in torch, {threads}, times in ms"
    shown = simple_table("layer", "computed by", "time", "share", "in torch", "ratio", title=title)

    def add(name: str, kernel: str, seconds: float, share: str, dense: float, style: str = "") -> None:
        cells = [name, kernel, f"{1e3 * seconds:.3f}", share, f"{1e3 * dense:.3f}", f"{dense / seconds:.2f}×"]
        shown.add_row(*map(escape, cells), style=style)

    known = {row.weight: _short(row.weight) for row in table.rows}
    known |= {name: _short(name) for name in table.dense}
    own: dict[str, list[tuple[LayerReport, float]]] = {}
    others: list[tuple[LayerReport, float]] = []
    for layer, share in shares:
        if layer.weight in known:
            own.setdefault(layer.weight, []).append((layer, share))
        else:
            others.append((layer, share))
    rows = [(known[weight], own[weight]) for weight in known if weight in own]
    for kernel, what in (("kernel", "others"), ("torch", "others")):
        rest = [(layer, share) for layer, share in others if (layer.kernel == "torch") == (kernel == "torch")]
        rows += [(f"{len(rest)} {what}", rest)] if rest else []
    for name, found in rows:
        seconds, dense = (sum(getattr(layer, key) or 0.0 for layer, _ in found) for key in ("seconds", "dense_seconds"))
        kernels = dict.fromkeys(layer.kernel.partition(",")[0] for layer, _ in found)
        kernel = next(iter(kernels)) if len(kernels) == 1 else ""
        add(name, kernel, max(seconds, 1e-9), percent(sum(share for _, share in found)), dense)
    shown.add_section()
    add("whole network", "", times.total, "", times.dense_total, "bold")
    out.print(shown)
    _print(times.verdict())
    reasons = {layer.name: layer.reason for layer, _ in shares if layer.reason and layer.weight in known}
    for reason, names in by_reason(reasons).items():
        _print(f"{list_names(names)}: {reason}")
    if missing := [name for name in known if name not in own]:
        _print(f"Not in the traced model under these names: {list_names(missing)}")
    out.print()


def _show_sensitivity(measured: SensitivityMap, data: str) -> None:
    what = "Accuracy" if measured.dense is not None else "Relative output change"
    pattern = "" if measured.pattern == "unstructured" else f" ({measured.pattern})"
    ranked = measured.ranked()
    title = f"{what} when one layer alone is pruned{pattern}, most sensitive first"
    table = simple_table("layer", *(f"{100 * level:.4g} %" for level in measured.sparsities), title=title)
    for layer in ranked[:MAX_RANKED]:
        members = f" +{len(layer.members) - 1}" if len(layer.members) > 1 else ""
        table.add_row(escape(_short(layer.name) + members), *(_cost(layer, level) for level in range(len(layer.harm))))
    out.print(table)
    if len(ranked) > MAX_RANKED:
        _print(f"and {len(ranked) - MAX_RANKED} less sensitive layers; --json lists them")
    dense = measured.dense
    score = "" if dense is None else f"; dense: {percent(dense.accuracy)}, loss {dense.loss:.3g}"
    _print(f"On {data}, pruned by magnitude, without training{score}")
    if any(len(layer.members) > 1 for layer in measured.layers):
        _print(f"+1, +2 …: pruned with that many layers that share their {measured.pattern}s; --json names them")
    for reason, names in by_reason(measured.skipped).items():
        _print(f"Not {list_names(names)}: {reason}")
    for note in measured.notes:
        _print(f"Note: {note}")
    out.print()


def _cost(layer: LayerCost, level: int) -> str:
    value = layer.harm[level] if layer.accuracy is None else layer.accuracy[level]
    return "∞" if not math.isfinite(value) else percent(value)


def _show_proposal(proposal: Proposal, table: ModelTable, data: str) -> None:
    title = f"Proposed sparsities for {percent(proposal.target)} in total"
    shown = simple_table("layer", "weights", "zeros", "weights left", title=title)
    for row in table.rows:
        share = proposal.sparsity.get(row.weight, 0.0)
        left = amount(round(row.parameters * (1 - share)))
        shown.add_row(escape(_short(row.weight)), amount(row.parameters), percent(share) if share else "dense", left)
    out.print(shown)
    scores = [f"{name} {percent(score.accuracy)}" for name, score in proposal.calibration.items()]
    _print(f"Accuracy after pruning, without training: {', '.join(scores)}")
    _print(f"Tested on {proposal.judged} of {data}; the others are used for a few training steps\n")
