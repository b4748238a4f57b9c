"""The schedulers that a config can name, besides the base: levels, Ampere, STR, ProbMask, ADMM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gossamer.asp import ASP
from gossamer.asp.selection import calculator
from gossamer.errors import GossamerError
from gossamer.files import whole
from gossamer.graph import DEPTHWISE, get_parameter, unwrap
from gossamer.modifiers import ADMMPruningModifier, LevelPruningModifier, Modifier, ProbMaskPruningModifier
from gossamer.msbench import selection, sparsers
from gossamer.msbench.config import NAME, Config
from gossamer.msbench.schedulers import BaseScheduler, logger, made
from gossamer.recipe import Recipe
from gossamer.sparse import fraction, interpolate

if TYPE_CHECKING:
    from gossamer.analysis.layers import LayerReport

Algorithm = Literal[0, 1, "uniform", "energy", "erk", "global"]
TABLE: list[float] = [30, 40, 50, 60, 70, 80, 90]
ALGORITHMS = ("uniform", "energy")
"""What the numbers of `prun_algo` mean."""
ADMM_ARGUMENTS = {
    "final_sparsity": "sparsity.target_sparsity",
    "rho": "scheduler.kwargs.rho",
    "end_epoch": "scheduler.kwargs.total_iters",
    "update_frequency": "scheduler.kwargs.iters_per_epoch",
}
LAYER_TYPES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention")


class AmbaLevelPruneScheduler(BaseScheduler):
    """A table of sparsities, each trained for an equal share of `total_iters`; docs/msbench.md has the arguments."""

    def __init__(
        self,
        config: Config,
        *,
        total_iters: int = 10000,
        sparsity_table: list[float] | None = None,
        prun_algo: Algorithm = 1,
        prun_algo_tuning: float = 0.5,
        dw_no_prune: bool = False,
        do_sparse_analysis: bool = False,
        default_input_shape: list[int] | None = None,
        default_input_custom: Any = None,
        output_dir: str | os.PathLike[str] = "./sparse_analysis",
        save_dir: str | os.PathLike[str] = "./model_save_path",
        sparse_rate_tolerance: float = 0.015,
        prune_tolerance_max: float = 1.0,
        prune_tolerance_min: float = 1.0,
        init_lr: float | list[float] | None = None,
        verbose: bool = False,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        table = TABLE if sparsity_table is None else sparsity_table
        problems = [
            f"sparsity_table: expected percents from 0 to below 100, found {percent:g}"
            for percent in table
            if not 0 <= percent < 100
        ]
        if any(after <= before for before, after in pairwise(table)):
            problems.append(f"sparsity_table: expected percents that rise, as in [30, 50, 70], found {table}")
        if not table:
            problems.append("sparsity_table: expected sparsities in percent, as in [30, 50, 70], found none")
        if total_iters < max(len(table), 1):
            problems.append(f"total_iters: {total_iters} iterations are too few for {len(table)} levels")
        if problems:
            raise GossamerError("\n".join(f"{NAME}: scheduler.kwargs.{problem}" for problem in problems))
        self.table = [_share(percent) for percent in table]
        self.total_iters, self.tuning = total_iters, prun_algo_tuning
        self.allocation = ALGORITHMS[prun_algo] if isinstance(prun_algo, int) else prun_algo
        self.tolerance, self.caps = sparse_rate_tolerance, (prune_tolerance_max, prune_tolerance_min)
        self.exclude += [DEPTHWISE] if dw_no_prune else []
        self.analyse, self.output_dir, self.save_dir = do_sparse_analysis, Path(output_dir), Path(save_dir)
        self.example = default_input_custom if default_input_custom is not None else default_input_shape
        self.init_lr, self.verbose = init_lr, verbose
        self._ending: int | None = None
        """The level that is over with the next optimizer step."""
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

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        if not self._begun and self.analyse:
            self._write_analysis(self.sparse_analysis(model))
        self._save_level(model)
        super().advance(model, iteration)
        if self.verbose:
            for name in self.names:
                zeros = int((get_parameter(unwrap(model), name) == 0).count_nonzero())
                logger.info("iteration %d: '%s' has %d zeros", iteration, name, zeros)
        ends = [*self.level_starts[1:], self.total_iters]
        self._ending = ends.index(iteration + 1) if iteration + 1 in ends else None
        if not (self.leads and self._stepped):  # the step is over, or none will be noticed
            self._save_level(model)

    def after_step(self) -> None:
        model = self._reference() if self._reference is not None else None
        if self._ending is not None and model is not None:
            self._save_level(model)

    def exported(self) -> None:
        self.after_step()

    def sparse_analysis(self, model: nn.Module) -> LayerReport:
        """Per layer parameters, MACs, and sparsity and energy kept at each level, by the weights as they are now."""
        from gossamer.analysis.layers import layer_report

        owner = self._expect_names(model, "sparse_analysis")
        modifier = self.modifiers()[0]
        assert isinstance(modifier, LevelPruningModifier)
        weights = {name: get_parameter(owner, name).detach() for name in self.names}
        shares = [modifier.shares(weights, sparsity) for sparsity in self.table]
        by_name = {name: [share[name] for share in shares] for name in self.names}
        return layer_report(owner, by_name, self.table, self.example, self.skipped)

    def _write_analysis(self, report: LayerReport) -> None:
        if not _is_first_process():
            return
        written = [*report.save(self.output_dir)]
        if find_spec("matplotlib") is None:
            logger.warning("the analysis has no picture: matplotlib is missing (pip install 'gossamer[report]')")
        else:
            from gossamer.analysis.layers_plot import save

            written.append(self.output_dir / "pruner_report.svg")
            save(report, written[-1])
        logger.info("analysis written: %s", ", ".join(str(path) for path in written))

    def _save_level(self, model: nn.Module) -> None:
        """One checkpoint per level, with its last step in it: the model's state, and which level it was."""
        level, self._ending = self._ending, None
        if level is None or not _is_first_process():
            return
        model = unwrap(model)
        sparsities = {selection.layer_of(n): _zeros(get_parameter(model, n)) for n in self.names}
        state = {
            "model": model.state_dict(),
            "prune_step": level,
            "sparse_rate": self.table[level],
            "sparsities": sparsities,
        }
        path = self.save_dir / f"global_sparse_rate_{self.table[level]}.pth.tar"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path) as scratch:
                torch.save(state, scratch)
        except (OSError, RuntimeError) as error:
            raise GossamerError(f"{path}: cannot be written: {error}; choose another save_dir") from None
        logger.info("level %d of %d is over: %s", level + 1, len(self.table), path)


class AmpereScheduler(BaseScheduler):
    """2:4 by ASP; masks are computed by `init_optimizer`."""

    traces: ClassVar[bool] = False

    def __init__(
        self,
        config: Config,
        *,
        mask_calculator: str = "m4n2_1d",
        whitelist: list[Any] | None = None,
        allow_recompute_mask: bool = False,
        allow_permutation: bool = False,
        verbosity: int = 2,
    ) -> None:
        super().__init__(config)
        calculator(mask_calculator)  # which says what is wrong with it
        types = [layer_type(entry) for entry in (["Linear", "Conv2d"] if whitelist is None else whitelist)]
        self.arguments: dict[str, Any] = {
            "mask_calculator": mask_calculator,
            "whitelist": types,
            "allow_recompute_mask": allow_recompute_mask,
            "allow_permutation": allow_permutation,
            "verbosity": verbosity,
        }
        self._computed = False

    def install(self, model: nn.Module) -> None:
        ASP.init_model_for_pruning(model, **self.arguments)
        layers = ASP.layers(model)
        self.names = [name for name, reason in layers.items() if reason is None]
        self.skipped = {name: reason for name, reason in layers.items() if reason is not None}
        self.iteration, self._computed = None, False

    def init_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_prepared(None, "init_optimizer")
        super().init_optimizer(optimizer)
        model = self._reference() if self._reference is not None else None
        assert model is not None
        ASP.init_optimizer_for_pruning(optimizer, model=model)
        if not ASP.is_sparsity_enabled(model):
            ASP.compute_sparse_masks(model)
        self._computed = True

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        if not self._computed:
            raise GossamerError("prune_model: call init_optimizer(optimizer) first, which computes the 2:4 masks")

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        return self.recipe(steps_per_epoch).modifiers

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        self._check_prepared(None, "recipe")
        return ASP.recipe(self._reference() if self._reference is not None else None)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        ASP.forget(super().export_sparse_model(model))
        return model


class STRScheduler(BaseScheduler):
    """Learned thresholds; they need no schedule."""


class ProbMaskPruneScheduler(BaseScheduler):
    """Learned probabilities within a budget, which falls from warm-up to fine-tuning (Zhou et al. 2021).

    `prune_rate` is the sparsity in the end. The temperature falls from `tau` of the mask generator to 0.03 of it.
    """

    TAU_END: ClassVar[float] = 0.03

    def __init__(
        self,
        config: Config,
        *,
        prune_rate: float,
        total_iterations: int,
        warmup_iteration_stamps: int,
        finetune_iteration_stamps: int,
        start_prune_rate: float = 0.0,
        seed: int = 0,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        where = f"{NAME}: scheduler.kwargs"
        for key, rate in (("prune_rate", prune_rate), ("start_prune_rate", start_prune_rate)):
            if not 0 <= rate < 1:
                raise GossamerError(f"{where}.{key}: expected a share from 0 to below 1, found {rate:g}")
        if not 0 <= warmup_iteration_stamps <= finetune_iteration_stamps <= total_iterations:
            raise GossamerError(
                f"{where}: expected warmup_iteration_stamps ≤ finetune_iteration_stamps ≤ total_iterations, found "
                f"{warmup_iteration_stamps}, {finetune_iteration_stamps} and {total_iterations}"
            )
        if not issubclass(self.sparser, sparsers.ProbMaskFakeSparse):
            raise GossamerError(f"{NAME}: fake_sparse: ProbMaskPruneScheduler needs ProbMaskFakeSparse")
        self.rate, self.start_rate, self.total = prune_rate, start_prune_rate, total_iterations
        self.warmup, self.finetune, self.seed = warmup_iteration_stamps, finetune_iteration_stamps, seed
        self._pool = sparsers.Pool(seed=seed)

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        fields: dict[str, Any] = {
            "params": "__ALL_PRUNABLE__",
            **self.excluding,
            "start_epoch": self.warmup / steps_per_epoch,
            "finetune_epoch": self.finetune / steps_per_epoch,
            "end_epoch": self.total / steps_per_epoch,
            "final_sparsity": self.rate,
            "init_sparsity": self.start_rate,
            "seed": self.seed,
        }
        return [made(ProbMaskPruningModifier, fields, {})]

    def install(self, model: nn.Module) -> None:
        self._pool = sparsers.Pool(seed=self.seed)
        super().install(model)
        self._pool.begin([get_parameter(model, name).detach() for name in self.names])

    def make_sparser(self, weight: Tensor) -> sparsers.FakeSparse:
        return self.sparser(weight, self.generator, pool=self._pool, **self.config.kwargs["fake_sparse"])  # pyright: ignore[reportCallIssue]

    def rate_at(self, iteration: int) -> float:
        """The sparsity at an iteration: 0 in the warm-up, then a cubic ramp until fine-tuning."""
        if iteration < self.warmup:
            return 0.0
        return interpolate(self.start_rate, self.rate, fraction(iteration, self.warmup, self.finetune))

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        if not self._pool.members:
            return
        start: float = getattr(self.generator, "tau", 1.0)
        tau = start * interpolate(1.0, self.TAU_END, fraction(iteration, self.warmup, self.total), "linear")
        self._pool.set(self.rate_at(iteration), tau, iteration)
        self._pool.project()

    def after_step(self) -> None:
        if self._pool.members:
            self._pool.project()

    def exported(self) -> None:
        self._pool = sparsers.Pool(seed=self.seed)


class ADMMScheduler(BaseScheduler):
    """ADMM towards a target sparsity for the first third of the epochs, then training with the zeros held.

    The target stands in the config under `sparsity`: `{'target_sparsity': 0.9, 'uniform': True}`. The lengths come
    from `before_run`, or from `total_iters` and `iters_per_epoch`.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_iters: int | None = None,
        iters_per_epoch: int | None = None,
        rho: float | None = None,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        if "target_sparsity" not in config.sparsity:
            raise GossamerError(f"{NAME}: ADMMScheduler needs 'sparsity': {{'target_sparsity': …, 'uniform': True}}")
        if self.generator.mask_type is None:
            raise GossamerError(f"{NAME}: mask_generator: ADMMScheduler cannot use one of your own")
        self.rho = rho
        self.lengths = _lengths(total_iters, iters_per_epoch, "scheduler.kwargs.")
        self.modifiers()  # so that what is wrong is told at once

    def before_run(self, model: nn.Module, iters_per_epoch: int, max_iters: int) -> None:
        """Say how long the training is."""
        self._check_prepared(model, "before_run")
        if self._begun:
            raise GossamerError("before_run: pruning has begun already; call it before the first prune_model")
        self.lengths = _lengths(max_iters, iters_per_epoch)
        self.install(model)

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        total, epoch = self.lengths
        epoch = epoch or max((total or 3) // 30, 1)
        end = max((total or 3) // epoch // 3, 1) * epoch
        fields: dict[str, Any] = {
            "params": "__ALL_PRUNABLE__",
            **self.excluding,
            "start_epoch": 0.0,
            "end_epoch": end / steps_per_epoch,
            "update_frequency": epoch / steps_per_epoch,
            "final_sparsity": self.config.sparsity["target_sparsity"],
            "global_sparsity": not self.config.sparsity.get("uniform", True),
        }
        if self.generator.mask_type != "unstructured":
            fields["mask_type"] = self.generator.mask_type
        if self.rho is not None:
            fields["rho"] = self.rho
        return [made(ADMMPruningModifier, fields, ADMM_ARGUMENTS)]

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        if self.lengths[0] is None:
            raise GossamerError("prune_model: call before_run(model, iters_per_epoch, max_iters) first")
        super().advance(model, iteration)


def _lengths(total_iters: int | None, iters_per_epoch: int | None, place: str = "") -> tuple[int | None, int | None]:
    for key, length in (("total_iters", total_iters), ("iters_per_epoch", iters_per_epoch)):
        if length is not None and length < 1:
            raise GossamerError(f"{place}{key}: expected a number of iterations above 0, found {length}")
    return total_iters, iters_per_epoch


def _share(percent: float) -> float:
    """Percent as a share, as it is written: 30 becomes 0.3, not 0.30000000000000004."""
    return round(percent / 100, 12)


def _zeros(weight: Tensor) -> float:
    return float((weight.detach() == 0).double().mean())


def layer_type(entry: Any) -> type[nn.Module]:
    found = getattr(nn, entry, None) if isinstance(entry, str) and entry in LAYER_TYPES else entry
    if not isinstance(found, type):
        known = ", ".join(LAYER_TYPES)
        raise GossamerError(f"whitelist: expected types of layers, or names from {known}, found {entry!r}")
    return found


def _is_first_process() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
