"""Whole runs, from a config to a result: train, resume, evaluate, export.

The functions behind the commands of the same names; they print nothing
besides the display that they are given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, open_regular, remove_leftovers
from gossamer.model.counting import count_by_kind
from gossamer.runner.builders import code_of
from gossamer.runner.checkpoint import Checkpoint, CheckpointError, Checkpoints, Description, MisfitError, title
from gossamer.runner.config import Config, Loaded, config_text, read_config
from gossamer.runner.config.sparse import FOLDERS
from gossamer.runner.data.sources import Purpose
from gossamer.runner.display import Display, logged
from gossamer.runner.distributed import Place, done_by_first, joined, reproducible, same_everywhere
from gossamer.runner.figures import known_counts, zero_share
from gossamer.runner.hooks import subclass
from gossamer.runner.lock import LOCK, locked
from gossamer.runner.model_files import Export
from gossamer.runner.records import METRICS
from gossamer.runner.reporting import note_sensitivity, note_start, report_end
from gossamer.runner.trainer import Runner, SparseRunner
from gossamer.runner.trust import check_links, remember, trust_of
from gossamer.version import __version__

logger = logging.getLogger("gossamer")
HEADER = "# All settings of this run; `gossamer resume` reads them."
WEIGHTS = (".safetensors", ".pt", ".pth", ".onnx", ".tar")
CONFIG, RECIPE, CHECKPOINTS = "config.yaml", "recipe.yaml", "checkpoints"
WRITTEN = (".", CHECKPOINTS, "levels", "analysis", "pictures")
"""The folders of a run in which it writes files."""
_KWARGS = "sparsity.scheduler.kwargs"


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    folder: Path
    complete: bool
    """Whether the training reached its end, or was asked to stop before."""
    iteration: int
    metrics: dict[str, float]
    sparsity: float | None = None
    """Zeros over weights of the model; None in a float run."""
    source: Path | None = None
    """The checkpoint or file of weights that was evaluated, exported or, at the end of a training, written."""
    model: str | None = None
    """That checkpoint by name, as `best checkpoint, iteration 40: top1 96.30`; None for a file of weights."""
    model_iteration: int | None = None
    """The iteration of that checkpoint, which `metrics` and `sparsity` are of."""
    files: list[Path] = field(default_factory=list[Path])
    sparsity_of_pruned_layers: float | None = None
    """Zeros over weights of the layers that are made sparse; filters that were removed count as zeros."""
    first: bool = True
    """Whether this is the first of several processes, which speaks for them."""


def run(
    config: str | Path, sets: Sequence[str] = (), data: str | None = None, *, display: Display | None = None
) -> Result:
    """Train what a config describes; go on with a run that is there, where the config says so."""
    return _train(read_config(config, sets, data), display)


def resume(
    folder: str | Path, sets: Sequence[str] = (), *, imports: Sequence[str] = (), display: Display | None = None
) -> Result:
    """Go on with the run of a folder.

    Code that a folder names runs if you trained in it on this machine, here as below; `imports` are packages that you
    vouch for besides.
    """
    if Checkpoints(Path(folder) / "checkpoints", keep=1).latest() is None and (Path(folder) / CONFIG).is_file():
        raise GossamerError(f"{folder}: has no checkpoint to go on from; begin the run again by gossamer train")
    return _train(_of_folder(Path(folder), [*sets, "saver.auto_resume=true"], imports=imports), display)


def evaluate(
    config: str | Path,
    sets: Sequence[str] = (),
    data: str | None = None,
    *,
    weights: str | Path | None = None,
    imports: Sequence[str] = (),
    display: Display | None = None,
) -> Result:
    """Test what is named, else the model of the run. `config` may be a run folder."""
    loaded = loaded_of(config, sets, data, weights, imports)
    with joined(loaded.config.runtime.device) as place, built(loaded, place, "test", display) as runner:
        metrics = runner.evaluate()
        pruned, sparsity = _sparsity(runner)
        if runner.folder.is_dir():
            runner.draw("evaluation.png")
        at = runner.start.checkpoint.iteration if runner.start.checkpoint is not None else None
        result = Result(runner.folder, True, at or 0, metrics, sparsity, _source(runner), named(runner), at)
        return replace(result, sparsity_of_pruned_layers=pruned, first=place.first)


def export(
    config: str | Path,
    sets: Sequence[str] = (),
    data: str | None = None,
    *,
    weights: str | Path | None = None,
    formats: Sequence[str] = ("onnx",),
    opset: int = 18,
    dynamic_batch: bool = True,
    output: Path | None = None,
    imports: Sequence[str] = (),
    display: Display | None = None,
) -> Result:
    """Write what is named, else the model of the run."""
    wanted = Export(formats, opset, dynamic_batch)
    loaded = loaded_of(config, sets, data, weights, imports)
    with joined(loaded.config.runtime.device) as place, built(loaded, place, "export", display) as runner:
        pruned, sparsity = _sparsity(runner)
        folder = output or runner.folder
        files = [one.path for one in runner.finish(folder, wanted)]
        at = runner.start.checkpoint.iteration if runner.start.checkpoint is not None else None
        result = Result(folder, True, 0, {}, sparsity, _source(runner), named(runner), at, files)
        return replace(result, sparsity_of_pruned_layers=pruned, first=place.first)


def measure_sensitivity(
    folder: str | Path, progress: Callable[[str, float], None] | None = None, *, imports: Sequence[str] = ()
) -> None:
    """Measure the model of a run for its report, however long that takes; builds the model and reads images."""
    if Checkpoints(Path(folder) / "checkpoints", keep=1).model() is None and (Path(folder) / CONFIG).is_file():
        raise GossamerError(f"{folder}: has no checkpoint to measure; begin the run again by gossamer train")
    loaded = _of_folder(Path(folder), [], imports=imports)
    with joined(loaded.config.runtime.device) as place, built(loaded, place, "export", Display(shown=False)) as runner:
        if runner.sparsifier is not None:
            runner.sparsifier.finish(runner.model)
        note_sensitivity(runner, progress)


def _train(loaded: Loaded, display: Display | None) -> Result:
    with joined(loaded.config.runtime.device) as place:
        runner = _runner_class(loaded)(loaded, place, display=display)
        with logged(runner.display) as keep, reproducible(loaded.config.runtime.deterministic), ExitStack() as stack:
            # Before anything is read from the folder, which another process may be changing.
            done_by_first(lambda: _lock(runner.folder, stack), place)
            for warning in loaded.warnings if place.first else ():
                logger.warning("%s", warning)
            runner = _built_to_train(runner)
            done_by_first(lambda: _open_folder(runner, keep), place)
            _tell_setting(runner)
            if place.first and runner.start.checkpoint is not None and runner.iteration < runner.length:
                runner.display.message(f"Resuming from iteration {runner.iteration} of {runner.start.checkpoint.path}.")
            note_start(runner)
            try:
                complete = runner.train()
                final, about = _final(runner) if complete else (runner, None)
                pruned, sparsity = _sparsity(final)
                files = [one.path for one in final.finish()] if complete else []
            except GossamerError as error:
                logger.error("%s", error)
                report_end(runner, complete=False)
                raise
            done_by_first(lambda: report_end(final, complete=complete), place)
            result = Result(runner.folder, complete, runner.iteration, dict(final.metrics), sparsity, files=files)
            if about is not None:
                if place.first:
                    logger.info("the model of the run is its %s", title(about))
                result = replace(result, source=about.path, model=title(about), model_iteration=about.iteration)
            return replace(result, sparsity_of_pruned_layers=pruned, first=place.first)


def _lock(folder: Path, stack: ExitStack) -> None:
    """Hold the lock of a run folder, and that of the run whose checkpoints it shares by a link, if it does."""
    stack.enter_context(locked(folder))
    if (folder / CHECKPOINTS).is_symlink():
        real = (folder / CHECKPOINTS).resolve()
        if any((real.parent / name).exists() for name in (CONFIG, LOCK)):
            real = real.parent
        if real != folder.resolve():
            stack.enter_context(locked(real))


def _built_to_train(runner: Runner) -> Runner:
    """A runner that is ready to train: this one, or another if its checkpoint turns out to be of no use.

    A run is built from scratch for each checkpoint that is tried, so that nothing of the others is left in it.
    """
    unusable: dict[Path, CheckpointError] = {}
    while True:
        try:
            runner.build()
        except CheckpointError as error:
            checkpoint = runner.start.checkpoint
            if checkpoint is None or not runner.start.others:
                raise
            if isinstance(error, MisfitError) and runner.describes_another_run():
                raise
            unusable[checkpoint.path] = error
            runner = type(runner)(runner.loaded, runner.place, display=runner.display)
            runner.unusable = unusable
        else:
            if runner.place.first:
                runner.checkpoints.set_aside(unusable)
            return runner


def _final(runner: Runner) -> tuple[Runner, Description | None]:
    """The runner that holds the model of the run: this one, or another with the best checkpoint in it.

    The first process reads the checkpoint and sends it to the others, which may not see its folder.
    """
    place = runner.place
    chosen = same_everywhere(done_by_first(lambda: _chosen(runner), place), place)
    if not isinstance(chosen, Checkpoint):
        return runner, chosen
    final = type(runner)(runner.loaded, place, purpose="export", display=runner.display)
    final.chosen = chosen
    with _without_warnings():  # the first runner has logged them
        final.build()
    final.iteration, final.metrics = chosen.iteration, dict(chosen.metrics)
    return final, chosen.about


def _chosen(runner: Runner) -> Checkpoint | Description | None:
    """The checkpoint that is the model of the run, without the optimizer's state; its description if it is this one."""
    about = runner.checkpoints.model()
    if about is None or about.iteration == runner.iteration or (found := runner.checkpoints.load_model()) is None:
        return about
    return replace(found, state={key: value for key, value in found.state.items() if key != "optimizer"})


@contextmanager
def _without_warnings() -> Generator[None]:
    parent = logging.getLogger("gossamer")
    level = parent.level
    parent.setLevel(logging.ERROR)
    try:
        yield
    finally:
        parent.setLevel(level)


@contextmanager
def built(loaded: Loaded, place: Place, purpose: Purpose, display: Display | None) -> Generator[Runner]:
    """A runner that is ready to test or export; its messages are shown."""
    runner = _runner_class(loaded)(loaded, place, purpose=purpose, display=display)
    with logged(runner.display), reproducible(runner.config.runtime.deterministic):
        runner.build()
        yield runner


def _runner_class(loaded: Loaded) -> type[Runner]:
    word = loaded.config.runtime.runner.type
    if word in ("base", "sparse"):
        return SparseRunner if word == "sparse" else Runner
    if ":" not in word:
        raise GossamerError(f"runtime.runner.type: expected base, sparse or package.module:Class, found '{word}'")
    return subclass(word, Runner, "runtime.runner.type", loaded.trust)


def code_in(config: Config) -> list[tuple[str, str]]:
    """The code that a config names: keys, and import paths or libraries."""
    runner = config.runtime.runner.type
    hooks = [(f"hooks.{index}.type", hook.type) for index, hook in enumerate(config.hooks) if ":" in hook.type]
    return [*code_of(config.net), *hooks, *([("runtime.runner.type", runner)] if ":" in runner else [])]


def loaded_of(
    config: str | Path, sets: Sequence[str], data: str | None, weights: str | Path | None, imports: Sequence[str] = ()
) -> Loaded:
    """The settings of a config file or of a run folder, with what the command line adds.

    A config beside files of a run stands for that run folder: it may be somebody else's.
    """
    more = [*sets] if weights is None else [*sets, f"saver.resume_model={json.dumps(str(weights))}"]
    if Path(config).is_dir():
        return _of_folder(Path(config), more, data, imports)
    path = Path(config)
    if path.is_file() and (_is_run(path.parent) or (path.name == CONFIG and _is_of_run(path))):
        return _of_folder(path.parent, more, data, imports, path.name)
    if not Path(config).suffix and not Path(config).exists():
        raise GossamerError(
            f"{config}: there is no such run folder or config; runs are in runs/ unless a config says else"
        )
    if Path(config).suffix in WEIGHTS:
        raise GossamerError(
            f"{config}: is a file of weights; name the config or the run, and this by --weights {config}"
        )
    return read_config(config, more, data)


def _of_folder(
    folder: Path, sets: Sequence[str], data: str | None = None, imports: Sequence[str] = (), name: str = CONFIG
) -> Loaded:
    """The config that a run folder holds, for this folder wherever it is now.

    A folder may be somebody else's: what its config names as code must be vouched for, and nothing is written outside.
    """
    if not (folder / name).is_file():
        what = "a folder without config.yaml" if folder.is_dir() else "no such run folder"
        raise GossamerError(f"{folder}: {what}; name a folder that `gossamer train` made, as runs/res18")
    check_links(folder)
    own = [f"saver.save_dir={json.dumps(str(folder))}", "saver.resume_model=null"]
    if (folder / RECIPE).is_file():
        own += [f"sparsity.recipe={json.dumps(str(folder / RECIPE))}", "sparsity.recipe_variables={}"]
    loaded = _writing_inside(read_config(folder / name, [*own, *sets], data), folder)
    code = code_in(loaded.config)
    trust = trust_of(folder, folder, imports, from_command_line(code, loaded.given))
    trust.check(code)
    return replace(loaded, trust=trust)


def from_command_line(code: Sequence[tuple[str, str]], given: Set[str]) -> set[str]:
    """The import paths that `--set` names."""
    unnamed = {path for key, path in code if key not in given and not ("hooks" in given and key.startswith("hooks."))}
    return {path for _, path in code} - unnamed


def _writing_inside(loaded: Loaded, folder: Path) -> Loaded:
    """The settings with the folders that a method writes to, where the config names some, inside of the run folder."""
    sparsity = loaded.config.sparsity
    if sparsity is None or sparsity.scheduler is None or not isinstance(sparsity.scheduler.get("kwargs"), dict):
        return loaded
    kwargs: dict[str, Any] = sparsity.scheduler["kwargs"]
    elsewhere = [key for key in FOLDERS if kwargs.get(key) is not None and f"{_KWARGS}.{key}" not in loaded.given]
    if not elsewhere:
        return loaded
    inside = {key: str(folder / FOLDERS[key]) for key in elsewhere}
    scheduler = {**sparsity.scheduler, "kwargs": {**kwargs, **inside}}
    config = loaded.config.model_copy(update={"sparsity": sparsity.model_copy(update={"scheduler": scheduler})})
    return replace(loaded, config=config, text=config_text(config))


def _is_of_run(path: Path) -> bool:
    """Whether a run wrote this config."""
    try:
        with open_regular(path) as file:
            return file.read(len(HEADER)) == HEADER.encode()
    except OSError:
        return False


def _is_run(folder: Path) -> bool:
    """Whether a folder holds what a run writes besides its config, whose first line anybody can change."""
    return (folder / METRICS).exists() or Checkpoints(folder / CHECKPOINTS, keep=1).latest() is not None


def _tell_setting(runner: Runner) -> None:
    """What the figures of a run depend on, for its log."""
    train = len(runner.train_data) if runner.train_data is not None else 0
    test = len(runner.test_data) if runner.test_data is not None else 0
    count = runner.place.world
    where = f"{runner.place.device}, {count} {'process' if count == 1 else 'processes'}"
    logger.info("gossamer %s, torch %s, %s", __version__, torch.__version__, where)
    logger.info("%d training and %d test images, %d classes", train, test, runner.num_classes)


def _open_folder(runner: Runner, keep: Callable[[Path], None]) -> None:
    """From here on the run has a folder: its log, its config, complete checkpoints; no leftovers of a killed one."""
    _check_config_place(runner.folder)
    keep(runner.folder)
    for name in WRITTEN:
        for left in remove_leftovers(runner.folder / name):
            logger.info("%s: removed; a process that was killed had not finished writing it", left)
    _keep_config(runner)
    if runner.start.checkpoint is not None:
        runner.checkpoints.complete(runner.start.checkpoint, runner.task.metric)
    remember(runner.folder, [path for _, path in code_in(runner.config)])


def _check_config_place(folder: Path) -> None:
    """Raise rather than write over a config that somebody wrote."""
    path = folder / CONFIG
    if path.is_file() and not _is_of_run(path):
        raise GossamerError(f"{path}: is no config of a run, and would be written over; choose another saver.save_dir")


def _keep_config(runner: Runner) -> None:
    """Write the config into the run folder, and the recipe with its variables, so that the folder stands alone."""
    texts = {CONFIG: f"{HEADER}\n{runner.loaded.text}"}
    if runner.sparsifier is not None and runner.sparsifier.recipe is not None:
        texts[RECIPE] = runner.sparsifier.recipe
    for name, text in texts.items():
        path = runner.folder / name
        try:
            with atomic_write(path) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise GossamerError(f"{path}: cannot be written: {error.strerror or error}") from error


def named(runner: Runner) -> str | None:
    """The checkpoint that a runner tests or exports, by name; None for a file of weights."""
    checkpoint = runner.start.checkpoint
    return None if checkpoint is None else title(checkpoint.about)


def origin(checkpoint: str | None, source: Path) -> str:
    """A checkpoint by its name and its file, or a file of weights."""
    return str(source) if checkpoint is None else f"{checkpoint} ({source})"


def _source(runner: Runner) -> Path | None:
    return runner.start.source or runner.start.weights


def _sparsity(runner: Runner) -> tuple[float | None, float | None]:
    """Zeros over weights: of the layers that are made sparse, and of the model; None in a float run."""
    if runner.sparsifier is None:
        return None, None
    pruned = runner.sparsifier.now(runner.model)
    weights = known_counts(count_by_kind(runner.outcome), pruned)
    return pruned, zero_share(weights) if weights else pruned
