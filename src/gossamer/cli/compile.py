"""`gossamer compile`: a model, or an ONNX file, as an engine of the runtime in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gossamer.cli.console import progress, reports_errors, say, show_json, without_log
from gossamer.cli.options import AsJson, Classes, Data, Imports, Input, Sets, Weights, load_model
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.runtime import Engine


@reports_errors
def compile_model(
    model: Annotated[str, Argument(metavar="MODEL", help="As for the other commands, or an .onnx file.")],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "model.gossamer"
    ),
    weights: Weights = None,
    input_shape: Input = None,
    classes: Classes = None,
    sets: Sets = None,
    data: Data = None,
    imports: Imports = None,
    summary: Annotated[bool, Option("--summary", help="Print how each layer is computed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile a model with zeros in its weights for this CPU, and write one file for gossamer.runtime.load().

    Every layer is measured on this machine to choose how it is computed, and the result is compared with dense torch.
    The file runs without the model's class.
    """
    from gossamer import runtime

    engine: Engine
    with progress("", as_json) as show:
        if model.endswith(".onnx"):
            given = {
                "--weights": weights,
                "--input": input_shape,
                "--num-classes": classes,
                "--set": sets,
                "--data": data,
            }
            if unused := [name for name, value in given.items() if value]:
                raise GossamerError(
                    f"{unused[0]}: not used for an ONNX file, which has its weights and shapes; drop it"
                )
            show("reading the file", 0.0)
            engine = runtime.InferenceSession(model, progress=show).engine
        else:
            show("loading the model", 0.0)
            loaded = load_model(model, weights, data, input_shape, sets or [], classes, imports)
            with without_log():
                engine = runtime.compile(loaded.model, loaded.example, progress=show)
        engine.save(output)
    size, times = output.stat().st_size, engine.times
    if as_json:
        measured = None
        if times is not None:
            measured = {"seconds": times.total, "dense_seconds": times.dense_total, "gain": times.gain}
        show_json({"model": model, "output": str(output), "bytes": size, "times": measured})
        return
    if summary:
        say(engine.summary())
    elif times is not None:
        say(times.verdict())
    say(f"{output}: {size / 1e6:.1f} MB; run it with gossamer.runtime.load('{output}')")
