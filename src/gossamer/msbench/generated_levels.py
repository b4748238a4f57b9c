"""The modifier that runs a custom mask generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.modifiers import LevelPruningModifier, Modifier
from gossamer.msbench.generators import MaskGenerator


class GeneratedLevels(LevelPruningModifier):
    """Levels whose masks a custom mask generator computes; it cannot be written into a recipe.

    The exception among modifiers: it refers to an object, the generator, and sets the generator's `sparsity` before
    each call, as the interface of mask generators requires. It keeps nothing between calls.
    """

    _generator: MaskGenerator

    @classmethod
    def of(cls, levels: Modifier, generator: MaskGenerator) -> GeneratedLevels:
        modifier = cls.model_validate(levels.model_dump(exclude_unset=True))
        modifier._generator = generator
        return modifier

    @property
    def name(self) -> str:
        """The name of the base class, under which states are saved."""
        return LevelPruningModifier.__name__

    def masks(self, run: Any, scores: Mapping[str, Tensor], sparsity: Mapping[str, float] | float) -> dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for name, score in scores.items():
            weight = run.weights.parameter(name).detach()
            self._generator.sparsity = sparsity[name] if isinstance(sparsity, Mapping) else sparsity
            mask = cast(object, self._generator.generate_mask(weight))
            if not isinstance(mask, Tensor) or mask.shape != score.shape:
                returned = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise GossamerError(
                    f"{type(self._generator).__name__}.generate_mask: expected a mask of shape {tuple(weight.shape)} "
                    f"for '{name}', found {returned}"
                )
            masks[name] = mask != 0
        return masks
