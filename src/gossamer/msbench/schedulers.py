"""Schedulers for levels (Ambarella), 2:4 (Ampere), STR, ProbMask and ADMM."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, distributed, nn

from gossamer.asp import ASP, parse_calculator
from gossamer.errors import GossamerError, Key, Problem, Problems, within
from gossamer.io import atomic_write
from gossamer.model import ALL_PRUNABLE, DEPTHWISE, get_parameter, layer_path, unwrap, weight_of
from gossamer.model.distribution import gathered_weights, is_distributed
from gossamer.modifiers import ADMMPruningModifier, Modifier, ProbMaskPruningModifier, STRPruningModifier
from gossamer.modifiers.learned import (
    CONTROLLED,
    STATISTICS,
    controlled_pull,
    note_statistics,
    warn_of_stale_statistics,
)
from gossamer.modifiers.state import Item, StateLayout, vector
from gossamer.msbench import sparsers
from gossamer.msbench.base import SCHEDULER_KWARGS, BaseScheduler, logger
from gossamer.msbench.config import Config
from gossamer.msbench.generators import NMMaskGenerator
from gossamer.quantities import (
    MAX_COUNT,
    Count,
    CountOrZero,
    Factor,
    LearningRate,
    PartialSparsity,
    Percent,
    PositiveFactor,
    Seed,
    Share,
    Size,
)
from gossamer.recipe import Recipe
from gossamer.sparse import fraction, interpolate, measured_sparsity, pulled
from gossamer.sparse.sharding import count

if TYPE_CHECKING:
    from gossamer.analysis.layers import LayerReport

# Levels

Algorithm = Literal[0, 1, "uniform", "energy", "erk", "global"]
DEFAULT_TABLE: list[float] = [30, 40, 50, 60, 70, 80, 90]
ALGORITHMS = ("uniform", "energy")
"""The meaning of the numbers of `prun_algo`."""


class AmbaLevelPruneScheduler(BaseScheduler):
    """A table of sparsities, each trained for an equal share of `total_iters`; docs/msbench.md has the arguments."""

    required_sparser = sparsers.FakeSparse
    field_keys: ClassVar[Mapping[str, Key]] = {
        "levels": (*SCHEDULER_KWARGS, "sparsity_table"),
        "energy_slope": (*SCHEDULER_KWARGS, "prun_algo_tuning"),
        "tolerance": (*SCHEDULER_KWARGS, "sparse_rate_tolerance"),
        "max_layer_sparsity": (*SCHEDULER_KWARGS, "prune_tolerance_max"),
        "end_epoch": (*SCHEDULER_KWARGS, "total_iters"),
    }

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
        table = DEFAULT_TABLE if sparsity_table is None else sparsity_table
        self._check(table, total_iters)
        self.table = [round(percent / 100, 12) for percent in table]  # 0.3, not 0.30000000000000004
        self.total_iters, self.tuning = total_iters, prun_algo_tuning
        allocation = ALGORITHMS[prun_algo] if isinstance(prun_algo, int) else prun_algo
        # With 2:4 all layers have the same sparsity.
        self.allocation = "uniform" if self.generator.mask_type == "2:4" else allocation
        self.rate_tolerance = sparse_rate_tolerance
        self.layer_tolerances = prune_tolerance_max, prune_tolerance_min
        self.exclude += [DEPTHWISE] if dw_no_prune else []
        self.writes_analysis, self.output_dir = do_sparse_analysis, Path(output_dir)
        self.save_dir = None if save_dir is None else Path(save_dir)
        self.example = default_input_custom if default_input_custom is not None else default_input_shape
        self.init_lr, self.verbose = init_lr, verbose
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] | None = None
        """From the last iteration on: the optimizers whose step in it was saved."""
        self._check_modifiers()

    def _check(self, table: Sequence[float], total_iters: int) -> None:
        problems = Problems()
        key = (*SCHEDULER_KWARGS, "sparsity_table")
        if not table:
            problems.add("expected sparsities in percent, as in [30, 50, 70], found none", *key)
        elif 0 < max(table) < 1:
            problems.add(f"expected percents, as in 30 for a share of 0.3, found {table}", *key)
        elif any(after <= before for before, after in pairwise(table)):
            problems.add(f"expected percents that rise, as in [30, 50, 70], found {table}", *key)
        if total_iters < len(table):
            problems.add(
                f"{total_iters} iterations are too few for {len(table)} levels", *SCHEDULER_KWARGS, "total_iters"
            )
        if self.generator.sparsity is not None and not isinstance(self.generator, NMMaskGenerator):
            fix = "set scheduler.kwargs.sparsity_table instead"
            problems.add("levels do not use it", "mask_generator", "kwargs", "sparsity", fix=fix)
        problems.raise_if_any()

    @property
    def level_starts(self) -> list[int]:
        """The iteration at which each level starts: n·total_iters // L."""
        return [n * self.total_iters // len(self.table) for n in range(len(self.table))]

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        more: dict[str, Any] = {"allocation": self.allocation}
        if self.allocation == "energy":
            more |= {"energy_slope": self.tuning, "tolerance": self.rate_tolerance, **self._cap()}
        return [self.levels(self.table, self.total_iters / steps_per_epoch, **more)]

    def _cap(self) -> dict[str, float]:
        """MSBench's two tolerances both bound a layer's sparsity at the last level; 1.0 sets no bound."""
        most, least = self.layer_tolerances
        bounds = [self.table[-1] * most] if most > 1 else []
        bounds += [1 - (1 - self.table[-1]) * least] if least < 1 else []
        return {"max_layer_sparsity": min(0.99, *bounds)} if bounds else {}

    @property
    def final_sparsity(self) -> float | None:
        return self.table[-1]

    @property
    def length(self) -> int | None:
        return self.total_iters

    def advance(self, model: nn.Module, iteration: int) -> None:
        """A level is saved when it ends; the last one again after the step of each optimizer in the last iteration."""
        if not self._begun and self.writes_analysis:
            self._write_analysis(self.sparse_analysis(model))
        before, after = self.level, max(n for n, start in enumerate(self.level_starts) if start <= iteration)
        if before is not None and before < after:
            self._save_level(model, before)
        super().advance(model, iteration)
        if self.verbose:
            for name in self.names:
                zeros = count(get_parameter(unwrap(model), name).detach() == 0)
                logger.info("iteration %d: '%s' has %d zeros", iteration, name, zeros)
        reached = self.iteration is not None and self.iteration + 1 >= self.total_iters
        if iteration + 1 >= self.total_iters and not reached:
            self._save_level(model, after)
            self._stepped = weakref.WeakSet()

    @property
    def level(self) -> int | None:
        """The current level, from 0; None before the first."""
        return self._bound.state.get("level") if self._begun and self._bound is not None else None

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._after_step(optimizer)
        model, level = self.prepared, self.level
        if self._stepped is not None and optimizer not in self._stepped and model is not None and level is not None:
            self._stepped.add(optimizer)
            self._save_level(model, level)

    def sparse_analysis(self, model: nn.Module) -> LayerReport:
        """Parameters, MACs, and sparsity and energy kept at each level for every layer, by the current weights."""
        from gossamer.analysis.layers import layer_report

        owner = self._check_copy(model, "sparse_analysis")
        bound = self._bound
        if bound is None:
            raise GossamerError("sparse_analysis: the model was exported; prepare it again")
        shares = [bound.modifier.sparsities(bound, sparsity) for sparsity in self.table]
        by_name = {name: [share[name] for share in shares] for name in self.names}
        return layer_report(owner, by_name, self.table, self.example, self.skipped)

    def final_sparsities(self) -> Mapping[str, float]:
        """By the current weights; empty after the export and for custom mask generators."""
        bound = self._bound
        if bound is None or self.generator.mask_type is None:
            return {}
        return bound.modifier.sparsities(bound, self.table[-1])

    def _write_analysis(self, report: LayerReport) -> None:
        if not _is_first_rank():
            return
        written = [*report.save(self.output_dir)]
        if find_spec("matplotlib") is None:
            logger.warning("the analysis has no plot: matplotlib is missing (pip install 'gossamer[report]')")
        else:
            from gossamer.report.plots import plot_layers

            written.append(self.output_dir / "pruner_report.svg")
            plot_layers(report, written[-1])
        logger.info("analysis written: %s", ", ".join(str(path) for path in written))

    def _save_level(self, model: nn.Module, level: int) -> None:
        """Write a checkpoint of the model at the end of a level."""
        model, split = unwrap(model), is_distributed(model)
        if self.save_dir is None or not (_is_first_rank() or split):
            return
        path = self.save_dir / f"global_sparse_rate_{self.table[level]}.pth.tar"
        try:
            own = gathered_weights(model) if split else model.state_dict()
        except Exception as error:  # of the model's own code
            reason = f"{type(error).__name__}: {error}"
            raise GossamerError(f"{path}: the model's state_dict() fails ({reason}); set save_dir to null") from error
        state = {
            "model": own,
            "prune_step": level,
            "sparse_rate": self.table[level],
            "sparsities": {layer_path(name): measured_sparsity(weight_of(model, name)) for name in self.names},
        }
        if not _is_first_rank():
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as scratch:
                torch.save(state, scratch)
        except (OSError, RuntimeError) as error:
            raise GossamerError(f"{path}: cannot be written: {error}; choose another save_dir") from None
        logger.info("level %d of %d ended: %s", level + 1, len(self.table), path)


def _is_first_rank() -> bool:
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


# 2:4

LAYER_TYPES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention")


class AmpereScheduler(BaseScheduler):
    """2:4 with ASP; `init_optimizer` computes the masks.

    ASP does the work that a run of modifiers does for other schedulers, so this class overrides everything that uses
    the run, and `_run` stays None. `modifiers` are those of ASP's recipe.
    """

    uses_fx: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        *,
        mask_calculator: str = "m4n2_1d",
        whitelist: list[Any] | None = None,
        allow_recompute_mask: bool = False,
        allow_permutation: bool = False,
        verbosity: CountOrZero = 2,
    ) -> None:
        super().__init__(config)
        with within(*SCHEDULER_KWARGS):
            self._pattern = parse_calculator(mask_calculator)
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
        outside = [layer_path(name) for name in self.exclude]
        ASP.init_model_for_pruning(model, **self.arguments, disallowed_layer_names=outside)
        layers = ASP.layers(model)
        self.names = [name for name, reason in layers.items() if reason is None]
        self.skipped = {name: reason for name, reason in layers.items() if reason is not None}
        self.iteration, self._computed = None, False

    def init_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_prepared(None, "init_optimizer")
        super().init_optimizer(optimizer)
        model = self.prepared
        assert model is not None
        ASP.init_optimizer_for_pruning(optimizer, model=model)
        if not ASP.is_sparsity_enabled(model):
            ASP.compute_sparse_masks(model, example_inputs=self.example_inputs, parts=self.in_parts)
        self._computed = True

    def advance(self, model: nn.Module, iteration: int) -> None:
        if not self._computed:
            raise GossamerError("prune_model: call init_optimizer(optimizer) first, which computes the 2:4 masks")

    @property
    def final_sparsity(self) -> float | None:
        kept, of = getattr(self._pattern, "n", None), getattr(self._pattern, "m", None)
        return None if kept is None or of is None else 1 - kept / of

    @property
    def config_fingerprint(self) -> str:
        return repr(self.arguments)

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        return self.recipe(steps_per_epoch).modifiers

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        self._check_prepared(None, "recipe")
        return ASP.recipe(self.prepared)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        ASP.forget(super().export_sparse_model(model))
        return model


def layer_type(entry: object) -> type[nn.Module]:
    """The class of a layer from an entry of `whitelist`."""
    kind = getattr(nn, entry, None) if isinstance(entry, str) and entry in LAYER_TYPES else entry
    if not isinstance(kind, type):
        message = f"expected types of layers, or names from {', '.join(LAYER_TYPES)}, found {entry!r}"
        raise GossamerError(message, "whitelist")
    return kind


# Learned thresholds


class STRScheduler(BaseScheduler):
    """Learned thresholds.

    With `prune_rate`, the sparsity of all layers together follows a cubic schedule and reaches its final value after
    half of `total_iterations`: after each step all thresholds are pulled with one common strength. Without it, the
    weight decay of the thresholds determines the sparsity.
    """

    required_sparser = sparsers.STRFakeSparse
    field_keys: ClassVar[Mapping[str, Key]] = {
        "final_sparsity": (*SCHEDULER_KWARGS, "prune_rate"),
        "end_epoch": (*SCHEDULER_KWARGS, "total_iterations"),
    }

    def __init__(
        self,
        config: Config,
        *,
        prune_rate: PartialSparsity | None = None,
        total_iterations: Count | None = None,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        if prune_rate is not None and total_iterations is None:
            raise GossamerError("missing key; prune_rate needs it", *SCHEDULER_KWARGS, "total_iterations")
        self.rate, self.total = prune_rate, total_iterations
        self._check_modifiers()

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        [thresholds] = super().modifiers(steps_per_epoch)
        if self.rate is None or self.total is None:
            return [thresholds]
        target = {"start_epoch": 0.0, "end_epoch": self.total / steps_per_epoch, "final_sparsity": self.rate}
        return [self.build(STRPruningModifier, thresholds.model_dump(exclude_unset=True) | target)]

    @property
    def final_sparsity(self) -> float | None:
        return self.rate

    @property
    def length(self) -> int | None:
        return None if self.rate is None else self.total

    def after_step(self) -> None:
        self._control()

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        if unwrap(model) is self.prepared:
            self._control()
        return super().export_sparse_model(model)

    @torch.no_grad()
    def _control(self) -> None:
        """Pull all thresholds so that the sparsity of all layers together is the scheduled one, at the end exactly."""
        model = self.prepared
        if model is None or self.rate is None or self.total is None:
            return
        thresholds = {
            name: module.s
            for name, module in sparsers.fake_sparse_modules(model).items()
            if name in self.names and isinstance(module, sparsers.STRFakeSparse)
        }
        weights = {name: get_parameter(model, name).detach() for name in thresholds}
        done = 0 if self.iteration is None else self.iteration + 1
        tolerance = 0.0 if done >= self.total else CONTROLLED
        strength = controlled_pull(weights, thresholds, self.rate, fraction(done, 0, self.total // 2), tolerance)
        for name, s in pulled(weights, thresholds, strength).items():
            thresholds[name].copy_(s)


# Learned masks


class ProbMaskPruneScheduler(BaseScheduler):
    """Learned probabilities within a budget, which falls between warm-up and fine-tuning (Zhou et al. 2021).

    `prune_rate` is the final sparsity. The temperature falls from `tau` of the mask generator to 0.03 of it.
    """

    required_sparser = sparsers.ProbMaskFakeSparse
    recalibrates: ClassVar[bool] = True
    extra_state_keys: ClassVar[tuple[str, ...]] = ("statistics",)
    TAU_END: ClassVar[float] = 0.03

    def __init__(
        self,
        config: Config,
        *,
        prune_rate: PartialSparsity,
        total_iterations: Count,
        warmup_iteration_stamps: CountOrZero,
        finetune_iteration_stamps: CountOrZero,
        start_prune_rate: PartialSparsity = 0.0,
        seed: Seed = 0,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        if not warmup_iteration_stamps <= finetune_iteration_stamps <= total_iterations:
            message = (
                "expected warmup_iteration_stamps ≤ finetune_iteration_stamps ≤ total_iterations, found "
                f"{warmup_iteration_stamps}, {finetune_iteration_stamps} and {total_iterations}"
            )
            raise GossamerError(message, *SCHEDULER_KWARGS)
        self.rate, self.start_rate, self.total = prune_rate, start_prune_rate, total_iterations
        self.warmup, self.finetune, self.seed = warmup_iteration_stamps, finetune_iteration_stamps, seed
        self._pool = sparsers.Pool(seed=seed)
        self._statistics: dict[str, Tensor] = {}
        """Batch norm's, at the start and at the last step."""

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        fields: dict[str, Any] = {
            "params": ALL_PRUNABLE,
            **self.excluding,
            "start_epoch": self.warmup / steps_per_epoch,
            "finetune_epoch": self.finetune / steps_per_epoch,
            "end_epoch": self.total / steps_per_epoch,
            "final_sparsity": self.rate,
            "init_sparsity": self.start_rate,
            "seed": self.seed,
        }
        return [self.build(ProbMaskPruningModifier, fields)]

    @property
    def final_sparsity(self) -> float | None:
        return self.rate

    @property
    def length(self) -> int | None:
        return self.total

    def param_groups(
        self, model: nn.Module, weight_decay: float = 0.0, st_decay: float | None = 0.0
    ) -> list[dict[str, Any]]:
        """As in the base class; probabilities have no weight decay."""
        return super().param_groups(model, weight_decay, st_decay)

    def install(self, model: nn.Module) -> None:
        self._pool = sparsers.Pool(seed=self.seed)
        super().install(model)
        self._pool.begin([get_parameter(model, name).detach() for name in self.names])
        self._statistics = {}
        note_statistics(model, self._statistics)

    def make_sparser(self, weight: Tensor) -> sparsers.FakeSparse:
        return self.sparser(weight, self.generator, pool=self._pool, **self.config.kwargs["fake_sparse"])  # pyright: ignore[reportCallIssue]

    def rate_at(self, iteration: int) -> float:
        """The sparsity at an iteration: 0 in the warm-up, then a cubic ramp until fine-tuning."""
        if iteration < self.warmup:
            return 0.0
        return interpolate(self.start_rate, self.rate, fraction(iteration, self.warmup, self.finetune))

    def advance(self, model: nn.Module, iteration: int) -> None:
        if not self._pool.members:
            return
        start: float = getattr(self.generator, "tau", 1.0)
        tau = start * interpolate(1.0, self.TAU_END, fraction(iteration, self.warmup, self.total), "linear")
        self._pool.set(self.rate_at(iteration), tau, iteration)
        self._pool.project()

    def after_step(self) -> None:
        model = self.prepared
        if self._pool.members and model is not None:
            self._pool.project()
            note_statistics(model, self._statistics)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        """As in the base class; warns if batch norm was not recalibrated after training with random masks."""
        prepared = self.prepared
        super().export_sparse_model(model)
        if prepared is not None and unwrap(model) is prepared:
            warn_of_stale_statistics(prepared, self._statistics, "export_sparse_model")
            self._pool = sparsers.Pool(seed=self.seed)
        return model

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"statistics": dict(self._statistics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        entries = Item(state, "load_state_dict").entries()
        saved = entries["statistics"].fields([], STATISTICS) if "statistics" in entries else {}
        statistics = {key: vector().parse(item, StateLayout(self.names, {})) for key, item in saved.items()}
        problems = super().load_state_dict(state)
        self._statistics = statistics or self._statistics
        return problems


# ADMM


class ADMMScheduler(BaseScheduler):
    """ADMM towards a target sparsity for the first third of the epochs, then training with the zeros held.

    The target is in the config under `sparsity`: `{'target_sparsity': 0.9, 'uniform': True}`. The lengths come from
    `before_run`, or from `total_iters` and `iters_per_epoch`.
    """

    required_sparser = sparsers.FakeSparse
    field_keys: ClassVar[Mapping[str, Key]] = {
        "final_sparsity": ("sparsity", "target_sparsity"),
        "rho": (*SCHEDULER_KWARGS, "rho"),
        "end_epoch": (*SCHEDULER_KWARGS, "total_iters"),
        "update_frequency": (*SCHEDULER_KWARGS, "iters_per_epoch"),
    }

    def __init__(
        self,
        config: Config,
        *,
        total_iters: Count | None = None,
        iters_per_epoch: Count | None = None,
        rho: PositiveFactor | None = None,
        **excluded: Any,
    ) -> None:
        super().__init__(config, **excluded)
        if "target_sparsity" not in config.sparsity:
            message = "ADMMScheduler needs {'target_sparsity': …, 'uniform': True}"
            raise GossamerError(message, "sparsity")
        if self.generator.mask_type is None or self.generator.score_type != "magnitude":
            message = f"ADMMScheduler prunes by magnitude and does not support {type(self.generator).__name__}"
            raise GossamerError(message, "mask_generator")
        self.rho = rho
        self.total_iters, self.iters_per_epoch = total_iters, iters_per_epoch
        self._check_modifiers()

    @property
    def final_sparsity(self) -> float | None:
        return self.config.sparsity["target_sparsity"]

    @property
    def length(self) -> int | None:
        return self.total_iters

    def before_run(self, model: nn.Module, iters_per_epoch: int, max_iters: int) -> None:
        """Set the length of the training."""
        self._check_prepared(model, "before_run")
        if self._begun:
            raise GossamerError("before_run: pruning has already begun; call it before the first prune_model")
        for key, length in (("max_iters", max_iters), ("iters_per_epoch", iters_per_epoch)):
            if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MAX_COUNT:  # pyright: ignore[reportUnnecessaryIsInstance]
                expected = f"a number of iterations from 1 to {MAX_COUNT:,}"
                raise GossamerError(f"before_run: {key}: expected {expected}, found {length!r}")
        self.total_iters, self.iters_per_epoch = max_iters, iters_per_epoch
        self.install(model)

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        total = self.total_iters or 3
        epoch = self.iters_per_epoch or max(total // 30, 1)
        end = max(total // epoch // 3, 1) * epoch
        fields: dict[str, Any] = {
            "params": ALL_PRUNABLE,
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
        return [self.build(ADMMPruningModifier, fields)]

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        if self.total_iters is None:
            fix = "set total_iters and iters_per_epoch"
            raise GossamerError(Problem("the length of the training is not set", SCHEDULER_KWARGS, fix=fix))
        return super().recipe(steps_per_epoch)

    def advance(self, model: nn.Module, iteration: int) -> None:
        if self.total_iters is None:
            raise GossamerError("prune_model: call before_run(model, iters_per_epoch, max_iters) first")
        super().advance(model, iteration)
