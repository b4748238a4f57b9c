"""Levels of sparsity with learning-rate restarts, as for Ambarella's chips: checkpoints and an analysis beside them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.io import atomic_write
from gossamer.model import DEPTHWISE, get_parameter, unwrap, weight_of
from gossamer.modifiers import LevelPruningModifier, Modifier
from gossamer.msbench import selection
from gossamer.msbench.config import NAME, Config
from gossamer.msbench.generators import NMMaskGenerator
from gossamer.msbench.schedulers import BaseScheduler, logger
from gossamer.msbench.sparsers import FakeSparse
from gossamer.quantities import Count, Factor, LearningRate, Percent, Share, Size
from gossamer.sparse import share_of_zeros

if TYPE_CHECKING:
    from gossamer.analysis.layers import LayerReport

Algorithm = Literal[0, 1, "uniform", "energy", "erk", "global"]
TABLE: list[float] = [30, 40, 50, 60, 70, 80, 90]
ALGORITHMS = ("uniform", "energy")
"""What the numbers of `prun_algo` mean."""


class AmbaLevelPruneScheduler(BaseScheduler):
    """A table of sparsities, each trained for an equal share of `total_iters`; docs/msbench.md has the arguments."""

    needs = FakeSparse

    def __init__(
        self,
        config: Config,
        *,
        total_iters: Count = 10000,
        sparsity_table: list[Percent] | None = None,
        prun_algo: Algorithm = 1,
        prun_algo_tuning: Factor = 0.5,
        dw_no_prune: bool = False,
        do_sparse_analysis: bool = False,
        default_input_shape: list[Size] | None = None,
        default_input_custom: Any = None,
        output_dir: str | os.PathLike[str] = "./sparse_analysis",
        save_dir: str | os.PathLike[str] | None = "./model_save_path",
        sparse_rate_tolerance: Share = 0.015,
        prune_tolerance_max: Factor = 1.0,
        prune_tolerance_min: Factor = 1.0,
        init_lr: LearningRate | list[LearningRate] | None = None,
        verbose: bool = False,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        table = TABLE if sparsity_table is None else sparsity_table
        problems: list[str] = []
        if table and 0 < max(table) < 1:
            problems.append(f"sparsity_table: expected percents, as in 30 for a share of 0.3, found {table}")
        if any(after <= before for before, after in pairwise(table)):
            problems.append(f"sparsity_table: expected percents that rise, as in [30, 50, 70], found {table}")
        if not table:
            problems.append("sparsity_table: expected sparsities in percent, as in [30, 50, 70], found none")
        if total_iters < max(len(table), 1):
            problems.append(f"total_iters: {total_iters} iterations are too few for {len(table)} levels")
        if problems:
            raise GossamerError("\n".join(f"{NAME}: scheduler.kwargs.{problem}" for problem in problems))
        if self.generator.sparsity is not None and not isinstance(self.generator, NMMaskGenerator):
            raise GossamerError(f"{NAME}: mask_generator.kwargs.sparsity: levels take theirs from sparsity_table")
        self.table = [_share(percent) for percent in table]
        self.total_iters, self.tuning = total_iters, prun_algo_tuning
        allocation = ALGORITHMS[prun_algo] if isinstance(prun_algo, int) else prun_algo
        # 2:4 leaves layers no share to choose.
        self.allocation = "uniform" if self.generator.mask_type == "2:4" else allocation
        self.tolerance, self.caps = sparse_rate_tolerance, (prune_tolerance_max, prune_tolerance_min)
        self.exclude += [DEPTHWISE] if dw_no_prune else []
        self.analyse, self.output_dir = do_sparse_analysis, Path(output_dir)
        self.save_dir = None if save_dir is None else Path(save_dir)
        self.example = default_input_custom if default_input_custom is not None else default_input_shape
        self.init_lr, self.verbose = init_lr, verbose
        self._closing: weakref.WeakSet[torch.optim.Optimizer] | None = None
        """In the last iteration: the optimizers whose last step is saved."""
        self.modifiers()  # so that what is wrong is told at once

    @property
    def level_starts(self) -> list[int]:
        """The iteration at which each level starts: n·total_iters // L."""
        return [n * self.total_iters // len(self.table) for n in range(len(self.table))]

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        more: dict[str, Any] = {"allocation": self.allocation}
        if self.allocation == "energy":
            more |= {"energy_slope": self.tuning, "tolerance": self.tolerance, **self._cap()}
        return [self.levels(self.table, self.total_iters / steps_per_epoch, **more)]

    def _cap(self) -> dict[str, float]:
        """The original's two tolerances both bound a layer's sparsity at the last level; 1.0 sets none."""
        most, least = self.caps
        bounds = [self.table[-1] * most] if most > 1 else []
        bounds += [1 - (1 - self.table[-1]) * least] if least < 1 else []
        return {"max_layer_sparsity": min(0.99, *bounds)} if bounds else {}

    @property
    def final_sparsity(self) -> float | None:
        return self.table[-1]

    @property
    def length(self) -> int | None:
        return self.total_iters

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        """A level is saved when it is left; the last one when it ends, and again with each optimizer's last step."""
        if not self._begun and self.analyse:
            self._write_analysis(self.sparse_analysis(model))
        before, after = self.level, max(n for n, start in enumerate(self.level_starts) if start <= iteration)
        if before is not None and before < after:
            self._save_level(model, before)
        super().advance(model, iteration)
        if self.verbose:
            for name in self.names:
                zeros = int((get_parameter(unwrap(model), name) == 0).count_nonzero())
                logger.info("iteration %d: '%s' has %d zeros", iteration, name, zeros)
        reached = self.iteration is not None and self.iteration + 1 >= self.total_iters
        self._closing = None
        if iteration + 1 >= self.total_iters and not reached:
            self._save_level(model, after)
            self._closing = weakref.WeakSet()

    @property
    def level(self) -> int | None:
        """The level that holds, from 0; None before the first."""
        return self._bound.state.get("level") if self._begun and self._bound is not None else None

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._after_step(optimizer)
        model = self._reference() if self._reference is not None else None
        if (
            self._closing is not None
            and optimizer not in self._closing
            and model is not None
            and self.level is not None
        ):
            self._closing.add(optimizer)
            self._save_level(model, self.level)

    def sparse_analysis(self, model: nn.Module) -> LayerReport:
        """Per layer parameters, MACs, and sparsity and energy kept at each level, by the weights as they are now."""
        from gossamer.analysis.layers import layer_report

        owner = self._expect_names(model, "sparse_analysis")
        bound = self._bound
        if bound is None or not isinstance(bound.modifier, LevelPruningModifier):
            raise GossamerError("sparse_analysis: the model was exported; prepare it again")
        shares = [bound.modifier.shares(bound, sparsity) for sparsity in self.table]
        by_name = {name: [share[name] for share in shares] for name in self.names}
        return layer_report(owner, by_name, self.table, self.example, self.skipped)

    def final_shares(self) -> dict[str, float]:
        """The sparsity of each weight at the last level, by the weights as they are now; none after the export."""
        bound = self._bound
        if bound is None or type(bound.modifier) is not LevelPruningModifier:
            return {}
        return bound.modifier.shares(bound, self.table[-1])

    def _write_analysis(self, report: LayerReport) -> None:
        if not _is_first_process():
            return
        written = [*report.save(self.output_dir)]
        if find_spec("matplotlib") is None:
            logger.warning("the analysis has no picture: matplotlib is missing (pip install 'gossamer[report]')")
        else:
            from gossamer.report.plots import plot_layers

            written.append(self.output_dir / "pruner_report.svg")
            plot_layers(report, written[-1])
        logger.info("analysis written: %s", ", ".join(str(path) for path in written))

    def _save_level(self, model: nn.Module, level: int) -> None:
        """The model's state, and which level it was."""
        if self.save_dir is None or not _is_first_process():
            return
        model = unwrap(model)
        sparsities = {selection.layer_of(n): share_of_zeros(weight_of(model, n)) for n in self.names}
        path = self.save_dir / f"global_sparse_rate_{self.table[level]}.pth.tar"
        try:
            own = model.state_dict()
        except Exception as error:  # of the model's own code
            told = f"{type(error).__name__}: {error}"
            raise GossamerError(f"{path}: the model's state_dict() fails ({told}); set save_dir to null") from error
        state = {
            "model": own,
            "prune_step": level,
            "sparse_rate": self.table[level],
            "sparsities": sparsities,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as scratch:
                torch.save(state, scratch)
        except (OSError, RuntimeError) as error:
            raise GossamerError(f"{path}: cannot be written: {error}; choose another save_dir") from None
        logger.info("level %d of %d is over: %s", level + 1, len(self.table), path)


def _share(percent: float) -> float:
    """Percent as a share, as it is written: 30 becomes 0.3, not 0.30000000000000004."""
    return round(percent / 100, 12)


def _is_first_process() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
