"""`gossamer train`, `resume`, `eval` and `compare`: runs from config files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gossamer.cli.console import AsJson, out, reports_errors, show_json
from gossamer.cli.models import Data, Imports, Sets

if TYPE_CHECKING:
    from gossamer.runner.display import Display
    from gossamer.runner.runs import Result

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config file.")]
ConfigOrRun = Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A config file, or a run folder.")]
Weights = Annotated[
    Path | None, typer.Option("--weights", metavar="FILE|RUN", help="What to take, in place of the run's best.")
]
Processes = Annotated[int, typer.Option("--nproc", metavar="N", help="Processes on this machine.")]


@reports_errors
def train(
    config: Config,
    evaluate_only: Annotated[bool, typer.Option("-e", "--evaluate", help="Evaluate, and do not train.")] = False,
    sets: Sets = None,
    data: Data = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Train what a config describes, dense or sparse; Ctrl-C saves, and `resume` goes on."""
    if processes != 1:
        _launched(processes)
    if evaluate_only:
        evaluate(config, None, sets, data, None, processes, as_json)
        return
    from gossamer.runner.runs import run

    _ended(run(config, sets or [], data, display=_display(as_json)), as_json)


@reports_errors
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    sets: Sets = None,
    imports: Imports = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its latest checkpoint: to the same weights as if it had never stopped."""
    if processes != 1:
        _launched(processes)
    from gossamer.runner.runs import resume as go_on

    _ended(go_on(folder, sets or [], imports=imports or (), display=_display(as_json)), as_json)


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
    """Test a run: what --weights or saver.resume_model names, else its best checkpoint, else its last."""
    if processes != 1:
        _launched(processes)
    from gossamer.runner.runs import evaluate as test
    from gossamer.runner.runs import origin

    result = test(config, sets or [], data, weights=weights, imports=imports or (), display=_display(as_json))
    if result.first and as_json:
        show_json(_plain(result))
    elif result.first:
        from gossamer.runner.summary import metrics_table

        if result.source is not None:
            out.print(origin(result.model, result.source), highlight=False, markup=False, soft_wrap=True)
        out.print(metrics_table(result.metrics, result.sparsity))


@reports_errors
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders; differences are to the first.")],
    as_json: AsJson = False,
) -> None:
    """Runs side by side: accuracy, sparsity, weights that are not zero."""
    from gossamer.runner.summary import comparison, comparison_table

    if as_json:
        show_json(comparison(folders))
        return
    out.print(comparison_table(folders))


def _launched(processes: int) -> NoReturn:
    """The same command in each of several processes."""
    from gossamer.runner.distributed import launch

    arguments = [word for word in sys.argv[1:] if not word.startswith("--nproc=")]
    if "--nproc" in arguments:
        at = arguments.index("--nproc")
        del arguments[at : at + 2]
    raise typer.Exit(launch(processes, arguments))


def _ended(result: Result, as_json: bool) -> None:
    if not result.first:
        return
    if as_json:
        show_json(_plain(result))
    elif result.complete:
        from gossamer.runner.summary import run_table

        out.print(run_table(result.folder))
    else:
        out.print(f"Stopped at iteration {result.iteration}, and saved. Go on by:", highlight=False)
        out.print(f"  gossamer resume {shlex.quote(str(result.folder))}", highlight=False, soft_wrap=True)
    if not result.complete:
        raise typer.Exit(130)


def _display(as_json: bool) -> Display | None:
    """None is the usual one."""
    if not as_json:
        return None
    from gossamer.runner.display import Display

    return Display(shown=False)


def _plain(result: Result) -> dict[str, object]:
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
