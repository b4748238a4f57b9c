"""`gossamer compile`: a model, or an ONNX file, as an engine of the runtime in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    Each network of a detector is one file, without post-processing, as in gossamer export.
    """
    from gossamer import runtime

    engines: dict[str, runtime.Engine]
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
            engines = {"": runtime.InferenceSession(model).engine}
        else:
            engines = load_model(model, weights, data, input_shape, sets or [], classes, imports).compile()
        files = {output.with_name(f"{output.stem}{end}{output.suffix}"): engine for end, engine in engines.items()}
        for path, engine in files.items():
            engine.save(path)
    sizes = {str(path): path.stat().st_size for path in files}
    if as_json:
        first = next(iter(sizes))
        show_json({"model": model, "output": first, "bytes": sizes[first], "files": sizes})
        return
    for path, engine in files.items():
        if summary:
            say(engine.summary())
        say(f"{path}: {sizes[str(path)] / 1e6:.1f} MB; run it with gossamer.runtime.load('{path}')")
