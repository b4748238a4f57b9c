"""The folder of a run: its config, its recipe, and which code they may import.

A config beside files of a run stands for that run folder. It may come from someone else, so the code that it names
must be trusted, and nothing is written outside of the folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError
from gossamer.io import atomic_write, open_regular, remove_leftovers
from gossamer.runner.builders import code_of
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.config import Config, Loaded, config_text, read_config
from gossamer.runner.config.checking import FOLDERS
from gossamer.runner.lock import LOCK, locked
from gossamer.runner.records import METRICS
from gossamer.runner.trust import check_links, remember, trust_of

if TYPE_CHECKING:
    from gossamer.runner.trainer import Trainer

logger = logging.getLogger("gossamer")
CONFIG, RECIPE, CHECKPOINTS = "config.yaml", "recipe.yaml", "checkpoints"
HEADER = "# All settings of this run; `gossamer resume` reads them."
"""The first line of a config that a run wrote."""
_WRITTEN = (".", CHECKPOINTS, "levels", "analysis", "pictures")
"""The folders into which a run writes files."""
_WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".tar")
_KWARGS = "sparsity.scheduler.kwargs"


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
        raise GossamerError(f"{config}: there is no such run folder or config; by default runs are in runs/")
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
        what = "is a folder without config.yaml" if folder.is_dir() else "there is no such run folder"
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
    if trainer.sparsifier is not None and trainer.sparsifier.recipe is not None:
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
