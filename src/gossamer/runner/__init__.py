"""The door for people who train from config files: classifiers and detectors, dense or sparse.

    from gossamer.runner import run

    result = run("configs/cls/resnet/res18.yaml", data="tiny")

What is named here loads when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.runner.hooks import Hook
    from gossamer.runner.runner import Runner
    from gossamer.runner.running import Result, evaluate, export, resume, run
    from gossamer.runner.sparse_runner import SparseRunner

__all__ = ["Hook", "Result", "Runner", "SparseRunner", "evaluate", "export", "resume", "run"]

_HOMES = {
    "Hook": "hooks",
    "Runner": "runner",
    "SparseRunner": "sparse_runner",
    **dict.fromkeys(("Result", "evaluate", "export", "resume", "run"), "running"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer.runner' has no attribute '{name}'")
    return getattr(import_module(f"gossamer.runner.{_HOMES[name]}"), name)
