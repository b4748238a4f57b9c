"""From a config to modifiers and a recipe, with complaints in the words of the config.

Nothing here knows a model; `schedulers.py` attaches what comes out to one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ValidationError
from torch import Tensor

from gossamer.errors import GossamerError, Problem
from gossamer.model import ALL_PRUNABLE
from gossamer.modifiers import EpochRangeModifier, LevelPruningModifier, Modifier, STRPruningModifier
from gossamer.modifiers.base import registered
from gossamer.msbench import generators, selection, sparsers
from gossamer.msbench.config import NAME, Config
from gossamer.msbench.generators import MaskGenerator
from gossamer.recipe import Recipe
from gossamer.validation import problems_of

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
STR_ARGUMENTS = {"final_sparsity": "scheduler.kwargs.prune_rate", "end_epoch": "scheduler.kwargs.total_iterations"}
"""Where the fields of modifiers come from."""
_EXCLUDED_BY = {"exclude": "no_prune_layer"}


class Lowered:
    """A checked config with its parts made, and the modifiers that it comes to."""

    needs: ClassVar[type[sparsers.FakeSparse] | None] = None
    """The sparser that a scheduler works with, or one that extends it; None for any that needs no scheduler."""

    def __init__(self, config: Config, no_prune_keyword: str, no_prune_layer: str) -> None:
        self.config = config
        self.exclude = selection.patterns(selection.words(no_prune_keyword), selection.words(no_prune_layer))
        self.generator = cast(MaskGenerator, config.types["mask_generator"](**config.kwargs["mask_generator"]))
        self.sparser = cast(type[sparsers.FakeSparse], config.types["fake_sparse"])
        self._check_parts()

    @property
    def learns(self) -> bool:
        """Whether sparsers stand in the weights' places, and not just masks."""
        return self.sparser is not sparsers.FakeSparse

    def modifiers(self, steps_per_epoch: float = 1.0) -> Sequence[Modifier]:
        """The modifiers of the recipe that does the same; times are in epochs of so many iterations."""
        if issubclass(self.sparser, sparsers.STRFakeSparse):
            kwargs = self.config.kwargs["fake_sparse"]
            given = {"s_init": kwargs["sInit_value"]} if "sInit_value" in kwargs else {}
            return [made(STRPruningModifier, {"params": ALL_PRUNABLE, **self.excluding, **given}, {})]
        sparsity = self.generator.sparsity
        target = self.config.sparsity.get("target_sparsity", 0.0) if sparsity is None else sparsity
        uniform = self.config.sparsity.get("uniform", True)
        return [self.levels([target], 1.0, **({} if uniform else {"allocation": "global"}))]

    @property
    def final_sparsity(self) -> float | None:
        """The sparsity in the end of what is pruned, where the config decides it."""
        return None

    @property
    def length(self) -> int | None:
        """The iterations of the whole training, where the config says it."""
        return None

    def levels(self, levels: Sequence[float], end_epoch: float, **more: Any) -> LevelPruningModifier:
        """A modifier with the pattern and the score of the mask generator."""
        fields: dict[str, Any] = {"params": ALL_PRUNABLE, **self.excluding, "levels": list(levels)}
        if self.generator.mask_type not in (None, "unstructured"):
            fields["mask_type"] = self.generator.mask_type
        if self.generator.score_type != "magnitude":
            fields["score_type"] = self.generator.score_type
        return made(LevelPruningModifier, {**fields, "end_epoch": end_epoch, **more}, LEVEL_ARGUMENTS)

    @property
    def excluding(self) -> dict[str, list[str]]:
        return {"exclude": self.exclude} if self.exclude else {}

    def recipe(self, steps_per_epoch: float = 1.0) -> Recipe:
        """The same as a recipe: a manager that runs it comes to the same weights."""
        own = [kind.__name__ for kind in self.config.types.values() if not kind.__module__.startswith("gossamer.")]
        if own:
            raise GossamerError(f"recipe: {' and '.join(own)} cannot be written down: a recipe knows no code")
        metadata = {"source": f"MSBench {type(self).__name__}", "steps_per_epoch": steps_per_epoch}
        modifiers = list(self.modifiers(steps_per_epoch))
        if self.length is not None and all(m.end_epoch < self.length / steps_per_epoch for m in modifiers):
            modifiers.append(EpochRangeModifier(start_epoch=0.0, end_epoch=self.length / steps_per_epoch))
        return Recipe.of(modifiers, metadata=metadata, name="msbench")

    @property
    def settings(self) -> str:
        """What is done, as text, to tell whether the config was changed in that."""
        return repr([(modifier.name, modifier.model_dump(exclude_unset=True)) for modifier in self.modifiers()])

    def _check_parts(self) -> None:
        """Raise for parts that belong to others."""
        for kind, sparser in (
            (generators.STRMaskGenerator, sparsers.STRFakeSparse),
            (generators.ProbMaskGenerator, sparsers.ProbMaskFakeSparse),
        ):
            if isinstance(self.generator, kind) and not issubclass(self.sparser, sparser):
                raise GossamerError(f"fake_sparse: {kind.__name__} belongs to {sparser.__name__}")
        if self.needs is None and issubclass(self.sparser, sparsers.ProbMaskFakeSparse):
            raise GossamerError("scheduler: ProbMaskFakeSparse needs ProbMaskPruneScheduler")
        # What stands in a weight's place hides the masks: nothing may extend a plain FakeSparse there.
        masks_only = self.needs is sparsers.FakeSparse and self.learns
        if self.needs is not None and (masks_only or not issubclass(self.sparser, self.needs)):
            needed, found = self.needs.__name__, self.sparser.__name__
            raise GossamerError(f"fake_sparse: {type(self).__name__} needs {needed}, found {found}")


@contextmanager
def told_of_config() -> Generator[None]:
    """Errors in the words of a config, and without the lines of a recipe that nobody wrote."""
    try:
        yield
    except GossamerError as error:
        raise GossamerError([_of_config(problem) for problem in error.problems]) from error


def _of_config(problem: Problem) -> Problem:
    """A problem of a modifier as one of the config that it was made of."""
    if problem.message.startswith(f"{NAME}: "):
        return problem
    field = problem.key[1:] if problem.key and problem.key[0] in registered() else problem.key
    key = (_EXCLUDED_BY.get(str(field[0]), field[0]), *field[1:]) if field else ()
    return replace(problem, message=f"{NAME}: {replace(problem, key=key, location=None)}", key=(), location=None)


def made(kind: type[M], fields: Mapping[str, Any], names: Mapping[str, str]) -> M:
    """A modifier of these fields; complaints are about the arguments that the fields came from, by `names`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = problems_of(error, fields, kind)
        raise GossamerError(f"{NAME}: {_renamed(problem, {**_EXCLUDED_BY, **names})}" for problem in problems) from None


def _renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    """The problem with the argument that a field came from in place of the field."""
    first, *inner = (*problem.key, "")
    return replace(problem, key=(names.get(str(first), first), *inner[:-1])) if problem.key else problem


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
            weight = run.weights.parameter(name).detach()
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
