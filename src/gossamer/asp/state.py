"""What ASP knows of one model: its masks, where they lie, and the optimizers that keep them.

The masks of a checkpoint are the buffers of the layers; the engine's own
(`engine/masks.py`) follow them and do the zeroing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.asp.graphs import Options, logger, make_folder, save_graph, search
from gossamer.asp.selection import Calculate, MaskCalculator, buffer_home, outputs_first
from gossamer.engine.masks import Masks
from gossamer.engine.optimizer import with_gradients
from gossamer.errors import GossamerError, SparsityError
from gossamer.model import first_names, get_parameter, has_parameter, weight_of
from gossamer.model.additions import MASK, PRUNED, buffer_name
from gossamer.model.parameters import empties_a_norm
from gossamer.model.permute import Permutation, state_of
from gossamer.modifiers.pruning import GMPruningModifier
from gossamer.recipe import Recipe
from gossamer.sparse import NM, share_of_zeros, zero_where

GRAPH_FILE = "model_offline_permutation_graph.json"


@dataclass
class State:
    """What ASP knows of one model."""

    reference: weakref.ref[nn.Module]
    calculate: Calculate
    given: MaskCalculator
    verbosity: int
    recompute: bool = False
    permute: bool = True
    saving: Path | None = None
    weights: dict[str, str] = field(default_factory=dict[str, str])
    """Clean names, each with the weight's name in the layer that holds its buffers."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    permutation: Permutation | None = None
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = field(
        default_factory=weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]]
    )
    _masks: Masks = field(default_factory=Masks)
    _read: dict[str, tuple[weakref.ref[Tensor], int]] = field(
        default_factory=dict[str, tuple[weakref.ref[Tensor], int]]
    )

    def model(self) -> nn.Module:
        model = self.reference()
        if model is None:
            raise GossamerError("the model that ASP was initialised with no longer exists")
        return model

    # Buffers: what a checkpoint holds

    def take_over(self, before: State | None) -> None:
        """Give the layers their buffers; masks that are there stay in force, also those of an earlier call."""
        for name in self.weights:
            self.mask(name)
            self.pruned(name)
        if before is None:
            return
        for name in before.weights.keys() - self.weights.keys():
            before.drop(name)
        for name, home in before.weights.items():
            if name in self.weights and not self.recompute:
                owner, leaf = buffer_home(self.model(), home)
                owner._buffers.pop(buffer_name(leaf, PRUNED), None)  # pyright: ignore[reportPrivateUsage]
        for optimizer in list(before.optimizers):
            before.release(optimizer)
            self.hook(optimizer)
        self.permutation = before.permutation

    @torch.no_grad()
    def drop(self, name: str) -> None:
        """Let a layer go: dense again if its values were kept, and without buffers."""
        if self.recompute and has_parameter(self.model(), name):
            get_parameter(self.model(), name).copy_(self._dense(name))
        owner, leaf = buffer_home(self.model(), self.weights[name])
        for kind in (MASK, PRUNED):
            owner._buffers.pop(buffer_name(leaf, kind), None)  # pyright: ignore[reportPrivateUsage]

    def mask(self, name: str) -> Tensor:
        """True where the weight is kept. A layer that was replaced, as quantization does, gets its mask anew."""

        def anew(weight: Tensor) -> Tensor:
            held = self._masks.kept_by(0, name)
            same = held is not None and held.shape == weight.shape
            return cast(Tensor, held) if same else torch.ones_like(weight, dtype=torch.bool)

        return self._buffer(name, MASK, anew)

    def pruned(self, name: str) -> Tensor | None:
        """The values that are masked, where they are kept."""
        return self._buffer(name, PRUNED, lambda w: torch.zeros_like(w, device="cpu")) if self.recompute else None

    def _buffer(self, name: str, kind: str, anew: Callable[[Tensor], Tensor]) -> Tensor:
        owner, leaf = buffer_home(self.model(), self.weights[name])
        found = owner._buffers.get(buffer_name(leaf, kind))  # pyright: ignore[reportPrivateUsage]
        weight = get_parameter(self.model(), name).detach()
        if found is None or found.shape != weight.shape:
            found = anew(weight)
            owner.register_buffer(buffer_name(leaf, kind), found)
        return found

    def _drop_missing(self) -> None:
        """Layers that are no longer in the model take no part."""
        for name in [name for name in self.weights if not has_parameter(self.model(), name)]:
            del self.weights[name]
            self._masks.forget(name)
            self.skipped[name] = "it is no longer in the model"

    @property
    def enabled(self) -> bool:
        self._drop_missing()
        return any(not bool(self.mask(name).all()) for name in self.weights)

    # Computing

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute(self, example_inputs: Any, effort: float, parts: bool) -> None:
        if not self.weights:
            raise GossamerError(f"no layer can be pruned: {self._reasons() or 'the whitelist matches none'}")
        if self.enabled and not self.recompute:
            raise GossamerError(
                "the masks were computed already, and the pruned values are gone; to compute them again later, "
                "call init_model_for_pruning with allow_recompute_mask=True"
            )
        for name in self.weights:
            if bool(get_parameter(self.model(), name).detach().isnan().any()):
                raise GossamerError(f"'{name}' cannot be pruned: it holds NaN; repair the weights first")
        if self.saving is not None:
            make_folder(self.saving)
        again = self.enabled
        sparse = {name: get_parameter(self.model(), name).detach().clone() for name in self.weights if again}
        for name in sparse:
            get_parameter(self.model(), name).copy_(self._dense(name))
        moved: Permutation | None = None
        try:
            if self.permute and not again and self.permutation is None:
                found = self._permutation((example_inputs, effort, parts))
                if found is not None:
                    found.apply(self.model(), list(self.optimizers))
                moved = found
            masks = {name: self._computed(name) for name in self.weights}
        except BaseException:
            if moved is not None:
                moved.inverse.apply(self.model(), list(self.optimizers))
            for name, values in sparse.items():
                get_parameter(self.model(), name).copy_(values)
            raise
        self.permutation = moved or self.permutation
        for name, keep in masks.items():
            weight, pruned = get_parameter(self.model(), name), self.pruned(name)
            if pruned is not None:
                pruned.copy_(weight.masked_fill(keep, 0))
            self.mask(name).copy_(keep)
        self._synchronise()
        self._masks.apply(self.model())
        self._tell_sparsity(masks)
        if moved is not None and self.saving is not None:
            save_graph(moved, self.saving / GRAPH_FILE)

    @torch.no_grad()
    def restore(self) -> None:
        if not self.enabled:
            return
        if not self.recompute:
            raise GossamerError(
                "the pruned values are gone; to restore them later, call init_model_for_pruning "
                "with allow_recompute_mask=True"
            )
        for name in self.weights:
            pruned = self.pruned(name)
            get_parameter(self.model(), name).copy_(self._dense(name))
            self.mask(name).fill_(True)
            if pruned is not None:
                pruned.zero_()
        self._say(2, "sparsity is off: the weights of %d layers are dense again", len(self.weights))

    def _dense(self, name: str) -> Tensor:
        """The weight with its pruned values put back."""
        weight, pruned = get_parameter(self.model(), name).detach(), self.pruned(name)
        return weight if pruned is None else torch.where(self.mask(name), weight, pruned.to(weight.device))

    def _computed(self, name: str) -> Tensor:
        weight = weight_of(self.model(), name)
        try:
            if isinstance(self.calculate, NM):
                keep = self.calculate.keep_largest(outputs_first(self.model(), name, weight))
                return outputs_first(self.model(), name, keep)
            keep = cast(object, self.calculate(weight))
        except SparsityError as error:
            raise GossamerError(f"'{name}' cannot be pruned: {error}") from error
        if not isinstance(keep, Tensor) or keep.shape != weight.shape:
            shown = f"shape {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise GossamerError(
                f"mask_calculator: expected a mask of shape {tuple(weight.shape)} for '{name}', found {shown}"
            )
        if not bool(((keep == 0) | (keep == 1)).all()):
            raise GossamerError(f"mask_calculator: expected a mask of zeros and ones for '{name}', found other values")
        if empties_a_norm(self.model(), name, keep != 0):
            raise GossamerError(
                f"mask_calculator: the mask of '{name}' leaves nothing of a row that the layer divides by its norm; "
                "keep a weight in each, or remove the norm from the layer first"
            )
        return keep.to(weight.device, torch.bool)

    def _permutation(self, options: Options) -> Permutation | None:
        if not (isinstance(self.calculate, NM) and self.calculate.permutable):
            self._say(1, "channels are not permuted: that serves patterns N:M along input channels only")
            return None
        optimizers, names = list(self.optimizers), list(self.weights)
        return search(self.model(), names, self.calculate, optimizers, self.verbosity, options)

    # Training

    def hook(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self.optimizers:
            self._tell_of_old_moments(optimizer)
        self.release(optimizer)

        def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_gradients(args, kwargs, self._mask_gradients, every=True)

        def after(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.apply_masks()

        self.optimizers[optimizer] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self.apply_masks()

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Let go of an optimizer."""
        for handle in self.optimizers.pop(optimizer, []):
            handle.remove()

    def apply_masks(self) -> None:
        """Zero the masked weights; nothing when the model is gone and only parts of it live on."""
        if self.reference() is not None:
            self._synchronise()
            self._masks.apply(self.model())

    def _tell_of_old_moments(self, optimizer: torch.optim.Optimizer) -> None:
        moves = [] if self.permutation is None else list(self.permutation.moves)
        if any(state_of(optimizer, get_parameter(self.model(), name)) for name in moves):
            self._say(
                1,
                "the optimizer was not known when the channels were permuted: what it remembers is in the old order; "
                "call init_optimizer_for_pruning before compute_sparse_masks",
            )

    def _mask_gradients(self) -> None:
        if self.reference() is None:
            return
        self._synchronise()
        for name in self._masks.names():
            gradient = get_parameter(self.model(), name).grad
            if gradient is not None:
                zero_where(gradient, self._masks.zeros(name).to(gradient.device))

    def _synchronise(self) -> None:
        """Follow the buffers, which a checkpoint may have overwritten since."""
        self._drop_missing()
        for name in self.weights:
            mask = self.mask(name)
            version = -1 if mask.is_inference() else mask._version  # pyright: ignore[reportPrivateUsage]
            known, seen = self._read.get(name, (None, -1))
            if known is not None and known() is mask and seen == version >= 0:
                continue
            self._read[name] = (weakref.ref(mask), version)
            if bool(mask.all()):
                self._masks.release(0, name)
            else:
                self._masks.hold(0, name, mask, get_parameter(self.model(), name))

    # Telling

    def recipe(self) -> Recipe:
        if not isinstance(self.calculate, NM):
            raise GossamerError("recipe: a mask_calculator that is a function cannot be written down")
        sparsity = self.calculate.sparsity
        modifier = GMPruningModifier(
            params=list(self.weights),
            mask_type=cast(str, self.given),
            permute=self.permute and self.calculate.permutable,
            init_sparsity=sparsity,
            final_sparsity=sparsity,
            start_epoch=0.0,
            end_epoch=0.0,
            update_frequency=1.0,
        )
        return Recipe.of([modifier], name="asp")

    def tell_skipped(self) -> None:
        for name in self.weights:
            self._say(3, "'%s' takes part", name)
        if self.skipped:
            total = len(self.weights) + len(self.skipped)
            self._say(1, "%d of %d layers stay dense: %s", len(self.skipped), total, self._reasons())

    def _reasons(self, shown: int = 4) -> str:
        told = [f"'{name}' ({reason})" for name, reason in list(self.skipped.items())[:shown]]
        more = len(self.skipped) - shown
        return ", ".join(told) + (f" and {more} more; ASP.layers() lists all" if more > 0 else "")

    def _tell_sparsity(self, masks: Mapping[str, Tensor]) -> None:
        for name, keep in masks.items():
            self._say(2, "'%s' is %.2f%% sparse", name, 100 * share_of_zeros(keep))

    def _say(self, level: int, message: str, *args: object) -> None:
        if self.verbosity >= level:
            logger.log({1: logging.WARNING, 2: logging.INFO}.get(level, logging.DEBUG), message, *args)


def mask_buffers(model: nn.Module, names: Iterable[str]) -> dict[str, list[Tensor]]:
    """The masks and pruned values that ASP has put on a model, by the weights they belong to."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for alias, name in first_names(model).items():  # a tied weight has its buffers in one of its layers
        if name in found:
            owner, leaf = buffer_home(model, alias)
            kept = dict(owner.named_buffers(recurse=False))
            found[name] += [kept[key] for kind in (MASK, PRUNED) if (key := buffer_name(leaf, kind)) in kept]
    return found
