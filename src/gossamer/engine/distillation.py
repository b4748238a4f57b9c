"""The teacher of a run: the module that the user gave, or a frozen copy of the model.

A copy is part of the run's state, because it exists nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, first_line, nearest
from gossamer.model import unwrap
from gossamer.model.additions import remove_substitutions
from gossamer.model.parameters import named_state
from gossamer.model.weights import duplicate
from gossamer.modifiers.state import Item, Spec

if TYPE_CHECKING:
    from gossamer.modifiers.distillation.passes import Distillation
    from gossamer.modifiers.distillation.teacher import Teacher

_KEYWORDS = ("self", "disable")

logger = logging.getLogger("gossamer")


def distillation_for(module: nn.Module, given: object, used: bool) -> Distillation | None:
    """The distillation of a run on `module`, with what the user gave as teacher; None without distillation."""
    _check(module, given)
    if not used:
        if given is not None and given is not False:
            logger.warning("distillation_teacher has no effect: the recipe holds no distillation modifier")
        return None
    if given is False or given == "disable":
        logger.warning("distillation is switched off: its modifiers have no effect in this run")
        return None
    from gossamer.modifiers.distillation.passes import Distillation
    from gossamer.modifiers.distillation.teacher import Teacher

    if isinstance(given, nn.Module):
        return Distillation(Teacher(given), unwrap(module))
    if given is None:
        logger.info("no distillation_teacher was given: the model learns from a frozen copy of itself as it is now")
    return Distillation(Teacher(frozen_copy(module), own=True), unwrap(module))


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of the model that never trains, without what recipes have attached to the model."""
    from gossamer.modifiers.distillation.teacher import without_hooks
    from gossamer.quantization import withdraw

    inner = unwrap(module)
    try:
        copy = duplicate(inner)
    except Exception as error:
        raise GossamerError(
            f"distillation_teacher: the model cannot be copied to be its own teacher ({first_line(error)}); "
            "give a teacher module"
        ) from error
    withdraw(copy)
    remove_substitutions(copy)
    copy.zero_grad(set_to_none=True)
    return without_hooks(copy).eval().requires_grad_(False)


def teacher_state(teacher: Teacher) -> dict[str, Tensor]:
    """Weights and buffers of a copy, by name."""
    return {name: tensor.detach() for name, tensor in named_state(teacher.module)}


def parse_teacher_state(
    teacher: Teacher, item: Item | None, model: Mapping[str, Spec]
) -> tuple[dict[str, Tensor] | None, str | None]:
    """The saved weights of a copy, None when there are none that fit, and then why; `model` is the model to copy."""
    if item is None:
        return None, None
    if not teacher.own:
        return None, "the frozen copy of the model in the state is dropped: another teacher was given"
    held = (
        dict(model)
        if teacher.released
        else {name: Spec.of(name, tensor) for name, tensor in named_state(teacher.module)}
    )
    saved = item.entries()
    odd = [name for name in held if name not in saved or saved[name].shape() != held[name].shape]
    if odd or saved.keys() - held.keys():
        name = (odd or sorted(saved.keys() - held.keys()))[0]
        return None, f"the frozen copy of the model in the state is dropped: {name!r} does not fit this model"
    return {name: saved[name].weight(spec) for name, spec in held.items()}, None


def load_teacher_state(
    teacher: Teacher, saved: Mapping[str, Tensor] | None, needed: bool, module: nn.Module
) -> list[str]:
    """Load parsed weights into a copy of `module`; returns messages about what does not match."""
    if not teacher.own:
        return []
    as_it = "is now" if teacher.released else "was given to modify"
    if teacher.released and needed:
        teacher.module, teacher.released = frozen_copy(module), False
    if teacher.released or saved is None:
        message = f"the state holds no frozen copy of the model: the teacher is the model as it {as_it}"
        return [message] if needed else []
    with torch.no_grad():
        for name, tensor in named_state(teacher.module):
            if name in saved:
                tensor.copy_(saved[name])
    return []


def _check(module: nn.Module, given: Any) -> None:
    if isinstance(given, str):
        if given not in _KEYWORDS:
            close = nearest(given, _KEYWORDS)
            message = f"expected a module, 'self' or 'disable', found '{given}'{close}"
            raise GossamerError(message, "distillation_teacher")
        return
    if given is None or given is False:
        return
    if not isinstance(given, nn.Module):
        raise GossamerError(
            f"distillation_teacher: expected a torch.nn.Module, 'self' or 'disable', found {type(given).__name__}"
        )
    if unwrap(given) is unwrap(module):
        raise GossamerError("distillation_teacher: it is the model that trains; write 'self' for a frozen copy of it")
    ours = {parameter.device for parameter in module.parameters()}
    theirs = {parameter.device for parameter in given.parameters()}
    if ours and theirs and not ours & theirs:
        from gossamer.modifiers.distillation.teacher import other_device_message

        raise GossamerError(other_device_message(min(theirs, key=str), min(ours, key=str)))
