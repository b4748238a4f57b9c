"""`gossamer compile`: a model, or an ONNX file, as an engine of the runtime in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from gossamer.cli.console import err, reports_errors, say, show_json
from gossamer.cli.options import AsJson, Classes, Data, Imports, Input, Sets, Weights, load_model
from gossamer.errors import GossamerError


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

    Every layer is measured on this machine to choose how it is computed. The file runs without the model's class.
    """
    from gossamer import runtime

    engine: Any
    with err.status("compiling"):
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
            engine = runtime.InferenceSession(model).engine
        else:
            loaded = load_model(model, weights, data, input_shape, sets or [], classes, imports)
            engine = runtime.compile(loaded.model, loaded.example)
        engine.save(output)
    size = output.stat().st_size
    if as_json:
        show_json({"model": model, "output": str(output), "bytes": size})
        return
    if summary:
        say(engine.summary())
    say(f"{output}: {size / 1e6:.1f} MB; run it with gossamer.runtime.load('{output}')")
