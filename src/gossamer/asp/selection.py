"""Which weights of a model ASP prunes, by layer type, name and what hardware can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from gossamer.analysis.eligibility import ineligible
from gossamer.errors import GossamerError, SparsityError, nearest
from gossamer.graph import first_names, get_module, named_modules, unwrap
from gossamer.sparse import NM, parse_pattern

MaskCalculator = str | Callable[[Tensor], Tensor]
Calculate = NM | Callable[[Tensor], Tensor]

LAYERS: dict[type[nn.Module], list[str]] = {
    nn.Linear: ["weight"],
    nn.Conv1d: ["weight"],
    nn.Conv2d: ["weight"],
    nn.Conv3d: ["weight"],
    nn.MultiheadAttention: ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
}
"""The weights of each type of layer; subclasses count as the type."""


def calculator(given: MaskCalculator) -> Calculate:
    """What computes a mask: a pattern by its name, or the user's own function."""
    if not isinstance(given, str):
        if not callable(given):
            found = type(given).__name__
            raise GossamerError(f"mask_calculator: expected the name of a pattern or a function, found {found}")
        return given
    try:
        pattern = parse_pattern(given)
    except SparsityError as error:
        raise GossamerError(f"mask_calculator: {error}") from None
    if not isinstance(pattern, NM):
        raise GossamerError(f"mask_calculator: expected a pattern such as m4n2_1d or 2:4, found '{given}'")
    return pattern


def chosen(
    model: nn.Module,
    leaves: Mapping[type[nn.Module], Sequence[str]],
    allowed: Sequence[str] | None,
    disallowed: Sequence[str],
) -> list[str]:
    """Clean names of the weights of all layers that types and names admit; a tied weight once."""
    prefix = "" if unwrap(model) is model else "module."
    wanted = None if allowed is None else {name.removeprefix(prefix) for name in allowed}
    unwanted = {name.removeprefix(prefix) for name in disallowed}
    known = {name for name, _ in named_modules(model)}
    for field, names in (("allowed_layer_names", wanted or ()), ("disallowed_layer_names", unwanted)):
        for name in names:
            if name not in known:
                raise GossamerError(f"{field}: the model has no layer '{name}'{nearest(name, known)}")
    first = first_names(model)
    found: list[str] = []
    for path, layer in named_modules(model):
        if path in unwanted or (wanted is not None and path not in wanted):
            continue
        for leaf in _leaves_of(layer, leaves):
            name = f"{path}.{leaf}" if path else leaf
            if name in first and first[name] not in found:
                found.append(first[name])
    return found


def _leaves_of(layer: nn.Module, leaves: Mapping[type[nn.Module], Sequence[str]]) -> Iterator[str]:
    for kind, names in leaves.items():
        if isinstance(layer, kind):
            yield from names


def why_not(weight: nn.Parameter, calculate: Calculate) -> str | None:
    """Why a weight is left dense, or None."""
    if not weight.requires_grad:
        return "it is frozen"
    if not weight.is_floating_point():
        return f"its weights are {weight.dtype}"
    reason = ineligible(weight.shape)
    if reason is None and isinstance(calculate, NM):
        reason = calculate.fits(weight.shape)
    return reason


def buffer_home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The layer that holds a weight, and the weight's name there."""
    path, _, leaf = name.rpartition(".")
    return get_module(model, path), leaf
