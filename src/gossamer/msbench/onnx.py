"""A prepared model as an ONNX file, with the zeros in its weights."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.graph import unwrap

if TYPE_CHECKING:
    from gossamer.msbench.schedulers import BaseScheduler


def write(scheduler: BaseScheduler, model: nn.Module, dummy_input: Any, onnx_name: str | os.PathLike[str]) -> str:
    """Export a copy of the model in evaluation mode to `onnx_name`.onnx; the file is written whole or not at all."""
    from gossamer.export.models import check_place, require, write_model
    from gossamer.export.writing import export

    require("export_sparse_onnx", "onnx", "onnxscript")
    copy = scheduler.export_sparse_model(deepcopy(unwrap(model))).eval()
    inputs = _inputs(copy, dummy_input)
    target = Path(f"{os.fspath(onnx_name).removesuffix('.onnx')}.onnx")
    check_place(target)
    return str(write_model(export(copy, inputs, target), target))


def _inputs(model: nn.Module, given: Any) -> tuple[Any, ...]:
    """The arguments of `forward`; a list of whole numbers is the shape of the only one."""
    if isinstance(given, tuple) and not isinstance(given, torch.Size):
        return cast(tuple[Any, ...], given)
    sizes: list[Any] = list(cast(Any, given)) if isinstance(given, list | torch.Size) else []
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) for size in sizes):
        return (cast(Any, given),)
    if min(sizes) < 1:
        raise GossamerError(f"export_sparse_onnx: {sizes} is no shape of a tensor")
    like = next(model.parameters(), torch.empty(0))
    return (torch.zeros(tuple(sizes), dtype=like.dtype, device=like.device),)
