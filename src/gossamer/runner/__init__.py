"""Training from config files: classifiers and detectors, dense or sparse.

    from gossamer.runner import run

    result = run("configs/cls/resnet/res18.yaml", data="tiny")

Public names are imported on first use, because they import torchvision and the data pipeline.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.runner.builders import Hook
    from gossamer.runner.runs import Result, evaluate, export, resume, run
    from gossamer.runner.trainer import Runner, SparseRunner

__all__ = ["Hook", "Result", "Runner", "SparseRunner", "evaluate", "export", "resume", "run"]

_MODULES = {
    "Hook": "builders",
    **dict.fromkeys(("Runner", "SparseRunner"), "trainer"),
    **dict.fromkeys(("Result", "evaluate", "export", "resume", "run"), "runs"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gossamer.runner' has no attribute '{name}'")
    return getattr(import_module(f"gossamer.runner.{_MODULES[name]}"), name)
