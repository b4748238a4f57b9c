"""`recipe_for` writes a recipe for a model, and `initialize` also attaches it to a training run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gossamer.analysis.sensitivity import MAX_BATCHES, first_inputs
from gossamer.create import modifiers
from gossamer.create.choices import CONSTANT, Choices, choose
from gossamer.create.layers import PLAIN, LayerPlan, percent, plan_layers
from gossamer.create.modifiers import Context, Phases, phases
from gossamer.create.schemas import RecipeVariables
from gossamer.create.text import Entry, Variable, format_recipe, name_patterns
from gossamer.engine import Manager
from gossamer.engine.manager import check_modify_arguments
from gossamer.errors import GossamerError, Problem
from gossamer.model import expect_model, left_dense, prunable, unwrap
from gossamer.model.parameters import nothing_to_prune
from gossamer.model.tracing.ends import Ends, ends
from gossamer.modifiers import Modifier
from gossamer.modifiers.base import modifier_class
from gossamer.progress import Progress
from gossamer.recipe import Recipe, load
from gossamer.recipe.nodes import expression_in
from gossamer.recipe.variables import evaluate
from gossamer.validation import problems_of

logger = logging.getLogger("gossamer")


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: float,
    pruning: bool | str | None = True,
    quantization: bool = True,
    lr: str | bool | None = "linear",
    distillation: bool = False,
    distillation_teacher: nn.Module | str | None = None,
    scaler: GradScaler | None = None,
    recipe_variables: RecipeVariables | dict[str, Any] | None = None,
    *,
    data: Iterable[Any] | None = None,
    grad_sampler: object = None,
    accumulation_steps: int = 1,
    example_inputs: Any = None,
    lr_scheduler: Any = None,
    loggers: Sequence[Any] = (),
    progress: Progress | None = None,
) -> tuple[Manager, Any]:
    """Write a recipe for the model, attach it, and return the manager and the optimizer or scaler to train with.

    The second value is the optimizer, or the scaler if one was given. Train for `manager.max_epochs` epochs;
    `manager.recipe` is the recipe's text, and `manager.save(path)` writes it.

    steps_per_epoch: optimizer steps in an epoch, which is `len(data_loader)` without gradient accumulation.
    pruning: True, or a method: magnitude (gmp), movement, acdc, obs, mfac, rigl, topkast, str, probmask, admm,
        levels, structured; constant (transfer, sparse-transfer) holds the zeros that the model has; False and None
        prune nothing, and with quantization False still holds the zeros of a model that is already sparse.
    quantization: whether the last epochs train the model as its 8-bit version.
    lr: linear, cosine, cyclic_linear, constant, stepped, exponential; with False you set the learning rate yourself.
    distillation: whether the model also learns from a teacher: `distillation_teacher`, or itself as it is now.
    scaler: the GradScaler of mixed precision.
    recipe_variables: a `RecipeVariables`, or a dict of its fields.
    data: batches to measure layers on (inputs, or pairs of inputs and labels; two batches are used): layers that
        matter more are pruned less. Without data, sizes and positions in the network decide.
    grad_sampler: gradients of single batches, for `obs`.
    accumulation_steps: the number that each loss is divided by if several batches make a step; for distillation.
    example_inputs: a tensor, or a tuple or dict of arguments, to trace the model with.
    lr_scheduler: with lr=False and `levels`: your scheduler, which restarts at each level.
    progress: called with a layer's name and the share of the work done while layers are measured.
    """
    choices = choose(pruning, quantization, lr, distillation, recipe_variables)
    check_modify_arguments(model, optimizer, steps_per_epoch, scaler)
    _check_choices(choices, distillation_teacher, grad_sampler, lr_scheduler)
    batches = _batches(data)
    warnings = list(choices.without_effect)
    if batches is not None and (problem := choices.check_data()) is not None:
        warnings.append(problem)
    if choices.lr is not None and len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
        warnings.append(Problem("the optimizer's groups have different learning rates; the recipe sets one for all"))
    made = design(model, choices, batches, example_inputs, float(steps_per_epoch), progress)
    for warning in (*warnings, *made.warnings):
        logger.warning("%s", warning)
    manager = Manager(made.recipe if batches is None else _broadcast(made.recipe))
    return manager, manager.modify(
        model,
        optimizer,
        steps_per_epoch,
        scaler=scaler,
        distillation_teacher=distillation_teacher,
        grad_sampler=grad_sampler,
        loggers=loggers,
        example_inputs=example_inputs,
        lr_scheduler=lr_scheduler,
        accumulation_steps=accumulation_steps,
    )


def recipe_for(
    model: nn.Module,
    pruning: bool | str | None = True,
    quantization: bool = True,
    lr: str | bool | None = "linear",
    distillation: bool = False,
    recipe_variables: object = None,
    *,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    steps_per_epoch: float | None = None,
    progress: Progress | None = None,
) -> Recipe:
    """The recipe that `initialize` would use; see there for the arguments.

    >>> recipe = recipe_for(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), quantization=False)
    >>> [modifier.name for modifier in recipe.modifiers]
    ['EpochRangeModifier', 'LearningRateFunctionModifier', 'GMPruningModifier']
    """
    choices = choose(pruning, quantization, lr, distillation, recipe_variables)
    return design(model, choices, data, example_inputs, steps_per_epoch, progress).recipe


@dataclass(frozen=True)
class Design:
    """A recipe and the decisions behind it."""

    recipe: Recipe
    choices: Choices
    phases: Phases
    layers: tuple[LayerPlan, ...]
    """Every prunable layer; empty if the recipe prunes nothing."""
    warnings: tuple[Problem, ...] = ()


def design(
    model: nn.Module,
    choices: Choices,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    steps_per_epoch: float | None = None,
    progress: Progress | None = None,
) -> Design:
    """Inspect the model and write the recipe; the model is not changed."""
    expect_model(model, "model")
    module, times = unwrap(model), phases(choices.variables.num_epochs, choices.quantization)
    if (choices.method is not None or choices.quantization) and not prunable(module):
        raise GossamerError(nothing_to_prune(module, "to prune or quantize; pass the network itself"))
    layers: list[LayerPlan] = []
    warnings: list[Problem] = []
    pruning: tuple[list[Variable], list[Entry]] = ([], [])
    if choices.method is CONSTANT or choices.holds_zeros:
        pruning = [], modifiers.held_zeros(module, choices)
    elif choices.method is not None:
        batches = None if data is None else list(islice(data, MAX_BATCHES))
        if batches and example_inputs is None:
            example_inputs = first_inputs(batches, module)
        network_ends = ends(module, example_inputs)
        layers = plan_layers(module, choices, network_ends, batches, progress)
        context = Context(choices, choices.method, layers, module, times, steps_per_epoch)
        notes = [note for note in (_trace_note(network_ends), _sparse_note(context)) if note is not None]
        warnings = notes + [Problem(f"'{name}' stays dense: {why}") for name, why in left_dense(module).items()]
        variables, (first, *rest) = modifiers.pruning(context)
        comments = [*_layer_comments(choices, layers, module), *(f"Note: {replace(note, key=())}." for note in notes)]
        pruning = variables, [replace(first, comments=[*comments, *first.comments]), *rest]
    recipe = _assemble(module, choices, times, pruning)
    return Design(recipe, choices, times, tuple(layers), tuple(warnings))


def _assemble(
    module: nn.Module,
    choices: Choices,
    times: Phases,
    pruning: tuple[list[Variable], list[Entry]],
) -> Recipe:
    rate_variables, rates = modifiers.learning_rate(choices)
    quantization_variables, quantization = modifiers.quantization(choices)
    distillation_variables, distillation = modifiers.distillation(choices)
    variables = [
        Variable("num_epochs", choices.variables.num_epochs),
        *rate_variables,
        *(variable for variable in pruning[0] if variable.name == "sparsity"),
        *quantization_variables,
        *(variable for variable in pruning[0] if variable.name != "sparsity"),
        *distillation_variables,
    ]
    sections = {
        "training_modifiers": [Entry("EpochRangeModifier", modifiers.WHOLE_RUN), *rates],
        "pruning_modifiers": pruning[1],
        "quantization_modifiers": quantization,
        "distillation_modifiers": distillation,
    }
    values: dict[str, object] = {}
    for variable in variables:
        values[variable.name] = _evaluated(variable.value, values)
    built = [_build(entry, values) for entries in sections.values() for entry in entries]
    write = partial(format_recipe, _head(module, choices, times, bool(pruning[1])), variables, sections)
    return Recipe.of(built, values, write=write)


def _build(entry: Entry, variables: Mapping[str, object]) -> Modifier:
    kind = modifier_class(entry.modifier)
    fields = {name: _evaluated(value, variables) for name, value in entry.fields.items()}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise GossamerError(problems_of(error, fields, kind), entry.modifier) from None


def _evaluated(value: object, variables: Mapping[str, object]) -> object:
    """The value of a field, with each `eval(…)` in it computed, as it is when the text is loaded."""
    if isinstance(value, str):
        expression = expression_in(value)
        return value if expression is None else evaluate(expression, variables.__getitem__)
    if isinstance(value, Mapping):
        return {key: _evaluated(item, variables) for key, item in cast(Mapping[str, object], value).items()}
    if isinstance(value, list):
        return [_evaluated(item, variables) for item in cast(list[object], value)]
    return value


# Comments and warnings


def _trace_note(network_ends: Ends) -> Problem | None:
    """A note about a model that could not be traced as a whole."""
    if network_ends.traced == "no":
        message = (
            "the model could not be traced from its input to its output; the layers that are defined first and last "
            "are assumed to be its first and last layers"
        )
        if network_ends.reason is not None:
            return Problem(f"{message}; {network_ends.reason}")
        return Problem(message, ("example_inputs",), fix="pass what the model takes")
    if network_ends.traced == "fully":
        return None
    message = "the model has data-dependent control flow and was traced on one example"
    if network_ends.unreached:
        message += f"; layers that were not reached ({len(network_ends.unreached)}) are left dense"
    return Problem(message)


def _sparse_note(context: Context) -> Problem | None:
    """A warning if the model has more zeros than its target."""
    if context.zeros <= context.choices.sparsity + 1e-3:
        return None
    message = (
        f"the model already has {percent(context.zeros)} zeros, and the target is {percent(context.choices.sparsity)}"
    )
    return Problem(message, ("recipe_variables", "sparsity"), fix="pruning constant keeps them all")


def _head(module: nn.Module, choices: Choices, times: Phases, prunes: bool) -> list[str]:
    method, parts = choices.method, list[str]()
    if method is CONSTANT or (method is None and prunes):
        parts.append("keep its zeros")
    elif method is not None:
        target = (
            f"{percent(choices.sparsity)} of {choices.unit_name}"
            if choices.unit_name
            else f"to {percent(choices.sparsity)}"
        )
        parts.append(f"prune {target} ({method.name}, {choices.mask_type})")
    parts += ["quantize"] * choices.quantization + ["distil"] * choices.distillation
    name = type(module).__name__.removeprefix("FSDP")  # which fully_shard puts in front
    lines = [f"Recipe for {name}, written by gossamer.create: {', '.join(parts) or 'train'}.", ""]
    for start, end, what in _timeline(choices, times, prunes):
        lines.append(f"  epoch {start:g} to {end:g}: {what}")
    if choices.adapted:
        lines += ["", *(f"Adapted: {note}." for note in choices.adapted)]
    example = '  gossamer.load("recipe.yaml", variables={"num_epochs": 30})'
    return [*lines, "", "The values below can be changed here, or when the recipe is loaded:", example]


def _timeline(choices: Choices, times: Phases, holds: bool) -> list[tuple[float, float, str]]:
    spans: list[tuple[float, float, str]] = []
    if choices.method is not None and choices.method is not CONSTANT:
        spans.append((0.0, times.pruning_end, f"pruning: {choices.method.summary}"))
        spans.append((times.pruning_end, times.quantization_start, "fine-tuning with fixed masks"))
    else:
        spans.append((0.0, times.quantization_start, "training with fixed masks" if holds else "training"))
    if choices.quantization:
        text = f"quantization-aware training; ranges are frozen at {times.freeze:g}"
        spans.append((times.quantization_start, times.num_epochs, text))
    return [span for span in spans if span[1] > span[0]]


def _layer_comments(choices: Choices, layers: Sequence[LayerPlan], module: nn.Module) -> list[str]:
    """How many layers are pruned, and the reasons, each with its layers."""
    pruned = [layer for layer in layers if layer.takes_part]
    running = [layer for layer in layers if layer.role != "idle"]
    total, count = sum(layer.weights for layer in running), sum(layer.weights for layer in pruned)
    share = percent(count / max(total, 1))
    lines = [f"Prunes {len(pruned)} of {len(running)} layers, with {count:,} weights ({share} of all)."]
    if choices.is_nm:
        lines.append(f"The pattern sets their sparsity, {choices.sparsity:g}.")
    elif choices.global_sparsity:
        lines.append("One threshold over all of them selects the weights, so their sparsities differ.")
    groups: dict[str, list[str]] = {}
    for layer in layers:
        reason = layer.why if layer.takes_part else f"left dense ({layer.why})"
        if reason != PLAIN:
            groups.setdefault(reason, []).append(layer.name)
    for reason, names in groups.items():
        lines.append(f"  {', '.join(name_patterns(names, module))}: {reason}.")
    return lines


# Arguments of `initialize`


def _check_choices(choices: Choices, teacher: object, grad_sampler: object, lr_scheduler: object) -> None:
    """Raise for arguments that contradict the choices, and warn about those without effect."""
    method = choices.method
    if teacher is not None and not choices.distillation:
        fix = "set distillation=True, or drop it"
        raise GossamerError(Problem("given, but distillation is off", ("distillation_teacher",), fix=fix))
    if teacher == "disable":
        message = "distillation=True needs a teacher, and 'disable' means none"
        raise GossamerError(Problem(message, ("distillation_teacher",), fix="drop one of them"))
    if method is not None and method.needs_sampler and grad_sampler is None:
        message = f"pruning {method.name} needs gradients of single batches"
        raise GossamerError(Problem(message, ("grad_sampler",), fix="pass it, or choose pruning mfac"))
    if grad_sampler is not None and (method is None or method.name not in ("obs", "mfac")):
        logger.warning("%s", Problem("no effect: only pruning obs and mfac use it", ("grad_sampler",)))
    if lr_scheduler is not None and choices.lr is not None:
        message = f"given, but the recipe sets the learning rate (lr {choices.lr})"
        raise GossamerError(Problem(message, ("lr_scheduler",), fix="pass lr=False, or drop lr_scheduler"))
    if lr_scheduler is not None and (method is None or method.name != "levels"):
        logger.warning("%s", Problem("no effect: only pruning levels restarts it", ("lr_scheduler",)))


def _batches(data: object) -> Iterable[Any] | None:
    if data is None:
        return None
    if isinstance(data, Tensor | str | bytes) or not isinstance(data, Iterable):
        message = f"expected batches, as a data loader yields them, found {type(data).__name__}"
        raise GossamerError(Problem(message, ("data",), fix="put a single batch into a list"))
    return data  # pyright: ignore[reportUnknownVariableType]


def _broadcast(recipe: Recipe) -> Recipe:
    """The recipe of rank 0 on every rank, because each rank measures its own data."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return recipe
    texts: list[Any] = [recipe.text]
    distributed.broadcast_object_list(texts, src=0)
    return load(str(texts[0]))
