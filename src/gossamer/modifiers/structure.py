"""Structured pruning: masks of whole filters or channels, replacing layers, and removing filters from the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from gossamer.errors import FieldError, ModifierError, Problem, nearest
from gossamer.model import ALL_PRUNABLE, get_module, layer_path, match, named_modules, named_parameters, prunable
from gossamer.model.distribution import is_distributed
from gossamer.model.name_patterns import PREFIX, matching
from gossamer.model.parameters import hint
from gossamer.modifiers.base import (
    LayerNames,
    Modifier,
    Outlook,
    ParamNames,
    Run,
    check_gradients_may_vanish,
    to_step,
)
from gossamer.modifiers.gradual import GMPruningModifier
from gossamer.modifiers.state import Item, Spec, StateField, StateLayout
from gossamer.quantities import Epoch


class StructuredPruningModifier(GMPruningModifier):
    """Gradual pruning of whole filters or input channels.

    Weights whose filters (or channels) can be removed only together share a mask. So do the weights of one list in
    `param_groups`, ranked by the sum of their scores; a weight that is alone in its list is pruned on its own.
    """

    mask_type: str | list[int] = "filter"
    param_groups: list[list[str]] = Field(default_factory=list[list[str]])

    @field_validator("mask_type")
    @classmethod
    def _whole_structures(cls, value: str | list[int]) -> str | list[int]:
        if value not in ("filter", "channel"):
            raise ValueError(f"expected filter or channel, found {value!r}")
        return value

    @model_validator(mode="after")
    def _layer_by_layer(self) -> Self:
        if self.param_groups and self.global_sparsity:
            raise FieldError("groups share one mask and cannot be ranked against other layers", "param_groups")
        return self

    def bind_filters(self, run: Run, targets: Sequence[str]) -> None:
        groups = [match(run.module, names, field="param_groups") for names in self.param_groups]
        repeated = [name for name, count in Counter(name for group in groups for name in group).items() if count > 1]
        if repeated:
            raise ModifierError(f"'{repeated[0]}' is in two groups; merge them", "param_groups")
        for group in groups:
            if missing := [name for name in group if name not in targets]:
                raise ModifierError(f"'{missing[0]}' is not in params", "param_groups")
            counts = {name: self._units(run, name) for name in group}
            if len(set(counts.values())) > 1:
                shown = ", ".join(f"{name} has {count}" for name, count in counts.items())
                raise ModifierError(
                    f"the weights of a group must have the same number of {self.mask_type}s: {shown}", "param_groups"
                )
        run.plan["groups"] = groups
        super().bind_filters(run, targets)

    def _units(self, run: Run, name: str) -> int:
        shape = self._rows(run, name, run.weights.parameter(name).detach()).shape
        return self.pattern.unit_scores(torch.empty(shape, device="meta")).numel()


class LayerPruningModifier(Modifier):
    """Replace layers by `Identity` from start to end; they are restored with their weights at the end."""

    family: ClassVar[str] = "pruning"
    structural: ClassVar[bool] = True

    layers: LayerNames

    def bind(self, run: Run) -> list[str]:
        if is_distributed(run.module):
            raise ModifierError("layers cannot be taken out of a model whose parameters are split over ranks")
        check_gradients_may_vanish(run)
        names = [name for name, _ in named_modules(run.module) if name]
        matches: list[str] = []
        for item in [self.layers] if isinstance(self.layers, str) else self.layers:
            if item == ALL_PRUNABLE:
                hits = [layer_path(name) for name in prunable(run.module)]
            elif item.startswith(PREFIX):
                hits = matching(item, names, field="layers", whole=True)
            else:
                hits = [item] if item in names else []
            if not hits:
                close = hint(item, [ALL_PRUNABLE]) or nearest(item, names)
                raise ModifierError(f"'{item}' matches none of {len(names)} modules{close}", "layers")
            matches += hits
        return [name for name in dict.fromkeys(matches) if not any(name.startswith(f"{other}.") for other in matches)]

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {"layers": StateField(lambda item, layout: self._parse_layers(run, item, layout), required=True)}

    def _parse_layers(self, run: Run, item: Item, layout: StateLayout) -> dict[str, dict[str, Tensor]]:
        """The weights to restore layers with; the model's own where the saved ones do not fit."""
        saved, replaced, weights = item.entries(), self.replaced_layers(run), dict[str, dict[str, Tensor]]()
        for name in run.targets:
            layer = replaced[name] if name in replaced else get_module(run.module, name)
            own: dict[str, Tensor] = layer.state_dict(keep_vars=True) if run.clock.end is not None else {}
            given = saved[name].entries() if name in saved else {}
            specs = {key: layout.tensors.get(f"{name}.{key}", Spec.of(key, value)) for key, value in own.items()}
            fits = given.keys() == own.keys() and all(given[key].shape() == specs[key].shape for key in given)
            if not fits and own:
                layout.dropped[name] = "its saved weights do not fit the layer, which keeps its present ones"
            if fits:
                own = {key: given[key].weight(spec) for key, spec in specs.items()}
            weights[name] = {key: value.detach().clone() for key, value in own.items()}
        return weights

    def outlook(self, run: Run) -> dict[str, Outlook]:
        inside = [n for n in prunable(run.module) if any(n.startswith(f"{layer}.") for layer in run.targets)]
        return {name: Outlook(run.weights.parameter(name).numel(), "layer", "removed", self.name) for name in inside}

    def replaced_layers(self, run: Run) -> Mapping[str, nn.Module]:
        return run.plan.get("originals", {})

    def start(self, run: Run) -> None:
        run.state["layers"] = {
            name: {key: value.detach().clone() for key, value in get_module(run.module, name).state_dict().items()}
            if run.clock.end is not None
            else {}
            for name in run.targets
        }
        self._replace_layers(run)

    def restore(self, run: Run) -> None:
        if "layers" in run.state:
            self._replace_layers(run)

    def end(self, run: Run) -> None:
        saved: dict[str, Any] = run.state.pop("layers", {})
        returned: dict[str, nn.Module] = dict(run.plan.get("originals", {}))
        self.undo(run)
        for name, layer in returned.items():
            layer.load_state_dict(saved[name])
            like = next((p for _, p in named_parameters(run.module) if p.is_floating_point()), None)
            if like is not None:
                layer.to(like.device, like.dtype)

    def undo(self, run: Run) -> None:
        originals: dict[str, nn.Module] = run.plan.pop("originals", {})
        for name, layer in originals.items():
            _replace(run.module, name, layer)

    def _replace_layers(self, run: Run) -> None:
        originals: dict[str, nn.Module] = run.plan.setdefault("originals", {})
        for name in run.targets:
            if name not in originals:
                originals[name] = get_module(run.module, name)
                originals[name].zero_grad(set_to_none=True)
                _replace(run.module, name, nn.Identity())


class LayerThinningModifier(Modifier):
    """Remove filters and channels that are entirely zero from the model, which then trains on with fewer parameters.

    Acts at the start and at each of `update_epochs`. The outputs of the model do not change.
    """

    family: ClassVar[str] = "pruning"
    epoch_fields: ClassVar[tuple[str, ...]] = ("start_epoch", "end_epoch", "update_epochs")

    params: ParamNames = "__ALL_PRUNABLE__"
    """Weights whose filters may be removed."""
    param_group_dependency_map: Any = None
    """Accepted without effect, as is the next: dependencies between layers are found by tracing the model."""
    structure_type: Literal["filter", "channel"] = "filter"
    update_epochs: list[Epoch] = Field(default_factory=list[float])

    @model_validator(mode="after")
    def _has_no_end(self) -> Self:
        if self.end_epoch != -1:
            raise FieldError("not supported: filters are removed permanently; remove this field", "end_epoch")
        early = [epoch for epoch in self.update_epochs if not epoch > self.start_epoch]
        if early:
            raise FieldError(
                f"expected epochs after start_epoch {self.start_epoch:g}, found {early[0]:g}", "update_epochs"
            )
        return self

    @property
    def updates_every(self) -> float | None:
        return -1.0 if self.update_epochs else None

    @property
    def removal_epochs(self) -> Sequence[float]:
        return self.start_epoch, *self.update_epochs

    def warnings(self) -> list[Problem]:
        if self.param_group_dependency_map is None:
            return super().warnings()
        message = "has no effect: dependencies are found by tracing the model"
        return [*super().warnings(), Problem(message, ("param_group_dependency_map",))]

    def shifted(self, epochs: float) -> Self:
        later = [epoch + epochs for epoch in self.update_epochs]
        start = max(self.start_epoch, 0.0) + epochs
        return self.with_fields(start_epoch=start, **({"update_epochs": later} if later else {}))

    def bind(self, run: Run) -> list[str]:
        from gossamer.model.thin.cuts import spread_over_processes

        if reason := spread_over_processes(run.distributed.module):
            raise ModifierError(f"filters cannot be removed: {reason}; thin the model after the run")
        return match(run.module, self.params)

    def start(self, run: Run) -> None:
        run.weights.thin(run.targets)

    def update(self, run: Run) -> None:
        if run.clock.step in [to_step(epoch, run.clock.steps_per_epoch) for epoch in self.update_epochs]:
            run.weights.thin(run.targets)


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(get_module(module, path), leaf, layer)
