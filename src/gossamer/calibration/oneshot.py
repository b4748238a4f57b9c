"""`oneshot`: run the stages of a recipe that need no training on a model in memory, or on one in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.calibration.data import calibration_batches
from gossamer.calibration.layerwise import LayerwisePass, Step
from gossamer.calibration.permutation import permute
from gossamer.calibration.profiles import shares_of
from gossamer.calibration.sites import site_of
from gossamer.calibration.smoothing import smooth
from gossamer.calibration.streaming import stream
from gossamer.engine import Manager
from gossamer.errors import GossamerError, ModifierError, RecipeError, file_error, short_error
from gossamer.model import expect_model, unwrap
from gossamer.model.example_inputs import Arguments
from gossamer.model.parameters import get_tensor
from gossamer.modifiers import Modifier
from gossamer.modifiers.oneshot import LayerModifier, LayerProblem, OneShotPruningModifier, SmoothQuantModifier
from gossamer.progress import Progress
from gossamer.recipe import Recipe, load

RecipeLike = Recipe | Modifier | str | os.PathLike[str] | Sequence[Modifier]
Train = Callable[[nn.Module, Manager], None]
"""Trains a model with a manager that is not attached yet: the loop calls `manager.modify`."""


def oneshot(
    model: nn.Module | str | os.PathLike[str],
    *,
    recipe: RecipeLike,
    data: Any = None,
    dataset: Any = None,
    output: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    num_calibration_samples: int | None = None,
    max_seq_length: int | None = None,
    stage: str | None = None,
    train: Train | None = None,
    progress: Progress | None = None,
) -> nn.Module | None:
    """Run the one-shot stages of a recipe on a trained model, in place, and return it.

    `data`, or `dataset`, is a loader or list of tensors, tuples or dicts, of texts if there is a `tokenizer`, or the
    path of a text file. Of it, `num_calibration_samples` are used (512), texts with `max_seq_length` tokens. Stages run
    in the recipe's order, or only `stage`; those with `run_type: train` are given to `train`. If anything fails, the
    model is as it was before.

    The model may be a folder that Transformers has written: it is read block by block, and the result is written to
    `output`, or `output_dir`, as it is ready. A model in memory is saved there with its `save_pretrained`.
    """
    for first, second, name in ((data, dataset, "dataset"), (output, output_dir, "output_dir")):
        if first is not None and second is not None:
            raise GossamerError(f"gives the same as {'data' if name == 'dataset' else 'output'}; drop one", name)
    given = dataset if data is None else data
    target = output if output is not None else output_dir
    text = tokenizer if tokenizer is not None else processor
    read = _recipe_of(recipe)
    if isinstance(model, str | os.PathLike):
        stages = _stages(read, stage, None)
        if target is None:
            raise GossamerError("a model in a folder needs a folder for the result", "output")
        if len(stages) > 1:
            raise RecipeError(f"{read.name}: choose one stage with stage=, because a folder is read once")
        stream(
            Path(model),
            Path(target),
            stages[0][0],
            given,
            recipe=repr((read.text, stage)),
            tokenizer=text,
            samples=num_calibration_samples,
            length=max_seq_length,
            progress=progress or _silent,
        )
        return None
    expect_model(model, "oneshot")
    if target is not None:
        _check_output(model, Path(target))
    stages = _stages(read, stage, train)
    module = unwrap(model)
    batches: list[Arguments] | None = None
    if given is not None:
        batches = calibration_batches(
            given, module, tokenizer=text, samples=num_calibration_samples, length=max_seq_length
        )
    with _as_before_on_error(module) as changing:
        for modifiers, training in stages:
            if training:
                assert train is not None
                train(model, Manager(Recipe.of(modifiers)))
            else:
                _run_stage(module, modifiers, batches, changing, progress or _silent)
    if target is not None:
        for part in (module, text):
            if hasattr(part, "save_pretrained"):
                cast(Any, part).save_pretrained(str(target))
    return model


def _check_output(model: nn.Module, target: Path) -> None:
    if not hasattr(unwrap(model), "save_pretrained"):
        raise GossamerError(f"{type(model).__name__} has no save_pretrained; save its state_dict yourself", "output")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise file_error(target, "exists and is not empty; choose another output")


def _recipe_of(recipe: RecipeLike) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Modifier):
        return Recipe.of([recipe])
    if isinstance(recipe, str | os.PathLike):
        return load(Path(recipe) if isinstance(recipe, os.PathLike) else recipe)
    return Recipe.of(recipe)


def _stages(recipe: Recipe, only: str | None, train: Train | None) -> list[tuple[tuple[Modifier, ...], bool]]:
    """The modifiers of each stage that runs, and whether it trains."""
    kinds = dict(recipe.run_types)
    stages = [
        (name, modifiers, kinds.get(name, "oneshot" if _needs_no_training(modifiers) else "train") == "train")
        for name, modifiers in recipe.stages or (("", recipe.modifiers),)
    ]
    if only is not None:
        names = [name for name, *_ in stages]
        stages = [entry for entry in stages if only in (entry[0], entry[0].removesuffix("_stage"))]
        if not stages:
            raise RecipeError(f"{recipe.name}: there is no stage '{only}'; there are {', '.join(names)}")
    training = next((name for name, _, trains in stages if trains), None)
    if training is not None and train is None:
        named = f"the stage '{training}'" if training else "the recipe"
        raise RecipeError(
            f"{recipe.name}: {named} trains; give oneshot a function train(model, manager) that runs your training "
            "loop, or choose one stage with stage="
        )
    return [(modifiers, trains) for _, modifiers, trains in stages]


def _needs_no_training(modifiers: Sequence[Modifier]) -> bool:
    from gossamer.modifiers.oneshot import OneShotModifier

    return any(isinstance(modifier, OneShotModifier) for modifier in modifiers)


def _run_stage(
    module: nn.Module,
    modifiers: Sequence[Modifier],
    batches: list[Arguments] | None,
    changing: Callable[[str, Tensor], None],
    progress: Progress,
) -> None:
    """Run the modifiers of one stage in their order; neighbours that change layers share a pass over the model."""

    def kind(modifier: Modifier) -> str:
        return "layers" if isinstance(modifier, LayerModifier) else "smooth" if _smooths(modifier) else "other"

    for name, group in groupby(modifiers, kind):
        members = list(group)
        if name == "layers":
            change_layers(module, cast("list[LayerModifier]", members), batches, changing, progress)
        elif name == "smooth":
            for modifier in cast("list[SmoothQuantModifier]", members):
                with evaluating(module), _of_modifier(modifier):
                    smooth(module, modifier, required(batches, modifier), run_batch, changing)
        else:
            Manager(Recipe.of(members)).apply(module, calibration_data=_as_given(batches))


def _as_given(batches: list[Arguments] | None) -> list[Any] | None:
    """Batches in the form in which users give them."""
    return None if batches is None else [args or kwargs for args, kwargs in batches]


def _smooths(modifier: Modifier) -> bool:
    return isinstance(modifier, SmoothQuantModifier)


def change_layers(
    module: nn.Module,
    modifiers: Sequence[LayerModifier],
    batches: list[Arguments] | None,
    changing: Callable[[str, Tensor], None],
    progress: Progress,
) -> None:
    """Change the layers that the modifiers name, in one pass if any of them needs data."""
    with evaluating(module):
        steps = [step_of(modifier, module, batches, changing) for modifier in modifiers]
        names = dict.fromkeys(name for step in steps for name in step.shares)
        total = sum(site_of(module, name).parameter.numel() for name in names)
        done = 0

        def advance(name: str, count: int) -> None:
            nonlocal done
            done += count
            progress(name, done / max(total, 1))

        if batches is not None:
            LayerwisePass(module, steps, batches, progress=advance, changing=changing).run()
            return
        for name in names:
            site = site_of(module, name)
            problems = [LayerProblem(name, matrix, None, 0.0) for matrix in site.matrices()]
            changing(name, site.parameter)
            for step in steps:
                if name in step.shares:
                    for problem in problems:
                        problem.share = step.shares[name]
                        problem.weight = step.compress(problem)
            site.write([problem.weight for problem in problems])
            advance(name, site.parameter.numel())


def step_of(
    modifier: LayerModifier,
    module: nn.Module,
    batches: list[Arguments] | None,
    changing: Callable[[str, Tensor], None],
) -> Step:
    """What a modifier does to a model."""
    with _of_modifier(modifier):
        shares = modifier.plan(module)
        if modifier.statistics != "nothing":
            required(batches, modifier)
        if isinstance(modifier, OneShotPruningModifier):
            if modifier.permute:
                permute(module, modifier, list(shares), batches or [], run_batch, changing)
            shares = shares_of(modifier, module, shares, batches or [], run_batch)
        return Step(modifier.name, shares, modifier.statistics, modifier.compressor(module))


def required(batches: list[Arguments] | None, modifier: Modifier) -> list[Arguments]:
    if batches is None:
        raise GossamerError(
            f"data: {modifier.name} needs calibration data; give a few dozen samples of the training data"
        )
    return batches


@contextmanager
def _of_modifier(modifier: Modifier) -> Generator[None]:
    """Errors inside name the modifier."""
    try:
        yield
    except ModifierError as error:
        raise ModifierError(error.problems, modifier.name) from error


def run_batch(module: nn.Module, batch: Arguments) -> None:
    """Run a model on a batch for what its hooks see."""
    args, kwargs = batch
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except GossamerError:
        raise
    except Exception as error:  # any model, any reason
        raise GossamerError(f"data: the model does not run on it ({short_error(error)})") from error


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Evaluation mode; afterwards every module has its mode back."""
    modes = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for child, training in modes:
            child.training = training


@contextmanager
def _as_before_on_error(module: nn.Module) -> Generator[Callable[[str, Tensor], None]]:
    """Yields a function that remembers a parameter before it changes; an error writes all of them back."""
    before: dict[str, Tensor] = {}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers() if name.endswith(_NORM)}

    def changing(name: str, parameter: Tensor) -> None:
        if name not in before:
            before[name] = parameter.detach().clone()

    try:
        yield changing
    except BaseException:
        with torch.no_grad():
            for name, value in (before | buffers).items():
                get_tensor(module, name).copy_(value)
        raise


_NORM = ("running_mean", "running_var", "num_batches_tracked")


def _silent(label: str, share: float) -> None:
    """Ignore progress."""
