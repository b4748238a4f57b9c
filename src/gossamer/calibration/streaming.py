"""One-shot methods on the checkpoint of a causal language model, one block in memory at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gossamer.calibration.blocks import find_blocks
from gossamer.calibration.checkpoint import Checkpoint, OutputFolder
from gossamer.calibration.data import calibration_batches, load_tokenizer
from gossamer.calibration.layerwise import LayerwisePass, Step
from gossamer.calibration.lockstep import removed
from gossamer.errors import GossamerError, ModifierError, RecipeError, file_error, first_line
from gossamer.model import first_names, get_module, named_modules
from gossamer.model.example_inputs import Arguments
from gossamer.modifiers import Modifier
from gossamer.modifiers.oneshot import LayerModifier, OneShotPruningModifier
from gossamer.progress import Progress


def stream(
    folder: Path,
    output: Path,
    modifiers: Sequence[Modifier],
    data: Any,
    *,
    recipe: str,
    tokenizer: Any,
    samples: int | None,
    length: int | None,
    progress: Progress,
) -> None:
    """Change the layers of a checkpoint, and write the result; the memory is that of one block.

    Parts of the output are written as they are ready. The same call after an interruption continues behind the last
    of them, with the same result to the bit.
    """
    checkpoint = Checkpoint(folder)
    if output.resolve() == folder.resolve():
        raise file_error(output, "is the folder of the model; choose another output")
    module = empty_model(folder)
    if data is None:
        raise GossamerError("data: a text file or batches of token ids are needed to calibrate")
    batches = calibration_batches(
        data,
        module,
        tokenizer=tokenizer if tokenizer is not None else _Lazy(folder),
        samples=samples,
        length=length,
    )
    steps = [_step_of(modifier, module) for modifier in modifiers]
    model = _Model(module, checkpoint, dict.fromkeys(name for step in steps for name in step.shares))
    target = OutputFolder(output, _fingerprint(checkpoint, recipe, batches), len(model.units) + 1)
    model.run(steps, batches, target, progress)
    target.finish(folder)


def empty_model(folder: Path) -> nn.Module:
    """The model of a folder without weights; buffers have their values."""
    try:
        import transformers
        from accelerate import init_empty_weights
    except ModuleNotFoundError as error:
        raise GossamerError(f"a folder needs the library {error.name}: pip install 'gossamer[transformers]'") from None
    library: Any = transformers
    try:
        config = library.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        names: list[str] = config.architectures or []
        kind = getattr(library, names[0], None) if names else None
        with init_empty_weights(include_buffers=False):
            model: nn.Module = kind(config) if kind else library.AutoModelForCausalLM.from_config(config)
        cast(Any, model).tie_weights()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise file_error(folder, f"is not a model that Transformers can build ({first_line(error)})") from None
    return model.float().eval()


class _Lazy:
    """A tokenizer that is loaded when there is text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return load_tokenizer(self._folder)(*args, **kwargs)


class _Model:
    """A model whose blocks get their weights when the batches arrive, and lose them when these go on."""

    def __init__(self, module: nn.Module, checkpoint: Checkpoint, targets: Sequence[str] | dict[str, None]) -> None:
        self._module = module
        self._checkpoint = checkpoint
        self._names = first_names(module)
        blocks = [block for items in find_blocks(module).values() for block in items]
        if not blocks:
            raise GossamerError(
                f"{checkpoint.folder}: no repeated blocks were found in {type(module).__name__}; load the model and "
                "call gossamer.oneshot(model, …)"
            )
        outside = [name.rpartition(".")[0] for name in targets if not any(name.startswith(f"{b}.") for b in blocks)]
        self.units = [*blocks, *dict.fromkeys(outside)]
        """Modules whose weights are written together, in the order of the model."""
        missing = [name for name in set(self._names.values()) if name not in checkpoint.entries]
        if missing:
            raise GossamerError(
                f"{checkpoint.folder}: the checkpoint has no '{min(missing)}', which {type(module).__name__} needs; "
                "load the model and call gossamer.oneshot(model, …)"
            )
        self._loaded: list[str] = []
        """Modules that have their weights now."""

    def run(self, steps: Sequence[Step], batches: list[Arguments], target: OutputFolder, progress: Progress) -> None:
        finished = self.units[: target.done]
        written = {unit: Checkpoint.of_file(target.part(number)) for number, unit in enumerate(finished)}
        current: list[str] = []

        def enter(unit: str) -> None:
            self._leave(current, target)
            self._load(unit, written.get(unit, self._checkpoint))
            current[:] = [unit]

        left = [
            Step(
                step.method,
                {name: share for name, share in step.shares.items() if not _within(name, finished)},
                step.statistics,
                step.compress,
            )
            for step in steps
        ]
        sizes = {
            name: self._checkpoint.entries[name].end - self._checkpoint.entries[name].start
            for step in steps
            for name in step.shares
        }
        done = sum(size for name, size in sizes.items() if _within(name, finished))

        def advance(name: str, _: int) -> None:
            nonlocal done
            done += sizes[name]
            progress(name, done / max(sum(sizes.values()), 1))

        with ExitStack() as hooks:
            for path, layer in named_modules(self._module):
                own = [leaf for leaf, parameter in layer.named_parameters(recurse=False) if parameter.is_meta]
                if own and not _within(f"{path}.", self.units):
                    hook = partial(self._on_call, path)
                    hooks.enter_context(removed(layer.register_forward_pre_hook(hook)))
            if any(step.shares for step in left):
                LayerwisePass(
                    self._module,
                    [step for step in left if step.shares],
                    batches,
                    progress=advance,
                    changing=lambda name, parameter: None,
                    gates={get_module(self._module, unit): partial(enter, unit) for unit in self.units},
                    dtypes={name: entry.dtype for name, entry in self._checkpoint.entries.items()},
                ).run()
        self._leave(current, target)
        for number in range(target.done, len(self.units)):
            self._write(number, target)  # blocks behind the last change
        rest = [name for name in self._checkpoint.entries if not _within(name, self.units)]
        target.write(len(self.units), {name: self._unchanged(name) for name in rest})

    def _on_call(self, path: str, _: nn.Module, __: Any) -> None:
        """Load a module outside of blocks when it is called."""
        if path not in self._loaded:
            self._load(path, self._checkpoint)

    def _load(self, path: str, source: Checkpoint) -> None:
        """Give the parameters below a module their values, in float32."""
        self._loaded.append(path)
        start = f"{path}." if path else ""
        for name, first in self._names.items():
            if name.startswith(start):
                owner, _, leaf = name.rpartition(".")
                layer = get_module(self._module, owner)
                held = source if first in source.entries else self._checkpoint
                layer.register_parameter(leaf, nn.Parameter(held.read(first).float(), requires_grad=False))

    def _leave(self, current: list[str], target: OutputFolder) -> None:
        """Write the unit that the batches have passed, and release everything that is in memory."""
        if current and (number := self.units.index(current[0])) >= target.done:
            self._write(number, target)
        for path in self._loaded:
            for _, layer in named_modules(get_module(self._module, path)):
                for leaf, parameter in list(layer.named_parameters(recurse=False)):
                    layer.register_parameter(leaf, nn.Parameter(parameter.to("meta"), requires_grad=False))
        self._loaded.clear()
        current.clear()

    def _write(self, number: int, target: OutputFolder) -> None:
        unit = self.units[number]
        names = [name for name in self._checkpoint.entries if _within(name, [unit])]
        loaded = unit in self._loaded
        target.write(number, {name: self._now(name) if loaded else self._unchanged(name) for name in names})

    def _now(self, name: str) -> tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]:
        entry = self._checkpoint.entries[name]
        owner, _, leaf = name.rpartition(".")
        values = get_module(self._module, owner).state_dict(keep_vars=True).get(leaf) if name in self._names else None
        if values is None:
            return self._unchanged(name)
        return entry.dtype, entry.shape, lambda: values

    def _unchanged(self, name: str) -> tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]:
        entry = self._checkpoint.entries[name]
        return entry.dtype, entry.shape, partial(self._checkpoint.read, name)


def _within(name: str, units: Sequence[str]) -> bool:
    return any(name.startswith(f"{unit}.") for unit in units)


def _step_of(modifier: Modifier, module: nn.Module) -> Step:
    if not isinstance(modifier, LayerModifier):
        raise RecipeError(
            f"{modifier.name} does not run on a folder; load the model and call gossamer.oneshot(model, …)"
        )
    try:
        if isinstance(modifier, OneShotPruningModifier) and modifier.sparsity_profile not in (None, "uniform"):
            raise ModifierError(
                "a profile needs the whole model; load it and call gossamer.oneshot", "sparsity_profile"
            )
        if isinstance(modifier, OneShotPruningModifier) and modifier.permute:
            raise ModifierError("is not supported on a folder", "permute")
        return Step(modifier.name, modifier.plan(module), modifier.statistics, modifier.compressor(module))
    except ModifierError as error:
        raise ModifierError(error.problems, modifier.name) from error


def _fingerprint(checkpoint: Checkpoint, recipe: str, batches: Sequence[Arguments]) -> str:
    digest = hashlib.sha256()
    digest.update(checkpoint.fingerprint.encode())
    digest.update(recipe.encode())
    for leaf in pytree.tree_leaves(list(batches)):
        digest.update(leaf.cpu().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
    return digest.hexdigest()


def is_model_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a model of Transformers."""
    return (Path(path) / "config.json").is_file()
