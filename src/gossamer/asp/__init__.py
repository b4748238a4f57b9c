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
from typing import Any, ClassVar

import torch
from torch import nn

from gossamer.analysis.eligibility import ineligible
from gossamer.asp.selection import LAYERS, MaskCalculator, calculator, chosen, why_not
from gossamer.asp.state import State, save_graph, search
from gossamer.errors import GossamerError
from gossamer.graph import get_parameter, prunable, unwrap
from gossamer.graph.permutation import Permutation
from gossamer.recipe import Recipe
from gossamer.sparse import NM

__all__ = ["ASP", "set_identical_seed"]


class ASP:
    """Automatic sparsity. Calls that name no model mean the one initialised last."""

    _states: ClassVar[weakref.WeakKeyDictionary[nn.Module, State]] = weakref.WeakKeyDictionary()
    _last: ClassVar[weakref.ref[nn.Module] | None] = None
    _saving: ClassVar[tuple[bool, str]] = (False, ".")

    @classmethod
    def prune_trained_model(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer, *, example_inputs: Any = None
    ) -> None:
        """Prune to 2:4 now, and keep the zeros through training with this optimizer."""
        whitelist = [nn.Linear, nn.Conv2d, nn.MultiheadAttention]
        cls.init_model_for_pruning(model, "m4n2_1d", verbosity=2, whitelist=whitelist)
        cls.init_optimizer_for_pruning(optimizer, model=model)
        cls.compute_sparse_masks(model, example_inputs=example_inputs)

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
        through the logger `gossamer.asp`. Buffers that came with the model, from a checkpoint, are kept.
        """
        _expect(model, nn.Module, "init_model_for_pruning", "torch.nn.Module")
        owner = unwrap(model)
        again = cls._states.pop(owner, None)
        if again is not None:
            again.release()
        custom = dict(custom_layer_dict or {})
        leaves = {kind: list(names) for kind, names in (LAYERS | custom).items() if kind in (*whitelist, *custom)}
        for kind in whitelist:
            if kind not in leaves:
                raise GossamerError(
                    f"whitelist: how to prune {kind.__name__} is not known; name its weights in custom_layer_dict, "
                    f"as in {{{kind.__name__}: ['weight']}}"
                )
        state = State(weakref.ref(owner), calculator(mask_calculator), mask_calculator, verbosity)
        state.recompute, state.permute, state.saving = allow_recompute_mask, allow_permutation, cls._saving
        for name in chosen(model, leaves, allowed_layer_names, disallowed_layer_names):
            reason = why_not(get_parameter(owner, name), state.calculate)
            if reason is None:
                state.weights.append(name)
            else:
                state.skipped[name] = reason
        state.register_buffers(fresh=again is not None)
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
    def compute_sparse_masks(cls, model: nn.Module | None = None, *, example_inputs: Any = None) -> None:
        """Permute channels if allowed (the first time), then compute the masks and zero the weights.

        Again later, it needs `allow_recompute_mask`: the dense weights are put back first. When anything fails the
        model is as it was. `example_inputs` is what the permutation follows the model with.
        """
        cls._state(model).compute(example_inputs)

    @classmethod
    def restore_pruned_weights(cls, model: nn.Module | None = None) -> None:
        """Make the model dense again; needs `allow_recompute_mask`."""
        cls._state(model).restore()

    @classmethod
    def is_sparsity_enabled(cls, model: nn.Module | None = None) -> bool:
        """Whether some weight is masked now, for instance after a checkpoint was loaded."""
        return cls.already_init_asp_model(model) and cls._state(model).enabled

    @classmethod
    def already_init_asp_model(cls, model: nn.Module | None = None) -> bool:
        """Whether the model, or any that still exists, was initialised."""
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
        verbosity: int = 2,
    ) -> Permutation:
        """Only permute: the model computes what it did, and 2:4 would keep larger weights."""
        names = [name for name in prunable(model) if ineligible(get_parameter(model, name).shape) is None]
        found = search(model, names, NM(2, 4), [optimizer] if optimizer else [], example_inputs, verbosity)
        found.apply(model, optimizer)
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
        """Where `compute_sparse_masks` writes which layers share channels: JSON, and a picture."""
        cls._saving = (save_permutation_graph, os.fspath(permutation_output_dir))
        if cls.already_init_asp_model():
            state = cls._state(None)
            state.permute, state.saving = allow_permutation, cls._saving

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


def set_identical_seed(identical_seed: int = 1) -> None:
    """Not needed: the search for permutations takes no random seed, and all processes come to the same result."""
