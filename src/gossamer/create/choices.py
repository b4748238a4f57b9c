"""Resolves the arguments of `initialize`: method, pattern, sparsity and learning rate, independent of the model.

Given options are kept, and a contradiction between two of them is an error. Other options adapt to the given ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from gossamer.create.schemas import RecipeVariables, as_variables
from gossamer.errors import GossamerError, Problem, format_value, nearest
from gossamer.sparse import NM, Block, Channel, Filter, Pattern, Unstructured, parse_pattern


@dataclass(frozen=True)
class Method:
    """One pruning method: what it can do and what it needs."""

    name: str
    modifier: str
    summary: str
    """What it does, as the end of `pruning: …`."""
    sharing: Literal["either", "global", "layers", "own"] = "either"
    """How layers share the zeros: by one threshold or each by its own share, only one of the two, or as they are."""
    single_weights: bool = False
    """Whether it is defined for single weights only."""
    by_gradient: bool = False
    """Whether it ranks by gradients, which a frozen layer does not have."""
    needs_sampler: bool = False

    @property
    def takes_shares(self) -> bool:
        """Whether the recipe can set how layers share the zeros."""
        return self.sharing in ("either", "layers") and self.name != "levels"


MAGNITUDE = Method("magnitude", "GMPruningModifier", "removes the smallest weights, a few more at every update")
CONSTANT = Method("constant", "ConstantPruningModifier", "keeps the zeros of the model", sharing="own")

METHODS: tuple[Method, ...] = (
    MAGNITUDE,
    Method(
        "movement",
        "MovementPruningModifier",
        "removes the weights that training moves towards zero",
        by_gradient=True,
    ),
    Method("acdc", "ACDCPruningModifier", "alternates between dense and sparse phases"),
    Method(
        "obs",
        "OBSPruningModifier",
        "removes the weights with the least second-order effect on the loss and updates the rest",
        by_gradient=True,
        needs_sampler=True,
    ),
    Method(
        "mfac",
        "MFACPruningModifier",
        "removes the weights with the least effect on the loss, estimated from recent gradients",
        by_gradient=True,
    ),
    Method(
        "rigl",
        "RigLPruningModifier",
        "is sparse from the start and moves weights to where gradients are largest",
        sharing="layers",
        single_weights=True,
        by_gradient=True,
    ),
    Method(
        "topkast",
        "TopKASTPruningModifier",
        "computes with the largest weights and trains a larger set",
        single_weights=True,
    ),
    Method(
        "str",
        "STRPruningModifier",
        "learns a threshold for each layer",
        sharing="global",
        single_weights=True,
        by_gradient=True,
    ),
    Method(
        "probmask",
        "ProbMaskPruningModifier",
        "learns a keep probability for each weight",
        sharing="global",
        single_weights=True,
        by_gradient=True,
    ),
    Method("admm", "ADMMPruningModifier", "pulls the weights towards the pattern, then prunes them"),
    Method("levels", "LevelPruningModifier", "prunes to a table of sparsities, one after the other"),
    Method("structured", "StructuredPruningModifier", "removes whole filters, a few more at every update"),
    CONSTANT,
)

_BY_NAME: Mapping[str, Method] = {
    **{method.name: method for method in METHODS},
    "gmp": MAGNITUDE,
    "transfer": CONSTANT,
    "sparse-transfer": CONSTANT,
}
NAMES = tuple(_BY_NAME)

LearningRate = Literal["linear", "cosine", "cyclic_linear", "constant", "stepped", "exponential"]
LEARNING_RATES: tuple[LearningRate, ...] = get_args(LearningRate)
_TARGET_PATTERNS: dict[str, tuple[str, Pattern]] = {"vnni": ("block4", Block(1, 4)), "tensorrt": ("2:4", NM(2, 4))}
_UNIT_SPARSITY = 0.5
"""The default sparsity of whole filters and channels, which is lower because all of their weights go."""


@dataclass(frozen=True)
class Choices:
    """The resolved arguments of `initialize`."""

    method: Method | None
    holds_zeros: bool
    """Without a method: whether zeros that the model already has are held."""
    quantization: bool
    lr: LearningRate | None
    distillation: bool
    variables: RecipeVariables
    mask_type: str | list[int]
    pattern: Pattern
    sparsity: float
    global_sparsity: bool
    """Whether one threshold over all layers decides which weights go."""
    final_lr: float
    adapted: tuple[str, ...]
    """Which defaults were replaced, and why."""
    without_effect: tuple[Problem, ...]
    """Options that were given and have no effect."""

    @property
    def scheme(self) -> str:
        """The scheme of quantization."""
        return self.variables.target or "default"

    @property
    def uses_data(self) -> bool:
        """Whether measurements on data can change how layers share the zeros."""
        return self.method is not None and self.method.takes_shares and not self.is_nm

    @property
    def unit_name(self) -> str:
        """`filters` or `channels` where whole ones are removed, else an empty string."""
        if isinstance(self.pattern, Filter):
            return "filters"
        return "channels" if isinstance(self.pattern, Channel) else ""

    @property
    def is_nm(self) -> bool:
        return isinstance(self.pattern, NM)

    def check_data(self) -> Problem | None:
        """A warning for data that has no effect."""
        return None if self.uses_data else Problem("no effect: the other options leave nothing to measure", ("data",))


def choose(
    pruning: object = True,
    quantization: object = True,
    lr: object = "linear",
    distillation: object = False,
    recipe_variables: object = None,
) -> Choices:
    """Resolve the arguments of `initialize`; raises `GossamerError` for unknown and for contradictory ones."""
    variables = as_variables(recipe_variables)
    method = method_of(pruning)
    for name, value in (("quantization", quantization), ("distillation", distillation)):
        if not isinstance(value, bool):
            raise GossamerError(f"expected True or False, found {value!r}", name)
    rate = _learning_rate(lr)
    if method is CONSTANT:
        for name in ("mask_type", "sparsity", "global_sparsity"):
            if variables.given(name):
                message = "pruning constant keeps the zeros of the model and adds none"
                raise _conflict(name, message, _OTHER.format(name))
    adapted: list[str] = []
    final_lr = _final_lr(rate, variables, adapted)
    mask_type, pattern = _pattern(method, variables, adapted)
    return Choices(
        method=method,
        holds_zeros=pruning is False and bool(quantization),
        quantization=bool(quantization),
        lr=rate,
        distillation=bool(distillation),
        variables=variables,
        mask_type=mask_type,
        pattern=pattern,
        sparsity=_sparsity(method, variables, pattern, adapted),
        global_sparsity=_global_sparsity(method, variables, pattern, adapted),
        final_lr=final_lr,
        adapted=tuple(adapted),
        without_effect=tuple(_without_effect(method, bool(quantization), bool(distillation), variables)),
    )


def method_of(pruning: object) -> Method | None:
    """The method that the argument `pruning` names; None for no pruning.

    >>> method_of(True).modifier, method_of("AC/DC").modifier, method_of("transfer").name
    ('GMPruningModifier', 'ACDCPruningModifier', 'constant')
    """
    if pruning is None or pruning is False:
        return None
    if pruning is True:
        return MAGNITUDE
    if not isinstance(pruning, str):
        raise GossamerError(f"expected true, false or the name of a method, found {pruning!r}", "pruning")
    plain = {name.replace("-", ""): method for name, method in _BY_NAME.items()}
    method = plain.get("".join(letter for letter in pruning.lower() if letter.isalnum()))
    if method is None:
        message = f"unknown method {format_value(pruning)}{nearest(pruning.lower(), NAMES)}"
        raise GossamerError(Problem(message, ("pruning",), fix=f"choose one of {', '.join(NAMES)}"))
    return method


def _learning_rate(lr: object) -> LearningRate | None:
    if lr is None or lr is False:
        return None
    for known in LEARNING_RATES:
        if lr == known:
            return known
    close = nearest(lr, LEARNING_RATES) if isinstance(lr, str) else ""
    fix = f"choose one of {', '.join(LEARNING_RATES)}, or False"
    raise GossamerError(Problem(f"unknown schedule {lr!r}{close}", ("lr",), fix=fix))


def _final_lr(lr: LearningRate | None, variables: RecipeVariables, adapted: list[str]) -> float:
    """The learning rate at the end; checks it against the schedule and the first learning rate."""
    first, last = variables.init_lr, variables.final_lr
    if lr is None:
        for name in ("init_lr", "final_lr"):
            if variables.given(name):
                raise _conflict(name, "the recipe does not set the learning rate (lr is off)", f"drop {name} or lr")
        return last
    if lr == "constant":
        if variables.given("final_lr") and last != first:
            raise _conflict("final_lr", "lr constant keeps init_lr to the end", "drop final_lr or lr")
        return first
    if last > first and not variables.given("final_lr"):
        last = first * 1e-4
        adapted.append(f"final_lr is {last:g}, below the init_lr of {first:g}")
    if last > first:
        raise _conflict("final_lr", f"{last:g} is above init_lr {first:g}", "drop final_lr, or raise init_lr")
    if last == 0 and lr in ("stepped", "exponential"):
        raise _conflict("final_lr", f"lr {lr} decreases by factors and never reaches 0", "drop final_lr or lr")
    return last


def _pattern(method: Method | None, variables: RecipeVariables, adapted: list[str]) -> tuple[str | list[int], Pattern]:
    """The mask type as it is written, and the pattern that it means."""
    given, target = variables.given("mask_type"), variables.target
    mask_type, pattern = variables.mask_type, parse_pattern(variables.mask_type)
    if method is None or method is CONSTANT:
        return mask_type, pattern
    if target is not None:
        target_type, target_pattern = _TARGET_PATTERNS[target]
        if given and not _is_same(pattern, target_pattern):
            message = f"{mask_type} contradicts target {target}, which needs {target_type}"
            raise _conflict("mask_type", message, "drop target or mask_type")
        if not given:
            mask_type, pattern = target_type, target_pattern
            adapted.append(f"mask_type is {target_type}, for target {target}")
    if method.name == "structured" and not (given or target):
        adapted.append("mask_type is filter, for pruning='structured'")
        return "filter", Filter()
    removes_units = method.name == "structured" and not isinstance(pattern, Filter | Channel)
    if removes_units or (method.single_weights and not isinstance(pattern, Unstructured)):
        units = "whole filters or channels" if removes_units else "single weights"
        option, _ = _pattern_option(variables)
        message = f"mask_type {mask_type} contradicts pruning {method.name}, which removes {units}"
        raise _conflict(option, message, _OTHER.format(option))
    return mask_type, pattern


def _sparsity(method: Method | None, variables: RecipeVariables, pattern: Pattern, adapted: list[str]) -> float:
    given, sparsity = variables.given("sparsity"), variables.sparsity
    if method is None or method is CONSTANT:
        return sparsity
    if isinstance(pattern, NM):
        if given and abs(sparsity - pattern.sparsity) > 1e-6:
            option, value = _pattern_option(variables)
            message = f"{sparsity:g} contradicts {option} {value}, which means {pattern.sparsity:g}"
            raise _conflict("sparsity", message, f"drop sparsity or {option}")
        if not given:
            adapted.append(f"sparsity is {pattern.sparsity:g}, the pattern's own")
        return pattern.sparsity
    if isinstance(pattern, Filter | Channel) and not given:
        units = "filters" if isinstance(pattern, Filter) else "channels"
        adapted.append(
            f"sparsity is {_UNIT_SPARSITY:g}, as a share of {units}: removing whole {units} costs more accuracy"
        )
        return _UNIT_SPARSITY
    return sparsity


def _global_sparsity(method: Method | None, variables: RecipeVariables, pattern: Pattern, adapted: list[str]) -> bool:
    given, value = variables.given("global_sparsity"), variables.global_sparsity
    if method is None or method is CONSTANT:
        return value and method is None
    fix = _OTHER.format("global_sparsity")
    if method.sharing == "global":
        needed, reason = True, f"pruning {method.name} has one budget for all layers"
    elif method.sharing == "layers":
        needed, reason = False, f"pruning {method.name} sets a sparsity for each layer"
    elif isinstance(pattern, NM):
        option, chosen = _pattern_option(variables)
        needed, reason = False, f"{option} {chosen} has the same sparsity in every layer"
        fix = f"drop global_sparsity or {option}"
    else:
        return value
    if value != needed and given:
        raise _conflict("global_sparsity", reason, fix)
    if value != needed:
        adapted.append(f"global_sparsity is {str(needed).lower()}: {reason}")
    return needed


def _without_effect(
    method: Method | None, quantization: bool, distillation: bool, variables: RecipeVariables
) -> list[Problem]:
    unused: dict[str, tuple[str, ...]] = {
        "distillation is off": () if distillation else ("hardness", "temperature"),
        "nothing is pruned": () if method is not None else ("sparsity", "mask_type", "global_sparsity"),
    }
    if not quantization and (method is None or method is CONSTANT):
        unused["nothing is pruned or quantized"] = ("target",)
    return [
        Problem(f"no effect: {reason}", ("recipe_variables", name))
        for reason, names in unused.items()
        for name in names
        if variables.given(name) and getattr(variables, name) is not None
    ]


def _is_same(pattern: Pattern, target: Pattern) -> bool:
    """Whether a mask of one pattern is a mask of the other; 2:4 in both directions is 2:4."""
    if isinstance(target, NM):
        return isinstance(pattern, NM) and (pattern.n, pattern.m) == (target.n, target.m)
    return pattern == target


# Contradictions

_OTHER = f"drop {{}}, or choose pruning {MAGNITUDE.name}"


def _conflict(name: str, message: str, fix: str) -> GossamerError:
    return GossamerError(Problem(message, ("recipe_variables", name), fix=fix))


def _pattern_option(variables: RecipeVariables) -> tuple[str, object]:
    """The option that decides the pattern, and its value."""
    if variables.target is not None:
        return "target", variables.target
    return "mask_type", variables.mask_type
