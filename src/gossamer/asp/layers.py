"""The weights that ASP prunes, by layer type, layer name and hardware support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from gossamer.analysis.hardware import ineligible
from gossamer.errors import GossamerError, nearest, within
from gossamer.model import first_names, get_module, is_transposed, layer_path, named_modules, stored_weight
from gossamer.model.parameters import TIED
from gossamer.model.weights import is_conv1d, stored, unprunable
from gossamer.sparse import NM, parse_nm

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


def parse_calculator(given: MaskCalculator) -> Calculator:
    """The pattern of a name, or the user's function."""
    if not isinstance(given, str):
        if not callable(given):
            shown = type(given).__name__
            raise GossamerError(f"mask_calculator: expected the name of a pattern or a function, found {shown}")
        return given
    with within("mask_calculator"):
        return parse_nm(given)


def leaves_by_type(
    whitelist: Sequence[type[nn.Module]], custom: Mapping[type[nn.Module], Sequence[str]]
) -> dict[type[nn.Module], list[str]]:
    """The names of the weights of each layer type that may be pruned."""
    _expect_several(whitelist, "whitelist", "a list of layer types")
    for kind, names in custom.items():
        _expect_several(names, f"custom_layer_dict: {_type_name(kind)}", "a list of parameter names")
    known = LAYERS | {kind: list(names) for kind, names in custom.items()}
    given: list[object] = [*whitelist, *custom]
    for kind in given:
        if not isinstance(kind, type):
            raise GossamerError(f"whitelist: expected types of layers, such as nn.Linear, found {kind!r}")
        if kind not in known:
            raise GossamerError(
                f"whitelist: the weights of {_type_name(kind)} are not known; name them in custom_layer_dict, "
                f"as in {{{_type_name(kind)}: ['weight']}}"
            )
    return {kind: names for kind, names in known.items() if kind in (*whitelist, *custom)}


def select_weights(
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
            name = _stored_name(model, f"{path}.{leaf}" if path else leaf)
            if name in first and layer_path(name) not in excluded:
                weights.setdefault(first[name], name)
    return weights


def reason_dense(model: nn.Module, name: str, weight: nn.Parameter, calculator: Calculator, tied: bool) -> str | None:
    """Why a weight stays dense, or None. `tied`: an embedding shares it, and the user did not name its layer."""
    source = stored_weight(model, name)
    reason = (None if source is None else source.reason) or unprunable(weight)
    if reason is not None:
        return reason
    if not weight.requires_grad:
        return "it is frozen"
    if tied:
        return f"{TIED}; name its layer in allowed_layer_names to prune it"
    rows = outputs_first(model, name, weight)
    reason = ineligible(rows.shape)
    if reason is None and isinstance(calculator, NM):
        reason = calculator.fits(rows.shape)
    return reason


def outputs_first(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight as `(out, in, …)`, however it is stored."""
    return weight.transpose(0, 1) if weight.dim() > 1 and is_transposed(model, name) else weight


def layer_and_leaf(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The layer that holds a weight, and the weight's name in it."""
    path, _, leaf = name.rpartition(".")
    return get_module(model, path), leaf


def _stored_name(model: nn.Module, name: str) -> str:
    """The name of the parameter that a weight is computed from, or of the weight itself."""
    path, _, leaf = name.rpartition(".")
    leaf = stored(get_module(model, path), leaf).leaf
    return f"{path}.{leaf}" if path else leaf


def _layer_paths(given: Sequence[str], field: str, known: set[str], first: Mapping[str, str]) -> set[str]:
    """Paths of layers from names of layers or weights, with or without the prefix of a wrapper."""
    _expect_several(given, field, "a list of layer names")
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
                    close = nearest(name, own) or f"; it has {', '.join(own) or 'none'}"
                    raise GossamerError(f"custom_layer_dict: {_type_name(kind)} has no parameter '{name}'{close}")
            yield from names


def _expect_several(given: object, field: str, what: str) -> None:
    if isinstance(given, str) or not isinstance(given, Iterable):
        shown = given.__name__ if isinstance(given, type) else repr(given)
        raise GossamerError(f"{field}: expected {what}, found {shown}")


def _type_name(kind: object) -> str:
    return cast(str, getattr(kind, "__name__", repr(kind)))
