"""Selects the layers that a recipe prunes and their sparsities, with the reason for each.

The criteria are shapes, the position in the network and, with data, how far pruning a layer changes the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from gossamer.analysis.hardware import ineligible
from gossamer.analysis.sensitivity import SensitivityCurve, allocate, sensitivity
from gossamer.create.choices import Choices
from gossamer.errors import GossamerError, Problem, SparsityError
from gossamer.model import embedding_tables, get_parameter, is_depthwise, is_transposed, left_dense, prunable, unwrap
from gossamer.model.parameters import TIED
from gossamer.model.tracing.flow import Ends
from gossamer.progress import Progress
from gossamer.sparse import Block, Channel, Filter, Pattern, Unstructured, erdos_renyi, within_reach, zero_count

TINY = 1024
"""Layers with fewer weights stay dense."""
TINY_TOGETHER = 0.01
"""All tiny layers together have at most this share of the weights."""
KEPT_AT_LEAST = 4
"""Under one threshold every layer keeps at least one fourth of the average density."""
LEAST = 0.05
"""A layer to be spared stays dense if its share would be below this."""

LEEWAY = 1.25
"""Under one threshold a layer, pruned alone, may change the outputs by this factor more than with its own share."""
_SPARSITY = ("recipe_variables", "sparsity")

Role = Literal["first", "head", "depthwise", "unreached", "idle"]
_SPARED: dict[Role, tuple[str, str]] = {
    "first": ("the first convolution", "few weights, and all later layers depend on them"),
    "head": ("the head", "no later layer can compensate for what it loses"),
    "depthwise": ("depthwise", "few weights, and one filter for each channel"),
    "unreached": ("not reached", "the traced example does not use it; it may be a head"),
    "idle": ("unused", "it does not run in evaluation mode, such as a head for training alone"),
}
"""Layers that stay dense: what they are, and the reason."""
PLAIN = "pruned"
"""The reason of a layer that is pruned like most others."""


@dataclass(frozen=True)
class LayerPlan:
    """One prunable weight, and what the recipe does with it."""

    name: str
    shape: tuple[int, ...]
    """Output channels first."""
    weights: int
    units: int
    """The number of weights, blocks or filters: of what the pattern removes as a whole."""
    role: Role | None
    fits: bool
    """Whether pattern and method could prune it."""
    takes_part: bool
    sparsity: float | None
    """The final sparsity; None when one threshold or the method itself decides."""
    bound: float | None
    """Under one threshold: the highest sparsity of this layer."""
    why: str
    moved: float | None = None
    """With data: how far the outputs change when this layer alone is pruned to the target sparsity."""


def plan_layers(
    model: nn.Module,
    choices: Choices,
    network_ends: Ends,
    data: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> list[LayerPlan]:
    """Every prunable layer of the model, in its order; raises `GossamerError` if none can be pruned."""
    module, method = unwrap(model), choices.method
    assert method is not None
    tables = embedding_tables(module)
    layers = [_layer(module, name, choices, name in tables) for name in prunable(module)]
    layers = _spared(module, layers, choices, network_ends)
    layers += [
        LayerPlan(name, (), 0, 0, None, False, False, 0.0, None, why) for name, why in left_dense(module).items()
    ]
    if choices.is_nm:
        return [replace(layer, sparsity=choices.sparsity) if layer.takes_part else layer for layer in layers]
    if method.name == "levels":
        _refuse_empty(layers, choices)
    if not choices.uses_data:
        return layers
    try:
        if data is not None:
            return _by_measure(module, layers, choices, data, progress)
        if not choices.global_sparsity:
            return _by_size(layers, choices)
        units = {layer.name: layer.units for layer in layers if layer.takes_part}
        within_reach(units, choices.sparsity, _highest_sparsity(choices))
    except SparsityError as error:
        raise GossamerError(problem.within(*_SPARSITY) for problem in error.problems) from None
    return layers


def _layer(module: nn.Module, name: str, choices: Choices, tied: bool) -> LayerPlan:
    weight = get_parameter(module, name)
    rows = weight.transpose(0, 1) if weight.dim() > 1 and is_transposed(module, name) else weight
    shape, method = tuple(rows.shape), choices.method
    reason = choices.pattern.fits(shape)
    if reason is not None and is_depthwise(module, name):
        reason = ": ".join(_SPARED["depthwise"])
    elif reason is not None:
        reason = f"mask_type {choices.mask_type} does not fit: {reason}"
    elif tied:
        reason = TIED
    elif method is not None and method.by_gradient and not weight.requires_grad:
        reason = f"frozen, and {method.name} ranks by gradients"
    units = _units(shape, choices.pattern) if reason is None else weight.numel()
    fits = reason is None
    sparsity = None if fits else 0.0
    return LayerPlan(name, shape, weight.numel(), units, None, fits, fits, sparsity, None, reason or PLAIN)


def _units(shape: tuple[int, ...], pattern: Pattern) -> int:
    match pattern:
        case Block():
            return math.prod(shape) // (pattern.rows * pattern.cols)
        case Filter():
            return shape[0]
        case Channel():
            return shape[1]
        case _:
            return math.prod(shape)


def _spared(module: nn.Module, layers: list[LayerPlan], choices: Choices, network_ends: Ends) -> list[LayerPlan]:
    """Leave small and important layers dense, unless there is little else to prune."""
    layers = [replace(layer, role=_role(module, layer.name, network_ends)) for layer in layers]
    whole = sum(layer.weights for layer in layers if layer.role != "idle")
    out = {"idle": ": ".join(_SPARED["idle"])}
    if isinstance(choices.pattern, Filter):
        out["head"] = "the head: each of its filters is an output"
        out["unreached"] = ": ".join(_SPARED["unreached"])
    layers = [replace(_left_dense(la, out[la.role]), fits=False) if la.role in out else la for la in layers]
    fitting = [layer for layer in layers if layer.takes_part]
    if not fitting:
        option = "target or mask_type" if choices.variables.target else "mask_type"
        fix = "" if isinstance(choices.pattern, Unstructured) else f"drop {option}"
        message = f"no layer of the model can be pruned: '{layers[0].name}': {layers[0].why}"
        raise GossamerError(Problem(message, fix=fix))
    reasons = _reasons(fitting, whole)
    if choices.variables.target == "tensorrt" and choices.is_nm:
        slow = {layer.name: why for layer in fitting if (why := ineligible(layer.shape)) is not None}
        reasons = {name: f"sparse tensor cores cannot run it: {why}" for name, why in slow.items()} | reasons
    if all(layer.name in reasons for layer in fitting):
        chosen = max(fitting, key=lambda layer: layer.weights)
        why = "pruned: the model has no other layer to prune"
        reasons.pop(chosen.name)
        layers = [replace(layer, role=None, why=why) if layer is chosen else layer for layer in layers]
    return [_left_dense(layer, reasons[layer.name]) if layer.name in reasons else layer for layer in layers]


def _reasons(fitting: Sequence[LayerPlan], whole: int) -> dict[str, str]:
    """Why layers that could be pruned stay dense: their position in the network, or their size."""
    reasons: dict[str, str] = {}
    for layer in fitting:
        too_large_to_spare = layer.role != "depthwise" and layer.weights > whole / 2
        if layer.role is not None and not too_large_to_spare:
            reasons[layer.name] = ": ".join(_SPARED[layer.role])
    total = 0
    for layer in sorted((layer for layer in fitting if layer.weights < TINY), key=lambda layer: layer.weights):
        total += layer.weights
        if total <= TINY_TOGETHER * whole:
            reasons.setdefault(layer.name, f"tiny: {layer.weights:,} weights")
    return reasons


def _role(module: nn.Module, name: str, network_ends: Ends) -> Role | None:
    if name in network_ends.first:
        return "first"
    if name in network_ends.last:
        return "head"
    if name in network_ends.unreached:
        return "idle" if network_ends.followed == "whole" else "unreached"
    return "depthwise" if is_depthwise(module, name) else None


def _left_dense(layer: LayerPlan, why: str) -> LayerPlan:
    return replace(layer, takes_part=False, sparsity=0.0, why=why)


# Shares


def _by_size(layers: Sequence[LayerPlan], choices: Choices) -> list[LayerPlan]:
    """A share for each layer, small ones denser (ERK); whole filters and channels the same share everywhere."""
    taking = {layer.name: layer for layer in layers if layer.takes_part}
    if isinstance(choices.pattern, Unstructured | Block):
        shares = erdos_renyi({name: _in_units(layer, choices) for name, layer in taking.items()}, choices.sparsity)
        why = "by size (ERK)"
    else:
        shares = {name: min(choices.sparsity, 1 - 1 / max(layer.units, 1)) for name, layer in taking.items()}
        why = "the same share in every layer"
    return [_with_share(layer, shares.get(layer.name), why) for layer in layers]


def _refuse_empty(layers: Sequence[LayerPlan], choices: Choices) -> None:
    """Raise if the shares that `levels` computes itself could leave nothing of a layer."""
    taking = [layer for layer in layers if layer.takes_part]
    shares = erdos_renyi({layer.name: layer.shape for layer in taking}, choices.sparsity)
    for layer in taking:
        _with_share(layer, _highest_sparsity(choices) if choices.global_sparsity else shares[layer.name], "")


def _in_units(layer: LayerPlan, choices: Choices) -> tuple[int, ...]:
    if not isinstance(choices.pattern, Block):
        return layer.shape
    out, channels, *kernel = layer.shape
    return (out // choices.pattern.rows, channels // choices.pattern.cols, *kernel)


def _with_share(layer: LayerPlan, share: float | None, why: str) -> LayerPlan:
    if share is None:
        return layer
    zeros = zero_count(layer.units, share)
    if zeros == 0:
        return replace(layer, sparsity=0.0, why=f"{why}: it stays dense")
    if zeros >= layer.units:
        message = f"nothing would be left of '{layer.name}'"
        raise GossamerError(Problem(message, _SPARSITY, fix="lower the sparsity"))
    return replace(layer, sparsity=share, why=why)


def _by_measure(
    module: nn.Module, layers: Sequence[LayerPlan], choices: Choices, data: Iterable[Any], progress: Progress | None
) -> list[LayerPlan]:
    """Shares, or bounds under one threshold, by how far pruning a layer alone changes the outputs.

    Layers that stay dense without data are measured as well, and become at most half as sparse as the target.
    """
    measured = [layer for layer in layers if layer.takes_part or (layer.role is not None and layer.fits)]
    density = 1 - choices.sparsity
    levels = [1 - density * factor for factor in (4, 2, 1, 1 / 2, 1 / KEPT_AT_LEAST) if density * factor < 1]
    curves = sensitivity(module, data, levels, [layer.name for layer in measured], choices.pattern, progress=progress)
    caps = {layer.name: choices.sparsity / 2 for layer in measured if not layer.takes_part}
    shares, distance = _measured_shares(curves, choices.sparsity, caps)
    return [_measured_plan(layer, curves.get(layer.name), shares, caps, distance, choices) for layer in layers]


def _measured_shares(
    curves: Mapping[str, SensitivityCurve], sparsity: float, caps: Mapping[str, float]
) -> tuple[dict[str, float], float]:
    """Shares without spared layers whose share would be negligible or put the total out of reach."""
    try:
        shares, distance = allocate(curves, sparsity, caps)
        dropped = {name for name in caps if shares[name] < LEAST}
    except SparsityError:
        shares, distance, dropped = dict[str, float](), 0.0, set(caps)
    if not dropped:
        return shares, distance
    return allocate({name: curve for name, curve in curves.items() if name not in dropped}, sparsity, caps)


def _measured_plan(
    layer: LayerPlan,
    curve: SensitivityCurve | None,
    shares: Mapping[str, float],
    caps: Mapping[str, float],
    distance: float,
    choices: Choices,
) -> LayerPlan:
    if curve is None:
        return layer
    layer = replace(layer, moved=curve.at(choices.sparsity))
    moved = (
        f"pruned alone to {percent(choices.sparsity)} it changes the outputs by {percent(curve.at(choices.sparsity))}"
    )
    if layer.name not in shares:
        return replace(layer, why=f"{layer.why}; {moved}")
    why = f"{_SPARED[layer.role][0]}, less sparse: {moved}" if layer.role and layer.name in caps else moved
    taking = replace(layer, takes_part=True, sparsity=None, why=why)
    if not choices.global_sparsity:
        return _with_share(taking, shares[layer.name], why)
    highest = min(curve.within(LEEWAY * distance), _highest_sparsity(choices), caps.get(layer.name, 1.0))
    return replace(taking, bound=_rounded_up(max(highest, shares[layer.name])))


def _highest_sparsity(choices: Choices) -> float:
    """The highest sparsity of a layer under one threshold."""
    return 1 - (1 - choices.sparsity) / KEPT_AT_LEAST


def _rounded_up(share: float) -> float:
    """The next share whose density has two digits.

    >>> _rounded_up(0.8312), _rounded_up(0.99917)
    (0.84, 0.99917)
    """
    density = 1 - share
    digits = 1 - math.floor(math.log10(density))
    return round(1 - math.floor(density * 10**digits + 1e-9) / 10**digits, digits)


def percent(share: float) -> str:
    """With three digits: `95.6 %`."""
    return f"{100 * share:.3g} %" if math.isfinite(share) else "more than can be measured"
