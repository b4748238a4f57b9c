"""What is learned from a teacher's layers: features like its own, by way of projections that are learned too.

The formula and its gradient, in the precision of float32 at least. When a
teacher is asked is the lessons' affair; tensors of the student are watched
and not replaced, for others may follow them by identity.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.sgd import sgd
from torch.utils.hooks import RemovableHandle

from gossamer.errors import ModifierError
from gossamer.model import get_module
from gossamer.modifiers.base import Run, placed
from gossamer.modifiers.distillation.learners import wide
from gossamer.modifiers.distillation.lessons import Learner, Lesson, Lessons
from gossamer.modifiers.distillation.outputs import Path
from gossamer.modifiers.distillation.teaching import LayerHook, Teacher


@dataclass(frozen=True)
class Pair:
    """A layer of the student and the teacher's that it imitates."""

    student: str
    teacher: str

    @property
    def key(self) -> str:
        return f"{self.student} → {self.teacher}"


class FeatureLearner(Learner):
    """loss + gain · Σ over layers of the mean squared difference between the student's features and the teacher's."""

    from_outputs = False

    def __init__(
        self,
        run: Run,
        lessons: Lessons,
        place: int,
        input_keys: Sequence[str] | None,
        layers: Sequence[Pair],
        gain: float,
        epsilon: float | None,
        project: bool,
    ) -> None:
        super().__init__(run, lessons, place, input_keys)
        self.layers, self.gain, self.epsilon, self.project = layers, gain, epsilon, project
        self._calls: Counter[str] = Counter()
        self._sound: dict[str, Tensor] = {}
        self._terms: list[Tensor] = []
        self._terms_of: Lesson | None = None
        self._without_gradient: set[str] = set()
        self._pulled: dict[str, Tensor] = {}
        self._pulled_at = -1

    # Listening

    def join(self, teacher: Teacher) -> Sequence[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for pair in self.layers:
            handles.append(teacher.listen((self.place, pair.key), get_module(teacher.module, pair.teacher)))
            hook = LayerHook(self, cast(Callable[[object, Tensor], None], partial(FeatureLearner.hear, pair=pair)))
            handles.append(get_module(self.run.module, pair.student).register_forward_hook(hook))
        return handles

    def begin(self, lesson: Lesson) -> None:
        self._calls.clear()
        self._sound.clear()
        self._without_gradient.clear()
        self._terms, self._terms_of = [], lesson
        silent = [p for p in self.layers if (self.place, p.key) not in lesson.answer(self.input_keys).features]
        if silent:
            raise ModifierError(
                f"the teacher does not call its layer '{silent[0].teacher}'; name another",
                "teacher_layer_names",
            )

    def hear(self, features: Tensor, pair: Pair) -> None:
        """A layer of the student has given its features."""
        lesson = self.lessons.current
        if lesson is None:
            return
        with placed(self.run), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            call = self._calls[pair.key]
            self._calls[pair.key] += 1
            if not torch.is_grad_enabled() or not features.requires_grad:
                self._without_gradient.add(pair.student)
                return
            given = lesson.answer(self.input_keys).features[self.place, pair.key]
            if call >= len(given):
                raise ModifierError(
                    f"'{pair.student}' ran more often than the teacher's '{pair.teacher}', "
                    f"which ran {len(given)} times; leave it out",
                    "student_layer_names",
                )
            with torch.no_grad():
                sound = given[call].isfinite().all()
                self._sound[pair.teacher] = sound & self._sound.get(pair.teacher, sound)
                weight = self.gain / len(given)
                term = self._compared(features.detach(), given[call], pair, weight)
                given[call] = term.value  # The features themselves are no longer needed.
            pull = _Pull(weakref.ref(self), lesson, self.lessons.factor(self.place), pair.key, term)
            self._terms.append(cast(Tensor, _Asked.apply(features, pull)))
            features.register_hook(pull)

    def gradients(self, lesson: Lesson, output: Any) -> dict[Path, Tensor]:
        missing = [pair.student for pair in self.layers if not self._calls[pair.key]]
        if missing:
            self.tell_once("distillation: layer '%s' of the model does not run in every pass", missing[0])
        self._check_sound()
        if self._terms:
            self.taught += 1
        elif self._without_gradient:
            raise ModifierError(
                f"learns nothing: '{min(self._without_gradient)}' and the other layers compute without gradient; they "
                "are frozen, or checkpointed with use_reentrant=True, which False would mend"
            )
        if self._without_gradient:
            self.tell_once(
                "distillation: layer '%s' computes without gradient and learns nothing; it is frozen, or checkpointed "
                "with use_reentrant=True, which False would mend",
                min(self._without_gradient),
            )
        return {}

    def _check_sound(self) -> None:
        """One look for all layers: it waits for the device."""
        flags = list(self._sound.values())
        if flags and not bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
            name = next(name for name, flag in self._sound.items() if not bool(flag))
            raise ModifierError(
                f"has a teacher whose layer '{name}' gives NaN or infinity for this batch; check the teacher's "
                "weights and the inputs, or let it compute in a wider precision"
            )

    def total(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        lesson, terms = self.lessons.of(outputs) or self._terms_of, self._terms
        if lesson is None or lesson is not self._terms_of or not terms:
            raise ModifierError(
                "needs the layers' features, which come with the last pass in training mode: call manager.loss "
                "with its outputs, before the model is called again"
            )
        lesson.explicit = True
        self.reached += 1
        self._terms = []
        learned = torch.stack([term.to(loss.device) for term in terms]).sum() / self.run.optimizer.accumulation_steps
        return loss + learned.to(loss.dtype)

    def forget(self, lesson: Lesson) -> None:
        """Nobody will ask for this lesson's loss any more."""
        if self._terms_of is lesson:
            self._terms, self._terms_of = [], None

    # Formula

    def _compared(self, ours: Tensor, theirs: Tensor, pair: Pair, weight: float) -> _Term:
        """Weight · mean((P x − y)²), over mean(y²) + epsilon when the teacher's features set the measure."""
        x, y = wide(ours), wide(theirs)
        along = _differing(x, y, pair, self.project)
        norm = 1.0 if self.epsilon is None else y.square().mean() + self.epsilon
        if along is None:
            apart = x - y
            slope = apart * (2 * weight / (apart.numel() * norm))
            return _Term(weight * apart.square().mean() / norm, slope, None)
        x, y = x.movedim(along, -1), y.movedim(along, -1)
        matrix = self._projection(pair, x.shape[-1], y.shape[-1], x)
        apart = x @ matrix.T - y
        slope = apart * (2 * weight / (apart.numel() * norm))
        pulled = slope.reshape(-1, y.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return _Term(weight * apart.square().mean() / norm, (slope @ matrix).movedim(-1, along), pulled)

    # Projections: the same on every rank, and trained like the layer whose features they take

    def _projection(self, pair: Pair, inputs: int, outputs: int, like: Tensor) -> Tensor:
        held: dict[str, Tensor] = self.run.state.setdefault("projections", {})
        if pair.key in held and tuple(held[pair.key].shape) != (outputs, inputs):  # of a model that was changed
            del held[pair.key]
            self.run.state.get("momenta", {}).pop(pair.key, None)
        if pair.key not in held:
            seeded = torch.Generator().manual_seed([p.key for p in self.layers].index(pair.key))
            held[pair.key] = (torch.rand(outputs, inputs, generator=seeded) * 2 - 1) / inputs**0.5
        held[pair.key] = held[pair.key].to(like)
        return held[pair.key]

    def pull(self, lesson: Lesson, key: str, gradient: Tensor) -> None:
        """Note a gradient of a projection, without loss scale; those of a step that was skipped are dropped."""
        if self._pulled_at != lesson.step:
            self._pulled, self._pulled_at = {}, lesson.step
        self._pulled[key] = self._pulled[key] + gradient if key in self._pulled else gradient

    @torch.no_grad()
    def train_projections(self) -> None:
        """One step with the arithmetic of `torch.optim.SGD`, on the mean of all ranks' gradients."""
        held: dict[str, Tensor] = self.run.state.get("projections", {})
        if not held:
            return
        momenta: dict[str, Tensor] = self.run.state.setdefault("momenta", {})
        pulled, self._pulled = self._pulled, {}
        gradients = [pulled[key] if key in pulled else torch.zeros_like(held[key]) for key in held]
        self.run.distributed.average(gradients)
        rates = {pair.key: self._settings(pair.student) for pair in self.layers}
        for (key, matrix), gradient in zip(held.items(), gradients, strict=True):
            if key not in rates or not bool(gradient.isfinite().all()):
                continue
            buffers = [momenta[key].to(matrix) if key in momenta else None]
            rate, momentum = rates[key]
            sgd(
                [matrix],
                [gradient],
                buffers,
                lr=rate,
                momentum=momentum,
                weight_decay=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            if buffers[0] is not None:
                momenta[key] = buffers[0]

    def _settings(self, name: str) -> tuple[float, float]:
        """The optimizer's learning rate and momentum for a layer; Adam's relatives have their first beta for it."""
        groups = self.run.optimizer.param_groups
        if not groups:
            return 0.0, 0.0
        own = {id(parameter) for parameter in get_module(self.run.module, name).parameters()}
        group = next((g for g in groups if any(id(parameter) in own for parameter in g["params"])), groups[0])
        return float(group["lr"]), float(group.get("momentum", group.get("betas", (0.0,))[0]))


@dataclass
class _Term:
    """One layer's share of the loss, with its gradients."""

    value: Tensor
    gradient: Tensor
    projection: Tensor | None


@dataclass
class _Pull:
    """A hook on features: adds what is learned to their gradient. The graph refers to it; it holds no run."""

    learner: weakref.ref[FeatureLearner]
    lesson: Lesson
    factor: float
    key: str
    term: _Term

    def __call__(self, gradient: Tensor) -> Tensor | None:
        learner = self.learner()
        if learner is None or self.lesson.explicit:
            return None
        learner.reached += 1
        learner.mixed += 1
        learner.forget(self.lesson)
        accumulated = self.factor / learner.run.optimizer.accumulation_steps
        if self.term.projection is not None:
            learner.pull(self.lesson, self.key, self.term.projection * accumulated)
        return (gradient + self.term.gradient * (self.lesson.scale * self.factor)).to(gradient.dtype)


class _Asked(torch.autograd.Function):
    """A layer's share as a tensor that can be trained on; its gradients are known already."""

    @staticmethod
    def forward(features: Tensor, pull: _Pull) -> Tensor:
        return pull.term.value.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pull, ctx.dtype = inputs[1], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pull: _Pull = ctx.pull
        learner, weight = pull.learner(), gradients[0]
        if learner is not None and pull.term.projection is not None:
            learner.mixed += 1  # The projection's gradient is freed of the loss scale.
            learner.pull(pull.lesson, pull.key, pull.term.projection * (weight / learner.run.optimizer.backward_scale))
        return (pull.term.gradient * weight).to(ctx.dtype), None


def _differing(x: Tensor, y: Tensor, pair: Pair, project: bool) -> int | None:
    """The dimension of channels when their numbers differ, None when the shapes are the same."""
    if x.shape == y.shape:
        return None
    told = (
        f"cannot compare '{pair.student}', which gives {tuple(x.shape)}, with the teacher's '{pair.teacher}', which "
        f"gives {tuple(y.shape)}"
    )
    apart = [dim for dim in range(x.dim()) if x.shape[dim] != y.shape[dim]] if x.dim() == y.dim() else []
    channels = (1,) if x.dim() >= 4 else (1, x.dim() - 1)
    if len(apart) != 1 or apart[0] not in channels:
        raise ModifierError(f"{told}: only the number of channels may differ", "student_layer_names")
    if not project:
        raise ModifierError(f"{told}; project_features: true maps one to the other", "project_features")
    return apart[0]
