"""GPTQ: weights rounded to integer grids, with later columns making up for earlier ones."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from gossamer.errors import FieldError, ModifierError, Problem, nearest
from gossamer.modifiers.oneshot.base import Compressor, LayerModifier, LayerProblem, Targets, by_pattern
from gossamer.modifiers.oneshot.pruning import with_damping
from gossamer.quantities import Count, Share
from gossamer.sparse.reconstruction import Grid, gptq
from gossamer.sparse.reconstruction.sweep import Order

ActOrder = Literal["static", "weight", "group", "dynamic"]
_ORDERS: dict[str, Order] = {"static": "static", "weight": "static", "group": "group", "dynamic": "group"}


class WeightArgs(BaseModel):
    """How the weights of a group are rounded, in the fields of compressed-tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_bits: int = Field(8, ge=2, le=16)
    type: Literal["int"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group"] | None = None
    group_size: int | None = None
    actorder: ActOrder | None = None
    dynamic: Literal[False] = False
    observer: Any = None
    """Accepted: scales always come from the largest magnitudes."""
    observer_kwargs: Any = None
    block_structure: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.strategy == "group" and not self.group_size:
            raise FieldError("'strategy: group' needs it, for instance 128", "group_size")
        if self.group_size and self.group_size > 0 and self.strategy not in (None, "group"):
            raise FieldError(f"used with 'strategy: group', found {self.strategy!r}", "group_size")
        if self.block_structure is not None:
            raise FieldError("blocks of weights with one scale are not supported", "block_structure")
        return self

    @property
    def grid(self) -> Grid:
        grouped = self.group_size is not None and self.group_size > 0
        strategy = self.strategy or ("group" if grouped else "channel")
        return Grid(self.num_bits, self.symmetric, strategy, self.group_size if grouped and self.group_size else 128)


class ConfigGroup(BaseModel):
    """The layers that are rounded in the same way."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: WeightArgs | None = None
    targets: Targets = Field(default_factory=lambda: ["Linear"])
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: Any = None


_GROUPED = WeightArgs(num_bits=4, strategy="group", group_size=128)
_PRESETS: dict[str, tuple[WeightArgs, bool]] = {
    "W8A8": (WeightArgs(num_bits=8, strategy="channel"), True),
    "INT8": (WeightArgs(num_bits=8, strategy="channel"), True),
    "W4A8": (_GROUPED, True),
    "W4A16": (_GROUPED, False),
    "W4A16_ASYM": (_GROUPED.model_copy(update={"symmetric": False}), False),
    "W8A16": (WeightArgs(num_bits=8, strategy="channel"), False),
}
"""By name of a scheme: how weights are rounded, and whether it also rounds activations."""


class GPTQModifier(LayerModifier):
    """Round weights column by column, and let later columns make up for it; zeros stay zero (Frantar et al. 2022)."""

    family: ClassVar[str] = "quantization"

    config_groups: dict[str, ConfigGroup] | None = None
    scheme: str | dict[str, Targets] | None = None
    """A preset such as W4A16 for all targets, or presets with their targets."""
    block_size: Count = 128
    dampening_frac: Share = 0.01
    actorder: ActOrder | None = None
    """Take columns in the order of their activations: `static` keeps groups of neighbours, `group` forms new ones."""
    kv_cache_scheme: Any = None
    batched_quantization: Any = None
    offload_hessians: bool = False

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, fields: Any) -> Any:
        return with_damping(fields)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.config_groups is None) == (self.scheme is None):
            raise FieldError("expected config_groups, or a scheme such as W4A16", "config_groups")
        for name in self._presets:
            if name.upper() not in _PRESETS:
                close = nearest(name, _PRESETS) or f"; known: {', '.join(_PRESETS)}"
                raise FieldError(f"unknown scheme '{name}'{close}", "scheme")
        if not any(group.weights for group in self._groups().values()):
            raise FieldError("no group rounds weights; give one 'weights'", "config_groups")
        return self

    @property
    def _presets(self) -> dict[str, Targets]:
        """By name of a scheme: its targets."""
        if isinstance(self.scheme, str):
            return {self.scheme: self.targets}
        return self.scheme or {}

    def _groups(self) -> dict[str, ConfigGroup]:
        return self.config_groups or {
            name: ConfigGroup(weights=_PRESETS[name.upper()][0], targets=targets)
            for name, targets in self._presets.items()
        }

    def _grids(self, module: nn.Module) -> dict[str, WeightArgs]:
        """By weight: how it is rounded; the first group that names it counts."""
        names = [name for inside in self.groups(module).values() for name in inside]
        found: dict[str, WeightArgs] = {}
        for key, group in self._groups().items():
            targets = [group.targets] if isinstance(group.targets, str) else group.targets
            try:
                matches = by_pattern(dict.fromkeys(targets), names, module, "targets")
            except ModifierError as error:
                raise ModifierError(error.problems, "config_groups", key) from None
            for name in matches:
                if group.weights is not None:
                    found.setdefault(name, group.weights)
        return found

    def plan(self, module: nn.Module) -> dict[str, float]:
        grids = self._grids(module)
        if not grids:
            raise ModifierError("its targets are all ignored", "config_groups")
        return dict.fromkeys(grids, 0.0)

    def compressor(self, module: nn.Module) -> Compressor:
        grids = self._grids(module)

        def compress(layer: LayerProblem) -> Tensor:
            args = grids[layer.name]
            order = args.actorder or self.actorder
            return gptq(
                layer.weight,
                layer.gram,
                args.grid,
                block_size=self.block_size,
                damping=self.dampening_frac,
                order=None if order is None else _ORDERS[order],
            )

        return compress

    def warnings(self) -> list[Problem]:
        problems = super().warnings()
        rounded = [
            ("config_groups", key)
            for key, group in (self.config_groups or {}).items()
            if group.input_activations or group.output_activations
        ]
        rounded += [("scheme", name) for name in self._presets if _PRESETS[name.upper()][1]]
        problems += [Problem("activations stay in floating point; only weights are rounded", key) for key in rounded]
        for field in ("kv_cache_scheme", "offload_hessians"):
            if getattr(self, field):
                problems.append(Problem("has no effect in Gossamer", (field,)))
        return problems
