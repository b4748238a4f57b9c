"""What ASP knows of one model: its masks, where they lie, and the optimizers that keep them.

The masks of a checkpoint are the buffers of the layers; the engine's own
(`training/masks.py`) follow them and do the zeroing.
"""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.asp.selection import Calculate, MaskCalculator, buffer_home
from gossamer.errors import GossamerError, SparsityError
from gossamer.graph import get_parameter
from gossamer.graph.permutation import Permutation, find
from gossamer.modifiers.pruning import GMPruningModifier
from gossamer.recipe import Recipe
from gossamer.sparse import NM, zero_where
from gossamer.training.closures import with_gradients
from gossamer.training.masks import Masks

logger = logging.getLogger("gossamer.asp")

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
    saving: tuple[bool, str] = (False, ".")
    weights: list[str] = field(default_factory=list[str])
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

    def register_buffers(self, fresh: bool) -> None:
        for name in self.weights:
            owner, leaf = buffer_home(self.model(), name)
            weight = get_parameter(self.model(), name)
            shapes = {f"__{leaf}_mma_mask": torch.ones_like(weight, dtype=torch.bool)}
            if self.recompute:
                shapes[f"__{leaf}_mma_pruned_p"] = torch.zeros_like(weight, device="cpu").detach()
            for key, value in shapes.items():
                if fresh or key not in owner._buffers:  # pyright: ignore[reportPrivateUsage]
                    owner.register_buffer(key, value)

    def mask(self, name: str) -> Tensor:
        owner, leaf = buffer_home(self.model(), name)
        return cast(Tensor, getattr(owner, f"__{leaf}_mma_mask"))

    def pruned(self, name: str) -> Tensor | None:
        owner, leaf = buffer_home(self.model(), name)
        return getattr(owner, f"__{leaf}_mma_pruned_p", None) if self.recompute else None

    @property
    def enabled(self) -> bool:
        return any(not bool(self.mask(name).all()) for name in self.weights)

    # Computing

    @torch.no_grad()
    def compute(self, example_inputs: Any) -> None:
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
        again = self.enabled
        sparse = {name: get_parameter(self.model(), name).detach().clone() for name in self.weights if again}
        for name in sparse:
            get_parameter(self.model(), name).copy_(self._dense(name))
        moved: Permutation | None = None
        try:
            if self.permute and not again and self.permutation is None:
                moved = self._permuted(example_inputs)
            masks = {name: self._computed(name) for name in self.weights}
        except BaseException:
            if moved is not None:
                self._apply(moved.inverse)
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
        weight = get_parameter(self.model(), name).detach()
        try:
            if isinstance(self.calculate, NM):
                return self.calculate.keep_largest(weight)
            keep = cast(object, self.calculate(weight))
        except SparsityError as error:
            raise GossamerError(f"'{name}' cannot be pruned: {error}") from error
        if not isinstance(keep, Tensor) or keep.shape != weight.shape:
            shown = f"shape {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise GossamerError(
                f"mask_calculator: expected a mask of shape {tuple(weight.shape)} for '{name}', found {shown}"
            )
        return keep.to(weight.device, torch.bool)

    def _permuted(self, example_inputs: Any) -> Permutation | None:
        if not (isinstance(self.calculate, NM) and self.calculate.permutable):
            self._say(1, "channels are not permuted: that serves patterns N:M along input channels only")
            return None
        found = search(
            self.model(), self.weights, self.calculate, list(self.optimizers), example_inputs, self.verbosity
        )
        self._apply(found)
        if self.saving[0]:
            save_graph(found, Path(self.saving[1]) / GRAPH_FILE)
        return found

    def _apply(self, permutation: Permutation) -> None:
        pruned = {name: [p] for name in self.weights if (p := self.pruned(name)) is not None}
        permutation.apply(self.model(), list(self.optimizers), pruned)

    # Training

    def hook(self, optimizer: torch.optim.Optimizer) -> None:
        for handle in self.optimizers.pop(optimizer, []):
            handle.remove()

        def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_gradients(args, kwargs, self._mask_gradients, every=True)

        def after(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._synchronise()
            self._masks.apply(self.model())

        self.optimizers[optimizer] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self._synchronise()
        self._masks.apply(self.model())

    def release(self) -> None:
        """Let go of the optimizers."""
        for handles in self.optimizers.values():
            for handle in handles:
                handle.remove()
        self.optimizers.clear()

    def _mask_gradients(self) -> None:
        self._synchronise()
        for name in self._masks.names():
            gradient = get_parameter(self.model(), name).grad
            if gradient is not None:
                zero_where(gradient, self._masks.zeros(name).to(gradient.device))

    def _synchronise(self) -> None:
        """Follow the buffers, which a checkpoint may have overwritten since."""
        for name in self.weights:
            mask = self.mask(name)
            version = mask._version  # pyright: ignore[reportPrivateUsage]
            known, seen = self._read.get(name, (None, -1))
            if known is not None and known() is mask and seen == version:
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
            self._say(2, "'%s' is %.2f%% sparse", name, 100 * (1 - float(keep.double().mean())))

    def _say(self, level: int, message: str, *args: object) -> None:
        if self.verbosity >= level:
            logger.log({1: logging.WARNING, 2: logging.INFO}.get(level, logging.DEBUG), message, *args)


def search(
    model: nn.Module,
    names: Sequence[str],
    pattern: NM,
    optimizers: Sequence[torch.optim.Optimizer],
    example_inputs: Any,
    verbosity: int,
) -> Permutation:
    """Look for a permutation; a bar shows how far it is where somebody watches."""
    from rich.console import Console
    from rich.progress import Progress

    watched = verbosity >= 2 and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not watched) as bar:
        task = bar.add_task("permuting channels", total=1.0)
        found = find(
            model,
            names,
            pattern.n,
            pattern.m,
            example_inputs=example_inputs,
            optimizer=optimizers,
            progress=lambda _, share: bar.update(task, completed=share),
        )
    if (told := found.untraceable or found.note) and verbosity >= 1:
        logger.warning(
            "%s: %s", "permutation was possible in part" if found.moves else "pruned without permutation", told
        )
    for layer in found.layers if verbosity >= 2 else ():
        kept = f"{layer.kept_before:.2%} of the magnitude kept, {layer.kept:.2%} after permutation"
        logger.info("'%s': %s", layer.name, f"not permuted: {layer.reason}" if layer.reason else kept)
    return found


def save_graph(permutation: Permutation, path: Path) -> None:
    """Which layers share channels and what each gains, as JSON, with a picture beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "note": permutation.untraceable or permutation.note,
        "groups": list(permutation.groups),
        "layers": [asdict(layer) for layer in permutation.layers],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    if find_spec("matplotlib") is None:
        logger.warning("no picture beside %s: matplotlib is not installed (pip install 'gossamer[report]')", path)
        return
    from gossamer.analysis.permutation_plot import plot_permutation

    plot_permutation(permutation, path.with_suffix(".png"))
