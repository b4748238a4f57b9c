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
    from gossamer.runtime.engine import Tuned


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
    bfloat16: Annotated[bool, Option("--bfloat16", help="Store the weights of layers in bfloat16.")] = False,
    again: Annotated[bool, Option("--again", help="Measure again what was measured on this CPU before.")] = False,
    summary: Annotated[bool, Option("--summary", help="Print how each layer is computed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile a model with zeros in its weights for this CPU, and write one file for gossamer.runtime.load().

    Every kind of layer is measured once on this CPU to choose how it is computed, and the result is compared with dense
    torch.
    The file runs without the model's class. Each network of a detector is one file, without post-processing, as in
    gossamer export.
    """
    import torch

    from gossamer import runtime

    engines: dict[str, Engine]
    tuned: Tuned = "again" if again else True
    with progress("", as_json) as show:
        if model.endswith(".onnx"):
            given = {
                "--weights": weights,
                "--input": input_shape,
                "--num-classes": classes,
                "--set": sets,
                "--data": data,
                "--bfloat16": bfloat16,
            }
            if unused := [name for name, value in given.items() if value]:
                raise GossamerError(
                    f"{unused[0]}: not used for an ONNX file, which has its weights and shapes; drop it"
                )
            show("reading the file", 0.0)
            engines = {"": runtime.InferenceSession(model, tuned=tuned, progress=show).engine}
        else:
            show("loading the model", 0.0)
            loaded = load_model(model, weights, data, input_shape, sets or [], classes, imports)
            with without_log():
                engines = loaded.compile(torch.bfloat16 if bfloat16 else torch.float32, tuned, progress=show)
        files = {output.with_name(f"{output.stem}{end}{output.suffix}"): engine for end, engine in engines.items()}
        for path, engine in files.items():
            engine.save(path)
    sizes = {str(path): path.stat().st_size for path in files}
    if as_json:
        described = {str(path): {"bytes": sizes[str(path)], "times": _times(engine)} for path, engine in files.items()}
        first = next(iter(described))
        show_json({"model": model, "output": first, **described[first], "files": described})
        return
    for path, engine in files.items():
        if summary:
            say(engine.summary())
        elif engine.times is not None:
            say(engine.times.verdict())
        say(f"{path}: {sizes[str(path)] / 1e6:.1f} MB; run it with gossamer.runtime.load('{path}')")


def _times(engine: Engine) -> dict[str, float] | None:
    times = engine.times
    if times is None:
        return None
    return {"seconds": times.total, "dense_seconds": times.dense_total, "gain": times.gain}
