"""`export_sparse_onnx`: a prepared model as an ONNX file, with the zeros in its weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.model import unwrap
from gossamer.model.weights import duplicate

if TYPE_CHECKING:
    from gossamer.msbench.base import BaseScheduler

logger = logging.getLogger("gossamer.msbench")


def write(scheduler: BaseScheduler, model: nn.Module, dummy_input: Any, onnx_name: str | os.PathLike[str]) -> str:
    """Export a copy of the model in evaluation mode to `onnx_name`.onnx; the file is written atomically.

    The batch dimension is dynamic. If the model supports only one batch size, so does the file, with a warning.
    """
    from gossamer.export.examples import ExampleInputs
    from gossamer.export.onnx.model_files import make_parent, require, write_model
    from gossamer.export.onnx.writer import export

    require("export_sparse_onnx", "onnx", "onnxscript")
    copy = scheduler.export_sparse_model(duplicate(unwrap(model))).eval()
    inputs = _inputs(copy, dummy_input)
    target = Path(f"{os.fspath(onnx_name).removesuffix('.onnx')}.onnx")
    make_parent(target)
    example = ExampleInputs.of(inputs)
    if example.batch is not None:
        several = example.doubled() if example.batch == 1 else example
        try:
            shapes = several.dynamic_shapes(copy)
            return str(write_model(export(copy, several.positional, target, dynamic_shapes=shapes), target))
        except (GossamerError, TypeError) as error:
            fixed = export(copy, inputs, target)  # raises if the batch dimension is not the cause
            logger.warning("%s: the file supports only batches of %d: %s", target, example.batch, error)
            return str(write_model(fixed, target))
    return str(write_model(export(copy, inputs, target), target))


def _inputs(model: nn.Module, given: Any) -> tuple[Any, ...]:
    """The arguments of `forward`; a list of whole numbers is the shape of a single one."""
    if isinstance(given, tuple) and not isinstance(given, torch.Size):
        return cast(tuple[Any, ...], given)
    sizes: list[Any] = list(cast(Any, given)) if isinstance(given, list | torch.Size) else []
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) for size in sizes):
        return (cast(Any, given),)
    if min(sizes) < 1:
        raise GossamerError(f"export_sparse_onnx: {sizes} is not a shape")
    like = next(model.parameters(), torch.empty(0))
    return (torch.zeros(tuple(sizes), dtype=like.dtype, device=like.device),)
