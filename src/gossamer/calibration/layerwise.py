"""Change the layers of a model one after the other, each calibrated on what the changed layers before it compute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from gossamer.calibration.lockstep import Lockstep, Walker, removed
from gossamer.calibration.sites import LinearSite, ProjectionSite, Site, attended, attention_inputs, site_of
from gossamer.errors import GossamerError, ModifierError, SparsityError
from gossamer.model import named_modules
from gossamer.model.example_inputs import Arguments
from gossamer.modifiers.oneshot import LayerProblem
from gossamer.modifiers.oneshot.base import Compressor, Statistics
from gossamer.sparse.reconstruction import Moments

logger = logging.getLogger("gossamer")

_RANK: dict[Statistics, int] = {"nothing": 0, "norms": 1, "products": 2}


@dataclass(frozen=True)
class Step:
    """One method on the weights that it plans to change."""

    method: str
    """The name of the modifier, for messages."""
    shares: Mapping[str, float]
    """By weight: its sparsity."""
    statistics: Statistics
    compress: Compressor


@dataclass(eq=False)
class _Stop:
    """A layer that batches wait for: its weights, or batch norm."""

    layer: nn.Module
    sites: list[Site] = field(default_factory=list[Site])
    moments: list[list[Moments]] = field(default_factory=list[list[Moments]])
    """By site and matrix; empty until the first inputs."""
    gate: Callable[[], None] | None = None
    statistics: Statistics = "nothing"
    done: bool = False
    everywhere: bool = False
    """Whether all batches were at this layer."""
    sums: list[Tensor] = field(default_factory=list[Tensor])
    """Of batch norm: count, sum and sum of squares of each channel."""


class LayerwisePass:
    """One pass over a model and its calibration data.

    `statistics` and masks of padding come from the batches; linear layers that are called with the same tensor share
    what is known of it. Batch norm behind a changed layer takes its statistics from all batches.
    """

    def __init__(
        self,
        module: nn.Module,
        steps: Sequence[Step],
        batches: Sequence[Arguments],
        *,
        progress: Callable[[str, int], None],
        changing: Callable[[str, Tensor], None],
        gates: Mapping[nn.Module, Callable[[], None]] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`gates` are called when all batches have arrived at a module; weights are rounded to `dtypes`."""
        self._gates = gates or {}
        self._dtypes = dtypes or {}
        self._module = module
        self._steps = steps
        self._progress = progress
        self._changing = changing
        self._changed = False
        self._left = dict.fromkeys(name for step in steps for name in step.shares)
        self._before: dict[int, tuple[Tensor, int, _Stop]] = {}
        """By batch: the inputs that it came with last, their version, and where."""
        self._masks = [_token_mask(arguments) for arguments in batches]
        self._stops = self._find_stops()
        self._lockstep = Lockstep[_Stop](module, batches, self._arrived)

    def run(self) -> None:
        """Change all layers that the batches reach; warns of the others."""
        order = {layer: position for position, layer in enumerate(self._module.modules())}
        stops = sorted(self._stops, key=lambda stop: order[stop.layer])
        with ExitStack() as hooks:
            for stop in stops:
                hooks.enter_context(removed(stop.layer.register_forward_pre_hook(self._hook(stop), with_kwargs=True)))
            self._lockstep.run(stops)
        if not self._changed:
            raise GossamerError("data: the model runs without calling any of the layers to change; check the targets")
        for name in self._left:
            logger.warning("'%s' is left as it is: no batch of the data reaches it", name)

    # Which layers

    def _find_stops(self) -> list[_Stop]:
        attention = {
            id(layer.out_proj): layer
            for _, layer in named_modules(self._module)
            if isinstance(layer, nn.MultiheadAttention)
        }
        stops: dict[tuple[int, bool], _Stop] = {}
        for name in self._left:
            site = site_of(self._module, name)
            owner = attention.get(id(site.layer))
            outwards = owner is not None
            layer = owner or site.layer
            stops.setdefault((id(layer), outwards), _Stop(layer)).sites.append(site)
        norms = [
            _Stop(layer)
            for _, layer in named_modules(self._module)
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        for stop in stops.values():
            names = {site.name for site in stop.sites}
            for step in self._steps:
                if names & step.shares.keys() and _RANK[step.statistics] > _RANK[stop.statistics]:
                    stop.statistics = step.statistics
        # A gate opens before the layer itself is calibrated.
        return [*(_Stop(layer, gate=gate) for layer, gate in self._gates.items()), *stops.values(), *norms]

    def _hook(self, stop: _Stop) -> Callable[..., Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if stop.done:
                return None
            if stop.gate is not None:
                self._lockstep.arrive(stop, ())
                return None
            layer = stop.layer
            if isinstance(layer, nn.MultiheadAttention):
                outwards = not isinstance(stop.sites[0], ProjectionSite)
                inputs = (attended(layer, args, kwargs),) if outwards else attention_inputs(args, kwargs)
                self._arrive(stop, inputs)
                return None
            given = cast(Tensor, args[0] if args else next(iter(kwargs.values())))
            after = next(iter(self._arrive(stop, (given,))))
            if after is given:
                return None
            return ((after, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): after})

        return before

    # What is known of inputs

    def _arrive(self, stop: _Stop, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add the inputs of the current batch and wait for the others, unless all of this is known already."""
        walker = self._lockstep.current
        assert walker is not None
        if isinstance(stop.layer, _BatchNorm):
            if not self._changed:
                return inputs
            self._add_to_norm(stop, inputs[0])
        elif stop.statistics != "nothing":
            if (known := self._known(stop, inputs, walker)) is not None:
                # Every batch has been at that layer, and nothing has changed the inputs since.
                self._process(stop, known)
                self._lockstep.check()
                return inputs
            self._add(stop, inputs, walker)
            self._before[walker.number] = (inputs[0], inputs[0]._version, stop)  # pyright: ignore[reportPrivateUsage]
        return self._lockstep.arrive(stop, inputs)

    def _known(self, stop: _Stop, inputs: tuple[Tensor, ...], walker: Walker[_Stop]) -> list[list[Moments]] | None:
        """The moments of the layer that the batch has just passed, if it was called with the same tensor."""
        if walker.number not in self._before or stop.moments or len(inputs) != 1:
            return None
        tensor, version, before = self._before[walker.number]
        same = tensor is inputs[0] and tensor._version == version  # pyright: ignore[reportPrivateUsage]
        plain = all(isinstance(site, LinearSite) for site in (*stop.sites, *before.sites))
        enough = _RANK[before.statistics] >= _RANK[stop.statistics]
        return before.moments if same and plain and enough and before.moments and before.everywhere else None

    def _add(self, stop: _Stop, inputs: tuple[Tensor, ...], walker: Walker[_Stop]) -> None:
        if not stop.moments:
            for other in self._stops:
                if other.done:
                    other.moments = []  # what is in memory is one layer's
            products = stop.statistics == "products"
            stop.moments = [
                [Moments(columns, products=products, device=site.parameter.device) for columns in site.columns]
                for site in stop.sites
            ]
        mask = self._masks[walker.number - 1]
        kept = tuple(part[mask] if mask is not None and part.shape[:2] == mask.shape else part for part in inputs)
        for site, moments in zip(stop.sites, stop.moments, strict=True):
            parts = site.of_attention(*kept) if isinstance(site, ProjectionSite) else site.samples(kept[0])
            for matrix, chunks in zip(moments, parts, strict=True):
                for chunk in chunks:
                    matrix.add(chunk)

    @staticmethod
    def _add_to_norm(stop: _Stop, inputs: Tensor) -> None:
        wide = inputs.detach().double().transpose(0, 1).flatten(1)
        sums = [torch.tensor(float(wide.shape[1]), device=wide.device), wide.sum(1), wide.square().sum(1)]
        stop.sums = [before + now for before, now in zip(stop.sums, sums, strict=True)] if stop.sums else sums

    # Changing a layer

    def _arrived(self, stop: _Stop, walkers: list[Walker[_Stop]]) -> None:
        stop.everywhere = len(walkers) == len(self._lockstep.walkers)
        self._process(stop, stop.moments)

    def _process(self, stop: _Stop, moments: list[list[Moments]]) -> None:
        stop.done = True
        if stop.gate is not None:
            stop.gate()
        elif isinstance(stop.layer, _BatchNorm):
            _set_statistics(stop.layer, stop.sums, len(self._lockstep.walkers))
        for index, site in enumerate(stop.sites):
            self._change(site, moments[index] if moments else [])
        if not self._left and not self._norms_left():
            self._lockstep.end()

    def _norms_left(self) -> bool:
        return any(not stop.done for stop in self._stops if isinstance(stop.layer, _BatchNorm))

    def _change(self, site: Site, moments: list[Moments]) -> None:
        if any(not known.finite for known in moments):
            raise GossamerError(
                f"data: the inputs of '{site.name}' are NaN or infinite; check the data, the weights, and that the "
                "model's dtype has enough range"
            )
        matrices = site.matrices()
        problems = [
            LayerProblem(site.name, matrix, moments[index] if moments else None, 0.0)
            for index, matrix in enumerate(matrices)
        ]
        self._changing(site.name, site.parameter)
        for step in self._steps:
            if site.name not in step.shares:
                continue
            for problem, share in zip(problems, _by_matrix(matrices, step.shares[site.name]), strict=True):
                problem.share = share
                try:
                    problem.weight = step.compress(problem)
                except SparsityError as error:
                    raise ModifierError(f"'{site.name}' cannot be changed: {error}", step.method) from error
        site.write([problem.weight for problem in problems], self._dtypes.get(site.name))
        self._changed = True
        self._left.pop(site.name, None)
        self._progress(site.name, site.parameter.numel())


def _by_matrix(matrices: Sequence[Tensor], share: float) -> list[float]:
    """The sparsity of each matrix, with which all together lose round(size · share) weights."""
    sizes = [matrix.numel() for matrix in matrices]
    total, done, before = round(sum(sizes) * share), 0, 0
    shares: list[float] = []
    for size in sizes:
        done += size
        target = total * done // sum(sizes)
        shares.append((target - before) / size)
        before = target
    return shares if len(sizes) > 1 else [share]


def _token_mask(arguments: Arguments) -> Tensor | None:
    """True at the tokens that are not padding; None if a batch has none."""
    mask = arguments[1].get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return None
    return mask != 0


def _set_statistics(layer: _BatchNorm, sums: Sequence[Tensor], batches: int) -> None:
    count, total, squares = sums
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0) * (count / (count - 1).clamp(min=1))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(batches)
