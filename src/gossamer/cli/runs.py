"""`gossamer train`, `resume`, `eval`, `compare` and `report`: runs of the trainer, and what they have written."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Argument, Option

from gossamer.cli.console import amount, out, percent, progress, reports_errors, say, show_json
from gossamer.cli.options import AsJson, Data, Imports, Sets
from gossamer.errors import GossamerError
from gossamer.runner.formatting import format_size

if TYPE_CHECKING:
    from gossamer.runner.display import Display
    from gossamer.runner.runs import Result

Runs = Annotated[list[Path], Argument(metavar="RUN…", help="Run folders; the first is the reference.")]
Processes = Annotated[int, Option("--nproc", metavar="N", help="Number of processes on this machine.")]


@reports_errors
def train(
    config: Annotated[Path, Argument(metavar="CONFIG", help="A config file.")],
    evaluate_only: Annotated[bool, Option("-e", "--evaluate", help="Evaluate without training.")] = False,
    sets: Sets = None,
    data: Data = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Train the model of a config, dense or sparse. Ctrl-C saves a checkpoint, and `gossamer resume` continues."""
    if processes != 1:
        _launch(processes)
    if evaluate_only:
        evaluate(config, sets=sets, data=data, processes=processes, as_json=as_json)
        return
    from gossamer.runner.runs import run

    _show_result(run(config, sets or [], data, display=_display(as_json)), as_json)


@reports_errors
def resume(
    folder: Annotated[Path, Argument(metavar="RUN", help="A run folder.")],
    sets: Sets = None,
    imports: Imports = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its latest checkpoint, with the same result as without interruption."""
    if processes != 1:
        _launch(processes)
    from gossamer.runner.runs import resume as resume_run

    _show_result(resume_run(folder, sets or [], imports=imports or (), display=_display(as_json)), as_json)


@reports_errors
def evaluate(
    config: Annotated[Path, Argument(metavar="CONFIG|RUN", help="A config file, or a run folder.")],
    weights: Annotated[
        Path | None, Option(metavar="FILE|RUN", help="Weights instead of the run's best checkpoint.")
    ] = None,
    text: Annotated[
        Path | None,
        Option("--perplexity", metavar="FILE", help="Measure a folder of Transformers on a text instead."),
    ] = None,
    length: Annotated[int | None, Option("--length", metavar="N", help="Tokens of a sequence of the text.")] = None,
    sets: Sets = None,
    data: Data = None,
    imports: Imports = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Test the weights of --weights or saver.resume_model, else the best checkpoint of a run, else its last."""
    if text is not None:
        _show_perplexity(config, text, length, as_json)
        return
    if length is not None:
        raise GossamerError("used with --perplexity only", "--length")
    if processes != 1:
        _launch(processes)
    from gossamer.runner.runs import describe_source
    from gossamer.runner.runs import evaluate as test

    result = test(config, sets or [], data, weights=weights, imports=imports or (), display=_display(as_json))
    if result.first and as_json:
        show_json(_as_data(result))
    elif result.first:
        from gossamer.runner.summary import metrics_table

        if result.source is not None:
            say(describe_source(result.model, result.source))
        out.print(metrics_table(result.metrics, result.sparsity))


@reports_errors
def compare(folders: Runs, as_json: AsJson = False) -> None:
    """Compare accuracy, sparsity and non-zero weights of runs."""
    from gossamer.runner.summary import comparison, comparison_table

    if as_json:
        show_json(comparison(folders))
    else:
        out.print(comparison_table(folders))


@reports_errors
def report(
    folders: Runs,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="The file to write; by default report.html in the run folder."),
    ] = None,
    sensitivity: Annotated[
        bool, Option("--sensitivity", help="First measure the sensitivity of layers, which takes longer.")
    ] = False,
    benchmark: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Include the results of gossamer benchmark --output; repeatable."),
    ] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML page about a run, or ./report.html that compares several."""
    from gossamer.runner.reporting import report as write

    if sensitivity:
        from gossamer.runner.runs import measure_sensitivity

        for folder in folders:
            with progress(f"sensitivity of {folder.name}:", as_json) as show:
                measure_sensitivity(folder, show, imports=imports or ())
    path = write(folders, output, benchmark)
    if as_json:
        show_json({"file": str(path), "bytes": path.stat().st_size, "runs": [str(folder) for folder in folders]})
        return
    say(f"{path}: {format_size(path.stat().st_size)}")


def _show_perplexity(folder: Path, text: Path, length: int | None, as_json: bool) -> None:
    from gossamer.calibration.perplexity import perplexity

    with progress("", as_json, remaining=True) as show:
        found = perplexity(folder, text, length=length, progress=show)
    if as_json:
        show_json({"model": str(folder), "text": str(text), **asdict(found)})
        return
    say(f"perplexity {found.value:.2f} on {amount(found.tokens)} tokens of {text}, in sequences of {found.length}")
    if found.zeros:
        say(f"{percent(found.zeros / found.weights)} of {amount(found.weights)} weights are zero")


def _launch(processes: int) -> NoReturn:
    """Run this command in several processes."""
    from gossamer.runner.distributed import launch

    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--nproc=")]
    if "--nproc" in arguments:
        at = arguments.index("--nproc")
        del arguments[at : at + 2]
    raise typer.Exit(launch(processes, arguments))


def _show_result(result: Result, as_json: bool) -> None:
    if not result.first:
        return
    if as_json:
        show_json(_as_data(result))
    elif result.complete:
        from gossamer.runner.summary import run_table

        out.print(run_table(result.folder))
    else:
        say(f"Stopped at iteration {result.iteration} and saved. Continue with:")
        say(f"  gossamer resume {shlex.quote(str(result.folder))}")
    if not result.complete:
        raise typer.Exit(130)


def _display(as_json: bool) -> Display | None:
    """None means the default display."""
    if not as_json:
        return None
    from gossamer.runner.display import Display

    return Display(shown=False)


def _as_data(result: Result) -> dict[str, object]:
    return {
        "folder": str(result.folder),
        "complete": result.complete,
        "iteration": result.iteration,
        "metrics": result.metrics,
        "sparsity": result.sparsity,
        "sparsity_of_pruned_layers": result.sparsity_of_pruned_layers,
        "source": None if result.source is None else str(result.source),
        "model": result.model,
        "model_iteration": result.model_iteration,
        "files": [str(path) for path in result.files],
    }
