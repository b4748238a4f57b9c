"""Distillation without a change to the user's loop: hooks around the student's forward pass.

A hook before the forward pass runs the teacher, once per batch for all modifiers. A hook after it puts an identity on
the outputs whose backward pass mixes the gradients: ∂total = keep · ∂loss + scale · ∂distillation, where the scale is
the current loss scale over the number of accumulated losses. `losses.py` has the formulas.
"""

from __future__ import annotations

import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import ModifierError
from gossamer.model.additions import recompile, uncompiled
from gossamer.model.tracing.tracer import as_arguments
from gossamer.modifiers.base import Run, locating_errors
from gossamer.modifiers.distillation.outputs import Path, replaced, tensors
from gossamer.modifiers.distillation.teacher import Hook, Teacher, TeacherOutput

_FARTHEST = 200
"""How many autograd nodes are searched between outputs and the identity on them."""

logger = logging.getLogger("gossamer")


class TrainingPass:
    """One forward pass of the student, with the teacher's outputs; refers to nothing in the student's graph."""

    def __init__(self, run: Run) -> None:
        self.teacher_outputs: dict[tuple[str, ...], TeacherOutput] = {}
        self.step = run.clock.step
        self.explicit = False
        """Whether the user called `manager.loss`, so that the gradients come with its result."""
        self._run = weakref.ref(run)
        self._scale = (-1, 0.0)

    def teacher_output(self, keys: Sequence[str] | None) -> TeacherOutput:
        return self.teacher_outputs[tuple(keys or ())]

    @property
    def scale(self) -> float:
        """The factor on the user's loss in this backward pass; read once, because it synchronizes with the device."""
        run, backward = self._run(), torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if run is None:
            return 0.0
        if backward == -1 or self._scale[0] != backward:
            self._scale = (backward, run.optimizer.backward_scale / run.optimizer.accumulation_steps)
        return self._scale[1]


class DistillationLoss(ABC):
    """What one modifier adds to the loss, from its start to its end."""

    keep: float = 1.0
    """The factor on the user's loss."""
    from_outputs: bool = True
    """Whether it compares the model's outputs, and not its layers."""

    def __init__(self, run: Run, distillation: Distillation, order: int, input_keys: Sequence[str] | None) -> None:
        self.run = run
        self.distillation = distillation
        self.order = order
        """Position in the recipe: what a modifier adds is multiplied by the `keep` of those after it."""
        self.input_keys = input_keys
        self.forward_passes = self.teacher_passes = self.backward_passes = self.mixed_passes = 0
        """Since the last optimizer step; `mixed_passes` are backward passes whose gradients were mixed."""
        self._missed = 0
        self._warned: set[str] = set()

    @abstractmethod
    def gradients(self, training_pass: TrainingPass, output: Any) -> dict[Path, Tensor]:
        """After the student's forward pass: the gradient with respect to each of its outputs."""

    @abstractmethod
    def total(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """The same as a loss, for `manager.loss`."""

    def hooks(self, teacher: Teacher) -> Sequence[RemovableHandle]:
        """Register further hooks that this loss needs."""
        return ()

    def begin(self, training_pass: TrainingPass) -> None:  # noqa: B027  (most losses wait for the end of the pass)
        """The teacher has run, and the student is about to."""

    def warn_once(self, message: str, *args: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *args)

    def check(self) -> None:
        """Before an optimizer step: raise when distillation had no effect since the last one."""
        forward, teacher = self.forward_passes, self.teacher_passes
        backward, mixed = self.backward_passes, self.mixed_passes
        self.forward_passes = self.teacher_passes = self.backward_passes = self.mixed_passes = 0
        if teacher and not backward:
            where = "the model's output" if self.from_outputs else "the layers"
            raise ModifierError(
                f"learned nothing in this step: no gradient came back through {where}, as when the loss is computed "
                "inside forward; train on loss = manager.loss(loss, outputs)"
            )
        if mixed and not self.run.optimizer.uses_scaler and self.run.optimizer.backward_scale != 1:
            raise ModifierError(
                "learned at the loss scale of the GradScaler that modify was given, and this step goes past it; use "
                "that one, scaler.scale(loss).backward() and scaler.step(optimizer), or give modify no scaler"
            )
        if forward or teacher or backward:
            self._missed = 0
        elif any(parameter.grad is not None for parameter in self.run.module.parameters()):
            self._missed += 1
            self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        """A single step may be intended; a second in a row is an error."""
        message = "the optimizer makes a step, and the model was not called in training mode"
        fix = "call the model itself, not its forward or its parts, or train on manager.loss(loss, outputs, inputs)"
        if self._missed > 1:
            raise ModifierError(f"learns nothing: for the second time in a row {message}; {fix}")
        self.warn_once(f"distillation: {message}; {fix}")


class Distillation:
    """The teacher, the hooks on the student, and the losses of all distillation modifiers of a run."""

    def __init__(self, teacher: Teacher, student: nn.Module) -> None:
        self.teacher = teacher
        self.current: TrainingPass | None = None
        """The forward pass that is running."""
        self._student = weakref.ref(student)
        self._losses: dict[int, DistillationLoss] = {}
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._orders = 0
        self._paused = 0
        self._in_forward = False

    def next_order(self) -> int:
        self._orders += 1
        return self._orders

    def add(self, loss: DistillationLoss) -> None:
        """Use this loss from the next forward pass on."""
        student = self._student()
        assert student is not None
        if not self._losses:
            # Outside of all other hooks: the teacher gets the inputs as the user passed them.
            self._handles[0] = [
                student.register_forward_pre_hook(BeforeForward(self), prepend=True, with_kwargs=True),
                student.register_forward_hook(AfterForward(self), always_call=True),
            ]
        self._handles[loss.order] = list(loss.hooks(self.teacher))
        self._losses = dict(sorted({**self._losses, loss.order: loss}.items()))
        recompile(student.modules())

    def remove(self, order: int) -> None:
        """Remove a loss, and with the last one the hooks on the student."""
        self._losses.pop(order, None)
        removed = self._handles.pop(order, []) + ([] if self._losses else self._handles.pop(0, []))
        for handle in removed:
            handle.remove()
        student = self._student()
        if removed and student is not None:
            recompile(student.modules())

    @contextmanager
    def pause(self) -> Generator[None]:
        """Forward passes inside run without the teacher."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def factor(self, order: int) -> float:
        """The factor that later losses put on what this one adds."""
        return math.prod(loss.keep for behind, loss in self._losses.items() if behind > order)

    def of(self, outputs: Any) -> TrainingPass | None:
        """The forward pass that produced these outputs, or what they were computed from."""
        nodes = deque(tensor.grad_fn for tensor in tensors(outputs).values())
        seen: set[Any] = set()
        while nodes and len(seen) < _FARTHEST:
            node = nodes.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            mix = getattr(node, "mix", None)
            if isinstance(mix, _GradientMix) and mix.distillation() is self:
                return mix.training_pass
            nodes.extend(below for below, _ in node.next_functions)
        return None

    def compute(self, inputs: Any, keys: Sequence[str] | None) -> TeacherOutput:
        """Run the teacher outside a forward pass, on a tensor, or a tuple or mapping of arguments."""
        student = self._student()
        assert student is not None
        args, kwargs = as_arguments(inputs)
        return self.teacher.compute(student, args, kwargs, keys)

    def begin(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The student is about to run in training mode."""
        self.current = None
        if self._paused or not self._losses:
            return
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if in_backward and self._in_forward:
            return  # Activation checkpointing computes a pass again.
        self._in_forward = self._in_forward or not in_backward
        training_pass: TrainingPass | None = None
        for loss in self._losses.values():
            training_pass = training_pass or TrainingPass(loss.run)
            keys = tuple(loss.input_keys or ())
            with locating_errors(loss.run):
                if getattr(student, "_is_replica", False):
                    raise ModifierError("cannot teach the replicas of DataParallel; use DistributedDataParallel")
                if keys not in training_pass.teacher_outputs:
                    training_pass.teacher_outputs[keys] = self.teacher.compute(student, args, kwargs, keys)
                loss.begin(training_pass)
        self.current = training_pass

    def end(self, output: Any) -> Any:
        """The student has run: its output with the identity on it, or None to leave it unchanged."""
        training_pass, self.current = self.current, None
        held = tensors(output)
        if (
            training_pass is None
            or output is None
            or (held and not any(tensor.requires_grad for tensor in held.values()))
        ):
            return None
        # A scalar is the loss of a model that computes it itself, and not an output to compare.
        passed = {path: tensor for path, tensor in held.items() if tensor.requires_grad and tensor.dim() > 0}
        added: dict[Path, Tensor] = {}
        for order, loss in self._losses.items():
            loss.forward_passes += 1
            with locating_errors(loss.run), torch.no_grad():
                found = loss.gradients(training_pass, output)
            for path, gradient in found.items():
                share = gradient * self.factor(order)
                added[path] = added[path] + share if path in added else share
        keep = math.prod(loss.keep for loss in self._losses.values())
        losses = [weakref.ref(loss) for loss in self._losses.values() if loss.from_outputs]
        mix = _GradientMix(weakref.ref(self), training_pass, keep, [added.get(path) for path in passed], losses)
        identities = cast(tuple[Tensor, ...], _Identity.apply(mix, *passed.values()))
        return replaced(output, dict(zip(passed, identities, strict=True)))


@dataclass
class _GradientMix:
    """How one pass mixes its gradients. The autograd graph refers to it, so it refers to no run and no graph."""

    distillation: weakref.ref[Distillation]
    training_pass: TrainingPass
    keep: float
    added: list[Tensor | None]
    losses: list[weakref.ref[DistillationLoss]]

    def __call__(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        for reference in self.losses:
            loss = reference()
            if loss is not None:
                loss.backward_passes += 1
                loss.mixed_passes += not self.training_pass.explicit
        if self.training_pass.explicit:
            return list(gradients)
        scale = self.training_pass.scale
        return [
            gradient * self.keep if more is None else (gradient * self.keep + more * scale).to(gradient.dtype)
            for gradient, more in zip(gradients, self.added, strict=True)
        ]


class _Identity(torch.autograd.Function):
    """Returns outputs unchanged and mixes their gradients, also of outputs that the user's loss does not use."""

    @staticmethod
    def forward(mix: _GradientMix, *outputs: Tensor) -> tuple[Tensor, ...]:
        # Not a view for autograd: the user may change outputs in place.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mix = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.mix(gradients)


class BeforeForward(Hook):
    """Runs before the student's forward pass."""

    @uncompiled
    def __call__(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        distillation = cast("Distillation | None", self.owner())
        if distillation is not None and student.training and torch.is_grad_enabled():
            distillation.begin(student, args, kwargs)


class AfterForward(Hook):
    """Runs after the student's forward pass."""

    @uncompiled
    def __call__(self, student: nn.Module, args: object, output: Any) -> Any:
        distillation = cast("Distillation | None", self.owner())
        if distillation is None or not student.training or not torch.is_grad_enabled():
            return None
        return distillation.end(output)
