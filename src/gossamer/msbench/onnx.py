"""A prepared model as an ONNX file, with the zeros in its weights."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Generator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.files import whole
from gossamer.graph import unwrap

if TYPE_CHECKING:
    from gossamer.msbench.schedulers import BaseScheduler


def write(scheduler: BaseScheduler, model: nn.Module, dummy_input: Any, onnx_name: str | os.PathLike[str]) -> str:
    """Export a copy of the model in evaluation mode to `onnx_name`.onnx; the file is written whole or not at all."""
    missing = [name for name in ("onnx", "onnxscript") if not _installed(name)]
    if missing:
        raise GossamerError(f"export_sparse_onnx needs {' and '.join(missing)}: pip install 'gossamer[onnx]'")
    copy = scheduler.export_sparse_model(deepcopy(unwrap(model))).eval()
    inputs = _inputs(copy, dummy_input)
    target = Path(f"{os.fspath(onnx_name).removesuffix('.onnx')}.onnx")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole(target) as scratch, _quiet():
            torch.onnx.export(copy, inputs, scratch, dynamo=True, external_data=False, verbose=False)
    except OSError as error:
        raise GossamerError(f"{target}: cannot be written: {error.strerror or error}") from None
    except Exception as error:
        raise GossamerError(f"{target}: torch.onnx cannot export the model: {_reason(error)}") from error
    return str(target)


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


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """torch.onnx tells its progress on stdout and by warnings that nobody can act on."""
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _reason(error: BaseException) -> str:
    """The first line of what went wrong: torch's own error is advice, and behind the first line stands a trace."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error.__cause__ or error)).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error.__cause__ or error).__name__)
