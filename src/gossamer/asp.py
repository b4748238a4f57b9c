"""NVIDIA ASP's interface: 2:4 sparsity in two lines.

    from gossamer.asp import ASP

    ASP.prune_trained_model(model, optimizer)

All calls of the original are supported. `ASP` finds the `Pruner` of a model, which keeps all state, so that several
models, a second run or an exception do not interfere. Masks are buffers of the layers, with the names that checkpoints
of the original have.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.analysis.hardware import ineligible
from gossamer.engine.masks import ZeroMasks
from gossamer.engine.optimizer import call_after_backward
from gossamer.errors import GossamerError, nearest, within
from gossamer.model import (
    embedding_tables,
    expect_model,
    first_names,
    get_module,
    get_parameter,
    has_parameter,
    is_transposed,
    layer_path,
    left_dense,
    named_modules,
    prunable,
    stored_weight,
    unwrap,
    weight_of,
)
from gossamer.model.additions import MASK, PRUNED, buffer_name, drop_buffers
from gossamer.model.distribution import is_distributed, refuse_unsupported, reshard
from gossamer.model.parameters import TIED, empties_a_norm
from gossamer.model.permute import Permutation, find_permutation, state_of
from gossamer.model.weights import is_conv1d, stored, unprunable
from gossamer.sparse import NM, measured_sparsity, parse_nm, zero_where
from gossamer.sparse.sharding import count, counts, is_sharded, local

if TYPE_CHECKING:
    from gossamer.recipe import Recipe

__all__ = ["ASP", "create_mask", "set_identical_seed"]

MaskCalculator = str | Callable[[Tensor], Tensor]
"""As users give it: the name of a pattern, or a function from a weight to its mask."""
Calculator = NM | Callable[[Tensor], Tensor]
LAYERS: dict[type[nn.Module], list[str]] = {
    nn.Linear: ["weight"],
    nn.Conv1d: ["weight"],
    nn.Conv2d: ["weight"],
    nn.Conv3d: ["weight"],
    nn.MultiheadAttention: ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
}
"""The weights of each layer type; subclasses count as the type, and Transformers' `Conv1D` as `nn.Linear`."""
_GRAPH_FILE = "model_offline_permutation_graph.json"
_HOLDER = 0
"""The key under which the engine's masks are held."""

logger = logging.getLogger("gossamer.asp")


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
        refuse_unsupported(model, "init_model_for_pruning")
        owner = unwrap(model)
        pruner = Pruner(weakref.ref(owner), parse_calculator(mask_calculator), mask_calculator, verbosity)
        allowed, pruner.graph_folder = cls._saving
        pruner.recompute, pruner.permute = allow_recompute_mask, allow_permutation and allowed
        leaves = _leaves_by_type(whitelist, custom_layer_dict or {})
        named = allowed_layer_names is not None or bool(custom_layer_dict)
        tables = [] if named else embedding_tables(owner)
        pruner.skipped = left_dense(owner)
        for name, home in _select_weights(model, leaves, allowed_layer_names, disallowed_layer_names).items():
            reason = _reason_dense(owner, name, get_parameter(owner, name), pruner.calculator, name in tables)
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
        cls._pruner(model).compute(example_inputs=example_inputs, effort=effort, parts=parts)

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
            if ineligible(_outputs_first(model, name, get_parameter(model, name)).shape) is None
        ]
        optimizers = [optimizer] if optimizer is not None else []
        permutation = _search(
            model, names, NM(2, 4), optimizers, verbosity, example_inputs=example_inputs, effort=effort, parts=parts
        )
        permutation.apply(model, optimizers, _mask_buffers(model, permutation.moves))
        if dump_fx_graph:
            _save_graph(permutation, Path(save_dumped_fx_graph))
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


def create_mask(tensor: torch.Tensor, pattern: str = "m4n2_1d", density: float = 0.5) -> torch.Tensor:
    """The mask of a pattern on one tensor, in its dtype. `density` is ignored: the pattern determines it."""
    calculator = cast(NM, parse_calculator(pattern))
    rows = tensor.detach() if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    return calculator.keep_largest(rows).reshape(tensor.shape).to(tensor.dtype)


def set_identical_seed(identical_seed: int = 1) -> None:
    """Not needed: the search for permutations uses no random seed, and every rank computes the same result."""


@dataclass
class Pruner:
    """Prunes one model and keeps its zeros."""

    reference: weakref.ref[nn.Module]
    calculator: Calculator
    mask_calculator: MaskCalculator
    """As the user gave it."""
    verbosity: int
    recompute: bool = False
    permute: bool = True
    graph_folder: Path | None = None
    weights: dict[str, str] = field(default_factory=dict[str, str])
    """Clean names, each with the weight's name in the layer that holds its buffers."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Weights that stay dense, with the reason."""
    permutation: Permutation | None = None
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = field(
        default_factory=weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]]
    )
    _masks: ZeroMasks = field(default_factory=ZeroMasks)
    _versions: dict[str, tuple[weakref.ref[Tensor], int]] = field(
        default_factory=dict[str, tuple[weakref.ref[Tensor], int]]
    )
    """The buffers, and their versions, that `_masks` follow."""

    def model(self) -> nn.Module:
        model = self.reference()
        if model is None:
            raise GossamerError("the model that ASP was initialised with no longer exists")
        return model

    # Buffers

    def replace(self, before: Pruner | None) -> None:
        """Add buffers to the layers. Existing masks stay in force, also those of an earlier pruner of the model."""
        for name in self.weights:
            self.mask(name)
            self.pruned(name)
        if before is None:
            return
        for name in before.weights.keys() - self.weights.keys():
            before.drop(name)
        for name, home in before.weights.items():
            if name in self.weights and not self.recompute:
                layer, leaf = _layer_and_leaf(self.model(), home)
                layer._buffers.pop(buffer_name(leaf, PRUNED), None)  # pyright: ignore[reportPrivateUsage]
        for optimizer in list(before.optimizers):
            before.unhook(optimizer)
            self.hook(optimizer)
        self.permutation = before.permutation

    @torch.no_grad()
    def drop(self, name: str) -> None:
        """Stop pruning a layer: remove its buffers, and restore its dense weight if that was kept."""
        if self.recompute and has_parameter(self.model(), name):
            get_parameter(self.model(), name).copy_(self._dense(name))
        layer, leaf = _layer_and_leaf(self.model(), self.weights[name])
        for kind in (MASK, PRUNED):
            layer._buffers.pop(buffer_name(leaf, kind), None)  # pyright: ignore[reportPrivateUsage]

    def mask(self, name: str) -> Tensor:
        """True where the weight is kept. A layer that was replaced, as by quantization, gets its mask again."""

        def default(weight: Tensor) -> Tensor:
            held = self._masks.kept_by(_HOLDER, name)
            same = held is not None and held.shape == weight.shape
            return cast(Tensor, held) if same else torch.ones_like(weight, dtype=torch.bool)

        return self._buffer(name, MASK, default)

    def pruned(self, name: str) -> Tensor | None:
        """The masked values, if they are kept."""
        return self._buffer(name, PRUNED, lambda w: torch.zeros_like(w, device="cpu")) if self.recompute else None

    def _buffer(self, name: str, kind: str, default: Callable[[Tensor], Tensor]) -> Tensor:
        layer, leaf = _layer_and_leaf(self.model(), self.weights[name])
        buffer = layer._buffers.get(buffer_name(leaf, kind))  # pyright: ignore[reportPrivateUsage]
        weight = get_parameter(self.model(), name).detach()
        if buffer is None or buffer.shape != weight.shape:
            buffer = default(weight)
            layer.register_buffer(buffer_name(leaf, kind), buffer)
        return buffer

    def _drop_missing(self) -> None:
        for name in [name for name in self.weights if not has_parameter(self.model(), name)]:
            del self.weights[name]
            self._masks.forget(name)
            self.skipped[name] = "it is no longer in the model"

    @property
    def enabled(self) -> bool:
        """Whether any weight is masked."""
        self._drop_missing()
        return any(counts([~self.mask(name) for name in self.weights]))

    # Masks

    @torch.inference_mode(False)
    @torch.no_grad()
    def compute(self, **search: Any) -> None:
        """Permute, compute the masks and zero the weights; on an error the model is unchanged."""
        reshard(self.model())
        if not self.weights:
            raise GossamerError(f"no layer can be pruned: {self._reasons() or 'the whitelist matches none'}")
        if self.enabled and not self.recompute:
            raise GossamerError(
                "the masks were computed already, and the pruned values are lost; to compute them again later, "
                "call init_model_for_pruning with allow_recompute_mask=True"
            )
        for name in self.weights:
            if count(get_parameter(self.model(), name).detach().isnan()):
                raise GossamerError(f"'{name}' cannot be pruned: it holds NaN; repair the weights first")
        if self.graph_folder is not None:
            _make_folder(self.graph_folder)
        again = self.enabled
        sparse = {name: get_parameter(self.model(), name).detach().clone() for name in self.weights if again}
        for name in sparse:
            get_parameter(self.model(), name).copy_(self._dense(name))
        applied: Permutation | None = None
        try:
            if self.permute and is_distributed(self.model()):
                self._log(1, "channels are not permuted: the parameters of the model are split over ranks")
            elif self.permute and not again and self.permutation is None:
                permutation = self._permutation(search)
                if permutation is not None:
                    permutation.apply(self.model(), list(self.optimizers))
                applied = permutation
            masks = {name: self._compute_mask(name) for name in self.weights}
        except BaseException:
            if applied is not None:
                applied.inverse.apply(self.model(), list(self.optimizers))
            for name, values in sparse.items():
                get_parameter(self.model(), name).copy_(values)
            raise
        self.permutation = applied or self.permutation
        for name, keep in masks.items():
            weight, pruned = get_parameter(self.model(), name), self.pruned(name)
            if pruned is not None:
                pruned.copy_(weight.masked_fill(keep, 0))
            self.mask(name).copy_(keep)
        self.apply_masks()
        for name, keep in masks.items():
            self._log(2, "'%s' is %.2f%% sparse", name, 100 * measured_sparsity(keep))
        if applied is not None and self.graph_folder is not None:
            _save_graph(applied, self.graph_folder / _GRAPH_FILE)

    @torch.no_grad()
    def restore(self) -> None:
        """Make the weights dense again."""
        reshard(self.model())
        if not self.enabled:
            return
        if not self.recompute:
            raise GossamerError(
                "the pruned values are lost; to restore them later, call init_model_for_pruning "
                "with allow_recompute_mask=True"
            )
        for name in self.weights:
            pruned = self.pruned(name)
            get_parameter(self.model(), name).copy_(self._dense(name))
            self.mask(name).fill_(True)
            if pruned is not None:
                pruned.zero_()
        self._log(2, "sparsity is off: the weights of %d layers are dense again", len(self.weights))

    def _dense(self, name: str) -> Tensor:
        """The weight with its pruned values restored."""
        weight, pruned = get_parameter(self.model(), name).detach(), self.pruned(name)
        return weight if pruned is None else torch.where(self.mask(name), weight, pruned.to(weight.device))

    def _compute_mask(self, name: str) -> Tensor:
        weight = weight_of(self.model(), name)
        with within(name):
            if isinstance(self.calculator, NM):
                keep = self.calculator.keep_largest(_outputs_first(self.model(), name, weight))
                return _outputs_first(self.model(), name, keep)
            if is_sharded(weight):
                raise GossamerError("mask_calculator: a function needs the whole weight, which is split over ranks")
            keep = cast(object, self.calculator(weight))
        if not isinstance(keep, Tensor) or keep.shape != weight.shape:
            shown = f"shape {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise GossamerError(
                f"mask_calculator: expected a mask of shape {tuple(weight.shape)} for '{name}', found {shown}"
            )
        if not bool(((keep == 0) | (keep == 1)).all()):
            raise GossamerError(f"mask_calculator: expected a mask of zeros and ones for '{name}', found other values")
        if empties_a_norm(self.model(), name, keep != 0):
            raise GossamerError(
                f"mask_calculator: the mask of '{name}' removes a whole row that the layer divides by its norm; "
                "keep a weight in each row, or remove the norm from the layer first"
            )
        return keep.to(weight.device, torch.bool)

    def _permutation(self, search: Mapping[str, Any]) -> Permutation | None:
        if not (isinstance(self.calculator, NM) and self.calculator.permutable):
            self._log(1, "channels are not permuted: only N:M patterns along input channels benefit")
            return None
        optimizers = list(self.optimizers)
        return _search(self.model(), list(self.weights), self.calculator, optimizers, self.verbosity, **search)

    # Training

    def hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Mask gradients before and weights after each step of the optimizer."""
        if optimizer not in self.optimizers:
            self._warn_of_old_moments(optimizer)
        self.unhook(optimizer)

        def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return call_after_backward(args, kwargs, self._mask_gradients, every=True)

        def after(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.apply_masks()

        self.optimizers[optimizer] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self.apply_masks()

    def unhook(self, optimizer: torch.optim.Optimizer) -> None:
        for handle in self.optimizers.pop(optimizer, []):
            handle.remove()

    def apply_masks(self) -> None:
        """Zero the masked weights; does nothing if the model no longer exists."""
        if self.reference() is not None:
            reshard(self.model())
            self._follow_buffers()
            self._masks.apply(self.model())

    def _mask_gradients(self) -> None:
        if self.reference() is None:
            return
        self._follow_buffers()
        for name in self._masks.names():
            gradient = get_parameter(self.model(), name).grad
            if gradient is not None:
                zero_where(gradient, self._masks.zero_mask(name).to(gradient.device))

    def _follow_buffers(self) -> None:
        """Update the engine's masks from buffers that changed, for instance by loading a checkpoint."""
        self._drop_missing()
        for name in self.weights:
            mask = self.mask(name)
            version = -1 if mask.is_inference() else mask._version + local(mask)._version  # pyright: ignore[reportPrivateUsage]
            known, seen = self._versions.get(name, (None, -1))
            if known is not None and known() is mask and seen == version >= 0:
                continue
            self._versions[name] = (weakref.ref(mask), version)
            if not count(~mask):
                self._masks.release(_HOLDER, name)
            else:
                self._masks.hold(_HOLDER, name, mask, get_parameter(self.model(), name))

    def _warn_of_old_moments(self, optimizer: torch.optim.Optimizer) -> None:
        moves = [] if self.permutation is None else list(self.permutation.moves)
        if any(state_of(optimizer, get_parameter(self.model(), name)) for name in moves):
            self._log(
                1,
                "the optimizer was not known when the channels were permuted: its state is in the old order; "
                "call init_optimizer_for_pruning before compute_sparse_masks",
            )

    # Reports

    def recipe(self) -> Recipe:
        """The pruning as a recipe."""
        from gossamer.modifiers.gradual import GMPruningModifier
        from gossamer.recipe import Recipe

        if not isinstance(self.calculator, NM):
            raise GossamerError("recipe: a recipe cannot hold a mask_calculator that is a function")
        sparsity = self.calculator.sparsity
        modifier = GMPruningModifier(
            params=list(self.weights),
            mask_type=cast(str, self.mask_calculator),
            permute=self.permute and self.calculator.permutable,
            init_sparsity=sparsity,
            final_sparsity=sparsity,
            start_epoch=0.0,
            end_epoch=0.0,
            update_frequency=1.0,
        )
        return Recipe.of([modifier], name="asp")

    def log_layers(self) -> None:
        for name in self.weights:
            self._log(3, "'%s' is pruned", name)
        if self.skipped:
            total = len(self.weights) + len(self.skipped)
            self._log(1, "%d of %d layers stay dense: %s", len(self.skipped), total, self._reasons())

    def _reasons(self, limit: int = 4) -> str:
        listed = [f"'{name}' ({reason})" for name, reason in list(self.skipped.items())[:limit]]
        more = len(self.skipped) - limit
        return ", ".join(listed) + (f" and {more} more; ASP.layers() lists all" if more > 0 else "")

    def _log(self, level: int, message: str, *args: object) -> None:
        if self.verbosity >= level:
            logger.log({1: logging.WARNING, 2: logging.INFO}.get(level, logging.DEBUG), message, *args)


def _search(
    model: nn.Module,
    names: Sequence[str],
    pattern: NM,
    optimizers: Sequence[torch.optim.Optimizer],
    verbosity: int,
    **options: Any,
) -> Permutation:
    """Search a permutation, with a progress bar on a terminal, and log the result.

    `options` are those of `find_permutation`.
    """
    from rich.console import Console
    from rich.progress import Progress

    visible = verbosity >= 2 and sys.stderr is not None and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not visible) as bar:
        task = bar.add_task("permuting channels", total=1.0)

        def report(_: str, share: float) -> None:
            bar.update(task, completed=share)

        permutation = find_permutation(
            model, names, pattern.n, pattern.m, optimizer=optimizers, progress=report, **options
        )
    if (reason := permutation.untraceable or permutation.note) and verbosity >= 1:
        logger.warning("channels are %s: %s", "permuted in part" if permutation.moves else "not permuted", reason)
    for layer in permutation.layers if verbosity >= 2 else ():
        kept = f"{layer.kept_before:.2%} of the magnitude kept, {layer.kept:.2%} after permutation"
        logger.info("'%s': %s", layer.name, f"not permuted: {layer.reason}" if layer.reason else kept)
    return permutation


def _mask_buffers(model: nn.Module, names: Iterable[str]) -> dict[str, list[Tensor]]:
    """ASP's masks and pruned values on a model, by the weights they belong to."""
    buffers: dict[str, list[Tensor]] = {name: [] for name in names}
    for alias, name in first_names(model).items():  # a tied weight has its buffers in one of its layers
        if name in buffers:
            layer, leaf = _layer_and_leaf(model, alias)
            own: Mapping[str, Tensor] = dict(layer.named_buffers(recurse=False))
            buffers[name] += [own[key] for kind in (MASK, PRUNED) if (key := buffer_name(leaf, kind)) in own]
    return buffers


def _save_graph(permutation: Permutation, path: Path) -> None:
    """Write which layers share channels, and what each gains, as JSON and a plot beside it."""
    _make_folder(path.parent)
    content = {
        "note": permutation.untraceable or permutation.note,
        "groups": list(permutation.groups),
        "layers": [asdict(layer) for layer in permutation.layers],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    if find_spec("matplotlib") is None:
        logger.warning("no plot beside %s: matplotlib is not installed (pip install 'gossamer[report]')", path)
        return
    from gossamer.report.plots import plot_permutation

    plot_permutation(permutation, path.with_suffix(".png"))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"{folder}: the folder for the graph cannot be created: {error.strerror}") from error


# Which weights


def parse_calculator(given: MaskCalculator) -> Calculator:
    """The pattern of a name, or the user's function."""
    if not isinstance(given, str):
        if not callable(given):
            shown = type(given).__name__
            raise GossamerError(f"mask_calculator: expected the name of a pattern or a function, found {shown}")
        return given
    with within("mask_calculator"):
        return parse_nm(given)


def _leaves_by_type(
    whitelist: Sequence[type[nn.Module]], custom: Mapping[type[nn.Module], Sequence[str]]
) -> dict[type[nn.Module], list[str]]:
    """The names of the weights of each layer type that may be pruned."""
    _expect_list(whitelist, "whitelist", "layer types")
    for kind, names in custom.items():
        _expect_list(names, f"custom_layer_dict: {kind.__name__}", "parameter names")
    known = LAYERS | {kind: list(names) for kind, names in custom.items()}
    for kind in whitelist:
        if not isinstance(cast(object, kind), type):
            raise GossamerError(f"whitelist: expected types of layers, such as nn.Linear, found {kind!r}")
        if kind not in known:
            raise GossamerError(
                f"whitelist: the weights of {kind!r} are not known; name them in custom_layer_dict, "
                "as in {nn.Linear: ['weight']}"
            )
    return {kind: names for kind, names in known.items() if kind in (*whitelist, *custom)}


def _select_weights(
    model: nn.Module,
    leaves: Mapping[type[nn.Module], Sequence[str]],
    allowed: Sequence[str] | None,
    disallowed: Sequence[str],
) -> dict[str, str]:
    """The weights that types and names admit, by clean name; a tied weight once, with its name in that layer."""
    first = first_names(model)
    known = {name for name, _ in named_modules(model)}
    included = None if allowed is None else _layer_paths(allowed, "allowed_layer_names", known, first)
    excluded = _layer_paths(disallowed, "disallowed_layer_names", known, first)
    weights: dict[str, str] = {}
    for path, layer in named_modules(model):
        if path in excluded or (included is not None and path not in included):
            continue
        for leaf in _leaves_of(layer, leaves):
            home, _, own = f"{path}.{leaf}".lstrip(".").rpartition(".")
            name = f"{home}.{stored(get_module(model, home), own).leaf}".lstrip(".")
            if name in first and layer_path(name) not in excluded:
                weights.setdefault(first[name], name)
    return weights


def _reason_dense(model: nn.Module, name: str, weight: nn.Parameter, calculator: Calculator, tied: bool) -> str | None:
    """Why a weight stays dense, or None. `tied`: an embedding shares it, and the user did not name its layer."""
    source = stored_weight(model, name)
    reason = (None if source is None else source.reason) or unprunable(weight)
    if reason is not None:
        return reason
    if not weight.requires_grad:
        return "it is frozen"
    if tied:
        return f"{TIED}; name its layer in allowed_layer_names to prune it"
    rows = _outputs_first(model, name, weight)
    reason = ineligible(rows.shape)
    if reason is None and isinstance(calculator, NM):
        reason = calculator.fits(rows.shape)
    return reason


def _outputs_first(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight as `(out, in, …)`, however it is stored."""
    return weight.transpose(0, 1) if weight.dim() > 1 and is_transposed(model, name) else weight


def _layer_and_leaf(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The layer that holds a weight, and the weight's name in it."""
    path, _, leaf = name.rpartition(".")
    return get_module(model, path), leaf


def _layer_paths(given: Sequence[str], field: str, known: set[str], first: Mapping[str, str]) -> set[str]:
    """Paths of layers from names of layers or weights, with or without the prefix of a wrapper."""
    _expect_list(given, field, "layer names")
    paths: set[str] = set()
    for name in given:
        plain = name
        while plain not in known and plain not in first and plain.startswith(("module.", "_orig_mod.")):
            plain = plain.partition(".")[2]
        if plain not in known and plain not in first:
            raise GossamerError(f"{field}: the model has no layer '{name}'{nearest(name, known)}")
        paths.add(plain if plain in known else layer_path(plain))
    return paths


def _leaves_of(layer: nn.Module, leaves: Mapping[type[nn.Module], Sequence[str]]) -> Iterator[str]:
    for kind, names in leaves.items():
        if isinstance(layer, kind) or (kind is nn.Linear and is_conv1d(layer)):
            own = [name for name, _ in layer.named_parameters()]
            for name in names if kind not in LAYERS else ():
                if name not in own:
                    close = nearest(name, own)
                    raise GossamerError(f"custom_layer_dict: {kind.__name__} has no parameter '{name}'{close}")
            yield from names


def _expect(given: object, kind: type, call: str, name: str) -> None:
    if not isinstance(given, kind):
        raise GossamerError(f"{call}: expected a {name}, found {type(given).__name__}")


def _expect_list(given: object, field: str, what: str) -> None:
    if isinstance(given, str | type):
        raise GossamerError(f"{field}: expected a list of {what}, found {given!r}")
