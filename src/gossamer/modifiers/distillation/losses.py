"""Distillation losses and their gradients, computed in float32 at least.

`OutputLoss` compares the distributions over classes (Hinton et al. 2015), `FeatureLoss` the features of layers.
`passes.py` runs the teacher and brings the gradients to the student.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gossamer.errors import ModifierError
from gossamer.model import get_module
from gossamer.modifiers.base import Run, locating_errors, sgd_options, sgd_step
from gossamer.modifiers.distillation.outputs import Key, Path, classes, pairs
from gossamer.modifiers.distillation.passes import Distillation, DistillationLoss, TrainingPass
from gossamer.modifiers.distillation.teacher import LayerHook, Teacher


class OutputLoss(DistillationLoss):
    """(1 − hardness) · loss + hardness · T² · KL(teacher ‖ student) at temperature T."""

    def __init__(
        self,
        run: Run,
        distillation: Distillation,
        order: int,
        input_keys: Sequence[str] | None,
        hardness: float,
        temperature: float,
        output_keys: Sequence[Key] | None,
    ) -> None:
        super().__init__(run, distillation, order, input_keys)
        self.keep = 1 - hardness
        self.hardness, self.temperature, self.output_keys = hardness, temperature, output_keys

    def gradients(self, training_pass: TrainingPass, output: Any) -> dict[Path, Tensor]:
        self.teacher_passes += 1
        found = pairs(output, training_pass.teacher_output(self.input_keys).outputs, self.output_keys)
        weight = self.hardness * self.temperature**2 / len(found)
        learned = {
            path: weight * divergence_gradient(ours, theirs, self.temperature)
            for path, (ours, theirs) in found.items()
            if ours.requires_grad
        }
        _check_finite(learned.values(), [theirs for _, theirs in found.values()])
        return learned

    def total(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        training_pass = self.distillation.of(outputs)
        if training_pass is None and inputs is None:
            raise ModifierError(
                "cannot tell which batch manager.loss is called for: give it the outputs as the model returned them "
                "in training mode, or the inputs too, manager.loss(loss, outputs, inputs)"
            )
        if training_pass is None:
            teacher = self.distillation.compute(inputs, self.input_keys)
            self.teacher_passes += 1
        else:
            teacher, training_pass.explicit = training_pass.teacher_output(self.input_keys), True
        self.backward_passes += 1
        found = pairs(outputs, teacher.outputs, self.output_keys)
        divergences = [divergence(ours, theirs, self.temperature) for ours, theirs in found.values()]
        distance = torch.stack(divergences).mean()
        if training_pass is None:
            _check_finite(
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
    # A class of probability 0 has no part, also where both logits are −∞.
    return torch.where(share > 0, share * (theirs - ours), 0).sum() / _positions(student)


def divergence_gradient(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The gradient of `divergence` with respect to the student's logits."""
    ours, theirs = ((wide(logits) / temperature).softmax(classes(logits)) for logits in (student, teacher))
    return (ours - theirs) / (temperature * _positions(student))


def _check_finite(computed: Iterable[Tensor], teacher_logits: Sequence[Tensor]) -> None:
    """Raise when the teacher's outputs make a result infinite; the student's own overflow is not an error."""
    flags = [values.isfinite().all() for values in computed]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return
    if any(bool(wide(logits).softmax(classes(logits)).isnan().any()) for logits in teacher_logits):
        raise ModifierError(
            "has a teacher whose outputs are NaN or infinite for this batch; check the teacher's weights and the "
            "inputs, or let it compute in a wider precision"
        )


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _positions(tensor: Tensor) -> int:
    return max(tensor.numel() // max(tensor.shape[classes(tensor)], 1), 1)


@dataclass(frozen=True)
class Pair:
    """A layer of the student and the teacher's layer that it is compared with."""

    student: str
    teacher: str

    @property
    def key(self) -> str:
        return f"{self.student} → {self.teacher}"


class FeatureLoss(DistillationLoss):
    """loss + gain · Σ over layers of the mean squared difference between the student's features and the teacher's."""

    from_outputs = False

    def __init__(
        self,
        run: Run,
        distillation: Distillation,
        order: int,
        input_keys: Sequence[str] | None,
        layers: Sequence[Pair],
        gain: float,
        epsilon: float | None,
        project: bool,
    ) -> None:
        super().__init__(run, distillation, order, input_keys)
        self.layers, self.gain, self.epsilon, self.project = layers, gain, epsilon, project
        self._calls: Counter[str] = Counter()
        self._finite: dict[str, Tensor] = {}
        self._terms: list[Tensor] = []
        self._terms_of: TrainingPass | None = None
        self._without_gradient: set[str] = set()
        self._gradients: dict[str, Tensor] = {}
        self._gradients_step = -1

    # Features

    def hooks(self, teacher: Teacher) -> Sequence[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for pair in self.layers:
            handles.append(teacher.record((self.order, pair.key), get_module(teacher.module, pair.teacher)))
            hook = LayerHook(self, cast(Callable[[object, Tensor], None], partial(FeatureLoss.observe, pair=pair)))
            handles.append(get_module(self.run.module, pair.student).register_forward_hook(hook))
        return handles

    def begin(self, training_pass: TrainingPass) -> None:
        self._calls.clear()
        self._finite.clear()
        self._without_gradient.clear()
        self._terms, self._terms_of = [], training_pass
        features = training_pass.teacher_output(self.input_keys).features
        silent = [pair for pair in self.layers if (self.order, pair.key) not in features]
        if silent:
            raise ModifierError(
                f"the teacher does not call its layer '{silent[0].teacher}'; name another",
                "teacher_layer_names",
            )

    def observe(self, features: Tensor, pair: Pair) -> None:
        """Compare the features of a layer of the student, when it has run."""
        training_pass = self.distillation.current
        if training_pass is None:
            return
        with locating_errors(self.run), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            call = self._calls[pair.key]
            self._calls[pair.key] += 1
            if not torch.is_grad_enabled() or not features.requires_grad:
                self._without_gradient.add(pair.student)
                return
            given = training_pass.teacher_output(self.input_keys).features[self.order, pair.key]
            if call >= len(given):
                raise ModifierError(
                    f"'{pair.student}' ran more often than the teacher's '{pair.teacher}', "
                    f"which ran {len(given)} times; leave it out",
                    "student_layer_names",
                )
            with torch.no_grad():
                finite = given[call].isfinite().all()
                self._finite[pair.teacher] = finite & self._finite.get(pair.teacher, finite)
                weight = self.gain / len(given)
                term = self._compared(features.detach(), given[call], pair, weight)
                given[call] = term.value  # The features themselves are no longer needed.
            gradient_hook = _FeatureGradient(
                weakref.ref(self), training_pass, self.distillation.factor(self.order), pair.key, term
            )
            self._terms.append(cast(Tensor, _FeatureTerm.apply(features, gradient_hook)))
            features.register_hook(gradient_hook)

    def gradients(self, training_pass: TrainingPass, output: Any) -> dict[Path, Tensor]:
        missing = [pair.student for pair in self.layers if not self._calls[pair.key]]
        if missing:
            self.warn_once("distillation: layer '%s' of the model does not run in every pass", missing[0])
        self._check_finite()
        if self._terms:
            self.teacher_passes += 1
        elif self._without_gradient:
            raise ModifierError(
                f"learns nothing: '{min(self._without_gradient)}' and the other layers compute without gradient; they "
                "are frozen, or checkpointed with use_reentrant=True, which use_reentrant=False fixes"
            )
        if self._without_gradient:
            self.warn_once(
                "distillation: layer '%s' computes without gradient and learns nothing; it is frozen, or checkpointed "
                "with use_reentrant=True, which use_reentrant=False fixes",
                min(self._without_gradient),
            )
        return {}

    def _check_finite(self) -> None:
        """One check for all layers, because it synchronizes with the device."""
        flags = list(self._finite.values())
        if flags and not bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
            name = next(name for name, flag in self._finite.items() if not bool(flag))
            raise ModifierError(
                f"has a teacher whose layer '{name}' gives NaN or infinity for this batch; check the teacher's "
                "weights and the inputs, or let it compute in a wider precision"
            )

    def total(self, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        training_pass, terms = self.distillation.of(outputs) or self._terms_of, self._terms
        if training_pass is None or training_pass is not self._terms_of or not terms:
            raise ModifierError(
                "needs the layers' features, which come with the last pass in training mode: call manager.loss "
                "with its outputs, before the model is called again"
            )
        training_pass.explicit = True
        self.backward_passes += 1
        self._terms = []
        learned = torch.stack([term.to(loss.device) for term in terms]).sum() / self.run.optimizer.accumulation_steps
        return loss + learned.to(loss.dtype)

    def forget(self, training_pass: TrainingPass) -> None:
        """Drop the terms of a forward pass whose backward pass has run."""
        if self._terms_of is training_pass:
            self._terms, self._terms_of = [], None

    # Formula

    def _compared(self, ours: Tensor, theirs: Tensor, pair: Pair, weight: float) -> _Term:
        """Weight · mean((P x − y)²), over mean(y²) + epsilon when normalized."""
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

    def add_projection_gradient(self, training_pass: TrainingPass, key: str, gradient: Tensor) -> None:
        """Add a gradient of a projection, without loss scale; those of a skipped step are dropped."""
        if self._gradients_step != training_pass.step:
            self._gradients, self._gradients_step = {}, training_pass.step
        self._gradients[key] = self._gradients[key] + gradient if key in self._gradients else gradient

    @torch.no_grad()
    def train_projections(self) -> None:
        """One step of `torch.optim.SGD`, on the mean of all ranks' gradients."""
        held: dict[str, Tensor] = self.run.state.get("projections", {})
        if not held:
            return
        momenta: dict[str, Tensor] = self.run.state.setdefault("momenta", {})
        pulled, self._gradients = self._gradients, {}
        gradients = [pulled[key] if key in pulled else torch.zeros_like(held[key]) for key in held]
        self.run.distributed.average(gradients)
        options = sgd_options(self.run)
        first = next(iter(options.values()), (0.0, 0.0))
        layers = {pair.key: get_module(self.run.module, pair.student) for pair in self.layers}
        for (key, matrix), gradient in zip(held.items(), gradients, strict=True):
            if key in layers and bool(gradient.isfinite().all()):
                own = next((options[weight] for weight in layers[key].parameters() if weight in options), first)
                sgd_step(matrix, gradient, momenta, key, own, 0.0)


@dataclass
class _Term:
    """One layer's share of the loss, with its gradients."""

    value: Tensor
    gradient: Tensor
    projection: Tensor | None


@dataclass
class _FeatureGradient:
    """A hook on features that adds the loss's gradient. The autograd graph refers to it, so it refers to no run."""

    loss: weakref.ref[FeatureLoss]
    training_pass: TrainingPass
    factor: float
    key: str
    term: _Term

    def __call__(self, gradient: Tensor) -> Tensor | None:
        loss = self.loss()
        if loss is None or self.training_pass.explicit:
            return None
        loss.backward_passes += 1
        loss.mixed_passes += 1
        loss.forget(self.training_pass)
        accumulated = self.factor / loss.run.optimizer.accumulation_steps
        if self.term.projection is not None:
            loss.add_projection_gradient(self.training_pass, self.key, self.term.projection * accumulated)
        return (gradient + self.term.gradient * (self.training_pass.scale * self.factor)).to(gradient.dtype)


class _FeatureTerm(torch.autograd.Function):
    """A layer's term as a tensor to train on; its gradients are computed already."""

    @staticmethod
    def forward(features: Tensor, hook: _FeatureGradient) -> Tensor:
        return hook.term.value.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook, ctx.dtype = inputs[1], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hook: _FeatureGradient = ctx.hook
        loss, weight = hook.loss(), gradients[0]
        if loss is not None and hook.term.projection is not None:
            loss.mixed_passes += 1  # because the loss scale is removed from the projection's gradient
            loss.add_projection_gradient(
                hook.training_pass,
                hook.key,
                hook.term.projection * (weight / loss.run.optimizer.backward_scale),
            )
        return (hook.term.gradient * weight).to(ctx.dtype), None


def _differing(x: Tensor, y: Tensor, pair: Pair, project: bool) -> int | None:
    """The dimension of channels when their numbers differ, None when the shapes are the same."""
    if x.shape == y.shape:
        return None
    message = (
        f"cannot compare '{pair.student}', which gives {tuple(x.shape)}, with the teacher's '{pair.teacher}', which "
        f"gives {tuple(y.shape)}"
    )
    apart = [dim for dim in range(x.dim()) if x.shape[dim] != y.shape[dim]] if x.dim() == y.dim() else []
    channels = (1,) if x.dim() >= 4 else (1, x.dim() - 1)
    if len(apart) != 1 or apart[0] not in channels:
        raise ModifierError(f"{message}: only the number of channels may differ", "student_layer_names")
    if not project:
        raise ModifierError(f"{message}; project_features: true maps one to the other", "project_features")
    return apart[0]
