"""What was asked for, made to agree: method, pattern, sparsity and learning rate.

What the user gave is kept to, and a contradiction is an error that says which
of the two to drop. What was left open adapts, with a sentence that says so.
No model is known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.create.methods import CONSTANT, MAGNITUDE, Method, method_of
from gossamer.create.schemas import RecipeVariables, as_variables
from gossamer.errors import GossamerError, nearest
from gossamer.sparse import NM, Block, Channel, Filter, Pattern, Unstructured, parse_pattern

LearningRate = Literal["linear", "cosine", "cyclic_linear", "constant", "stepped", "exponential"]
LEARNING_RATES: tuple[LearningRate, ...] = (
    "linear",
    "cosine",
    "cyclic_linear",
    "constant",
    "stepped",
    "exponential",
)
_OF_TARGET: dict[str, tuple[str, Pattern]] = {"vnni": ("block4", Block(1, 4)), "tensorrt": ("2:4", NM(2, 4))}
DATA_IDLE = "data has no effect: what is chosen leaves no shares of layers to be measured"
_HALF = 0.5
"""The sparsity of whole filters and channels unless one is given: they go with all that is in them."""


@dataclass(frozen=True)
class Choices:
    """Everything about a recipe that does not depend on the model."""

    method: Method | None
    holds_zeros: bool
    """Without a method: whether the zeros that the model may have are held."""
    quantization: bool
    lr: LearningRate | None
    distillation: bool
    variables: RecipeVariables
    mask_type: str | list[int]
    pattern: Pattern
    sparsity: float
    global_sparsity: bool
    final_lr: float
    notes: tuple[str, ...]
    """What adapted, and why."""
    without_effect: tuple[str, ...]
    """What was given and means nothing here."""

    @property
    def scheme(self) -> str:
        return self.variables.target or "default"

    @property
    def measures(self) -> bool:
        """Whether layers share the zeros in a way on which data can have a say."""
        return self.method is not None and self.method.takes_shares and not self.is_nm

    @property
    def unit_words(self) -> str:
        """What goes as a whole and is counted so: filters or channels; empty where weights or blocks go."""
        if isinstance(self.pattern, Filter):
            return "filters"
        return "channels" if isinstance(self.pattern, Channel) else ""

    @property
    def is_nm(self) -> bool:
        return isinstance(self.pattern, NM)


def choose(
    pruning: object = True,
    quantization: object = True,
    lr: object = "linear",
    distillation: object = False,
    recipe_variables: object = None,
) -> Choices:
    """The choices that follow from the arguments of `initialize`; raises `GossamerError` for what cannot be."""
    variables = as_variables(recipe_variables)
    method = method_of(pruning)
    for name, value in (("quantization", quantization), ("distillation", distillation)):
        if not isinstance(value, bool):
            raise GossamerError(f"{name}: expected True or False, found {value!r}")
    rate = _learning_rate(lr)
    notes: list[str] = []
    final_lr = _final_lr(rate, variables, notes)
    mask_type, pattern = _pattern(method, variables, notes)
    sparsity = _sparsity(method, variables, pattern, notes)
    wide = _sharing(method, variables, pattern, notes)
    return Choices(
        method,
        pruning is False and bool(quantization),
        bool(quantization),
        rate,
        bool(distillation),
        variables,
        mask_type,
        pattern,
        sparsity,
        wide,
        final_lr,
        tuple(notes),
        tuple(_without_effect(method, bool(quantization), bool(distillation), variables)),
    )


def _learning_rate(lr: object) -> LearningRate | None:
    if lr is None or lr is False:
        return None
    for known in LEARNING_RATES:
        if lr == known:
            return known
    close = nearest(lr, LEARNING_RATES) if isinstance(lr, str) else ""
    raise GossamerError(f"lr: unknown schedule {lr!r}{close}; known: {', '.join(LEARNING_RATES)}, False")


def _final_lr(lr: LearningRate | None, variables: RecipeVariables, notes: list[str]) -> float:
    """The rate at the end; checks it against the schedule and against the rate at the beginning."""
    first, last = variables.init_lr, variables.final_lr
    if lr is None:
        if given := [name for name in ("init_lr", "final_lr") if variables.given(name)]:
            raise _conflict(
                f"lr=False leaves the learning rate alone, and {given[0]} sets it", f"lr=False or {given[0]}"
            )
        return last
    if lr == "constant":
        if variables.given("final_lr") and last != first:
            raise _conflict("lr='constant' keeps init_lr to the end, and final_lr says otherwise", "lr or final_lr")
        return first
    if last > first and not variables.given("final_lr"):
        last = first * 1e-4
        notes.append(f"final_lr is {last:g}, below the init_lr of {first:g}")
    if last > first:
        raise _conflict(
            f"final_lr {last:g} lies above init_lr {first:g}, and a learning rate falls", "final_lr, or raise init_lr"
        )
    if last == 0 and lr in ("stepped", "exponential"):
        raise _conflict(f"lr='{lr}' goes down by factors and never comes to final_lr 0", "lr or final_lr")
    return last


def _pattern(method: Method | None, variables: RecipeVariables, notes: list[str]) -> tuple[str | list[int], Pattern]:
    """The mask type as it is written, and the pattern that it means."""
    given, target = variables.given("mask_type"), variables.target
    mask_type, pattern = variables.mask_type, parse_pattern(variables.mask_type)
    if method is None or method is CONSTANT:
        if given and method is CONSTANT:
            raise _conflict(
                "pruning='constant' holds the zeros that the model has, and mask_type asks for new ones",
                "mask_type, or choose pruning='magnitude'",
            )
        return mask_type, pattern
    if target is not None:
        wanted, of_target = _OF_TARGET[target]
        if given and not _is_same(pattern, of_target):
            raise _conflict(
                f"target '{target}' needs mask_type {wanted}, and mask_type is {mask_type}",
                "target or mask_type",
            )
        if not given:
            mask_type, pattern = wanted, of_target
            notes.append(f"mask_type is {wanted}, for target {target}")
    asked, drop = f"mask_type is {mask_type}", "mask_type"
    if target is not None:
        asked, drop = f"target '{target}' asks for mask_type {mask_type}", "target"
        drop += " and mask_type" if given else ""
    drop += f", or choose pruning='{MAGNITUDE.name}'"
    if method.name == "structured" and not isinstance(pattern, Filter | Channel):
        if given or target is not None:
            raise _conflict(f"pruning='structured' removes whole filters or channels, and {asked}", drop)
        mask_type, pattern = "filter", Filter()
        notes.append("mask_type is filter, for pruning='structured'")
    elif method.single_weights and not isinstance(pattern, Unstructured):
        raise _conflict(f"pruning='{method.name}' is for single weights, and {asked}", drop)
    return mask_type, pattern


def _sparsity(method: Method | None, variables: RecipeVariables, pattern: Pattern, notes: list[str]) -> float:
    given, sparsity = variables.given("sparsity"), variables.sparsity
    if method is None:
        return sparsity
    if method.sharing == "own":
        if given:
            raise _conflict(
                f"pruning='{method.name}' holds the zeros that the model has, and sparsity asks for {sparsity:g}",
                f"sparsity, or choose pruning='{MAGNITUDE.name}'",
            )
        return sparsity
    if isinstance(pattern, NM):
        if given and abs(sparsity - pattern.sparsity) > 1e-6:
            asked = f"target '{variables.target}'" if variables.target else f"mask_type {variables.mask_type}"
            raise _conflict(
                f"{asked} means sparsity {pattern.sparsity:g}, and sparsity is {sparsity:g}",
                f"sparsity or {'target' if variables.target else 'mask_type'}",
            )
        if not given:
            notes.append(f"sparsity is {pattern.sparsity:g}, the pattern's own")
        return pattern.sparsity
    if isinstance(pattern, Filter | Channel) and not given:
        units = "filters" if isinstance(pattern, Filter) else "channels"
        notes.append(f"sparsity is {_HALF:g}, as a share of {units}: whole ones cost more")
        return _HALF
    return sparsity


def _sharing(method: Method | None, variables: RecipeVariables, pattern: Pattern, notes: list[str]) -> bool:
    """Whether one threshold over all layers says which weights go."""
    given, wide = variables.given("global_sparsity"), variables.global_sparsity
    if method is None:
        return wide
    if method is CONSTANT:
        if given:
            raise _conflict(
                "pruning='constant' holds the zeros that the model has, and global_sparsity shares new ones",
                "global_sparsity, or choose pruning='magnitude'",
            )
        return False
    if method.sharing == "global":
        if given and not wide:
            raise _conflict(
                f"pruning='{method.name}' has one budget for all layers, and global_sparsity is false",
                f"global_sparsity, or choose pruning='{MAGNITUDE.name}'",
            )
        return True
    if method.sharing == "layers":
        if given and wide:
            raise _conflict(
                f"pruning='{method.name}' gives each layer a share of its own, and global_sparsity is true",
                f"global_sparsity, or choose pruning='{MAGNITUDE.name}'",
            )
        if wide:
            notes.append(f"global_sparsity is false: {method.name} gives each layer a share of its own")
        return False
    if isinstance(pattern, NM):
        if given and wide:
            asked = f"target '{variables.target}'" if variables.target else f"mask_type {variables.mask_type}"
            raise _conflict(
                f"{asked} is the same share of every layer, and global_sparsity is true",
                f"global_sparsity or {'target' if variables.target else 'mask_type'}",
            )
        return False
    return wide


def _without_effect(
    method: Method | None, quantization: bool, distillation: bool, variables: RecipeVariables
) -> list[str]:
    idle: dict[str, tuple[str, ...]] = {
        "distillation is off": () if distillation else ("hardness", "temperature"),
        "nothing is pruned": () if method is not None else ("sparsity", "mask_type", "global_sparsity"),
    }
    if not quantization and (method is None or method is CONSTANT):
        idle["nothing is pruned or quantized"] = ("target",)
    return [
        f"recipe_variables.{name} has no effect: {why}"
        for why, names in idle.items()
        for name in names
        if variables.given(name) and getattr(variables, name) is not None
    ]


def _is_same(found: Pattern, wanted: Pattern) -> bool:
    """Whether zeros of the one pattern are zeros of the other; 2:4 in both directions is 2:4."""
    if isinstance(wanted, NM):
        return isinstance(found, NM) and (found.n, found.m) == (wanted.n, wanted.m)
    return found == wanted


def _conflict(what: str, drop: str) -> GossamerError:
    return GossamerError(f"{what}; drop {drop}")
