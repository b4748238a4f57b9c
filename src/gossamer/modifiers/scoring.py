"""Scorers rank weights for gradual pruning: by magnitude, movement, second-order saliency, or whole filters.

A scorer reads weights and gradients through `Run` and keeps its sums in `run.state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from gossamer.errors import ModifierError
from gossamer.model import is_transposed
from gossamer.model.distribution import is_distributed, sharded_tensors
from gossamer.modifiers.base import Run
from gossamer.sparse import BlockFisher, Filter, ShardedFisher, expand_units, magnitude, movement
from gossamer.sparse.scores import FilterKind, filter_scores
from gossamer.sparse.sharding import is_sharded, refuse_flat

FILTER_KINDS: tuple[FilterKind, ...] = get_args(FilterKind)


Fisher = BlockFisher | ShardedFisher


class FisherDefaults(NamedTuple):
    """The default number of gradients and block size of a second-order method."""

    num_grads: int
    block: int


OBS = FisherDefaults(1024, 50)
MFAC = FisherDefaults(64, 2000)
DAMP = 0.3
"""The default damp, as a fraction of the Fisher matrix's mean diagonal."""


@dataclass(frozen=True)
class Scorer:
    """Ranks weights by magnitude, |w|; subclasses by other scores. Higher scores are kept."""

    uses_gradients: ClassVar[bool] = False
    """Whether scores depend on gradients, and not on the weights alone."""
    signed: ClassVar[bool] = False
    """Whether a weight can score less than a masked one, whose score is 0."""

    def check(self, run: Run) -> None:
        """Raise if the run lacks what the scorer needs."""

    def observe(self, run: Run) -> None:
        """Called before each optimizer step, with gradients."""

    def scores(self, run: Run, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: magnitude(run.weights.parameter(name)) for name in names}

    def compensate(self, run: Run, masks: Mapping[str, Tensor]) -> None:
        """Called before masks are set; may change the weights that are kept."""


@dataclass(frozen=True)
class FilterScorer(Scorer):
    """One score per filter, the same for each of its weights."""

    kind: FilterKind

    def scores(self, run: Run, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._spread(run, name) for name in names}

    def _spread(self, run: Run, name: str) -> Tensor:
        """Rounded to float32, so that filters that differ by round-off tie; as float64, so that their mean is exact."""
        weight = outputs_first(run, name, run.weights.parameter(name).detach())
        numbers = filter_scores(weight, self.kind).float().double()
        if is_sharded(weight):
            return outputs_first(run, name, expand_units(Filter(), numbers, weight))
        return outputs_first(run, name, numbers.reshape(-1, *[1] * (weight.dim() - 1)).expand_as(weight))


@dataclass(frozen=True)
class MovementScorer(Scorer):
    """The sum over steps of −w·∂L/∂w; the magnitude before the first gradient."""

    uses_gradients: ClassVar[bool] = True
    signed: ClassVar[bool] = True

    def observe(self, run: Run) -> None:
        sums: dict[str, Tensor] = run.state.setdefault("movement", {})
        for name in run.targets:
            gradient = run.weights.gradient(name)
            if gradient is None:
                continue
            moved = movement(run.weights.parameter(name), gradient)
            moved = moved if moved.dtype == torch.float64 else moved.float()
            sums[name] = sums[name].to(moved.device).add_(moved) if name in sums else moved

    def scores(self, run: Run, names: Sequence[str]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = run.state.get("movement", {})
        return _or_magnitude(run, names, {name: sums[name] for name in names if name in sums})


@dataclass(frozen=True)
class FisherScorer(Scorer):
    """w² / (2·diag(F⁻¹)) from sampled gradients, or from those of the last training steps.

    With `surgeon` (optimal brain surgeon), gradients come from the user's sampler, and the kept weights are updated to
    compensate for the pruned ones. The score is the magnitude before the first gradient.
    """

    uses_gradients: ClassVar[bool] = True

    num_grads: Callable[[float], int]
    """The number of gradients to use at a sparsity."""
    damp: float | None
    """None: a fraction of the mean diagonal of the Fisher matrix over the weights that are ranked together."""
    block_size: int | None
    together: bool
    """Whether the weights of all layers are ranked together."""
    surgeon: bool

    def check(self, run: Run) -> None:
        if is_distributed(run.module):
            if self.block_size is None:
                raise ModifierError(
                    "the Fisher matrix of a whole parameter needs all of it on one rank, which is not supported for a "
                    "model that is split over ranks; set a number",
                    "fisher_block_size",
                )
            for name, parameter in sharded_tensors(run.module):
                if (reason := refuse_flat(parameter)) is not None:
                    raise ModifierError(f"'{name}' cannot be ranked: {reason}")
        if self.surgeon and run.data.grad_sampler is None:
            raise ModifierError(
                "needs gradients of single batches: pass grad_sampler= to modify(), a mapping with "
                "'data_loader_builder' and 'loss_function', or a function that takes the model and yields losses"
            )

    def observe(self, run: Run) -> None:
        """Keep the gradients of the last steps before the next update, or the end, which may prune once more."""
        due, count = run.clock.next_update, self.num_grads(_reached(run))
        if run.data.grad_sampler is not None or due is None or due - run.clock.step > count:
            return
        rows: dict[str, list[Tensor]] = run.state.setdefault("gradients", {})
        for name in run.targets:
            gradient = run.weights.gradient(name)
            if gradient is not None:
                kept = rows.setdefault(name, [])
                values = gradient.detach()
                kept.append(values.clone() if is_sharded(values) else values.reshape(-1).clone())
                del kept[:-count]

    def scores(self, run: Run, names: Sequence[str]) -> dict[str, Tensor]:
        fisher = self._sampled(run, names) if run.data.grad_sampler is not None else self._kept(run, names)
        damp = self._damp(fisher)
        if self.surgeon:
            run.scratch["fisher"] = {name: (matrix, damp[name]) for name, matrix in fisher.items()}
        return _or_magnitude(
            run,
            names,
            {name: matrix.saliency(run.weights.parameter(name), damp[name]) for name, matrix in fisher.items()},
        )

    def compensate(self, run: Run, masks: Mapping[str, Tensor]) -> None:
        fisher: dict[str, tuple[Fisher, float]] = run.scratch.pop("fisher", {})
        for name in (name for name in fisher if name in masks):  # the same order on all ranks
            matrix, damp = fisher[name]
            run.weights.write(name, matrix.compensated(run.weights.parameter(name), masks[name], damp))

    def _damp(self, fisher: Mapping[str, Fisher]) -> dict[str, float]:
        """The damp by name: the recipe's, or a fraction of the mean diagonal.

        Layers that are ranked together share one, so that it adds the same to the score of a weight in each of them.
        """
        means = {name: matrix.mean_diagonal() for name, matrix in fisher.items()}
        for name, mean in means.items():
            if not math.isfinite(mean):
                raise ModifierError(f"gradients of '{name}' are not finite; check the losses of the gradient sampler")
        if self.damp is not None:
            return dict.fromkeys(fisher, self.damp)
        if self.together:
            sizes = {name: matrix.weights for name, matrix in fisher.items()}
            shared = sum(means[name] * size for name, size in sizes.items()) / max(sum(sizes.values()), 1)
            means = dict.fromkeys(fisher, shared)
        # Without any gradient every damp ranks by magnitude.
        return {name: DAMP * mean or 1.0 for name, mean in means.items()}

    def _kept(self, run: Run, names: Sequence[str]) -> dict[str, Fisher]:
        rows: dict[str, list[Tensor]] = run.state.get("gradients", {})
        fisher: dict[str, Fisher] = {}
        for name, kept in rows.items():
            if kept and name in names:
                fisher[name] = self._matrix(run.weights.parameter(name), len(kept))
                for gradient in kept:
                    fisher[name].add(gradient)
        return fisher

    def _sampled(self, run: Run, names: Sequence[str]) -> dict[str, Fisher]:
        """One gradient per loss that the sampler yields; restores gradients, buffers and modes of the model.

        Batch norm uses its running statistics meanwhile: the Fisher matrix assumes independent samples, and batch
        statistics would hide the effect of a filter's scale.
        """
        parameters = {name: run.weights.parameter(name) for name in names}
        count = self.num_grads(_reached(run))
        fisher = {name: self._matrix(weight, count) for name, weight in parameters.items()}
        before = {name: parameter.grad for name, parameter in run.module.named_parameters()}
        buffers: dict[str, Tensor] = {name: buffer.clone() for name, buffer in run.module.named_buffers()}
        frozen = [parameter for parameter in parameters.values() if not parameter.requires_grad]
        norms = [(module, module.training) for module in run.module.modules() if isinstance(module, _BatchNorm)]
        # A hook too, because a sampler may call `model.train()`.
        hooks = [norm.register_forward_pre_hook(_evaluate) for norm, _ in norms]
        sampled = False
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for norm, _ in norms:
                norm.eval()
            for loss in islice(self._losses(run), count):
                sampled = True
                run.module.zero_grad(set_to_none=True)
                loss.backward()
                for name, parameter in parameters.items():
                    fisher[name].add(parameter.grad)
        finally:
            for hook in hooks:
                hook.remove()
            for norm, training in norms:
                norm.train(training)
            for name, parameter in run.module.named_parameters():
                parameter.grad = before[name]
            for name, buffer in run.module.named_buffers():
                buffer.copy_(buffers[name])
            for parameter in frozen:
                parameter.requires_grad_(False)
        if not sampled:
            raise ModifierError("the gradient sampler yielded no loss; give it at least one batch")
        return fisher

    def _matrix(self, weight: Tensor, gradients: int) -> Fisher:
        if is_sharded(weight):
            assert self.block_size is not None
            return ShardedFisher(weight, self.block_size, gradients)
        return BlockFisher(weight, self.block_size, gradients)

    def _losses(self, run: Run) -> Iterator[Tensor]:
        assert run.data.grad_sampler is not None
        with torch.enable_grad():
            yield from run.data.grad_sampler(run.distributed.module)


def _evaluate(layer: nn.Module, _: object) -> None:
    layer.eval()


def outputs_first(run: Run, name: str, tensor: Tensor) -> Tensor:
    """A weight-shaped tensor with output channels first (its own inverse)."""
    return tensor.transpose(0, 1) if tensor.dim() > 1 and is_transposed(run.module, name) else tensor


def _or_magnitude(run: Run, names: Sequence[str], scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All scores by name; layers without a gradient are ranked by magnitude and reported."""
    unseen = [name for name in names if name not in scores]
    run.scratch["unseen"] = unseen if scores else []
    for name in run.scratch["unseen"]:
        run.log.skip(name, "no gradient was seen: ranked by magnitude")
    return {name: scores[name] if name in scores else magnitude(run.weights.parameter(name)) for name in names}


def _reached(run: Run) -> float:
    """The largest sparsity that the modifier has scheduled so far."""
    return max(run.state.get("sparsity", {}).values(), default=0.0)
