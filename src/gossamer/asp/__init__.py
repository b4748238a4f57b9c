"""The door for people who come from NVIDIA's ASP: 2:4 sparsity in two lines.

    from gossamer.asp import ASP

    ASP.prune_trained_model(model, optimizer)

All calls of the original are here. What they know lives with the model, so
that two models, a second run and an exception half-way do not disturb each
other; masks are buffers of the layers, under the names that old checkpoints
have.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from gossamer.analysis.hardware import ineligible
from gossamer.asp.graphs import save_graph, search
from gossamer.asp.selection import (
    LAYERS,
    MaskCalculator,
    calculator,
    chosen,
    leaves_by_type,
    outputs_first,
    why_not,
)
from gossamer.asp.state import State, mask_buffers
from gossamer.errors import GossamerError
from gossamer.model import embedding_tables, expect_model, get_parameter, left_dense, prunable, unwrap
from gossamer.model.additions import drop_buffers
from gossamer.model.permute import Permutation
from gossamer.recipe import Recipe
from gossamer.sparse import NM

__all__ = ["ASP", "create_mask", "set_identical_seed"]


class ASP:
    """Automatic sparsity. Calls that name no model mean the one initialised last."""

    _states: ClassVar[weakref.WeakKeyDictionary[nn.Module, State]] = weakref.WeakKeyDictionary()
    _last: ClassVar[weakref.ref[nn.Module] | None] = None
    _saving: ClassVar[tuple[bool, Path | None]] = (True, None)
    """Whether to permute at all, and where to write graphs, for models that are initialised from now on."""

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
        """Prune to 2:4 now, and keep the zeros through training with this optimizer; a pruned model stays as it is."""
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
        """Give the layers their mask buffers; all weights stay as they are until `compute_sparse_masks`.

        `mask_calculator`: a pattern (`m4n2_1d`, `2:4`, `m4n2_2d_best`, `m4n2_2d_greedy`, …) or a function from a
        weight to its mask. `verbosity`: 0 errors only, 1 with warnings, 2 with what was done, 3 with details, all
        through the logger `gossamer.asp`. Masks that the model has already, from an earlier call or a checkpoint,
        stay in force.
        """
        expect_model(model, "init_model_for_pruning")
        _expect(verbosity, int, "verbosity", "number from 0 to 3")
        owner = unwrap(model)
        state = State(weakref.ref(owner), calculator(mask_calculator), mask_calculator, verbosity)
        allowed, state.saving = cls._saving
        state.recompute, state.permute = allow_recompute_mask, allow_permutation and allowed
        leaves = leaves_by_type(whitelist, custom_layer_dict or {})
        named = allowed_layer_names is not None or bool(custom_layer_dict)
        tables = set[str]() if named else embedding_tables(owner)
        state.skipped = left_dense(owner)
        for name, home in chosen(model, leaves, allowed_layer_names, disallowed_layer_names).items():
            reason = why_not(owner, name, get_parameter(owner, name), state.calculate, name in tables)
            if reason is None:
                state.weights[name] = home
            else:
                state.skipped[name] = reason
        with torch.inference_mode(False):
            state.take_over(cls._states.pop(owner, None))
        cls._states[owner] = state
        cls._last = weakref.ref(owner)
        state.tell_skipped()

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer, *, model: nn.Module | None = None) -> None:
        """Mask gradients before and weights after each step of the optimizer; it finds its model by its parameters."""
        _expect(optimizer, torch.optim.Optimizer, "init_optimizer_for_pruning", "torch.optim.Optimizer")
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        states = [cls._state(model)] if model is not None or not cls._states else list(cls._states.values())
        own = [s for s in states if any(id(parameter) in held for parameter in s.model().parameters())]
        if not own:
            raise GossamerError(
                "init_optimizer_for_pruning: the optimizer holds no parameter of a model that was initialised; "
                "call init_model_for_pruning(model) first, and pass an optimizer of that model"
            )
        for state in own:
            state.hook(optimizer)

    @classmethod
    def compute_sparse_masks(
        cls, model: nn.Module | None = None, *, example_inputs: Any = None, effort: float = 1.0, parts: bool = False
    ) -> None:
        """Permute channels if allowed (the first time), then compute the masks and zero the weights.

        Again later, it needs `allow_recompute_mask`: the dense weights are put back first. When anything fails the
        model is as it was. `example_inputs` is what the permutation follows the model with; `effort` says how long
        it searches, 1 being the usual; `parts` lets a model that chooses its path by values be followed in parts.
        """
        cls._state(model).compute(example_inputs, effort, parts)

    @classmethod
    def restore_pruned_weights(cls, model: nn.Module | None = None) -> None:
        """Make the model dense again; needs `allow_recompute_mask`."""
        cls._state(model).restore()

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """Take ASP's buffers out of a model, or of a copy of one, and let its optimizers go; the zeros stay."""
        owner = unwrap(model)
        state = cls._states.pop(owner, None)
        if state is not None:
            for optimizer in list(state.optimizers):
                state.release(optimizer)
        drop_buffers(owner)

    @classmethod
    def is_sparsity_enabled(cls, model: nn.Module | None = None) -> bool:
        """Whether some weight is masked now, for instance after a checkpoint was loaded."""
        return cls.already_init_asp_model(model) and cls._state(model).enabled

    @classmethod
    def already_init_asp_model(cls, model: nn.Module | None = None) -> bool:
        """Whether the model was initialised; without one, whether the model initialised last still exists."""
        if model is not None:
            return unwrap(model) in cls._states
        return cls._last is not None and cls._last() is not None

    @classmethod
    def layers(cls, model: nn.Module | None = None) -> dict[str, str | None]:
        """Every weight that was considered: None when it takes part, else the reason why it is left dense."""
        state = cls._state(model)
        return {**dict.fromkeys(state.weights), **state.skipped}

    @classmethod
    def permutation(cls, model: nn.Module | None = None) -> Permutation | None:
        """What the last permutation did, layer by layer; None before it."""
        return cls._state(model).permutation

    @classmethod
    def recipe(cls, model: nn.Module | None = None) -> Recipe:
        """The same as a recipe: a manager that runs it comes to the same weights."""
        return cls._state(model).recipe()

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
        """Only permute: the model computes what it did, and 2:4 would keep larger weights.

        Moments of the `optimizer` and masks that ASP has put on the model go along.
        """
        expect_model(model, "permute_model")
        names = [
            name
            for name in prunable(model)
            if ineligible(outputs_first(model, name, get_parameter(model, name)).shape) is None
        ]
        optimizers = [optimizer] if optimizer is not None else []
        found = search(model, names, NM(2, 4), optimizers, verbosity, (example_inputs, effort, parts))
        found.apply(model, optimizers, mask_buffers(model, found.moves))
        if dump_fx_graph:
            save_graph(found, Path(save_dumped_fx_graph))
        return found

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = False,
        save_permutation_graph: bool = False,
        permutation_output_dir: str | os.PathLike[str] = ".",
    ) -> None:
        """Whether to permute, and where `compute_sparse_masks` writes which layers share channels (JSON, a picture).

        Holds for the model initialised last and for those after it; what was forbidden there stays so.
        """
        cls._saving = (allow_permutation, Path(permutation_output_dir) if save_permutation_graph else None)
        if cls.already_init_asp_model():
            state = cls._state(None)
            state.permute, state.saving = state.permute and allow_permutation, cls._saving[1]

    @classmethod
    def _state(cls, model: nn.Module | None) -> State:
        owner = unwrap(model) if model is not None else None if cls._last is None else cls._last()
        state = cls._states.get(owner) if owner is not None else None
        if state is None:
            raise GossamerError("the model is not initialised; call ASP.init_model_for_pruning(model) first")
        return state


def _expect(given: object, kind: type, call: str, name: str) -> None:
    if not isinstance(given, kind):
        raise GossamerError(f"{call}: expected a {name}, found {type(given).__name__}")


def create_mask(tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> torch.Tensor:
    """The mask of a pattern on one tensor, ones and zeros of its type; the pattern says the density."""
    found = calculator(pattern)
    rows = tensor.detach() if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    return cast(NM, found).keep_largest(rows).reshape(tensor.shape).to(tensor.dtype)


def set_identical_seed(identical_seed: int = 1) -> None:
    """Not needed: the search for permutations takes no random seed, and all processes come to the same result."""
