"""What is learned from a teacher's outputs: its distribution over classes (Hinton et al. 2015).

The formula and its gradient, in the precision of float32 at least. When a
teacher is asked, and how gradients reach the student, is the lessons' affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ModifierError
from gossamer.modifiers.base import Run
from gossamer.modifiers.distillation.lessons import Learner, Lesson, Lessons
from gossamer.modifiers.distillation.outputs import Key, Path, classes, pairs


class OutputLearner(Learner):
    """(1 − hardness) · loss + hardness · T² · KL(teacher ‖ student) at temperature T."""

    def __init__(
        self,
        run: Run,
        lessons: Lessons,
        place: int,
        input_keys: Sequence[str] | None,
        hardness: float,
        temperature: float,
        output_keys: Sequence[Key] | None,
    ) -> None:
        super().__init__(run, lessons, place, input_keys)
        self.keep = 1 - hardness
        self.hardness, self.temperature, self.output_keys = hardness, temperature, output_keys

    def gradients(self, lesson: Lesson, output: Any) -> dict[Path, Tensor]:
        self.taught += 1
        found = pairs(output, lesson.answer(self.input_keys).outputs, self.output_keys)
        weight = self.hardness * self.temperature**2 / len(found)
        learned = {
            path: weight * divergence_gradient(ours, theirs, self.temperature)
            for path, (ours, theirs) in found.items()
            if ours.requires_grad
        }
        _check_sound(learned.values(), [theirs for _, theirs in found.values()])
        return learned

    def total(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        lesson = self.lessons.of(outputs)
        if lesson is None and inputs is None:
            raise ModifierError(
                "cannot tell which batch manager.loss is called for: give it the outputs as the model returned them "
                "in training mode, or the inputs too, manager.loss(loss, outputs, inputs)"
            )
        if lesson is None:
            answer = self.lessons.ask(inputs, self.input_keys)
            self.taught += 1
        else:
            answer, lesson.explicit = lesson.answer(self.input_keys), True
        self.reached += 1
        found = pairs(outputs, answer.outputs, self.output_keys)
        divergences = [divergence(ours, theirs, self.temperature) for ours, theirs in found.values()]
        distance = torch.stack(divergences).mean()
        if lesson is None:
            _check_sound(
                (wide(theirs).softmax(classes(theirs)) for _, theirs in found.values()),
                [theirs for _, theirs in found.values()],
            )
        weight = self.hardness * self.temperature**2 / self.run.optimizer.accumulation_steps
        return self.keep * loss + weight * distance


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher ‖ student) at a temperature, the mean over all positions. Classes are the last dimension; the second
    one of four or more, as in `(batch, classes, height, width)`.

    >>> float(divergence(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]), 2.0))
    0.0
    """
    ours, theirs = ((wide(logits) / temperature).log_softmax(classes(logits)) for logits in (student, teacher))
    share = theirs.exp()
    # What the teacher rules out takes no part, also where both have −∞.
    return torch.where(share > 0, share * (theirs - ours), 0).sum() / _positions(student)


def divergence_gradient(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The gradient of `divergence` with respect to the student's logits."""
    ours, theirs = ((wide(logits) / temperature).softmax(classes(logits)) for logits in (student, teacher))
    return (ours - theirs) / (temperature * _positions(student))


def _check_sound(learned: Iterable[Tensor], taught: Sequence[Tensor]) -> None:
    """Raise when what is learned is not finite because of the teacher; a student's overflow is its own affair."""
    flags = [values.isfinite().all() for values in learned]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return
    if any(bool(wide(logits).softmax(classes(logits)).isnan().any()) for logits in taught):
        raise ModifierError(
            "has a teacher whose outputs are NaN or infinite for this batch; check the teacher's weights and the "
            "inputs, or let it compute in a wider precision"
        )


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _positions(tensor: Tensor) -> int:
    return max(tensor.numel() // max(tensor.shape[classes(tensor)], 1), 1)
