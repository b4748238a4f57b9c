"""NVIDIA ASP's interface: 2:4 sparsity in two lines.

    from gossamer.asp import ASP

    ASP.prune_trained_model(model, optimizer)

All calls of the original are supported. State is kept per model, so that several models, a second run or an exception
do not interfere. Masks are buffers of the layers, with the names that checkpoints of the original have.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from gossamer.analysis.hardware import ineligible
from gossamer.asp.pruner import (
    LAYERS,
    MaskCalculator,
    Pruner,
    Search,
    leaves_by_type,
    mask_buffers,
    outputs_first,
    parse_calculator,
    reason_dense,
    save_graph,
    select_weights,
)
from gossamer.errors import GossamerError
from gossamer.model import embedding_tables, expect_model, get_parameter, left_dense, prunable, unwrap
from gossamer.model.additions import drop_buffers
from gossamer.model.permute import Permutation
from gossamer.sparse import NM

if TYPE_CHECKING:
    from gossamer.recipe import Recipe

__all__ = ["ASP", "create_mask", "set_identical_seed"]


class ASP:
    """Automatic sparsity. Without a `model`, calls are about the one initialised last."""

    _pruners: ClassVar[weakref.WeakKeyDictionary[nn.Module, Pruner]] = weakref.WeakKeyDictionary()
    _last: ClassVar[weakref.ref[nn.Module] | None] = None
    _saving: ClassVar[tuple[bool, Path | None]] = (True, None)
    """Whether to permute, and where to write graphs, for models initialised from now on."""

    @classmethod
    def prune_trained_model(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        example_inputs: Any = None,
        effort: float = 1.0,
        parts: bool = False,
    ) -> None:
        """Prune to 2:4 now, and keep the zeros in training with this optimizer. Keeps the masks of a pruned model."""
        whitelist = [nn.Linear, nn.Conv2d, nn.MultiheadAttention]
        cls.init_model_for_pruning(model, "m4n2_1d", verbosity=2, whitelist=whitelist)
        cls.init_optimizer_for_pruning(optimizer, model=model)
        if not cls.is_sparsity_enabled(model):
            cls.compute_sparse_masks(model, example_inputs=example_inputs, effort=effort, parts=parts)

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: MaskCalculator = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type[nn.Module]] = tuple(LAYERS),
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: Mapping[type[nn.Module], Sequence[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Add mask buffers to the layers; weights do not change before `compute_sparse_masks`.

        `mask_calculator` is a pattern (`m4n2_1d`, `2:4`, `m4n2_2d_best`, `m4n2_2d_greedy`, …) or a function from a
        weight to its mask. `verbosity` selects what the logger `gossamer.asp` gets: 0 errors, 1 warnings, 2 results,
        3 details. Masks that the model already has, from an earlier call or a checkpoint, stay in force.
        """
        expect_model(model, "init_model_for_pruning")
        _expect(verbosity, int, "verbosity", "number from 0 to 3")
        owner = unwrap(model)
        pruner = Pruner(weakref.ref(owner), parse_calculator(mask_calculator), mask_calculator, verbosity)
        allowed, pruner.graph_folder = cls._saving
        pruner.recompute, pruner.permute = allow_recompute_mask, allow_permutation and allowed
        leaves = leaves_by_type(whitelist, custom_layer_dict or {})
        named = allowed_layer_names is not None or bool(custom_layer_dict)
        tables = set[str]() if named else embedding_tables(owner)
        pruner.skipped = left_dense(owner)
        for name, home in select_weights(model, leaves, allowed_layer_names, disallowed_layer_names).items():
            reason = reason_dense(owner, name, get_parameter(owner, name), pruner.calculator, name in tables)
            if reason is None:
                pruner.weights[name] = home
            else:
                pruner.skipped[name] = reason
        with torch.inference_mode(False):
            pruner.replace(cls._pruners.pop(owner, None))
        cls._pruners[owner] = pruner
        cls._last = weakref.ref(owner)
        pruner.log_layers()

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer, *, model: nn.Module | None = None) -> None:
        """Mask gradients before and weights after each step of the optimizer, whose parameters identify the model."""
        _expect(optimizer, torch.optim.Optimizer, "init_optimizer_for_pruning", "torch.optim.Optimizer")
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        pruners = [cls._pruner(model)] if model is not None or not cls._pruners else list(cls._pruners.values())
        own = [one for one in pruners if any(id(parameter) in held for parameter in one.model().parameters())]
        if not own:
            raise GossamerError(
                "init_optimizer_for_pruning: the optimizer holds no parameter of a model that was initialised; "
                "call init_model_for_pruning(model) first, and pass an optimizer of that model"
            )
        for pruner in own:
            pruner.hook(optimizer)

    @classmethod
    def compute_sparse_masks(
        cls, model: nn.Module | None = None, *, example_inputs: Any = None, effort: float = 1.0, parts: bool = False
    ) -> None:
        """Permute channels if allowed (the first time only), compute the masks and zero the weights.

        To repeat it, pass `allow_recompute_mask` to `init_model_for_pruning`: the dense weights are restored first. If
        anything fails, the model is unchanged. The permutation traces the model with `example_inputs`; `effort`
        scales its search time; `parts` traces a model with data-dependent control flow in parts.
        """
        cls._pruner(model).compute(Search(example_inputs, effort, parts))

    @classmethod
    def restore_pruned_weights(cls, model: nn.Module | None = None) -> None:
        """Make the model dense again; needs `allow_recompute_mask`."""
        cls._pruner(model).restore()

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """Remove ASP's buffers from a model or a copy of it, and its hooks from the optimizers; the zeros stay."""
        owner = unwrap(model)
        pruner = cls._pruners.pop(owner, None)
        if pruner is not None:
            for optimizer in list(pruner.optimizers):
                pruner.unhook(optimizer)
        drop_buffers(owner)

    @classmethod
    def is_sparsity_enabled(cls, model: nn.Module | None = None) -> bool:
        """Whether any weight is masked now, for instance after loading a checkpoint."""
        return cls.already_init_asp_model(model) and cls._pruner(model).enabled

    @classmethod
    def already_init_asp_model(cls, model: nn.Module | None = None) -> bool:
        """Whether the model was initialised; without one, whether the model initialised last still exists."""
        if model is not None:
            return unwrap(model) in cls._pruners
        return cls._last is not None and cls._last() is not None

    @classmethod
    def layers(cls, model: nn.Module | None = None) -> dict[str, str | None]:
        """Every weight considered: None if it is pruned, otherwise the reason why it stays dense."""
        pruner = cls._pruner(model)
        return {**dict.fromkeys(pruner.weights), **pruner.skipped}

    @classmethod
    def permutation(cls, model: nn.Module | None = None) -> Permutation | None:
        """The last permutation, layer by layer; None before it."""
        return cls._pruner(model).permutation

    @classmethod
    def recipe(cls, model: nn.Module | None = None) -> Recipe:
        """An equivalent recipe: a manager that runs it computes the same weights."""
        return cls._pruner(model).recipe()

    @classmethod
    def permute_model(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str | os.PathLike[str] = "./model_permutation_graph.json",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        example_inputs: Any = None,
        effort: float = 1.0,
        parts: bool = False,
        verbosity: int = 2,
    ) -> Permutation:
        """Permute channels only: the model's outputs do not change, and 2:4 would keep larger weights.

        Moments of the `optimizer` and ASP's masks are permuted along.
        """
        expect_model(model, "permute_model")
        names = [
            name
            for name in prunable(model)
            if ineligible(outputs_first(model, name, get_parameter(model, name)).shape) is None
        ]
        optimizers = [optimizer] if optimizer is not None else []
        permutation = Search(example_inputs, effort, parts).run(model, names, NM(2, 4), optimizers, verbosity)
        permutation.apply(model, optimizers, mask_buffers(model, permutation.moves))
        if dump_fx_graph:
            save_graph(permutation, Path(save_dumped_fx_graph))
        return permutation

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = False,
        save_permutation_graph: bool = False,
        permutation_output_dir: str | os.PathLike[str] = ".",
    ) -> None:
        """Whether to permute, and where `compute_sparse_masks` writes which layers share channels (JSON, a plot).

        Applies to the model initialised last and to later ones; a permutation that was forbidden there stays so.
        """
        cls._saving = (allow_permutation, Path(permutation_output_dir) if save_permutation_graph else None)
        if cls.already_init_asp_model():
            pruner = cls._pruner(None)
            pruner.permute, pruner.graph_folder = pruner.permute and allow_permutation, cls._saving[1]

    @classmethod
    def _pruner(cls, model: nn.Module | None) -> Pruner:
        owner = unwrap(model) if model is not None else None if cls._last is None else cls._last()
        pruner = cls._pruners.get(owner) if owner is not None else None
        if pruner is None:
            raise GossamerError("the model is not initialised; call ASP.init_model_for_pruning(model) first")
        return pruner


def _expect(given: object, kind: type, call: str, name: str) -> None:
    if not isinstance(given, kind):
        raise GossamerError(f"{call}: expected a {name}, found {type(given).__name__}")


def create_mask(tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> torch.Tensor:
    """The mask of a pattern on one tensor, in its dtype. `density` is ignored: the pattern determines it."""
    calculator = cast(NM, parse_calculator(pattern))
    rows = tensor.detach() if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    return calculator.keep_largest(rows).reshape(tensor.shape).to(tensor.dtype)


def set_identical_seed(identical_seed: int = 1) -> None:
    """Not needed: the search for permutations uses no random seed, and every rank computes the same result."""
