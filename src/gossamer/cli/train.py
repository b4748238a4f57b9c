"""`gossamer train`, `resume` and `eval`: runs of the trainer."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gossamer.cli.console import AsJson, out, reports_errors, say, show_json
from gossamer.cli.models import Data, Imports, Sets

if TYPE_CHECKING:
    from gossamer.runner.display import Display
    from gossamer.runner.runs import Result

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file.")]
ConfigOrRun = Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A config file, or a run folder.")]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="FILE|RUN", help="Weights instead of the run's best checkpoint."),
]
Processes = Annotated[int, typer.Option("--nproc", metavar="N", help="Number of processes on this machine.")]


@reports_errors
def train(
    config: Config,
    evaluate_only: Annotated[bool, typer.Option("-e", "--evaluate", help="Evaluate without training.")] = False,
    sets: Sets = None,
    data: Data = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Train the model of a config, dense or sparse. Ctrl-C saves a checkpoint, and `gossamer resume` continues."""
    if processes != 1:
        _launch(processes)
    if evaluate_only:
        evaluate(config, None, sets, data, None, processes, as_json)
        return
    from gossamer.runner.runs import run

    _show_result(run(config, sets or [], data, display=_display(as_json)), as_json)


@reports_errors
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
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
    config: ConfigOrRun,
    weights: Weights = None,
    sets: Sets = None,
    data: Data = None,
    imports: Imports = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Test the weights of --weights or saver.resume_model, else the best checkpoint of a run, else its last."""
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
