"""The door for people who train from config files: classifiers and detectors, dense or sparse.

    from gossamer.runner import run

    result = run("configs/cls/resnet/res18.yaml", data="tiny")

Vision libraries load when a run is built.
"""

from gossamer.runner.hooks import Hook
from gossamer.runner.runner import Runner
from gossamer.runner.running import Result, evaluate, export, resume, run
from gossamer.runner.sparse_runner import SparseRunner

__all__ = ["Hook", "Result", "Runner", "SparseRunner", "evaluate", "export", "resume", "run"]
