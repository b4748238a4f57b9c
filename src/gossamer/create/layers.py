"""Which layers of a model take part in pruning, and how much each of them gives, with the reason.

Looks at shapes, at where a layer stands in the network and, when there is
data, at what pruning it does to the outputs. What a recipe looks like is not
known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from gossamer.analysis.hardware import ineligible
from gossamer.analysis.sensitivity import Progress, SensitivityCurve, allocate, sensitivity
from gossamer.create.choices import Choices
from gossamer.errors import GossamerError, SparsityError
from gossamer.model import embedding_tables, get_parameter, is_depthwise, is_transposed, left_dense, prunable, unwrap
from gossamer.model.parameters import TIED
from gossamer.model.tracing.flow import Ends
from gossamer.sparse import Block, Channel, Filter, Pattern, Unstructured, erdos_renyi, within_reach, zero_count

TINY = 1024
"""Weights below which a layer is hardly worth pruning."""
TINY_TOGETHER = 0.01
"""All tiny layers together hold no more than this share of the weights."""
KEPT_AT_LEAST = 4
"""Under one threshold every layer keeps at least this fraction, a quarter, of the average density."""
LEAST = 0.05
"""A layer that is to be spared is left dense rather than given less than this."""

LEEWAY = 1.25
"""Under one threshold a layer may move the outputs, pruned alone, by this much more than when all move them alike."""

Role = Literal["first", "head", "depthwise", "unreached", "idle"]
_SPARED: dict[Role, str] = {
    "first": "the first convolution: few weights, and everything behind it depends on them",
    "head": "the head: nothing behind it could make up for what it loses",
    "depthwise": "depth-wise: few weights, and each channel has only its own",
    "unreached": "not reached: the path of the model depends on values, and it may be a head",
    "idle": "it does not run in evaluation mode: a head for training alone, or not in use",
}
_BY_ORDER: dict[Role, str] = {
    "first": "taken for the first convolution: it is defined first",
    "head": "taken for the head: it is defined last",
}


@dataclass(frozen=True)
class Layer:
    """One prunable weight, and what is to become of it."""

    name: str
    shape: tuple[int, ...]
    """Output channels first."""
    weights: int
    units: int
    """Weights, blocks or filters: what the pattern takes away as one."""
    role: Role | None
    fits: bool
    """Whether pattern and method could prune it."""
    takes_part: bool
    sparsity: float | None
    """In the end; None when one threshold or the method itself decides."""
    bound: float | None
    """Under one threshold: what the layer may give at most."""
    why: str
    moved: float | None = None
    """With data: how far the outputs move when the layer alone is pruned to the sparsity asked for."""


def look_at(
    model: nn.Module,
    choices: Choices,
    found_ends: Ends,
    data: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> list[Layer]:
    """Every prunable layer of the model in its order; raises `GossamerError` when none can take part."""
    module, method = unwrap(model), choices.method
    assert method is not None
    tables = embedding_tables(module)
    layers = [_layer(module, name, choices, name in tables) for name in prunable(module)]
    found = _spared(module, layers, choices, found_ends)
    found += [Layer(name, (), 0, 0, None, False, False, 0.0, None, why) for name, why in left_dense(module).items()]
    if choices.is_nm:
        return [replace(layer, sparsity=choices.sparsity) if layer.takes_part else layer for layer in found]
    if method.name == "levels":
        _refuse_empty(found, choices)
    if not choices.measures:
        return found
    try:
        if data is not None:
            return _by_measure(module, found, choices, data, progress)
        if not choices.global_sparsity:
            return _by_size(found, choices)
        within_reach({layer.name: layer.units for layer in found if layer.takes_part}, choices.sparsity, _most(choices))
    except SparsityError as error:
        raise GossamerError(f"recipe_variables.sparsity: {error}") from None
    return found


def _layer(module: nn.Module, name: str, choices: Choices, tied: bool) -> Layer:
    weight = get_parameter(module, name)
    rows = weight.transpose(0, 1) if weight.dim() > 1 and is_transposed(module, name) else weight
    shape, method = tuple(rows.shape), choices.method
    reason = choices.pattern.fits(shape)
    if reason is not None and is_depthwise(module, name):
        reason = _SPARED["depthwise"]
    elif reason is not None:
        reason = f"mask_type {choices.mask_type} does not fit: {reason}"
    elif tied:
        reason = TIED
    elif method is not None and method.by_gradient and not weight.requires_grad:
        reason = f"frozen, and {method.name} ranks by gradients"
    units = _units(shape, choices.pattern) if reason is None else weight.numel()
    taken = "takes part" if reason is None else reason
    sparsity = None if reason is None else 0.0
    fits = reason is None
    return Layer(name, shape, weight.numel(), units, None, fits, fits, sparsity, None, taken)


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


def _spared(module: nn.Module, layers: list[Layer], choices: Choices, found: Ends) -> list[Layer]:
    """Leave out what is small and matters much; where little else is there, it takes part all the same."""
    layers = [replace(layer, role=_role(module, layer.name, found)) for layer in layers]
    whole = sum(layer.weights for layer in layers if layer.role != "idle")
    out = {"idle": _SPARED["idle"]}
    if isinstance(choices.pattern, Filter):
        out |= {"head": "the head: without a filter it would lack an output", "unreached": _SPARED["unreached"]}
    layers = [replace(_left_dense(la, out[la.role]), fits=False) if la.role in out else la for la in layers]
    fitting = [layer for layer in layers if layer.takes_part]
    if not fitting:
        asked = "target or mask_type" if choices.variables.target else "mask_type"
        drop = "" if isinstance(choices.pattern, Unstructured) else f"; drop {asked}"
        raise GossamerError(f"no layer of the model can be pruned: '{layers[0].name}': {layers[0].why}{drop}")
    reasons = _reasons(fitting, whole, _SPARED | (_BY_ORDER if found.followed == "not" else {}))
    if choices.variables.target == "tensorrt" and choices.is_nm:
        slow = {layer.name: why for layer in fitting if (why := ineligible(layer.shape)) is not None}
        if any(layer.name not in slow and layer.name not in reasons for layer in fitting):
            reasons = {name: f"sparse tensor cores cannot run it: {why}" for name, why in slow.items()} | reasons
        else:
            told = "takes part, though sparse tensor cores cannot run it: "
            layers = [replace(la, why=told + slow[la.name]) if la.name in slow else la for la in layers]
            fitting = [layer for layer in layers if layer.takes_part]
    if all(layer.name in reasons for layer in fitting):
        chosen = max(fitting, key=lambda layer: layer.weights)
        told = "takes part: there is no other layer to prune"
        reasons.pop(chosen.name)
        layers = [replace(layer, role=None, why=told) if layer is chosen else layer for layer in layers]
    return [_left_dense(layer, reasons[layer.name]) if layer.name in reasons else layer for layer in layers]


def _reasons(fitting: Sequence[Layer], whole: int, spared: Mapping[Role, str]) -> dict[str, str]:
    """Why layers are left dense that could be pruned: their place in the network, or their size."""
    found: dict[str, str] = {}
    for layer in fitting:
        too_large_to_spare = layer.role != "depthwise" and layer.weights > whole / 2
        if layer.role is not None and not too_large_to_spare:
            found[layer.name] = spared[layer.role]
    passed = 0
    for layer in sorted((layer for layer in fitting if layer.weights < TINY), key=lambda layer: layer.weights):
        passed += layer.weights
        if passed <= TINY_TOGETHER * whole:
            found.setdefault(layer.name, f"tiny: {layer.weights:,} weights")
    return found


def _role(module: nn.Module, name: str, found: Ends) -> Role | None:
    if name in found.first:
        return "first"
    if name in found.last:
        return "head"
    if name in found.unreached:
        return "idle" if found.followed == "whole" else "unreached"
    return "depthwise" if is_depthwise(module, name) else None


def _left_dense(layer: Layer, why: str) -> Layer:
    return replace(layer, takes_part=False, sparsity=0.0, why=why)


# Shares


def _by_size(layers: Sequence[Layer], choices: Choices) -> list[Layer]:
    """A share for each layer, small ones denser (ERK); whole filters and channels the same share everywhere."""
    taking = {layer.name: layer for layer in layers if layer.takes_part}
    if isinstance(choices.pattern, Unstructured | Block):
        shares = erdos_renyi({name: _in_units(layer, choices) for name, layer in taking.items()}, choices.sparsity)
        why = "by size (ERK)"
    else:
        shares = {name: min(choices.sparsity, 1 - 1 / max(layer.units, 1)) for name, layer in taking.items()}
        why = "the same share in every layer"
    return [_with_share(layer, shares.get(layer.name), why) for layer in layers]


def _refuse_empty(layers: Sequence[Layer], choices: Choices) -> None:
    """Raise when the shares that `levels` finds by itself could leave a layer without a unit."""
    taking = [layer for layer in layers if layer.takes_part]
    shares = erdos_renyi({layer.name: layer.shape for layer in taking}, choices.sparsity)
    for layer in taking:
        _with_share(layer, _most(choices) if choices.global_sparsity else shares[layer.name], "")


def _in_units(layer: Layer, choices: Choices) -> tuple[int, ...]:
    if not isinstance(choices.pattern, Block):
        return layer.shape
    out, channels, *kernel = layer.shape
    return (out // choices.pattern.rows, channels // choices.pattern.cols, *kernel)


def _with_share(layer: Layer, share: float | None, why: str) -> Layer:
    if share is None:
        return layer
    zeros = zero_count(layer.units, share)
    if zeros == 0:
        return replace(layer, sparsity=0.0, why=f"{why}: it stays dense")
    if zeros >= layer.units:
        raise GossamerError(f"recipe_variables.sparsity: nothing would be left of '{layer.name}'; lower the sparsity")
    return replace(layer, sparsity=share, why=why)


def _by_measure(
    module: nn.Module, layers: Sequence[Layer], choices: Choices, data: Iterable[Any], progress: Progress | None
) -> list[Layer]:
    """Shares, or bounds under one threshold, by how far pruning a layer alone moves the outputs.

    What is spared without data is measured as well, and gives at most half of what is asked for.
    """
    asked = [layer for layer in layers if layer.takes_part or (layer.role is not None and layer.fits)]
    density = 1 - choices.sparsity
    levels = [1 - density * factor for factor in (4, 2, 1, 1 / 2, 1 / KEPT_AT_LEAST) if density * factor < 1]
    curves = sensitivity(module, data, levels, [layer.name for layer in asked], choices.pattern, progress=progress)
    caps = {layer.name: choices.sparsity / 2 for layer in asked if not layer.takes_part}
    shares, distance = _measured_shares(curves, choices.sparsity, caps)
    return [_judged(layer, curves.get(layer.name), shares, caps, distance, choices) for layer in layers]


def _measured_shares(
    curves: Mapping[str, SensitivityCurve], sparsity: float, caps: Mapping[str, float]
) -> tuple[dict[str, float], float]:
    """The shares, without the layers to be spared that would give next to nothing or put the total out of reach."""
    try:
        shares, distance = allocate(curves, sparsity, caps)
        dropped = {name for name in caps if shares[name] < LEAST}
    except SparsityError:
        shares, distance, dropped = dict[str, float](), 0.0, set(caps)
    if not dropped:
        return shares, distance
    return allocate({name: curve for name, curve in curves.items() if name not in dropped}, sparsity, caps)


def _judged(
    layer: Layer,
    curve: SensitivityCurve | None,
    shares: Mapping[str, float],
    caps: Mapping[str, float],
    distance: float,
    choices: Choices,
) -> Layer:
    if curve is None:
        return layer
    layer = replace(layer, moved=curve.at(choices.sparsity))
    moved = f"pruned alone to {percent(choices.sparsity)} it moves the outputs by {percent(curve.at(choices.sparsity))}"
    if layer.name not in shares:
        return replace(layer, why=f"{layer.why}; {moved}")
    told = f"{layer.why.partition(':')[0]}, given less: {moved}" if layer.name in caps else moved
    taking = replace(layer, takes_part=True, sparsity=None, why=told)
    if not choices.global_sparsity:
        return _with_share(taking, shares[layer.name], told)
    most = min(curve.within(LEEWAY * distance), _most(choices), caps.get(layer.name, 1.0))
    return replace(taking, bound=_rounded_up(max(most, shares[layer.name])))


def _most(choices: Choices) -> float:
    """What a layer may give at most under one threshold."""
    return 1 - (1 - choices.sparsity) / KEPT_AT_LEAST


def _rounded_up(share: float) -> float:
    """The least share above it of which the density has two digits.

    >>> _rounded_up(0.8312), _rounded_up(0.99917)
    (0.84, 0.99917)
    """
    density = 1 - share
    digits = 1 - math.floor(math.log10(density))
    return round(1 - math.floor(density * 10**digits + 1e-9) / 10**digits, digits)


def percent(share: float) -> str:
    """In words of three digits: `95.6 %`."""
    return f"{100 * share:.3g} %" if math.isfinite(share) else "more than can be measured"
