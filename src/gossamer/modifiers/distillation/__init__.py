"""Distillation: a model learns from a teacher besides its labels, from outputs or layer by layer.

The modifiers define what is compared and when; `passes.py` runs the teacher once per batch and mixes the gradients,
`losses.py` has the formulas. Both import torch's compiler, to be excluded from it, so they are imported when used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from pydantic import field_validator, model_validator
from torch import Tensor, nn

from gossamer.errors import FieldError, GossamerError, ModifierError, Problem, nearest
from gossamer.model import named_modules
from gossamer.modifiers.base import Modifier, Run
from gossamer.modifiers.state import LARGEST_SETTING, Item, Spec, StateField, StateLayout
from gossamer.quantities import Factor, Share, Temperature

if TYPE_CHECKING:
    from gossamer.modifiers.distillation.losses import FeatureLoss
    from gossamer.modifiers.distillation.passes import Distillation, DistillationLoss

_PREFIXES = ("module.", "_orig_mod.")


class TeacherModifier(Modifier):
    """The base class: adds a distillation loss to the run, from start to end."""

    family: ClassVar[str] = "distillation"

    distill_output_keys: list[str | int] | None = None
    teacher_input_keys: list[str] | None = None
    """The arguments of the model that the teacher is given, by name; None: all."""

    @field_validator("distill_output_keys", "teacher_input_keys")
    @classmethod
    def _not_empty(cls, keys: list[Any] | None) -> list[Any] | None:
        if keys == []:
            raise ValueError("expected at least one key, or nothing for all")
        return keys

    @property
    def uses_teacher(self) -> bool:
        """Whether the teacher contributes to the loss."""
        return True

    @abstractmethod
    def distillation_loss(self, run: Run, distillation: Distillation, order: int) -> DistillationLoss:
        """What this modifier adds to the loss of the run."""

    def bind(self, run: Run) -> list[str]:
        if run.distillation is not None:
            run.plan["order"] = run.distillation.next_order()
        return []

    def start(self, run: Run) -> None:
        self.restore(run)

    def restore(self, run: Run) -> None:
        if run.distillation is not None and self.uses_teacher:
            run.scratch["loss"] = self.distillation_loss(run, run.distillation, run.plan["order"])
            run.distillation.add(run.scratch["loss"])

    def undo(self, run: Run) -> None:
        if run.distillation is not None:
            run.distillation.remove(run.plan["order"])
        run.scratch.pop("loss", None)

    def finish(self, run: Run) -> None:
        self.undo(run)

    def end(self, run: Run) -> None:
        self.undo(run)
        run.state.clear()

    def before_step(self, run: Run) -> None:
        if "loss" in run.scratch:
            cast("DistillationLoss", run.scratch["loss"]).check()

    def loss(self, run: Run, loss: Tensor, outputs: Any, inputs: Any) -> Tensor:
        if "loss" not in run.scratch or not loss.requires_grad:
            return loss
        if outputs is None:
            raise ModifierError("needs what the model returned: manager.loss(loss, outputs)")
        return cast("DistillationLoss", run.scratch["loss"]).total(loss, outputs, inputs)


class DistillationModifier(TeacherModifier):
    """Learn from a teacher's outputs as well as from the labels: (1 − hardness) · loss + hardness · T² · KL."""

    hardness: Share = 0.5
    """The teacher's share of the loss."""
    temperature: Temperature = 2.0
    """T: the logits of both are divided by it."""

    @property
    def uses_teacher(self) -> bool:
        return self.hardness > 0

    def distillation_loss(self, run: Run, distillation: Distillation, order: int) -> DistillationLoss:
        from gossamer.modifiers.distillation.losses import OutputLoss

        keys = self.distill_output_keys
        return OutputLoss(run, distillation, order, self.teacher_input_keys, self.hardness, self.temperature, keys)


class PerLayerDistillationModifier(TeacherModifier):
    """Learn from a teacher's features layer by layer: loss + gain · Σ mean((student − teacher)²)."""

    gain: Factor = 1.5
    normalize: bool = True
    """Divide each layer's term by the mean square of the teacher's features."""
    project_features: bool = True
    """Map the student's channels to the teacher's by a matrix that is learned, where their numbers differ."""
    student_layer_names: list[str] | None = None
    teacher_layer_names: list[str] | None = None
    epsilon: Factor = 1e-6
    """Added to that mean square."""

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        ours, theirs = self.student_layer_names, self.teacher_layer_names
        if ours is not None and theirs is not None and len(ours) != len(theirs):
            raise FieldError(
                f"expected as many as student_layer_names, {len(ours)}, found {len(theirs)}", "teacher_layer_names"
            )
        if [] in (ours, theirs):
            raise FieldError("expected at least one layer, or nothing for all", "student_layer_names")
        return self

    def warnings(self) -> list[Problem]:
        idle = self.distill_output_keys is not None
        return super().warnings() + [Problem("has no effect on features of layers", ("distill_output_keys",))] * idle

    def bind(self, run: Run) -> list[str]:
        teacher = None if run.distillation is None else run.distillation.teacher.module
        run.plan["layers"] = self._layers(run.module, teacher)
        return super().bind(run)

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        keys = {f"{ours} → {theirs}" for ours, theirs in run.plan["layers"]}
        matrices = StateField(lambda item, layout: _matrices(item, layout, keys))
        return {"projections": matrices, "momenta": matrices}

    def check_state(self, item: Item, state: Mapping[str, Any]) -> None:
        projections = state.get("projections", {})
        for key, momentum in state.get("momenta", {}).items():
            if key not in projections or projections[key].shape != momentum.shape:
                raise GossamerError(f"{item.where}.momenta: '{key}' is not like its projection")

    def distillation_loss(self, run: Run, distillation: Distillation, order: int) -> DistillationLoss:
        from gossamer.modifiers.distillation.losses import FeatureLoss, Pair

        layers = [Pair(ours, theirs) for ours, theirs in run.plan["layers"]]
        epsilon = self.epsilon if self.normalize else None
        keys = self.teacher_input_keys
        return FeatureLoss(run, distillation, order, keys, layers, self.gain, epsilon, self.project_features)

    def before_step(self, run: Run) -> None:
        super().before_step(run)
        if "loss" in run.scratch:
            cast("FeatureLoss", run.scratch["loss"]).train_projections()

    def _layers(self, student: nn.Module, teacher: nn.Module | None) -> list[tuple[str, str]]:
        """Names of layers to compare: the same in both, unless the recipe says otherwise."""
        named = self.student_layer_names or self.teacher_layer_names
        ours = _checked(student, named, "student_layer_names", "model") if named else _computing(student)
        if not ours:
            raise ModifierError("the model has no convolution or linear layer; name others", "student_layer_names")
        if teacher is None:
            return [(name, name) for name in ours]
        theirs = self.teacher_layer_names or ours
        if named is None and not set(ours) <= {name for name, _ in named_modules(teacher)}:
            theirs = _computing(teacher)
            if len(theirs) != len(ours):
                raise ModifierError(
                    f"the model has {len(ours)} convolutions and linear layers and the teacher "
                    f"{len(theirs)}, under other names; name those to compare, and teacher_layer_names",
                    "student_layer_names",
                )
        theirs = _checked(teacher, theirs, "teacher_layer_names", "teacher")
        return list(zip(ours, theirs, strict=True))


def _matrices(item: Item, layout: StateLayout, keys: Collection[str]) -> dict[str, Tensor]:
    """Projections by pair of layers; how many channels these have shows when they are called."""
    found: dict[str, Tensor] = {}
    for key, entry in item.entries().items():
        if key in keys:
            shape = entry.shape()
            if len(shape) != 2:
                raise GossamerError(f"{entry.where}: expected a matrix, found shape {shape}")
            found[key] = entry.tensor(Spec(shape, None, layout.device), -LARGEST_SETTING, LARGEST_SETTING)
    return found


def _computing(module: nn.Module) -> list[str]:
    """All 2-d convolutions and linear layers, each once."""
    seen: dict[int, str] = {}
    for name, layer in named_modules(module):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            seen.setdefault(id(layer), name)
    return list(seen.values())


def _checked(module: nn.Module, names: Sequence[str], field: str, whose: str) -> list[str]:
    known = {name for name, _ in named_modules(module)}
    found: list[str] = []
    for name in names:
        plain = name
        while plain not in known and plain.startswith(_PREFIXES):
            plain = plain.split(".", 1)[1]
        if plain not in known or not plain:
            raise ModifierError(f"the {whose} has no layer '{name}'{nearest(name, known)}", field)
        found.append(plain)
    return found
