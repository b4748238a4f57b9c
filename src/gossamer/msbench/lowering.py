"""From a config to modifiers, with complaints in the words of the config."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.modifiers import LevelPruningModifier, Modifier
from gossamer.msbench.config import NAME, complaint, sentence
from gossamer.msbench.generators import MaskGenerator

M = TypeVar("M", bound=Modifier)
LEVEL_ARGUMENTS = {
    "levels": "scheduler.kwargs.sparsity_table",
    "energy_slope": "scheduler.kwargs.prun_algo_tuning",
    "tolerance": "scheduler.kwargs.sparse_rate_tolerance",
    "max_layer_sparsity": "scheduler.kwargs.prune_tolerance_max",
    "end_epoch": "scheduler.kwargs.total_iters",
}
ADMM_ARGUMENTS = {
    "final_sparsity": "sparsity.target_sparsity",
    "rho": "scheduler.kwargs.rho",
    "end_epoch": "scheduler.kwargs.total_iters",
    "update_frequency": "scheduler.kwargs.iters_per_epoch",
}
"""Where the fields of modifiers come from."""


@contextmanager
def told_of_config() -> Generator[None]:
    """Errors in the words of a config, and without the lines of a recipe that nobody wrote."""
    try:
        yield
    except GossamerError as error:
        lines = [re.sub(rf"^({NAME}(:\d+)?: )?", f"{NAME}: ", line) for line in str(error).splitlines()]
        raise GossamerError("\n".join(line.replace(": exclude:", ": no_prune_layer:") for line in lines)) from error


def made(kind: type[M], fields: Mapping[str, Any], names: Mapping[str, str]) -> M:
    """A modifier of these fields; complaints are about the arguments that the fields came from, by `names`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        told: list[str] = []
        for details in error.errors(include_url=False):
            field = str(details["loc"][0]) if details["loc"] else ""
            place = f"{names.get(field, field)}: " if field else ""
            told.append(f"{NAME}: {place}{sentence([details], fields.get(field)) if field else complaint(details)}")
        raise GossamerError("\n".join(told)) from None


class GeneratedLevels(LevelPruningModifier):
    """Levels whose masks a mask generator of the user's own makes; it cannot be written into a recipe."""

    _generator: MaskGenerator

    @classmethod
    def of(cls, levels: Modifier, generator: MaskGenerator) -> GeneratedLevels:
        made = cls.model_validate(levels.model_dump(exclude_unset=True))
        made._generator = generator
        return made

    def masks(self, run: Any, scores: Mapping[str, Tensor], sparsity: Mapping[str, float] | float) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, score in scores.items():
            weight = run.parameter(name).detach()
            self._generator.sparsity = sparsity[name] if isinstance(sparsity, Mapping) else sparsity
            mask = cast(object, self._generator.generate_mask(weight))
            if not isinstance(mask, Tensor) or mask.shape != score.shape:
                what = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise GossamerError(
                    f"{type(self._generator).__name__}.generate_mask: expected a mask of shape {tuple(weight.shape)} "
                    f"for '{name}', found {what}"
                )
            found[name] = mask != 0
        return found
