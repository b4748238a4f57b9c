"""The training passes of a student, each taught once, whoever learns from it.

A hook before the student's forward pass asks the teacher; a hook behind it
puts an identity on the outputs whose backward pass mixes the gradients:
∂total = keep · ∂loss + scale · ∂learned, where the scale is that of the loss
at that moment over the number of accumulated losses. Nothing else in a user's
loop has to change. What is learned is the learners' affair; nothing here
knows a formula.
"""

from __future__ import annotations

import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import ModifierError
from gossamer.model.compiling import recompile, uncompiled
from gossamer.modifiers.base import Run, placed
from gossamer.modifiers.distillation.outputs import Path, replaced, tensors
from gossamer.modifiers.distillation.teaching import Answer, Hook, Teacher

_FARTHEST = 200
"""Autograd nodes between outputs and the identity on them that are looked through."""

logger = logging.getLogger("gossamer")


class Lesson:
    """One training pass: what the teacher answered. Holds nothing of the student's graph, which holds this."""

    def __init__(self, run: Run) -> None:
        self.answers: dict[tuple[str, ...], Answer] = {}
        self.step = run.clock.step
        self.explicit = False
        """Whether the user has asked for the loss, so that gradients come with it."""
        self._run = weakref.ref(run)
        self._scale = (-1, 0.0)

    def answer(self, keys: Sequence[str] | None) -> Answer:
        return self.answers[tuple(keys or ())]

    @property
    def scale(self) -> float:
        """By how much the user's loss is multiplied in this backward pass; read once, for it waits for the device."""
        run, backward = self._run(), torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if run is None:
            return 0.0
        if backward == -1 or self._scale[0] != backward:
            self._scale = (backward, run.optimizer.backward_scale / run.optimizer.accumulation_steps)
        return self._scale[1]


class Learner(ABC):
    """What one modifier of a run makes of lessons, from its start to its end."""

    keep: float = 1.0
    """By how much the user's loss is multiplied."""
    from_outputs: bool = True
    """Whether it learns from the model's outputs, and not elsewhere."""

    def __init__(self, run: Run, lessons: Lessons, place: int, input_keys: Sequence[str] | None) -> None:
        self.run = run
        self.lessons = lessons
        self.place = place
        """In the recipe's order: what a modifier adds is multiplied by the `keep` of those behind it."""
        self.input_keys = input_keys
        self.attended = self.taught = self.reached = self.mixed = 0
        """Since the last step: passes of the student, lessons, backward passes seen, and those that were mixed."""
        self._missed = 0
        self._told: set[str] = set()

    @abstractmethod
    def gradients(self, lesson: Lesson, output: Any) -> dict[Path, Tensor]:
        """The student's pass is over: what is learned from its outputs, as the gradient of each."""

    @abstractmethod
    def total(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        """The same as a loss, for a user who asks."""

    def join(self, teacher: Teacher) -> Sequence[RemovableHandle]:
        """Whatever hooks this learner needs besides."""
        return ()

    def begin(self, lesson: Lesson) -> None:  # noqa: B027  (most learners wait for the end of the pass)
        """The teacher has answered, and the student is about to run."""

    def tell_once(self, message: str, *words: object) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message, *words)

    def check(self) -> None:
        """Before a step of the optimizer: raise when the lessons since the last one came to nothing."""
        attended, taught, reached, mixed = self.attended, self.taught, self.reached, self.mixed
        self.attended = self.taught = self.reached = self.mixed = 0
        if taught and not reached:
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
        if attended or taught or reached:
            self._missed = 0
        elif any(parameter.grad is not None for parameter in self.run.module.parameters()):
            self._missed += 1
            self._tell_of_missing()

    def _tell_of_missing(self) -> None:
        """One step may be a loop's own affair; what goes on like that would never learn."""
        told = "the optimizer makes a step, and the model was not called in training mode"
        way_out = "call the model itself, not its forward or its parts, or train on manager.loss(loss, outputs, inputs)"
        if self._missed > 1:
            raise ModifierError(f"learns nothing: for the second time in a row {told}; {way_out}")
        self.tell_once(f"distillation: {told}; {way_out}")


class Lessons:
    """A teacher and a student, and those who learn."""

    def __init__(self, teacher: Teacher, student: nn.Module) -> None:
        self.teacher = teacher
        self.current: Lesson | None = None
        """The pass that is under way."""
        self._student = weakref.ref(student)
        self._learners: dict[int, Learner] = {}
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._places = 0
        self._paused = 0
        self._taught_forward = False

    def next_place(self) -> int:
        self._places += 1
        return self._places

    def join(self, learner: Learner) -> None:
        """Teach this learner too, from the next pass on."""
        student = self._student()
        assert student is not None
        if not self._learners:
            # Outside of all other hooks: what these do to the student is no affair of the teacher's.
            self._handles[0] = [
                student.register_forward_pre_hook(EnterHook(self), prepend=True, with_kwargs=True),
                student.register_forward_hook(LeaveHook(self), always_call=True),
            ]
        self._handles[learner.place] = list(learner.join(self.teacher))
        self._learners = dict(sorted({**self._learners, learner.place: learner}.items()))
        recompile(student.modules())

    def leave(self, place: int) -> None:
        """Stop teaching a learner; the last one takes the hooks along."""
        self._learners.pop(place, None)
        removed = self._handles.pop(place, []) + ([] if self._learners else self._handles.pop(0, []))
        for handle in removed:
            handle.remove()
        student = self._student()
        if removed and student is not None:
            recompile(student.modules())

    @contextmanager
    def pause(self) -> Generator[None]:
        """Passes inside are not lessons."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def factor(self, place: int) -> float:
        """By how much what this learner adds is multiplied by those behind it."""
        return math.prod(learner.keep for behind, learner in self._learners.items() if behind > place)

    def of(self, outputs: Any) -> Lesson | None:
        """The lesson that outputs of the student come from, or values that were computed from them."""
        nodes = deque(tensor.grad_fn for tensor in tensors(outputs).values())
        seen: set[Any] = set()
        while nodes and len(seen) < _FARTHEST:
            node = nodes.popleft()
            if node is None or node in seen:
                continue
            seen.add(node)
            blend = getattr(node, "blend", None)
            if isinstance(blend, _Blend) and blend.lessons() is self:
                return blend.lesson
            nodes.extend(below for below, _ in node.next_functions)
        return None

    def ask(self, inputs: Any, keys: Sequence[str] | None) -> Answer:
        """What the teacher says to inputs outside of a lesson: a tensor, or a tuple or mapping of arguments."""
        student = self._student()
        assert student is not None
        if isinstance(inputs, Mapping):
            return self.teacher.answer(student, (), cast(Mapping[str, Any], inputs), keys)
        args = tuple(cast(Sequence[Any], inputs)) if isinstance(inputs, tuple | list) else (inputs,)
        return self.teacher.answer(student, args, {}, keys)

    def begin(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The student is about to run in training mode."""
        self.current = None
        if self._paused or not self._learners:
            return
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if in_backward and self._taught_forward:
            return  # A pass is computed once more, for a checkpoint; it has been taught.
        self._taught_forward = self._taught_forward or not in_backward
        lesson: Lesson | None = None
        for learner in self._learners.values():
            lesson = lesson or Lesson(learner.run)
            keys = tuple(learner.input_keys or ())
            with placed(learner.run):
                if getattr(student, "_is_replica", False):
                    raise ModifierError("cannot teach the replicas of DataParallel; use DistributedDataParallel")
                if keys not in lesson.answers:
                    lesson.answers[keys] = self.teacher.answer(student, args, kwargs, keys)
                learner.begin(lesson)
        self.current = lesson

    def end(self, output: Any) -> Any:
        """The student has run: its output, with the identity on it, or None to leave it as it is."""
        lesson, self.current = self.current, None
        held = tensors(output)
        if lesson is None or output is None or (held and not any(tensor.requires_grad for tensor in held.values())):
            return None
        # A loss, as models return it that compute it themselves, is no output to learn from.
        passed = {path: tensor for path, tensor in held.items() if tensor.requires_grad and tensor.dim() > 0}
        added: dict[Path, Tensor] = {}
        for place, learner in self._learners.items():
            learner.attended += 1
            with placed(learner.run), torch.no_grad():
                found = learner.gradients(lesson, output)
            for path, gradient in found.items():
                share = gradient * self.factor(place)
                added[path] = added[path] + share if path in added else share
        keep = math.prod(learner.keep for learner in self._learners.values())
        listeners = [weakref.ref(learner) for learner in self._learners.values() if learner.from_outputs]
        blend = _Blend(weakref.ref(self), lesson, keep, [added.get(path) for path in passed], listeners)
        identities = cast(tuple[Tensor, ...], _Identity.apply(blend, *passed.values()))
        return replaced(output, dict(zip(passed, identities, strict=True)))


@dataclass
class _Blend:
    """How one pass mixes its gradients. Referred to by autograd's graph, so it holds no run and no graph itself."""

    lessons: weakref.ref[Lessons]
    lesson: Lesson
    keep: float
    added: list[Tensor | None]
    listeners: list[weakref.ref[Learner]]

    def __call__(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        for listener in self.listeners:
            learner = listener()
            if learner is not None:
                learner.reached += 1
                learner.mixed += not self.lesson.explicit
        if self.lesson.explicit:
            return list(gradients)
        scale = self.lesson.scale
        return [
            gradient * self.keep if more is None else (gradient * self.keep + more * scale).to(gradient.dtype)
            for gradient, more in zip(gradients, self.added, strict=True)
        ]


class _Identity(torch.autograd.Function):
    """Outputs as they are, and gradients as a blend says; outputs that nobody uses get what is learned all the same."""

    @staticmethod
    def forward(blend: _Blend, *outputs: Tensor) -> tuple[Tensor, ...]:
        # Not a view in autograd's eyes: a user may change outputs in place, as always.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.blend = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.blend(gradients)


class EnterHook(Hook):
    """Before the student's pass."""

    @uncompiled
    def __call__(self, student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lessons = cast("Lessons | None", self.owner())
        if lessons is not None and student.training and torch.is_grad_enabled():
            lessons.begin(student, args, kwargs)


class LeaveHook(Hook):
    """Behind it."""

    @uncompiled
    def __call__(self, student: nn.Module, args: object, output: Any) -> Any:
        lessons = cast("Lessons | None", self.owner())
        if lessons is None or not student.training or not torch.is_grad_enabled():
            return None
        return lessons.end(output)
