"""`initialize`: make a recipe for the model and attach it to the training run.

Everything that can be refused is refused here, before the model is looked at
or touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from gossamer.analysis.sensitivity import Progress
from gossamer.create.choices import DATA_IDLE, Choices, choose
from gossamer.create.generator import design
from gossamer.create.schemas import RecipeVariables
from gossamer.engine import Manager
from gossamer.engine.manager import check_arguments
from gossamer.errors import GossamerError
from gossamer.recipe import Recipe, load

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
    """Make a recipe for the model, attach it, and return the manager with what to use in place of the optimizer.

    The second value is the optimizer, or the scaler when one was given. Train for `manager.max_epochs` epochs;
    `manager.recipe` is the recipe's text, and `manager.save(path)` keeps it.

    steps_per_epoch: optimizer steps in an epoch, which is `len(data_loader)` without gradient accumulation.
    pruning: True, or a method: magnitude (gmp), movement, acdc, obs, mfac, rigl, topkast, str, probmask, admm,
        levels, structured; constant (transfer, sparse-transfer) holds the zeros that the model has; False and None
        prune nothing, and with quantization False still holds the zeros of a model that is sparse already.
    quantization: whether the last epochs train the model as its 8-bit version.
    lr: linear, cosine, cyclic_linear, constant, stepped, exponential; False leaves the learning rate to you.
    distillation: whether the model also learns from a teacher: `distillation_teacher`, or itself as it is now.
    scaler: the GradScaler of mixed precision.
    recipe_variables: a `RecipeVariables`, or a dict of what it holds.
    data: batches by which layers are measured (inputs, or pairs of inputs and labels; two batches are used): layers
        that matter more then give less. Without it, sizes and places in the network decide.
    grad_sampler: gradients of single batches, for `obs`.
    accumulation_steps: by how much each loss is divided when several batches make a step; for distillation.
    example_inputs: a tensor, or a tuple or dict of arguments, by which the model can be followed.
    lr_scheduler: with lr=False and `levels`: your scheduler, which starts over at each level.
    progress: called with a layer's name and the share of the work done while layers are measured.
    """
    choices = choose(pruning, quantization, lr, distillation, recipe_variables)
    check_arguments(model, optimizer, steps_per_epoch, scaler)
    _check_partners(choices, distillation_teacher, grad_sampler, lr_scheduler)
    batches = _batches(data)
    if batches is not None and not choices.measures:
        logger.warning(DATA_IDLE)
    for sentence in choices.without_effect:
        logger.warning("%s", sentence)
    if choices.lr is not None and len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
        logger.warning("the optimizer's groups have different learning rates, and the recipe sets one for all of them")
    made = design(model, choices, batches, example_inputs, float(steps_per_epoch), progress)
    for sentence in made.warnings:
        logger.warning("%s", sentence)
    manager = Manager(made.recipe if batches is None else _agreed(made.recipe))
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


def _check_partners(choices: Choices, teacher: object, grad_sampler: object, lr_scheduler: object) -> None:
    """What is of use only beside something else."""
    method = choices.method
    if teacher is not None and not choices.distillation:
        raise GossamerError("distillation_teacher is given and distillation is off; set distillation=True, or drop it")
    if teacher == "disable":
        raise GossamerError(
            "distillation=True asks for a teacher, and distillation_teacher='disable' for none; drop one of them"
        )
    if method is not None and method.needs_sampler and grad_sampler is None:
        raise GossamerError(
            f"pruning='{method.name}' needs gradients of single batches; pass grad_sampler=, or choose pruning='mfac'"
        )
    if grad_sampler is not None and (method is None or method.name not in ("obs", "mfac")):
        logger.warning("grad_sampler has no effect: only pruning='obs' and pruning='mfac' use it")
    if lr_scheduler is not None and choices.lr is not None:
        raise GossamerError(
            f"lr_scheduler is given, and the recipe sets the learning rate (lr='{choices.lr}'); "
            "pass lr=False, or drop lr_scheduler"
        )
    if lr_scheduler is not None and (method is None or method.name != "levels"):
        logger.warning("lr_scheduler has no effect: only pruning='levels' starts it over")


def _batches(data: object) -> Iterable[Any] | None:
    if data is None:
        return None
    if isinstance(data, Tensor | str | bytes) or not isinstance(data, Iterable):
        raise GossamerError(
            f"data: expected batches, as a data loader yields them, found {type(data).__name__}; "
            "put a single batch into a list"
        )
    return data  # pyright: ignore[reportUnknownVariableType]


def _agreed(recipe: Recipe) -> Recipe:
    """The recipe of the first process in all of them: each may have measured on other data."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return recipe
    texts: list[Any] = [recipe.text]
    distributed.broadcast_object_list(texts, src=0)
    return load(str(texts[0]))
