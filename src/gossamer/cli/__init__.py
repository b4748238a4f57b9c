"""The command line `gossamer`, one module for commands that belong together.

Commands parse arguments, call the library and print the result; they load heavy libraries when they run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gossamer.cli import analyze, benchmark, compile, create, export, nm, oneshot, recipe, runs
from gossamer.cli.console import say

__all__ = ["app", "main"]

app = typer.Typer(
    name="gossamer",
    help="Make PyTorch networks sparse while they train.",
    epilog="Example: gossamer recipe check builtin:gmp-90 --model resnet18",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
app.add_typer(recipe.app, name="recipe")
app.command(epilog="Example: gossamer analyze resnet18 --recipe builtin:gmp-90")(analyze.analyze)
app.command(epilog="Example: gossamer create resnet18 --target tensorrt > recipe.yaml")(create.create)
app.command(epilog="Example: gossamer permute resnet18 --weights trained.pt -o permuted.safetensors")(nm.permute)
app.command(epilog="Example: gossamer check resnet18 --weights pruned.pt --pattern 2:4")(nm.check)
app.command(epilog="Example: gossamer convert msbench.yaml --steps-per-epoch 391 -o recipe.yaml")(create.convert)
app.command(epilog="Example: gossamer train configs/cls/resnet/res18.yaml --data tiny")(runs.train)
app.command(epilog="Example: gossamer resume runs/res18")(runs.resume)
app.command("eval", epilog="Example: gossamer eval runs/res18 --set dataset.test.batch_size=64")(runs.evaluate)
app.command(epilog="Example: gossamer export runs/res18_ampere_sparse --format onnx")(export.export)
app.command(epilog="Example: gossamer oneshot path/to/llama --recipe recipe.yaml --data corpus.txt -o llama-sparse")(
    oneshot.oneshot
)
app.command(epilog="Example: gossamer compare runs/res18 runs/res18_amba_sparse runs/res18_ampere_sparse")(runs.compare)
app.command(epilog="Example: gossamer benchmark dense.onnx sparse.onnx --threads 2")(benchmark.benchmark)
app.command("compile", epilog="Example: gossamer compile runs/res18_amba_sparse -o model.gossamer")(
    compile.compile_model
)
app.command(epilog="Example: gossamer report runs/res18")(runs.report)
app.command(epilog="Example: gossamer quantize-qat-export model.onnx -o model-int8.onnx")(export.quantize_qat_export)


def main() -> None:
    """Entry point of the `gossamer` script."""
    app(prog_name="gossamer")


def _show_version(requested: bool) -> None:
    if requested:
        from gossamer.version import __version__

        say(f"gossamer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Make PyTorch networks sparse while they train."""
