"""One-shot pruning: SparseGPT, Wanda, ALPS and magnitude, and how layers share the sparsity."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, field_validator, model_validator
from torch import Tensor, nn

from gossamer.errors import FieldError, ModifierError, Problem
from gossamer.model import get_parameter, is_transposed
from gossamer.modifiers.oneshot.base import Compressor, LayerModifier, LayerProblem, Statistics, by_pattern, logger
from gossamer.quantities import Count, PositiveFactor, Share, Sparsity
from gossamer.sparse import NM, Block, NM2d, Pattern, Unstructured, magnitude, parse_pattern
from gossamer.sparse.reconstruction import alps, sparsegpt, wanda_mask, wanda_scores

Profile = Literal["uniform", "owl", "alpha", "measured"]
"""How layers share the sparsity: all the same, by outliers, by spectra, or by measured costs."""


def _structure(value: str | list[int]) -> str | list[int]:
    _pattern(value)
    return value


def _pattern(value: str | list[int]) -> Pattern:
    if value in ("0:0", ""):
        return Unstructured()
    pattern = parse_pattern(value)
    if not isinstance(pattern, Unstructured | NM | Block) or isinstance(pattern, NM2d):
        raise FieldError(f"expected 0:0 (any weight), N:M such as 2:4, or a block, found {value!r}")
    return pattern


class OneShotPruningModifier(LayerModifier):
    """The base class of methods that zero weights of one layer after the other."""

    family: ClassVar[str] = "pruning"

    sparsity: Sparsity | list[Sparsity] | dict[str, Sparsity] | None = None
    """One for all targets, one for each of them in the model's order, or by target; of N:M the pattern's own."""
    mask_structure: Annotated[str | list[int], AfterValidator(_structure)] = "0:0"
    sparsity_profile: Profile | None = None
    owl_m: PositiveFactor | None = None
    """OWL: how many times the mean of its layer a score exceeds to be an outlier; 5 by default."""
    owl_lmbda: Share | None = None
    """How far sparsities of layers may lie from the mean; by default 0.08, for `alpha` 0.3 of the mean."""
    permute: bool = False
    """Reorder channels that no other layer sees, so that N:M keeps more; the model computes the same."""

    @field_validator("sparsity_profile", mode="before")
    @classmethod
    def _in_lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pattern = self.pattern
        if isinstance(pattern, NM):
            for share in self._shares():
                if abs(share - pattern.sparsity) > 1e-6:
                    message = f"mask_structure {self.mask_structure} means {pattern.sparsity:g}, found {share:g}"
                    raise FieldError(message, "sparsity")
            if self.sparsity_profile not in (None, "uniform"):
                raise FieldError("N:M is the same share of every layer; remove one of the two", "sparsity_profile")
        elif self.sparsity is None:
            raise FieldError("expected a number between 0 and 1, such as 0.5", "sparsity")
        elif self.permute:
            raise FieldError("expected N:M as mask_structure, because only its zeros depend on the order", "permute")
        if self.sparsity_profile not in (None, "uniform") and not isinstance(self.sparsity, float | int):
            raise FieldError("expected one number for a profile to distribute", "sparsity")
        for field in ("owl_m", "owl_lmbda"):
            if getattr(self, field) is not None and self.sparsity_profile in (None, "uniform", "measured"):
                raise FieldError("used with 'sparsity_profile: owl' only, or owl_lmbda with alpha", field)
        return self

    def _shares(self) -> list[float]:
        """Every sparsity that the recipe gives."""
        if isinstance(self.sparsity, dict):
            return list(self.sparsity.values())
        return self.sparsity if isinstance(self.sparsity, list) else [] if self.sparsity is None else [self.sparsity]

    @property
    def pattern(self) -> Pattern:
        return _pattern(self.mask_structure)

    @property
    def goal(self) -> float | None:
        if isinstance(self.pattern, NM):
            return self.pattern.sparsity
        return self.sparsity if isinstance(self.sparsity, float | int) else None

    def plan(self, module: nn.Module) -> dict[str, float]:
        groups = self.groups(module)
        names = [name for inside in groups.values() for name in inside]
        if isinstance(self.sparsity, list):
            if len(self.sparsity) != len(groups):
                shown = ", ".join(f"'{name}'" for name in list(groups)[:3])
                raise ModifierError(
                    f"{len(self.sparsity)} sparsities for {len(groups)} targets ({shown}{', …' * (len(groups) > 3)}); "
                    "give one for each, in the model's order",
                    "sparsity",
                )
            shares = {
                name: share for inside, share in zip(groups.values(), self.sparsity, strict=True) for name in inside
            }
        elif isinstance(self.sparsity, dict):
            shares = {name: share for name, (_, share) in by_pattern(self.sparsity, names, module, "sparsity").items()}
            if not shares:
                raise ModifierError("its names match none of the targets", "sparsity")
        else:
            shares = dict.fromkeys(names, self.goal or 0.0)
        return {name: share for name, share in shares.items() if self._fits(module, name, exact=name in groups)}

    def _fits(self, module: nn.Module, name: str, exact: bool) -> bool:
        weight = get_parameter(module, name)
        shape = list(weight.shape)
        if is_transposed(module, name):
            shape[:2] = shape[1::-1]
        reason = self.pattern.fits(shape)
        if reason and exact and name in ([self.targets] if isinstance(self.targets, str) else self.targets):
            raise ModifierError(f"{self.mask_structure} does not fit '{name}': {reason}", "mask_structure")
        if reason:
            logger.warning("%s: '%s' is left dense: %s", self.name, name, reason)
        return reason is None

    def scores(self, layer: LayerProblem) -> Tensor:
        """`(rows, columns)`: what a method would keep, for the search of an order of channels."""
        return wanda_scores(layer.weight, layer.norms)

    def compressor(self, module: nn.Module) -> Compressor:
        return self.compress

    @abstractmethod
    def compress(self, layer: LayerProblem) -> Tensor:
        """The pruned weight of a layer."""


class WandaPruningModifier(OneShotPruningModifier):
    """Prune by |W| · ‖x‖ in each row, without changing the other weights (Sun et al. 2023)."""

    statistics: ClassVar[Statistics] = "norms"

    def compress(self, layer: LayerProblem) -> Tensor:
        keep = wanda_mask(wanda_scores(layer.weight, layer.norms), self.pattern, layer.share)
        return layer.weight.masked_fill(~keep, 0.0)


class OneShotMagnitudePruningModifier(OneShotPruningModifier):
    """Prune the smallest magnitudes of each layer at once."""

    statistics: ClassVar[Statistics] = "nothing"

    @property
    def name(self) -> str:
        return "MagnitudePruningModifier"

    def compress(self, layer: LayerProblem) -> Tensor:
        keep = self.pattern.mask(magnitude(layer.weight), layer.share)
        return layer.weight.masked_fill(~keep, 0.0)

    def scores(self, layer: LayerProblem) -> Tensor:
        return magnitude(layer.weight)


class _ReconstructingModifier(OneShotPruningModifier):
    """The base class of methods that change the weights that they keep."""

    block_size: Count = 128
    """Columns whose mask is chosen together."""
    dampening_frac: Share = 0.01
    """Added to the diagonal of the products of inputs, as a fraction of its mean; `percdamp` of older recipes."""
    preserve_sparsity_mask: bool = False
    """Whether weights that are zero already stay zero and count."""
    offload_hessians: bool = False

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, fields: Any) -> Any:
        return with_damping(fields)

    def warnings(self) -> list[Problem]:
        idle = [Problem("has no effect in Gossamer", ("offload_hessians",))] if self.offload_hessians else []
        return [*super().warnings(), *idle]


class SparseGPTModifier(_ReconstructingModifier):
    """Prune column by column, and let later columns make up for it (Frantar & Alistarh 2023)."""

    def compress(self, layer: LayerProblem) -> Tensor:
        return sparsegpt(
            layer.weight,
            layer.gram,
            self.pattern,
            layer.share,
            block_size=self.block_size,
            damping=self.dampening_frac,
            keep_zeros=self.preserve_sparsity_mask,
        )


class ALPSPruningModifier(_ReconstructingModifier):
    """Find the mask by ADMM and the weights on it by conjugate gradients (Meng et al. 2024)."""

    max_iterations: Count = 300
    """Iterations of ADMM at most; it ends earlier when the mask no longer changes."""
    refinement_iterations: Count = 20
    """Iterations of conjugate gradients on the mask."""

    @model_validator(mode="after")
    def _chooses_every_zero(self) -> Self:
        if self.preserve_sparsity_mask:
            raise FieldError("ALPS chooses the mask again; use SparseGPTModifier", "preserve_sparsity_mask")
        return self

    def compress(self, layer: LayerProblem) -> Tensor:
        start = sparsegpt(
            layer.weight,
            layer.gram,
            self.pattern,
            layer.share,
            block_size=self.block_size,
            damping=self.dampening_frac,
        )
        return alps(
            layer.weight,
            layer.gram,
            self.pattern,
            layer.share,
            damping=self.dampening_frac,
            iterations=self.max_iterations,
            refinements=self.refinement_iterations,
            start=start,
        )


def with_damping(fields: Any) -> Any:
    """The fields of a modifier with `percdamp` under its newer name; null stands for the default."""
    if not isinstance(fields, dict):
        return fields
    given: dict[str, Any] = dict(fields)  # pyright: ignore[reportUnknownArgumentType]
    if "percdamp" in given and "dampening_frac" not in given:
        given["dampening_frac"] = given.pop("percdamp")
    if given.get("dampening_frac", 0.0) is None:
        del given["dampening_frac"]
    return given
