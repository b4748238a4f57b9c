"""The pruning part of a recipe: the modifiers of each method, and the variables that they use.

Which layers take part and what each gives comes in, with the reasons; how it
is laid out as text is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from gossamer.create.choices import Choices
from gossamer.create.layers import KEPT_AT_LEAST, Layer
from gossamer.create.naming import tidy
from gossamer.create.phases import Phases
from gossamer.create.text import Piece, Row, Variable
from gossamer.errors import GossamerError
from gossamer.model import ALL_PRUNABLE, get_parameter
from gossamer.modifiers.base import to_step
from gossamer.sparse import Filter, zero_count

FIRST = 0.05
"""The sparsity at the first update."""
LEVELS = (0.5, 0.75, 0.9, 1.0)
"""The levels of `levels`, as shares of the sparsity."""
PHASES = 6
"""Of AC/DC: an even number, dense first, sparse last."""

_FREQUENCIES = {
    "movement": ("eval(min(0.1, pruning_end / 50))", "small: the scores are fresh only where training goes on"),
    "obs": ("eval(pruning_end / 8)", "each update costs num_grads backward passes"),
    "acdc": (
        f"eval(pruning_end / {PHASES})",
        "the length of a phase; an even number of them: dense first, sparse last",
    ),
    "admm": ("eval(min(0.5, pruning_end / 10))", "epochs between two looks at the pattern"),
}
_SHARE = "the share of zeros in the layers that take part"
_USUAL = ("eval(min(0.5, pruning_end / 20))", "epochs between two updates of the masks")

Span = dict[str, object]


@dataclass(frozen=True)
class Context:
    """What the modifiers of all methods are made from."""

    choices: Choices
    layers: Sequence[Layer]
    model: nn.Module
    phases: Phases
    steps_per_epoch: float | None

    @property
    def taking(self) -> list[Layer]:
        """The layers that lose something."""
        return [layer for layer in self.layers if layer.takes_part and layer.sparsity != 0.0]

    @property
    def measured(self) -> bool:
        """Whether data had a say."""
        return any(layer.moved is not None for layer in self.layers)

    @property
    def params(self) -> str | list[str]:
        return self.named(self.taking)

    def named(self, layers: Sequence[Layer]) -> str | list[str]:
        if len(layers) == len(self.layers) and not isinstance(self.choices.pattern, Filter):
            return ALL_PRUNABLE
        return self.tidied(layers)

    def tidied(self, layers: Sequence[Layer]) -> list[str]:
        """Names in few words; where whole filters go, in full: patterns leave out the layer that is defined last."""
        names = [layer.name for layer in layers]
        return names if isinstance(self.choices.pattern, Filter) else tidy(names, self.model)

    @property
    def mask_type(self) -> Span:
        return {"mask_type": self.choices.mask_type}

    @property
    def zeros(self) -> float:
        """The share of zeros that the layers which take part have now."""
        weights = [get_parameter(self.model, layer.name).detach() for layer in self.taking]
        if any(weight.is_meta for weight in weights):
            return 0.0
        zeros = sum(weight.numel() - int(weight.count_nonzero()) for weight in weights)
        return zeros / max(sum(weight.numel() for weight in weights), 1)


def pruning(context: Context) -> tuple[list[Variable], list[Piece]]:
    """Variables and modifiers for the method that was chosen."""
    method = context.choices.method
    assert method is not None
    units = context.choices.unit_words
    told = f"the share of {units} that go, in the layers that take part" if units else _SHARE
    variables = [Variable("sparsity", context.choices.sparsity, told)]
    if method.sharing == "own" or _has_shares(context):
        variables = []
    end = "eval(quantization_start / 2)" if context.choices.quantization else "eval(num_epochs / 2)"
    variables.append(Variable("pruning_end", end, "from here on the zeros are held and the rest recovers"))
    if method.name not in ("str", "probmask", "levels"):
        variables.append(Variable("update_frequency", *_FREQUENCIES.get(method.name, _USUAL)))
    make: Callable[[Context], list[Piece]] = _MAKERS.get(method.name, _gradual)
    return variables, make(context)


def _has_shares(context: Context) -> bool:
    """Whether each layer has a sparsity of its own to be written, and not the one of all."""
    method = context.choices.method
    if method is not None and method.name == "rigl" and not context.measured:
        return False  # it shares by size itself
    return any(layer.sparsity not in (None, 0.0, context.choices.sparsity) for layer in context.layers)


def _span(frequency: bool = True) -> Span:
    fields: Span = {"start_epoch": 0.0, "end_epoch": "eval(pruning_end)"}
    return {**fields, "update_frequency": "eval(update_frequency)"} if frequency else fields


def _threshold(context: Context) -> Span:
    """One threshold over all layers, with bounds; nothing when each layer has its share."""
    if not context.choices.global_sparsity:
        return {"global_sparsity": False}
    bounds: object = f"eval(1 - (1 - sparsity) / {KEPT_AT_LEAST})"
    if context.measured:
        groups: dict[float, list[Layer]] = {}
        for layer in sorted(context.taking, key=lambda layer: layer.bound or 0.0):
            groups.setdefault(layer.bound or 0.0, []).append(layer)
        bounds = [Row(bound, context.tidied(group)) for bound, group in groups.items()]
    return {"global_sparsity": True, "max_layer_sparsity": bounds}


def _threshold_remarks(context: Context) -> dict[str, str]:
    if not context.choices.global_sparsity:
        return {}
    told = (
        "what a layer may give at most, by what it does to the outputs"
        if context.measured
        else ("no layer keeps less than a quarter of the average")
    )
    return {"global_sparsity": "one threshold for all layers", "max_layer_sparsity": told}


def shares(context: Context) -> list[Row]:
    """The layers by their sparsity, densest first, each number as short as its counts allow."""
    groups: dict[float, list[Layer]] = {}
    for layer in sorted(context.taking, key=lambda layer: layer.sparsity or 0.0):
        assert layer.sparsity is not None
        groups.setdefault(_short(layer.sparsity, layer.units), []).append(layer)
    return [Row(share, context.tidied(group), _shapes(group)) for share, group in groups.items()]


def _short(share: float, units: int) -> float:
    """The number of fewest digits that takes as many units."""
    for digits in range(2, 17):
        if zero_count(units, min(round(share, digits), 1.0)) == zero_count(units, share):
            return min(round(share, digits), 1.0)
    return share


def _shapes(group: Sequence[Layer]) -> str:
    found = list(dict.fromkeys("×".join(map(str, layer.shape)) for layer in group))
    return ", ".join(found[:3]) + (", …" if len(found) > 3 else "")


# Methods


def _gradual(context: Context) -> list[Piece]:
    method = context.choices.method
    assert method is not None
    own = _has_shares(context)
    final: object = shares(context) if own else "eval(sparsity)"
    first: object = FIRST if method.name != "movement" else 0.0
    remarks = _threshold_remarks(context)
    if context.zeros > FIRST:
        first = "__FROM_PARAM__"
        remarks["init_sparsity"] = "the model has zeros already"
    elif own and method.name != "movement":
        first = min(FIRST, *(layer.sparsity or 0.0 for layer in context.taking))
    elif method.name != "movement":
        first = f"eval(min({FIRST}, sparsity))"
    fields: Span = {} if own else {"params": context.params}
    fields |= {"init_sparsity": first, "final_sparsity": final, **_span(), **context.mask_type, **_threshold(context)}
    if method.name == "obs":
        fields["num_grads"] = 512
    return [Piece(method.modifier, fields, remarks=remarks)]


def _by_share(context: Context, make: Callable[[object, str | list[str]], Span]) -> list[Piece]:
    """One modifier, or one for each sparsity when layers have their own."""
    method = context.choices.method
    assert method is not None
    if not _has_shares(context):
        return [Piece(method.modifier, make("eval(sparsity)", context.params), remarks=_threshold_remarks(context))]
    return [
        Piece(method.modifier, make(row.sparsity, list(row.params)), [f"{row.remark}:" if row.remark else ""])
        for row in shares(context)
    ]


def _acdc(context: Context) -> list[Piece]:
    return _by_share(
        context,
        lambda sparsity, params: {
            "params": params,
            "compression_sparsity": sparsity,
            **_span(),
            **context.mask_type,
            **_threshold(context),
        },
    )


def _admm(context: Context) -> list[Piece]:
    return _by_share(
        context,
        lambda sparsity, params: {
            "params": params,
            "final_sparsity": sparsity,
            "rho": 0.03,
            **_span(),
            **context.mask_type,
            **_threshold(context),
        },
    )


def _topkast(context: Context) -> list[Piece]:
    def fields(sparsity: object, params: str | list[str]) -> Span:
        wider: object = "eval(max(0, 1 - 2.5 * (1 - sparsity)))"
        if isinstance(sparsity, float):
            wider = round(max(0.0, 1 - 2.5 * (1 - sparsity)), 6)
        both: Span = {"forward_sparsity": sparsity, "backward_sparsity": wider}
        return {"params": params, **both, **_span(), **_threshold(context)}

    return _by_share(context, fields)


def _rigl(context: Context) -> list[Piece]:
    """It shares by size itself; shares that were measured are given to it."""
    if not context.measured:
        fields: Span = {"params": context.named([la for la in context.layers if la.takes_part])}
        fields |= {"final_sparsity": "eval(sparsity)", "sparsity_strategy": "erdos_renyi_kernel", **_span()}
        return [Piece("RigLPruningModifier", fields, remarks={"sparsity_strategy": "small layers stay denser"})]
    return _by_share(
        context,
        lambda sparsity, params: {
            "params": params,
            "final_sparsity": sparsity,
            "sparsity_strategy": "uniform",
            **_span(),
        },
    )


def _learned(context: Context) -> list[Piece]:
    method = context.choices.method
    assert method is not None
    fields: Span = {"params": context.params, "final_sparsity": "eval(sparsity)", **_span(frequency=False)}
    return [Piece(method.modifier, fields)]


def _levels(context: Context) -> list[Piece]:
    steps = context.phases.pruning_end * (context.steps_per_epoch or float("inf"))
    if context.steps_per_epoch and to_step(context.phases.pruning_end, context.steps_per_epoch) < 1:
        raise GossamerError(
            f"pruning='levels' has no step to prune in: of num_epochs {context.choices.variables.num_epochs:g} with "
            f"steps_per_epoch {context.steps_per_epoch:g} it gets the first {context.phases.pruning_end:g} epochs; "
            "raise one of the two"
        )
    chosen = LEVELS[-max(1, int(min(len(LEVELS), steps))) :]
    levels = [f"eval(sparsity * {level})" if level != 1 else "eval(sparsity)" for level in chosen]
    fields: Span = {"params": context.params, "levels": levels, **_span(frequency=False)}
    remarks: dict[str, str] = {}
    if context.choices.is_nm:
        fields["allocation"] = "uniform"
    elif context.choices.global_sparsity:
        fields |= {"allocation": "energy", "max_layer_sparsity": f"eval(1 - (1 - sparsity) / {KEPT_AT_LEAST})"}
        remarks["allocation"] = "one threshold for all layers, on the energy that each would lose"
    else:
        fields["allocation"] = "erk"
        remarks["allocation"] = "by size: small layers stay denser"
    return [Piece("LevelPruningModifier", {**fields, **context.mask_type}, remarks=remarks)]


_MAKERS: dict[str, Callable[[Context], list[Piece]]] = {
    "acdc": _acdc,
    "admm": _admm,
    "topkast": _topkast,
    "rigl": _rigl,
    "str": _learned,
    "probmask": _learned,
    "levels": _levels,
}
