"""`report.html` of run folders, written at the end of a run and by `gossamer report`.

`notes.py` records what other files of a run do not contain, this module reads a run folder, and `gossamer.report`
renders the page. No model is built: layers, histograms and masks come from the tensors in `model.safetensors` or in
the checkpoint that is the model of the run, else from the notes. A part that cannot be shown has the reason and the
command that helps. A failed report never ends a run: it is a warning, and only an interrupt is raised.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from torch import Tensor

from gossamer.errors import GossamerError, Location, format_problems
from gossamer.io import atomic_write, open_regular, read_regular
from gossamer.model.additions import is_added
from gossamer.report import GENERATOR, render
from gossamer.report.content import (
    Card,
    HeatMap,
    LayerSparsity,
    MaskImage,
    RunContent,
    Series,
    Speed,
    SpeedTable,
    TimedFile,
    WeightHistogram,
)
from gossamer.report.weights import mask_image, select_layers
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.formatting import format_count, format_duration, format_metric, format_size
from gossamer.runner.notes import (
    MAX_BYTES,
    LayerWeights,
    N,
    PlannedLayer,
    PlanNote,
    SensitivityNote,
    WeightsNote,
    note_plan,
    note_sensitivity,
    origin_of,
    read_note,
    weights_of,
    write_note,
)
from gossamer.runner.records import read_records
from gossamer.runner.summary import finite, run_summary, signed
from gossamer.runner.trust import check_links
from gossamer.runner.weights import read_weights

if TYPE_CHECKING:
    from gossamer.runner.trainer import Trainer

logger = logging.getLogger("gossamer")
PAGE = "report.html"
MODEL = "model.safetensors"
MIN_SPARSITY = 0.001
"""Models below this sparsity count as dense: some weights are zero by chance."""


def report(
    folders: Sequence[str | Path],
    output: str | Path | None = None,
    benchmark: str | Path | Sequence[str | Path] | None = None,
) -> Path:
    """Write the page of one run, by default into its folder, or of several, by default into the working folder.

    `benchmark` is a file that `gossamer benchmark --output` wrote, or several. Raises `GossamerError` if a folder
    holds no run, or if `output` exists and is not a report.
    """
    if not folders:
        raise GossamerError("report: no run folder given; give one, such as runs/res18")
    paths = [Path(folder) for folder in folders]
    path = Path(output) if output is not None else (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    _check_output(path)
    for folder in paths if output is None else ():
        check_links(folder)
    names = _labels(paths)
    files = [benchmark] if isinstance(benchmark, str | Path) else benchmark or []
    speed = [read_speed(Path(file), paths) for file in files]
    text = render([run_content(folder, name) for folder, name in zip(paths, names, strict=True)], speed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GossamerError(
            f"{path}: cannot be written: {error.strerror or error}; choose another file with -o"
        ) from None
    return path


def note_start(trainer: Trainer) -> None:
    """Record what the report needs from before the training, on rank 0."""
    if not trainer.distributed.first or not trainer.config.runtime.report.enable or trainer.iteration >= trainer.length:
        return

    def note() -> None:
        if trainer.start_weights is not None:
            start = WeightsNote(layers=trainer.start_weights, origin=origin_of(trainer))
            write_note(trainer.folder, "start", start)
        note_plan(trainer)

    _guarded(trainer, note)


def report_end(trainer: Trainer, *, complete: bool) -> None:
    """Write the report of a run that ends, complete or not, on rank 0."""
    if not trainer.distributed.first or not trainer.config.runtime.report.enable:
        return
    if complete:
        _guarded(trainer, lambda: _note_end(trainer))
    _guarded(trainer, lambda: _page(trainer))


def _page(trainer: Trainer) -> None:
    """Write the page, unless the run failed before its first record."""
    if read_records(trainer.folder) or trainer.checkpoints.latest() is not None:
        report([trainer.folder])


def _note_end(trainer: Trainer) -> None:
    end = WeightsNote(layers=weights_of(trainer.outcome), iteration=trainer.iteration)
    write_note(trainer.folder, "end", end)
    setting = trainer.config.runtime.report.sensitivity
    if setting is not False:
        with trainer.display.testing(100) as show:
            note_sensitivity(trainer, lambda label, share: show(int(100 * share)), bounded=setting == "auto")


def _guarded(trainer: Trainer, act: Callable[[], object]) -> None:
    """Log a warning if `act` fails; an interrupt is raised again."""
    remedy = f"write it again with gossamer report {shlex.quote(str(trainer.folder))}"
    try:
        act()
    except KeyboardInterrupt:
        logger.warning("The report is incomplete: it was interrupted; %s", remedy)
        raise
    except Exception as error:  # noqa: BLE001 - a report must not end a run
        reason = " ".join(f"{error}".split()) or type(error).__name__
        logger.warning("The report is incomplete: %s; %s", reason, remedy)


def _check_output(path: Path) -> None:
    """Refuse to overwrite a file that is not a report."""
    if path.is_dir():
        raise GossamerError(f"{path}: is a folder; give a file with -o, such as {path / PAGE}")
    if not path.is_file():
        return
    try:
        with open_regular(path) as file:
            head = file.read(4000)
    except OSError as error:
        raise GossamerError(f"{path}: cannot be read: {error.strerror or error}; choose another file with -o") from None
    if head and GENERATOR.encode() not in head:
        raise GossamerError(f"{path}: is not a report and is not overwritten; choose another file with -o")


def _labels(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with numbers if two are equal."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else f"{name} ({index})" for index, name in enumerate(names, 1)]


# One run


def run_content(folder: Path, name: str) -> RunContent:
    """Everything that the page shows of one run; raises `GossamerError` if the folder holds none."""
    summary = run_summary(folder)
    records = read_records(folder)
    notes: list[str] = []
    start, end = _noted(folder, "start", WeightsNote, notes), _noted(folder, "end", WeightsNote, notes)
    plan, measured = _noted(folder, "plan", PlanNote, notes), _noted(folder, "sensitivity", SensitivityNote, notes)
    iterations = int(summary["iterations"])
    length = None if plan is None else plan.length
    complete = length is None or iterations >= length
    if not complete:
        stopped = f"This run is incomplete: it stopped at iteration {iterations} of {length}."
        notes.insert(0, f"{stopped} Continue with: gossamer resume {shlex.quote(str(folder))}")
    weights = _weight_content(folder, summary, plan, start, end, complete=complete)
    missing = dict(weights.missing)
    heat = _heat_map(measured, summary["model"]["iteration"], missing, folder)
    course = _plan(plan, missing)
    train = [record for record in records if record.get("kind") == "train"]
    cards = tuple(_cards(folder, summary, start, weights, sum(record.get("kind") == "test" for record in records)))
    sparsity = _schedule("sparsity", records, "sparsity")
    return RunContent(
        name=name,
        method=str(summary["method"] or "a run"),
        state=_state(summary, length),
        cards=cards,
        figures=tuple((card.title, card.value) for card in cards),
        metric=str(summary["metric"] or "metric"),
        tests=tuple(_tests(records, list(summary["metrics"]))),
        sparsity=None if sparsity is None or (course is None and not any(sparsity.y)) else sparsity,
        plan=course,
        loss=tuple(_losses(train)),
        rate=_schedule("learning rate", records, "lr"),
        layers=weights.layers,
        histograms=weights.histograms,
        masks=weights.masks,
        sensitivity=heat,
        missing=missing,
        settings=tuple(_settings(folder)),
        notes=tuple(notes),
    )


def _noted(folder: Path, name: str, kind: type[N], notes: list[str]) -> N | None:
    try:
        return read_note(folder, name, kind)
    except GossamerError as error:
        notes.append(str(error))
        return None


def _state(summary: Mapping[str, Any], length: int | None) -> str:
    done, epochs = int(summary["iterations"]), round(float(summary["epochs"]), 2)
    if length is not None and done < length:
        return f"stopped at iteration {done} of {length}, epoch {epochs:g}"
    return f"{done} iterations, {epochs:g} epochs"


# Figures


def _cards(
    folder: Path, summary: Mapping[str, Any], start: WeightsNote | None, weights: WeightContent, tests: int
) -> list[Card]:
    cards: list[Card] = []
    name = summary["metric"]
    if name is not None:
        course = summary["metrics"][name]
        value = "–" if course["model"] is None else format_metric(name, course["model"])
        cards.append(Card(name, value, (summary["model"]["title"] or "").partition(":")[0]))
        cards += _change(name, course, start, tests)
    share, total, nonzero = _sparsity(summary, weights)
    pruned = summary["sparsity_of_pruned_layers"]
    of = "" if pruned is None else f"{100 * pruned:.1f} % of the pruned layers"
    if share is not None:
        cards.append(Card("sparsity", f"{100 * share:.1f} %", of or "of all convolutions and linear layers"))
    if total is not None and nonzero is not None:
        cards.append(Card("non-zero weights", format_count(nonzero), f"of {format_count(total)}"))
    files = _files(folder)
    if files:
        others = [f"{name} {format_size(size)}" for name, size in files[1:]]
        cards.append(Card("file", format_size(files[0][1]), "; ".join([files[0][0], *others])))
    if summary["seconds"] is not None:
        speed = summary["images_per_s"]
        cards.append(
            Card("time", format_duration(summary["seconds"]), "" if speed is None else f"{speed:.0f} images/s")
        )
    return cards


def _change(name: str, course: Mapping[str, Any], start: WeightsNote | None, tests: int) -> list[Card]:
    """The change of the metric since the initial weights if their metrics are recorded, else since the first test."""
    if start is not None and start.origin is not None and name in start.origin.metrics:
        before, of = start.origin.metrics[name], f"against {start.origin.name}, its initial weights"
    else:
        before, of = course["first"] if tests > 1 else None, "since the first test"
    if before is None or course["model"] is None:
        return []
    return [Card("change", signed(name, course["model"] - before).replace("-", "−"), of)]


def _sparsity(summary: Mapping[str, Any], weights: WeightContent) -> tuple[float | None, int | None, int | None]:
    """Sparsity, weights and non-zero weights: of the model if counted, else of the layers on the page."""
    if summary["weights"] is None and weights.layers:
        total = sum(layer.parameters for layer in weights.layers)
        zeros = sum(layer.zeros for layer in weights.layers)
        return zeros / max(total, 1), total, total - zeros
    return summary["sparsity"], summary["weights"], summary["nonzero"]


def _files(folder: Path) -> list[tuple[str, int]]:
    """The files of the model with their sizes, the plain one first."""
    paths = [path for path in sorted(folder.glob("model*")) if path.is_file()]
    paths.sort(key=lambda path: path.name != "model.safetensors")
    return [(path.name, path.stat().st_size) for path in paths]


# Series


def _tests(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Series]:
    tests = [record for record in records if record.get("kind") == "test"]
    return [series for name in names if (series := _series(name, tests, name)) is not None]


def _losses(train: Sequence[Mapping[str, Any]]) -> list[Series]:
    """The total loss, and its parts if it has several."""
    parts = list(dict.fromkeys(key for record in train for key in record if key.startswith("loss_")))
    names = {"loss": "loss", **{key: key.removeprefix("loss_").replace("_", " ") for key in parts}}
    return [series for key, label in names.items() if (series := _series(label, train, key)) is not None]


def _series(label: str, records: Sequence[Mapping[str, Any]], key: str) -> Series | None:
    points = [(finite(record.get("epoch")), finite(record[key])) for record in records if key in record]
    ordered = sorted((x, index, y) for index, (x, y) in enumerate(points) if x is not None)
    if not ordered:
        return None
    return Series(label, tuple(x for x, _, _ in ordered), tuple(y for _, _, y in ordered))


def _schedule(label: str, records: Sequence[Mapping[str, Any]], key: str) -> Series | None:
    """A value in steps, as it was set, until the last iteration; sampled if the run did not record what it set."""
    trained = [record for record in records if record.get("kind") == "train"]
    changes = [record for record in records if record.get("kind") == "set" and key in record]
    if not any(finite(record.get("epoch")) is not None for record in changes):
        return _series(label, trained, key)
    # Train records count the sparsity too, also after the last step. Their learning rate is that of the next step.
    counted = trained if key == "sparsity" else []
    merged = _series(label, [*counted, *changes], key)
    assert merged is not None
    end = max((x for record in trained if (x := finite(record.get("epoch"))) is not None), default=merged.x[-1])
    if end > merged.x[-1]:
        return Series(label, (*merged.x, end), (*merged.y, merged.y[-1]), stepped=True)
    return Series(label, merged.x, merged.y, stepped=True)


def _plan(plan: PlanNote | None, missing: dict[str, str]) -> Series | None:
    if plan is None:
        missing["plan"] = "The planned sparsity was not recorded: the run is from an earlier version."
    elif not plan.sparse:
        missing["plan"] = "A dense run has no sparsity schedule."
    elif not plan.course:
        missing["plan"] = (
            "This method has no schedule: it learns its sparsity, or keeps the zeros of the initial weights."
        )
    else:
        before = (0.0, 0.0 if plan.course[0][0] > 1 else plan.course[0][1])
        x, y = zip(*((at / plan.steps_per_epoch, share) for at, share in (before, *plan.course)), strict=True)
        return Series("planned", x, y, stepped=True)
    return None


def _heat_map(
    note: SensitivityNote | None, iteration: int | None, missing: dict[str, str], folder: Path
) -> HeatMap | None:
    if note is None:
        reason = "The sensitivity of the layers was not measured."
    elif note.left_out is not None:
        reason = note.left_out
    elif iteration is not None and note.iteration != iteration:
        reason = "The sensitivity was measured at another iteration."
    elif not note.rows or any(len(values) != len(note.sparsities) for values in note.rows.values()):
        reason = "The recorded sensitivity is malformed."
    else:
        rows = tuple(
            (name.removesuffix(".weight"), tuple(math.inf if value is None else value for value in values))
            for name, values in note.rows.items()
        )
        source = f"Measured on the final model, number of images: {note.images}."
        return HeatMap(tuple(note.sparsities), rows, source)
    missing["sensitivity"] = f"{reason} Measure it with: gossamer report {shlex.quote(str(folder))} --sensitivity"
    return None


def _settings(folder: Path) -> list[tuple[str, str]]:
    settings: list[tuple[str, str]] = []
    for file, title in (("recipe.yaml", "The recipe"), ("config.yaml", "The config")):
        path = folder / file
        if path.is_file():
            try:
                text = read_regular(path, MAX_BYTES).decode(errors="replace")
            except OSError as error:
                text = f"This file cannot be read: {error.strerror or error}."
            settings.append((f"{title} ({file})", text))
    return settings


# Weights


@dataclass(frozen=True)
class WeightContent:
    """What the report shows of the weights."""

    layers: tuple[LayerSparsity, ...] = ()
    histograms: tuple[WeightHistogram, ...] = ()
    masks: tuple[MaskImage, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict[str, str])


def _weight_content(
    folder: Path,
    summary: Mapping[str, Any],
    plan: PlanNote | None,
    start: WeightsNote | None,
    end: WeightsNote | None,
    *,
    complete: bool,
) -> WeightContent:
    """The weights at the end of a run, or where it stopped."""
    recorded = {} if plan is None else plan.layers
    tensors, why = _tensors(folder, recorded, complete=complete)
    at = summary["model"]["iteration"]
    noted = end.layers if end is not None and (complete if at is None else end.iteration == at) else None
    before = {} if start is None else start.layers
    if not tensors and noted is None:
        return WeightContent(missing=dict.fromkeys(("layers", "histograms", "masks"), why))
    now = {name: LayerWeights.of(tensor) for name, tensor in tensors.items()} or noted or {}
    layers = tuple(_layer(name, weights, recorded.get(name, PlannedLayer())) for name, weights in now.items())
    picked = select_layers(layers)
    histograms = [
        WeightHistogram(name.removesuffix(".weight"), before[name].bins if name in before else None, weights.bins)
        for name, weights in now.items()
    ]
    histograms.sort(key=lambda histogram: histogram.layer not in picked)
    masks, missing = _masks(tensors, layers, picked, recorded, why)
    return WeightContent(layers, tuple(histograms), masks, missing)


def _tensors(folder: Path, recorded: Mapping[str, PlannedLayer], *, complete: bool) -> tuple[dict[str, Tensor], str]:
    """The prunable weights, or the reason why there are none."""
    model = Checkpoints(folder / "checkpoints", keep=1).model()
    paths = [folder / MODEL] if complete and (folder / MODEL).is_file() else []
    why = "The folder contains neither model.safetensors nor a checkpoint."
    for path in [*paths, *([] if model is None else [model.path])]:
        try:
            weights = read_weights(path)
        except GossamerError as error:
            logger.warning("%s", error)
            # The page may be shared, so it shows no folders of this machine.
            why = format_problems(replace(problem, location=Location(path.name)) for problem in error.problems)
            continue
        order = [name for name in recorded if name in weights] or list(weights)
        shown = {name: weights[name] for name in order if _is_shown(name, weights[name], recorded)}
        if shown:
            return shown, why
        why = f"{path.name} contains no weights of convolutions or linear layers."
    return {}, why


def _is_shown(name: str, tensor: Tensor, recorded: Mapping[str, PlannedLayer]) -> bool:
    if recorded:
        return name in recorded and tensor.is_floating_point()
    named = "weight" in name and not is_added(name)
    return named and tensor.dim() >= 2 and tensor.is_floating_point()


def _layer(name: str, weights: LayerWeights, recorded: PlannedLayer) -> LayerSparsity:
    total = weights.bins.total
    name = name.removesuffix(".weight")
    return LayerSparsity(name, weights.shape, total, weights.zeros, recorded.target, recorded.dense)


def _masks(
    tensors: Mapping[str, Tensor],
    layers: tuple[LayerSparsity, ...],
    picked: list[str],
    recorded: Mapping[str, PlannedLayer],
    why: str,
) -> tuple[tuple[MaskImage, ...], dict[str, str]]:
    if not tensors:
        return (), {"masks": f"{why} Write them with gossamer export --format safetensors."}
    if sum(layer.zeros for layer in layers) < MIN_SPARSITY * sum(layer.parameters for layer in layers):
        return (), {"masks": "The model is dense: there are no masks."}
    masks = [
        mask_image(name.removesuffix(".weight"), tensor, transposed=name in recorded and recorded[name].transposed)
        for name, tensor in tensors.items()
        if name.removesuffix(".weight") in picked
    ]
    return tuple(masks), {}


# Benchmarks


class _Ratio(BaseModel):
    value: float
    low: float | None
    high: float | None


class _Contents(BaseModel):
    bytes: int


class _Timing(BaseModel):
    name: str
    file: Path
    runtime: str
    version: str | None
    batch: int | None
    inputs: list[list[int]] = []
    rounds: int
    contents: _Contents
    sparsity: float
    median: float
    low: float
    high: float
    speed: _Ratio | None


class _Benchmark(BaseModel):
    threads: int
    sentences: list[str]
    timings: list[_Timing]


def read_speed(path: Path, folders: Sequence[Path]) -> Speed:
    """The results of `gossamer benchmark --output`; files in a run folder have the colour of that run."""
    expected = "expected a file written by gossamer benchmark --output"
    try:
        benchmark = _Benchmark.model_validate_json(read_regular(path, MAX_BYTES))
    except OSError as error:
        raise GossamerError(f"{path}: {error.strerror or error}; {expected}") from None
    except ValidationError:
        raise GossamerError(f"{path}: is not a benchmark result; {expected}") from None
    if not benchmark.timings:
        raise GossamerError(f"{path}: contains no timings; {expected}")
    runs = {folder.resolve(): index for index, folder in enumerate(folders)}
    tables: list[SpeedTable] = []
    for runtime, group in groupby(benchmark.timings, key=lambda timing: timing.runtime):
        timings = list(group)
        first = timings[0]
        inputs = " and ".join("×".join(map(str, shape)) for shape in first.inputs) or f"batch {first.batch}"
        what = "reading the file" if first.batch is None else f"{inputs}, threads: {benchmark.threads}"
        title = f"{runtime} {first.version or ''}: {what}, rounds: {first.rounds}"
        files = tuple(_timed(timing, runs.get(timing.file.resolve().parent)) for timing in timings)
        tables.append(SpeedTable(title, files))
    return Speed(tuple(tables), tuple(benchmark.sentences))


def _timed(timing: _Timing, run: int | None) -> TimedFile:
    speed = None if timing.speed is None else (timing.speed.value, timing.speed.low, timing.speed.high)
    figures = timing.sparsity, timing.median, timing.low, timing.high
    return TimedFile(timing.name, timing.contents.bytes, *figures, speed, run)
