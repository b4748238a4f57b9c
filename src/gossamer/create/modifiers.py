"""The modifiers and variables of a generated recipe: schedule, learning rate, pruning, quantization, distillation.

Epochs are expressions of `num_epochs`, so that they follow when the recipe is loaded with another length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from gossamer.create.choices import CONSTANT, Choices, Method
from gossamer.create.layers import KEPT_AT_LEAST, LayerPlan, percent
from gossamer.create.text import Entry, Variable, name_patterns
from gossamer.errors import GossamerError, Problem
from gossamer.model import ALL_PRUNABLE, get_parameter, prunable
from gossamer.modifiers.base import to_step
from gossamer.recipe.variables import evaluate
from gossamer.sparse import Filter, zero_count
from gossamer.sparse.sharding import count

Fields = dict[str, object]
WHOLE_RUN: Fields = {"start_epoch": 0.0, "end_epoch": "eval(num_epochs)"}

# Schedule

LONG, LAST_OF_LONG, LAST_OF_SHORT = 15.0, 5.0, 2.0
"""A run of 15 epochs or more quantizes in its last 5 epochs, a shorter one in its last 2."""

_QUANTIZATION_EPOCHS = (
    f"max(min(num_epochs / 2, {LAST_OF_SHORT / 2:g}), "
    f"min(2 * ceil(num_epochs / 2 - {LAST_OF_SHORT / 2:g}), {LAST_OF_SHORT:g}) + "
    f"{LAST_OF_LONG - LAST_OF_SHORT:g} * min(num_epochs // {LONG:g}, 1))"
)
"""The same as an expression; half of the run if it has 2 epochs or less."""


@dataclass(frozen=True)
class Phases:
    """The borders between the parts of a run, in epochs."""

    num_epochs: float
    pruning_end: float
    """Pruning starts at 0; masks are fixed from here on."""
    quantization_start: float
    """`num_epochs` without quantization."""
    freeze: float
    """Ranges and batch-norm statistics are frozen from here on."""


def phases(num_epochs: float, quantization: bool) -> Phases:
    """Quantization at the end, pruning in the first half of the rest.

    >>> phases(20.0, quantization=True)
    Phases(num_epochs=20.0, pruning_end=7.5, quantization_start=15.0, freeze=17.5)
    """
    last = evaluate(_QUANTIZATION_EPOCHS, {"num_epochs": num_epochs}.__getitem__) if quantization else 0.0
    assert isinstance(last, int | float)
    start = num_epochs - last
    return Phases(num_epochs, start / 2, start, start + last / 2)


# Learning rate

CYCLES = (4, 5, 3, 2)
"""Numbers of cycles of `cyclic_linear`: the first that gives cycles of whole epochs; otherwise there is one cycle."""
DROPS = 4
"""The number of drops of `stepped`, at equal distances."""
_LR_COMMENTS = {
    "linear": "The learning rate falls linearly.",
    "cosine": "The learning rate falls along half a period of a cosine.",
    "cyclic_linear": "The learning rate falls linearly in several cycles.",
    "constant": "The learning rate is constant.",
    "stepped": "The learning rate falls by the same factor at each step.",
    "exponential": "The learning rate falls by the same factor after every epoch.",
}


def learning_rate(choices: Choices) -> tuple[list[Variable], list[Entry]]:
    """Variables and modifiers for the learning rate; neither if the recipe does not set it."""
    if choices.lr is None:
        return [], []
    variables = [Variable("init_lr", choices.variables.init_lr, "the initial learning rate")]
    comments = [_LR_COMMENTS[choices.lr]]
    if choices.lr == "constant":
        fields: Fields = {"start_epoch": 0.0, "learning_rate": "eval(init_lr)"}
        return variables, [Entry("SetLearningRateModifier", fields, comments)]
    variables.append(Variable("final_lr", choices.final_lr, "the final learning rate"))
    if choices.lr in ("stepped", "exponential"):
        return variables, [_by_factor(choices.lr, comments)]
    fields = {**WHOLE_RUN, "lr_func": choices.lr, "init_lr": "eval(init_lr)", "final_lr": "eval(final_lr)"}
    if choices.lr == "cyclic_linear":
        count = next((count for count in CYCLES if choices.variables.num_epochs % count == 0), 1)
        variables.append(Variable("cycle_epochs", f"eval(num_epochs / {count})", "the length of a cycle"))
        fields["cycle_epochs"] = "eval(cycle_epochs)"
    return variables, [Entry("LearningRateFunctionModifier", fields, comments)]


def _by_factor(kind: str, comments: list[str]) -> Entry:
    lr_class = "ExponentialLR"
    kwargs: Fields = {"gamma": "eval((final_lr / init_lr) ** (1 / max(ceil(num_epochs) - 1, 1)))"}
    if kind == "stepped":
        lr_class = "MultiStepLR"
        kwargs = {
            "gamma": f"eval((final_lr / init_lr) ** (1 / {DROPS}))",
            "milestones": [f"eval(num_epochs * {drop} / {DROPS + 1})" for drop in range(1, DROPS + 1)],
        }
    fields = {**WHOLE_RUN, "lr_class": lr_class, "lr_kwargs": kwargs, "init_lr": "eval(init_lr)"}
    return Entry("LearningRateModifier", fields, comments)


# Pruning

FIRST = 0.05
"""The sparsity at the first update."""
LEVELS = (0.5, 0.75, 0.9, 1.0)
"""The levels of `levels`, as shares of the sparsity."""
ACDC_PHASES = 6
"""An even number: dense first, sparse last."""

_FREQUENCIES = {
    "movement": ("eval(min(0.1, pruning_end / 50))", "short: only weights that still train get new scores"),
    "obs": ("eval(pruning_end / 8)", "each update costs num_grads backward passes"),
    "acdc": (
        f"eval(pruning_end / {ACDC_PHASES})",
        "the length of a phase; an even number of phases, dense first, sparse last",
    ),
    "admm": ("eval(min(0.5, pruning_end / 10))", "epochs between two projections onto the pattern"),
}
_DEFAULT_FREQUENCY = ("eval(min(0.5, pruning_end / 20))", "epochs between two updates of the masks")
_BOUND = f"eval(1 - (1 - sparsity) / {KEPT_AT_LEAST})"


@dataclass(frozen=True)
class Context:
    """What the pruning modifiers are made from."""

    choices: Choices
    method: Method
    layers: Sequence[LayerPlan]
    model: nn.Module
    phases: Phases
    steps_per_epoch: float | None

    @property
    def pruned(self) -> list[LayerPlan]:
        """The layers that lose weights."""
        return [layer for layer in self.layers if layer.takes_part and layer.sparsity != 0.0]

    @property
    def measured(self) -> bool:
        """Whether the layers were measured on data."""
        return any(layer.moved is not None for layer in self.layers)

    @property
    def has_shares(self) -> bool:
        """Whether the recipe lists a sparsity for each layer."""
        if self.method.name == "rigl" and not self.measured:
            return False  # RigL computes shares by size itself
        return any(layer.sparsity not in (None, 0.0, self.choices.sparsity) for layer in self.layers)

    @property
    def params(self) -> str | list[str]:
        return self.names_of(self.pruned)

    def names_of(self, layers: Sequence[LayerPlan]) -> str | list[str]:
        if len(layers) == len(self.layers) and not isinstance(self.choices.pattern, Filter):
            return ALL_PRUNABLE
        return self.patterns_of(layers)

    def patterns_of(self, layers: Sequence[LayerPlan]) -> list[str]:
        """Names as patterns; filters need the full names, because patterns skip the layer that is defined last."""
        names = [layer.name for layer in layers]
        return names if isinstance(self.choices.pattern, Filter) else name_patterns(names, self.model)

    @property
    def mask_type(self) -> Fields:
        return {"mask_type": self.choices.mask_type}

    @property
    def zeros(self) -> float:
        """The share of zeros that the pruned layers already have."""
        weights = [get_parameter(self.model, layer.name).detach() for layer in self.pruned]
        if any(weight.is_meta for weight in weights):
            return 0.0
        zeros = sum(weight.numel() - count(weight.detach()) for weight in weights)
        return zeros / max(sum(weight.numel() for weight in weights), 1)


def pruning(context: Context) -> tuple[list[Variable], list[Entry]]:
    """Variables and modifiers for the pruning method."""
    method, units = context.method, context.choices.unit_name
    variables: list[Variable] = []
    if not context.has_shares:
        remark = "the sparsity of the pruned layers"
        if units:
            remark = f"the share of {units} removed from the pruned layers"
        variables.append(Variable("sparsity", context.choices.sparsity, remark))
    end = "eval(quantization_start / 2)" if context.choices.quantization else "eval(num_epochs / 2)"
    variables.append(Variable("pruning_end", end, "masks are fixed from here on, and the model recovers"))
    if method.name not in ("str", "probmask", "levels"):
        variables.append(Variable("update_frequency", *_FREQUENCIES.get(method.name, _DEFAULT_FREQUENCY)))
    make: Callable[[Context], list[Entry]] = _MAKERS.get(method.name, _gradual)
    return variables, make(context)


def held_zeros(model: nn.Module, choices: Choices) -> list[Entry]:
    """Keep the zeros of the model, except in weights that are all zero: those are not trained yet."""
    weights = {name: get_parameter(model, name).detach() for name in prunable(model)}
    zeros = {name: 0 if w.is_meta else w.numel() - count(w.detach()) for name, w in weights.items()}
    empty = [name for name, weight in weights.items() if weight.numel() and zeros[name] == weight.numel()]
    held = sum(count for name, count in zeros.items() if name not in empty)
    if held == 0 and choices.method is not CONSTANT:
        return []
    total = sum(weight.numel() for weight in weights.values())
    comment = "Keeps the zeros that the model has when training starts"
    if held == 0:
        comment += ". It has none yet: load the sparse weights first."
    else:
        comment += f": {held:,} of {total:,} weights ({percent(held / max(total, 1))})."
    fields: Fields = {"params": ALL_PRUNABLE, "start_epoch": 0.0, **({"exclude": empty} if empty else {})}
    remarks = {"exclude": "all zero: not trained yet, so not pruned"} if empty else {}
    return [Entry("ConstantPruningModifier", fields, [comment], remarks)]


def _span(frequency: bool = True) -> Fields:
    fields: Fields = {"start_epoch": 0.0, "end_epoch": "eval(pruning_end)"}
    return {**fields, "update_frequency": "eval(update_frequency)"} if frequency else fields


def _threshold(context: Context) -> tuple[Fields, dict[str, str]]:
    """One threshold over all layers with a bound for each, or one threshold per layer; with remarks."""
    if not context.choices.global_sparsity:
        return {"global_sparsity": False}, {}
    bounds: object = _BOUND
    remark = "every layer keeps at least a quarter of the average density"
    if context.measured:
        groups: dict[float, list[LayerPlan]] = {}
        for layer in sorted(context.pruned, key=lambda layer: layer.bound or 0.0):
            groups.setdefault(layer.bound or 0.0, []).append(layer)
        bounds = {bound: context.patterns_of(group) for bound, group in groups.items()}
        remark = "the highest sparsity of each layer, by its measured effect on the outputs"
    remarks = {"global_sparsity": "one threshold for all layers", "max_layer_sparsity": remark}
    return {"global_sparsity": True, "max_layer_sparsity": bounds}, remarks


def _shares(context: Context) -> dict[float, list[str]]:
    """The layers by sparsity, densest first, each number as short as the counts allow."""
    groups: dict[float, list[LayerPlan]] = {}
    for layer in sorted(context.pruned, key=lambda layer: layer.sparsity or 0.0):
        assert layer.sparsity is not None
        groups.setdefault(_short(layer.sparsity, layer.units), []).append(layer)
    return {share: context.patterns_of(group) for share, group in groups.items()}


def _short(share: float, units: int) -> float:
    """The number with the fewest digits that removes the same number of units."""
    for digits in range(2, 17):
        if zero_count(units, min(round(share, digits), 1.0)) == zero_count(units, share):
            return min(round(share, digits), 1.0)
    return share


def _gradual(context: Context) -> list[Entry]:
    name, own = context.method.name, context.has_shares
    final: object = _shares(context) if own else "eval(sparsity)"
    first: object = 0.0
    threshold, remarks = _threshold(context)
    if context.zeros > FIRST:
        first = "__FROM_PARAM__"
        remarks["init_sparsity"] = "the model already has zeros"
    elif name != "movement":
        first = f"eval(min({FIRST}, sparsity))"
        if own:
            first = min(FIRST, *(layer.sparsity or 0.0 for layer in context.pruned))
    fields: Fields = {} if own else {"params": context.params}
    fields |= {"init_sparsity": first, "final_sparsity": final, **_span(), **context.mask_type, **threshold}
    if name == "obs":
        fields["num_grads"] = 512
    return [Entry(context.method.modifier, fields, remarks=remarks)]


def _by_share(context: Context, make: Callable[[object], Fields], *, threshold: bool = True) -> list[Entry]:
    """One modifier, or one for each sparsity if layers have their own; `make` gives the fields for a sparsity."""
    modifier = context.method.modifier
    common, remarks = _threshold(context) if threshold else ({}, {})
    if not context.has_shares:
        return [Entry(modifier, {"params": context.params, **make("eval(sparsity)"), **common}, remarks=remarks)]
    shares = _shares(context).items()
    return [Entry(modifier, {"params": params, **make(sparsity), **common}) for sparsity, params in shares]


def _acdc(context: Context) -> list[Entry]:
    more: Fields = {**_span(), **context.mask_type}
    return _by_share(context, lambda sparsity: {"compression_sparsity": sparsity, **more})


def _admm(context: Context) -> list[Entry]:
    more: Fields = {"rho": 0.03, **_span(), **context.mask_type}
    return _by_share(context, lambda sparsity: {"final_sparsity": sparsity, **more})


def _topkast(context: Context) -> list[Entry]:
    def fields(sparsity: object) -> Fields:
        backward: object = "eval(max(0, 1 - 2.5 * (1 - sparsity)))"
        if isinstance(sparsity, float):
            backward = round(max(0.0, 1 - 2.5 * (1 - sparsity)), 6)
        return {"forward_sparsity": sparsity, "backward_sparsity": backward, **_span()}

    return _by_share(context, fields)


def _rigl(context: Context) -> list[Entry]:
    """RigL computes shares by size itself; shares that were measured are given to it."""
    if not context.measured:
        fields: Fields = {"params": context.names_of([layer for layer in context.layers if layer.takes_part])}
        fields |= {"final_sparsity": "eval(sparsity)", "sparsity_strategy": "erdos_renyi_kernel", **_span()}
        return [Entry("RigLPruningModifier", fields, remarks={"sparsity_strategy": "small layers stay denser"})]
    more: Fields = {"sparsity_strategy": "uniform", **_span()}
    return _by_share(context, lambda sparsity: {"final_sparsity": sparsity, **more}, threshold=False)


def _learned(context: Context) -> list[Entry]:
    fields: Fields = {"params": context.params, "final_sparsity": "eval(sparsity)", **_span(frequency=False)}
    return [Entry(context.method.modifier, fields)]


def _levels(context: Context) -> list[Entry]:
    steps = context.phases.pruning_end * (context.steps_per_epoch or float("inf"))
    if context.steps_per_epoch and to_step(context.phases.pruning_end, context.steps_per_epoch) < 1:
        message = (
            f"pruning levels has no step to prune in: with num_epochs {context.choices.variables.num_epochs:g} and "
            f"steps_per_epoch {context.steps_per_epoch:g} it has {context.phases.pruning_end:g} epochs"
        )
        raise GossamerError(Problem(message, fix="raise one of the two"))
    chosen = LEVELS[-max(1, int(min(len(LEVELS), steps))) :]
    levels = [f"eval(sparsity * {level})" if level != 1 else "eval(sparsity)" for level in chosen]
    fields: Fields = {"params": context.params, "levels": levels, **_span(frequency=False)}
    remarks: dict[str, str] = {}
    if context.choices.is_nm:
        fields["allocation"] = "uniform"
    elif context.choices.global_sparsity:
        fields |= {"allocation": "energy", "max_layer_sparsity": _BOUND}
        remarks["allocation"] = "one threshold for all layers, on the share of energy that each layer loses"
    else:
        fields["allocation"] = "erk"
        remarks["allocation"] = "by size: small layers stay denser"
    return [Entry("LevelPruningModifier", {**fields, **context.mask_type}, remarks=remarks)]


_MAKERS: dict[str, Callable[[Context], list[Entry]]] = {
    "acdc": _acdc,
    "admm": _admm,
    "topkast": _topkast,
    "rigl": _rigl,
    "str": _learned,
    "probmask": _learned,
    "levels": _levels,
}

# Quantization and distillation


def quantization(choices: Choices) -> tuple[list[Variable], list[Entry]]:
    if not choices.quantization:
        return [], []
    remark = (
        f"quantization takes the last {LAST_OF_LONG:g} epochs of {LONG:g} or more, the last {LAST_OF_SHORT:g} of "
        f"fewer, and half of {LAST_OF_SHORT:g} or less"
    )
    variables = [
        Variable("quantization_epochs", f"eval({_QUANTIZATION_EPOCHS})", remark),
        Variable("quantization_start", "eval(num_epochs - quantization_epochs)"),
    ]
    freeze = "eval(quantization_start + quantization_epochs / 2)"
    fields: Fields = {
        "start_epoch": "eval(quantization_start)",
        "scheme": choices.scheme,
        "disable_quantization_observer_epoch": freeze,
        "freeze_bn_stats_epoch": freeze,
    }
    comment = (
        "The model emulates 8-bit arithmetic. After half of these epochs the ranges of activations and the batch-norm "
        "statistics are frozen."
    )
    remarks = {"scheme": "works on every CPU" if choices.scheme == "default" else f"for target {choices.scheme}"}
    return variables, [Entry("QuantizationModifier", fields, [comment], remarks)]


def distillation(choices: Choices) -> tuple[list[Variable], list[Entry]]:
    if not choices.distillation:
        return [], []
    variables = [
        Variable("hardness", choices.variables.hardness, "the weight of the teacher, from 0 to 1"),
        Variable("temperature", choices.variables.temperature, "the temperature of the softmax"),
    ]
    fields: Fields = {"start_epoch": 0.0, "hardness": "eval(hardness)", "temperature": "eval(temperature)"}
    comment = "Distillation from a teacher: the model as it was before training, unless another is given."
    return variables, [Entry("DistillationModifier", fields, [comment])]
