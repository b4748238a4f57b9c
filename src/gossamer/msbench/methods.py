"""The schedulers that a config can name besides the base and levels: Ampere, STR, ProbMask, ADMM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.asp import ASP
from gossamer.asp.layers import parse_calculator
from gossamer.errors import GossamerError
from gossamer.model import get_parameter, unwrap
from gossamer.modifiers import ADMMPruningModifier, Modifier, ProbMaskPruningModifier, STRPruningModifier
from gossamer.modifiers.learned import (
    CONTROLLED,
    STATISTICS,
    controlled_pull,
    note_statistics,
    warn_of_stale_statistics,
)
from gossamer.modifiers.state import Item, Layout, vector
from gossamer.msbench import sparsers
from gossamer.msbench.config import NAME, Config
from gossamer.msbench.lowering import ADMM_ARGUMENTS, STR_ARGUMENTS, made
from gossamer.msbench.schedulers import BaseScheduler
from gossamer.msbench.selection import layer_of
from gossamer.quantities import MAX_COUNT, Count, CountOrZero, PartialSparsity, PositiveFactor, Seed
from gossamer.recipe import Recipe
from gossamer.sparse import fraction, interpolate, pulled

LAYER_TYPES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention")


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
        verbosity: CountOrZero = 2,
    ) -> None:
        super().__init__(config)
        self._pattern = parse_calculator(mask_calculator)  # which says what is wrong with it
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
        outside = [layer_of(name) for name in self.exclude]
        ASP.init_model_for_pruning(model, **self.arguments, disallowed_layer_names=outside)
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
            example, in_parts = self.followed
            ASP.compute_sparse_masks(model, example_inputs=example, parts=in_parts)
        self._computed = True

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        if not self._computed:
            raise GossamerError("prune_model: call init_optimizer(optimizer) first, which computes the 2:4 masks")

    @property
    def final_sparsity(self) -> float | None:
        kept, of = getattr(self._pattern, "n", None), getattr(self._pattern, "m", None)
        return None if kept is None or of is None else 1 - kept / of

    @property
    def settings(self) -> str:
        return repr(self.arguments)

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        return self.recipe(steps_per_epoch).modifiers

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        self._check_prepared(None, "recipe")
        return ASP.recipe(self._reference() if self._reference is not None else None)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        ASP.forget(super().export_sparse_model(model))
        return model


class STRScheduler(BaseScheduler):
    """Learned thresholds.

    With `prune_rate`, the sparsity of all layers together follows a cubic schedule and is final in the middle of
    `total_iterations`: after each step all thresholds are pulled with one common strength. Without it, the decay of
    the thresholds decides what comes out.
    """

    needs = sparsers.STRFakeSparse

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
            raise GossamerError(f"{NAME}: scheduler.kwargs.total_iterations: is missing beside prune_rate")
        self.rate, self.total = prune_rate, total_iterations
        self.modifiers()  # raises for invalid arguments

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        [thresholds] = super().modifiers(steps_per_epoch)
        if self.rate is None or self.total is None:
            return [thresholds]
        target = {"start_epoch": 0.0, "end_epoch": self.total / steps_per_epoch, "final_sparsity": self.rate}
        return [made(STRPruningModifier, thresholds.model_dump(exclude_unset=True) | target, STR_ARGUMENTS)]

    @property
    def final_sparsity(self) -> float | None:
        return self.rate

    @property
    def length(self) -> int | None:
        return None if self.rate is None else self.total

    def after_step(self) -> None:
        self._control()

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        prepared = self._reference() if self._reference is not None else None
        if unwrap(model) is prepared:
            self._control()
        return super().export_sparse_model(model)

    @torch.no_grad()
    def _control(self) -> None:
        """Pull all thresholds to where the sparsity of all layers together is the scheduled one, in the end exactly."""
        model = self._reference() if self._reference is not None else None
        if model is None or self.rate is None or self.total is None:
            return
        found = {name: node for name, node in sparsers.nodes(model).items() if name in self.names}
        thresholds = {name: node.s for name, node in found.items() if isinstance(node, sparsers.STRFakeSparse)}
        weights = {name: get_parameter(model, name).detach() for name in thresholds}
        done = 0 if self.iteration is None else self.iteration + 1
        tolerance = 0.0 if done >= self.total else CONTROLLED
        strength = controlled_pull(weights, thresholds, self.rate, fraction(done, 0, self.total // 2), tolerance)
        for name, s in pulled(weights, thresholds, strength).items():
            thresholds[name].copy_(s)


class ProbMaskPruneScheduler(BaseScheduler):
    """Learned probabilities within a budget, which falls from warm-up to fine-tuning (Zhou et al. 2021).

    `prune_rate` is the sparsity in the end. The temperature falls from `tau` of the mask generator to 0.03 of it.
    """

    needs = sparsers.ProbMaskFakeSparse
    recalibrates: ClassVar[bool] = True
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
        where = f"{NAME}: scheduler.kwargs"
        if not warmup_iteration_stamps <= finetune_iteration_stamps <= total_iterations:
            raise GossamerError(
                f"{where}: expected warmup_iteration_stamps ≤ finetune_iteration_stamps ≤ total_iterations, found "
                f"{warmup_iteration_stamps}, {finetune_iteration_stamps} and {total_iterations}"
            )
        self.rate, self.start_rate, self.total = prune_rate, start_prune_rate, total_iterations
        self.warmup, self.finetune, self.seed = warmup_iteration_stamps, finetune_iteration_stamps, seed
        self._pool = sparsers.Pool(seed=seed)
        self._statistics: dict[str, Tensor] = {}
        """Batch norm's, at the start and at the last step."""

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

    @property
    def final_sparsity(self) -> float | None:
        return self.rate

    @property
    def length(self) -> int | None:
        return self.total

    def param_groups(
        self, model: nn.Module, weight_decay: float = 0.0, st_decay: float | None = 0.0
    ) -> list[dict[str, Any]]:
        """As in the base; probabilities are not decayed."""
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

    def advance(self, model: nn.Module, iteration: int) -> dict[str, Tensor] | None:
        if not self._pool.members:
            return
        start: float = getattr(self.generator, "tau", 1.0)
        tau = start * interpolate(1.0, self.TAU_END, fraction(iteration, self.warmup, self.total), "linear")
        self._pool.set(self.rate_at(iteration), tau, iteration)
        self._pool.project()

    def after_step(self) -> None:
        model = self._reference() if self._reference is not None else None
        if self._pool.members and model is not None:
            self._pool.project()
            note_statistics(model, self._statistics)

    def export_sparse_model(self, model: nn.Module) -> nn.Module:
        """As in the base class; warns when batch norm was not recalibrated after training with random masks."""
        prepared = self._reference() if self._reference is not None else None
        if prepared is not None and unwrap(model) is prepared:
            warn_of_stale_statistics(prepared, self._statistics, "export_sparse_model")
        return super().export_sparse_model(model)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"statistics": dict(self._statistics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        entries = Item(state, "load_state_dict").entries()
        noted = entries["statistics"].fields([], STATISTICS) if "statistics" in entries else {}
        statistics = {key: vector().parse(item, Layout(self.names, {})) for key, item in noted.items()}
        problems = super().load_state_dict(state)
        self._statistics = statistics if "statistics" in entries else self._statistics
        return problems

    def exported(self) -> None:
        self._pool = sparsers.Pool(seed=self.seed)


class ADMMScheduler(BaseScheduler):
    """ADMM towards a target sparsity for the first third of the epochs, then training with the zeros held.

    The target stands in the config under `sparsity`: `{'target_sparsity': 0.9, 'uniform': True}`. The lengths come
    from `before_run`, or from `total_iters` and `iters_per_epoch`.
    """

    needs = sparsers.FakeSparse

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
            raise GossamerError(f"{NAME}: ADMMScheduler needs 'sparsity': {{'target_sparsity': …, 'uniform': True}}")
        if self.generator.mask_type is None or self.generator.score_type != "magnitude":
            kind = type(self.generator).__name__
            raise GossamerError(f"{NAME}: mask_generator: ADMMScheduler goes by magnitude and cannot use {kind}")
        self.rho = rho
        self.lengths: tuple[int | None, int | None] = (total_iters, iters_per_epoch)
        self.modifiers()  # so that what is wrong is told at once

    @property
    def final_sparsity(self) -> float | None:
        return self.config.sparsity["target_sparsity"]

    @property
    def length(self) -> int | None:
        return self.lengths[0]

    def before_run(self, model: nn.Module, iters_per_epoch: int, max_iters: int) -> None:
        """Say how long the training is."""
        self._check_prepared(model, "before_run")
        if self._begun:
            raise GossamerError("before_run: pruning has begun already; call it before the first prune_model")
        for key, length in (("max_iters", max_iters), ("iters_per_epoch", iters_per_epoch)):
            if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= MAX_COUNT:  # pyright: ignore[reportUnnecessaryIsInstance]
                wanted = f"a number of iterations from 1 to {MAX_COUNT:,}"
                raise GossamerError(f"before_run: {key}: expected {wanted}, found {length!r}")
        self.lengths = max_iters, iters_per_epoch
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


def layer_type(entry: Any) -> type[nn.Module]:
    found = getattr(nn, entry, None) if isinstance(entry, str) and entry in LAYER_TYPES else entry
    if not isinstance(found, type):
        known = ", ".join(LAYER_TYPES)
        raise GossamerError(f"whitelist: expected types of layers, or names from {known}, found {entry!r}")
    return found
