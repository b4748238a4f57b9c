"""Complete runs, from a config or a run folder to a result: train, resume, evaluate and export.

A config beside the files of a run stands for its folder. A folder may come from someone else: code that its config
names is imported only if the user trusts it, and nothing is written outside of the folder.
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

from gossamer.errors import GossamerError, within
from gossamer.io import atomic_write, open_regular, remove_leftovers
from gossamer.model.counting import count_by_kind
from gossamer.runner.builders import code_of, import_subclass
from gossamer.runner.checkpoint import Checkpoint, CheckpointError, Checkpoints, Description, MisfitError
from gossamer.runner.config import Config, Loaded, config_text, read_config
from gossamer.runner.config.loading import FOLDERS
from gossamer.runner.data.sources import Purpose
from gossamer.runner.display import Display, logged
from gossamer.runner.distributed import broadcast_object, deterministic, init_distributed, on_first_rank
from gossamer.runner.formatting import known_counts, zero_share
from gossamer.runner.lock import LOCK, locked
from gossamer.runner.model_files import Export
from gossamer.runner.records import METRICS
from gossamer.runner.trainer import SparseRunner, Trainer
from gossamer.runner.trust import check_links, remember, trust_of
from gossamer.version import __version__

logger = logging.getLogger("gossamer")
CONFIG, RECIPE, CHECKPOINTS = "config.yaml", "recipe.yaml", "checkpoints"
HEADER = "# All settings of this run; `gossamer resume` reads them."
"""The first line of a config that a run wrote."""
_WRITTEN = (".", CHECKPOINTS, "levels", "analysis", "pictures")
"""The folders into which a run writes files."""
_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".tar")
_KWARGS = "sparsity.scheduler.kwargs"


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    complete: bool
    """False if a signal stopped the training early."""
    iteration: int
    metrics: dict[str, float]
    sparsity: float | None = None
    """Zeros over weights of the model; None in a dense run."""
    source: Path | None = None
    """The checkpoint or file of weights that was evaluated, exported or, at the end of a training, written."""
    model: str | None = None
    """That checkpoint by name, as `best checkpoint, iteration 40: top1 96.30`; None for a file of weights."""
    model_iteration: int | None = None
    """The iteration of that checkpoint, to which `metrics` and `sparsity` belong."""
    files: list[Path] = field(default_factory=list[Path])
    sparsity_of_pruned_layers: float | None = None
    """Zeros over weights of the pruned layers; removed filters count as zeros."""
    first: bool = True
    """Whether this process is rank 0."""


def run(
    config: str | Path, sets: Sequence[str] = (), data: str | None = None, *, display: Display | None = None
) -> Result:
    """Train what a config describes. Resumes the run in its folder if the config says so."""
    return _train(read_config(config, sets, data), display)


def resume(
    folder: str | Path, sets: Sequence[str] = (), *, imports: Sequence[str] = (), display: Display | None = None
) -> Result:
    """Resume the run of a folder.

    Code that the folder names is imported if you trained in it on this machine; `imports` are further packages that
    you trust. The same holds for `evaluate` and `export`.
    """
    path = Path(folder)
    if Checkpoints(path / CHECKPOINTS, keep=1).latest() is None and (path / CONFIG).is_file():
        raise GossamerError(f"{folder}: has no checkpoint to resume from; start the run again with gossamer train")
    return _train(load_run_config(path, [*sets, "saver.auto_resume=true"], imports=imports), display)


def evaluate(
    config: str | Path,
    sets: Sequence[str] = (),
    data: str | None = None,
    *,
    weights: str | Path | None = None,
    imports: Sequence[str] = (),
    display: Display | None = None,
) -> Result:
    """Test the given weights, or the model of the run. `config` may be a run folder."""
    loaded = load_config(config, sets, data, weights, imports)
    with built(loaded, "test", display) as trainer:
        metrics = trainer.evaluate()
        if trainer.folder.is_dir():
            trainer.draw("evaluation.png")
        result = _result_of(trainer, trainer.folder)
        return replace(result, iteration=result.model_iteration or 0, metrics=metrics)


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
    """Write the files of the given weights, or of the model of the run. `config` may be a run folder."""
    plan = Export(formats, opset, dynamic_batch)
    loaded = load_config(config, sets, data, weights, imports)
    with built(loaded, "export", display) as trainer:
        result = _result_of(trainer, output or trainer.folder)
        return replace(result, files=[one.path for one in trainer.export(result.folder, plan)])


def measure_sensitivity(
    folder: str | Path, progress: Callable[[str, float], None] | None = None, *, imports: Sequence[str] = ()
) -> None:
    """Measure the sensitivity of the layers of a run's model for its report, without a limit on the time."""
    from gossamer.runner.notes import note_sensitivity

    path = Path(folder)
    if Checkpoints(path / CHECKPOINTS, keep=1).model() is None and (path / CONFIG).is_file():
        raise GossamerError(f"{folder}: has no checkpoint to measure; start the run again with gossamer train")
    with built(load_run_config(path, [], imports=imports), "export", Display(shown=False)) as trainer:
        trainer.finalize()
        note_sensitivity(trainer, progress)


@contextmanager
def built(loaded: Loaded, purpose: Purpose, display: Display | None) -> Generator[Trainer]:
    """A trainer that is ready to test or export, while its warnings are shown."""
    with init_distributed(loaded.config.runtime.device) as distributed:
        trainer = _trainer_class(loaded)(loaded, distributed, purpose=purpose, display=display)
        with logged(trainer.display), deterministic(trainer.config.runtime.deterministic):
            trainer.build()
            yield trainer


def describe_source(checkpoint: str | None, source: Path) -> str:
    """A checkpoint by its name and its file, or a file of weights."""
    return str(source) if checkpoint is None else f"{checkpoint} ({source})"


def _train(loaded: Loaded, display: Display | None) -> Result:
    from gossamer.runner.reporting import note_start, report_end

    with init_distributed(loaded.config.runtime.device) as distributed:
        trainer = _trainer_class(loaded)(loaded, distributed, display=display)
        with (
            logged(trainer.display) as open_log,
            deterministic(loaded.config.runtime.deterministic),
            ExitStack() as stack,
        ):
            # Before anything is read from the folder, which another process may be changing.
            on_first_rank(lambda: lock_folder(trainer.folder, stack), distributed)
            for warning in loaded.warnings if distributed.first else ():
                logger.warning("%s", warning)
            trainer = _built_to_train(trainer)
            on_first_rank(lambda: prepare_folder(trainer, open_log), distributed)
            _log_setting(trainer)
            start = trainer.start.checkpoint
            if distributed.first and start is not None and trainer.iteration < trainer.length:
                trainer.display.message(f"Resuming from iteration {trainer.iteration} of {start.path}.")
            note_start(trainer)
            try:
                complete = trainer.train()
                final, about = _model_of_run(trainer) if complete else (trainer, None)
                pruned, sparsity = _sparsity(final)
                files = [one.path for one in final.export()] if complete else []
            except GossamerError as error:
                logger.error("%s", error)
                report_end(trainer, complete=False)
                raise
            on_first_rank(lambda: report_end(final, complete=complete), distributed)
            result = Result(trainer.folder, complete, trainer.iteration, dict(final.metrics), sparsity, files=files)
            if about is not None:
                if distributed.first:
                    logger.info("the model of the run is its %s", about.title)
                result = replace(result, source=about.path, model=about.title, model_iteration=about.iteration)
            return replace(result, sparsity_of_pruned_layers=pruned, first=distributed.first)


def _built_to_train(trainer: Trainer) -> Trainer:
    """Build the trainer, with an earlier checkpoint if the latest turns out to be unusable.

    Each attempt has its own trainer, so that nothing of a failed attempt remains.
    """
    unusable: dict[Path, CheckpointError] = {}
    while True:
        try:
            trainer.build()
        except CheckpointError as error:
            checkpoint = trainer.start.checkpoint
            if checkpoint is None or not trainer.start.others:
                raise
            if isinstance(error, MisfitError) and trainer.describes_another_run():
                raise
            unusable[checkpoint.path] = error
            trainer = type(trainer)(trainer.loaded, trainer.distributed, display=trainer.display, unusable=unusable)
        else:
            if trainer.distributed.first:
                trainer.checkpoints.set_aside(unusable)
            return trainer


def _model_of_run(trainer: Trainer) -> tuple[Trainer, Description | None]:
    """The trainer that holds the model of the run: this one, or another with the best checkpoint.

    Rank 0 reads the checkpoint and sends it to the others, which may not see its folder.
    """
    distributed = trainer.distributed
    chosen = broadcast_object(on_first_rank(lambda: _best_checkpoint(trainer), distributed), distributed)
    if not isinstance(chosen, Checkpoint):
        return trainer, chosen
    final = type(trainer)(trainer.loaded, distributed, purpose="export", display=trainer.display, checkpoint=chosen)
    with _without_warnings():  # they were logged in the training
        final.build()
    final.iteration, final.metrics = chosen.iteration, dict(chosen.metrics)
    return final, chosen


def _best_checkpoint(trainer: Trainer) -> Checkpoint | Description | None:
    """The model of the run without the optimizer's state; only its description if the trainer already has it."""
    about = trainer.checkpoints.model()
    if about is None or about.iteration == trainer.iteration or (best := trainer.checkpoints.load_model()) is None:
        return about
    return replace(best, state={key: value for key, value in best.state.items() if key != "optimizer"})


@contextmanager
def _without_warnings() -> Generator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trainer_class(loaded: Loaded) -> type[Trainer]:
    name = loaded.config.runtime.runner.type
    if name in ("base", "sparse"):
        return SparseRunner if name == "sparse" else Trainer
    with within("runtime", "runner", "type"):
        return import_subclass(name, Trainer, "runtime.runner.type", loaded.trust, public_name="Runner")


def _log_setting(trainer: Trainer) -> None:
    """Log what results depend on."""
    train = len(trainer.train_data) if trainer.train_data is not None else 0
    test = len(trainer.test_data) if trainer.test_data is not None else 0
    count = trainer.distributed.world_size
    processes = f"{count} {'process' if count == 1 else 'processes'}"
    logger.info("gossamer %s, torch %s, %s, %s", __version__, torch.__version__, trainer.distributed.device, processes)
    logger.info("%d training and %d test images, %d classes", train, test, trainer.num_classes)


def _result_of(trainer: Trainer, folder: Path) -> Result:
    """The result of an evaluation or an export, before the model is finalized."""
    pruned, sparsity = _sparsity(trainer)
    start = trainer.start
    return Result(
        folder=folder,
        complete=True,
        iteration=0,
        metrics={},
        sparsity=sparsity,
        source=start.source,
        model=None if start.checkpoint is None else start.checkpoint.title,
        model_iteration=start.checkpoint.iteration if start.checkpoint is not None else None,
        sparsity_of_pruned_layers=pruned,
        first=trainer.distributed.first,
    )


def _sparsity(trainer: Trainer) -> tuple[float | None, float | None]:
    """Zeros over weights, of the pruned layers and of the model; None in a dense run."""
    pruned = trainer.sparsifier.sparsity(trainer.model)
    if pruned is None:
        return None, None
    weights = known_counts(count_by_kind(trainer.outcome), pruned)
    return pruned, zero_share(weights) if weights else pruned


# The run folder


def load_config(
    config: str | Path, sets: Sequence[str], data: str | None, weights: str | Path | None, imports: Sequence[str] = ()
) -> Loaded:
    """The settings of a config file or of a run folder, with what the command line adds."""
    path = Path(config)
    sets = [*sets] if weights is None else [*sets, f"saver.resume_model={json.dumps(str(weights))}"]
    if path.is_dir():
        return load_run_config(path, sets, data, imports)
    if path.is_file() and (_is_run(path.parent) or (path.name == CONFIG and _is_of_run(path))):
        return load_run_config(path.parent, sets, data, imports, path.name)
    if not path.suffix and not path.exists():
        raise GossamerError(f"{config}: no such run folder or config; by default runs are in runs/")
    if path.suffix in _WEIGHT_SUFFIXES:
        raise GossamerError(
            f"{config}: is a file of weights; name the config or the run, and this file with --weights {config}"
        )
    return read_config(config, sets, data)


def load_run_config(
    folder: Path, sets: Sequence[str], data: str | None = None, imports: Sequence[str] = (), name: str = CONFIG
) -> Loaded:
    """The config in a run folder, with paths changed to where the folder is now."""
    if not (folder / name).is_file():
        what = "is a folder without config.yaml" if folder.is_dir() else "no such run folder"
        raise GossamerError(f"{folder}: {what}; name a folder that `gossamer train` wrote, as runs/res18")
    check_links(folder)
    own = [f"saver.save_dir={json.dumps(str(folder))}", "saver.resume_model=null"]
    if (folder / RECIPE).is_file():
        own += [f"sparsity.recipe={json.dumps(str(folder / RECIPE))}", "sparsity.recipe_variables={}"]
    loaded = _writing_inside(read_config(folder / name, [*own, *sets], data), folder)
    code = code_in(loaded.config)
    trust = trust_of(folder, folder, imports, from_command_line(code, loaded.given))
    trust.check(code)
    return replace(loaded, trust=trust)


def code_in(config: Config) -> list[tuple[str, str]]:
    """The code that a config names: pairs of the key and the import path or library."""
    runner = config.runtime.runner.type
    hooks = [(f"hooks.{index}.type", hook.type) for index, hook in enumerate(config.hooks) if ":" in hook.type]
    return [*code_of(config.net), *hooks, *([("runtime.runner.type", runner)] if ":" in runner else [])]


def from_command_line(code: Sequence[tuple[str, str]], given: Set[str]) -> set[str]:
    """The import paths that `--set` names."""
    unnamed = {path for key, path in code if key not in given and not ("hooks" in given and key.startswith("hooks."))}
    return {path for _, path in code} - unnamed


def lock_folder(folder: Path, stack: ExitStack) -> None:
    """Hold the lock of a run folder, and that of the run whose checkpoints it shares through a link."""
    stack.enter_context(locked(folder))
    if (folder / CHECKPOINTS).is_symlink():
        real = (folder / CHECKPOINTS).resolve()
        if any((real.parent / name).exists() for name in (CONFIG, LOCK)):
            real = real.parent
        if real != folder.resolve():
            stack.enter_context(locked(real))


def prepare_folder(trainer: Trainer, open_log: Callable[[Path], None]) -> None:
    """Write config and recipe, open the log, and complete or remove what a killed process left behind."""
    folder = trainer.folder
    if (folder / CONFIG).is_file() and not _is_of_run(folder / CONFIG):
        raise GossamerError(
            f"{folder / CONFIG}: was not written by a run and would be overwritten; choose another saver.save_dir"
        )
    open_log(folder)
    for name in _WRITTEN:
        for path in remove_leftovers(folder / name):
            logger.info("%s: removed; a killed process had not finished writing it", path)
    texts = {CONFIG: f"{HEADER}\n{trainer.loaded.text}"}
    if trainer.sparsifier.recipe is not None:
        texts[RECIPE] = trainer.sparsifier.recipe
    for name, text in texts.items():
        try:
            with atomic_write(folder / name) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise GossamerError(f"{folder / name}: cannot be written: {error.strerror or error}") from error
    if trainer.start.checkpoint is not None:
        trainer.checkpoints.complete(trainer.start.checkpoint, trainer.task.metric)
    remember(folder, [path for _, path in code_in(trainer.config)])


def _writing_inside(loaded: Loaded, folder: Path) -> Loaded:
    """Move the folders that a method writes to into the run folder, unless the command line names them."""
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
    """Whether a folder has files that a run writes besides its config, whose first line anyone can change."""
    return (folder / METRICS).exists() or Checkpoints(folder / CHECKPOINTS, keep=1).latest() is not None
