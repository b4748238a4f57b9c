"""Weights out of safetensors files, of ours in each encoding and of others: tensor by tensor, nothing in them is run.

Files of ours are checked to the last byte before the first tensor is used. Nothing here knows how a file came about.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, nearest
from gossamer.export.weights.file import KIND, damaged, opened
from gossamer.export.weights.quantized import QuantizedFile
from gossamer.export.weights.states import clean_state
from gossamer.io import DTYPES, dtype_name, sealed_kind
from gossamer.model.additions import is_added
from gossamer.model.thin.cuts import shrink_to, shrunk
from gossamer.model.weights import shares_elements

THINNED = {"thinned": "yes"}
"""What a file says `about` a model whose layers are smaller than those of the network that its code builds."""
Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is, from 0 to 1."""


class Entry(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Weights(Protocol):
    """An open file of weights."""

    @property
    def tensors(self) -> Mapping[str, Entry]: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def about(self) -> Mapping[str, str]: ...
    def check(self, seen: Callable[[float], None] = ...) -> None: ...
    def read(self, name: str) -> Tensor: ...
    def read_into(self, name: str, target: Tensor) -> None: ...


def is_model_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts as the model files that `save` writes do, sound or not."""
    return sealed_kind(path) == KIND


def read_about(path: str | os.PathLike[str]) -> dict[str, str]:
    """What was said `about` a model file when it was written; empty for files of others. No tensor is read."""
    with open_weights(path) as weights:
        return dict(weights.about)


def is_thinned(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that its network was thinned."""
    return is_model_file(path) and THINNED.items() <= read_about(path).items()


def read_state(path: str | os.PathLike[str], *, progress: Progress | None = None) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by name, on the CPU, dense."""
    with open_weights(path) as weights:
        weights.check(_told(progress, "Checking the file"))
        found = {name: weights.read(name) for name in weights.tensors}
        return found | {name: found[first] for name, first in weights.tied.items()}


def load_into(model: nn.Module, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Fill a model's own tensors from a safetensors file, one after another; no second copy of the whole is made.

    The file is checked and compared with the model first: if this raises, the model is as it was. A file of a thinned
    network gives the model its smaller layers, and one of a quantized network lets it emulate the file's integers.
    """
    own = clean_state(model)
    with open_weights(path) as weights:
        names = _as_in(own, {name: name for name in weights.tensors} | dict(weights.tied))
        # What training added may be on one side only: the file of an ASP model fits the plain one, and the reverse.
        names = {name: first for name, first in names.items() if name in own or not is_added(name)}
        own = {name: tensor for name, tensor in own.items() if name in names or not is_added(name)}
        shapes = {name: weights.tensors[first].shape for name, first in names.items()}
        thinned = THINNED.items() <= weights.about.items()
        fitting = _shrunk(own, shapes, Path(path)) if thinned else own
        _check_fit(fitting, {name: weights.tensors[first] for name, first in names.items()}, Path(path))
        if isinstance(weights, QuantizedFile):
            weights.check_modules(model)
        weights.check(_told(progress, "Checking the file"))
        if thinned:
            shrink_to(model, shapes)
            own |= clean_state(model)
        told = _told(progress, "Loading weights")
        with torch.no_grad():
            for done, (name, first) in enumerate(names.items()):
                told(done / len(names))
                target = own[name].detach()
                weights.read_into(first, target)
                torch.autograd.graph.increment_version(target)  # numpy writes past autograd's own count
        if isinstance(weights, QuantizedFile):
            weights.emulate(model)
        told(1.0)


def emulate_as(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Let a model emulate the integers that a file holds; nothing for a file that holds none."""
    if sealed_kind(path) != KIND:
        return
    with open_weights(path) as weights:
        if isinstance(weights, QuantizedFile):
            weights.check_modules(model)
            weights.check()
            weights.emulate(model)


def read_integers(path: str | os.PathLike[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights that a file holds as integers, each with its scales; empty for a file that holds none."""
    with open_weights(path) as weights:
        weights.check()
        names = weights.integer_names if isinstance(weights, QuantizedFile) else []
        return {name: weights.integers(name) for name in names if isinstance(weights, QuantizedFile)}


def _as_in(own: Mapping[str, Tensor], names: dict[str, str]) -> dict[str, str]:
    """The names of a file with or without the `module.` that a model has: as DDP adds it, or a layer of that name."""
    if own.keys() & names.keys():
        return names
    if own and all(name.startswith("module.") for name in own):
        return {f"module.{name}": first for name, first in names.items()}
    if all(name.startswith("module.") for name in names):
        return {name.removeprefix("module."): first for name, first in names.items()}
    return names


def _shrunk(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Tensor]:
    try:
        return shrunk(own, shapes)
    except GossamerError as error:
        raise GossamerError(f"{path}: {error}; build the model as it was written") from None


@contextmanager
def open_weights(path: str | os.PathLike[str]) -> Generator[Weights]:
    """A safetensors file, of ours or of others; its text is checked, its tensors are not yet."""
    file = Path(path)
    if not file.is_file():
        raise GossamerError(f"{file}: there is no such file; give a .safetensors file")
    kind = sealed_kind(file)
    if kind == "gossamer checkpoint":
        raise GossamerError(f"{file}: is a checkpoint of a run; write its model by `gossamer export` and load that")
    if kind is not None:
        with opened(file) as found:
            yield QuantizedFile(found) if "quantized" in found.metadata else found
        return
    with _foreign(file) as found:
        yield found


class ForeignFile:
    """A safetensors file as that library reads it."""

    def __init__(self, file: Any, path: Path) -> None:
        self.path = path
        self._file = file
        self.tensors: dict[str, _Plain] = {}
        self.tied: dict[str, str] = {}
        self.about: dict[str, str] = {}
        known = {name: dtype for dtype, name in DTYPES.items()}
        names: list[str] = file.keys()
        for name in names:
            piece = file.get_slice(name)
            kind = str(piece.get_dtype())
            if kind not in known:
                raise GossamerError(
                    f"{path}: '{name}' holds numbers of the type {kind}, which torch does not read here"
                )
            self.tensors[name] = _Plain(known[kind], tuple(piece.get_shape()))

    def check(self, seen: Callable[[float], None] = lambda _: None) -> None:
        """There is nothing in such files to check their tensors by."""
        seen(1.0)

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def read_into(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name))


class _Plain:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape


@contextmanager
def _foreign(path: Path) -> Generator[ForeignFile]:
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        try:
            file = stack.enter_context(cast(Any, safe_open)(path, "pt"))
            metadata: dict[str, str] = file.metadata() or {}
            found = ForeignFile(file, path)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise GossamerError(f"{path}: {_what_it_is(path, error)}") from None
        if metadata.get("kind", "").startswith("gossamer") or "packed" in metadata:
            raise damaged(path, "it does not start as it was written")
        yield found


def _what_it_is(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return "is a file of PyTorch's own format and not safetensors; read it by torch.load(…, weights_only=True)"
    reason = " ".join(str(error).split())[:200]
    return f"is no safetensors file, or is cut short or damaged ({reason}); take another copy of it"


def _check_fit(own: Mapping[str, Any], found: Mapping[str, Entry], path: Path) -> None:
    missing = [name for name in own if name not in found]
    surplus = [name for name in found if name not in own]
    if missing or surplus:
        told = f"it has no '{missing[0]}'{nearest(missing[0], surplus)}" if missing else f"'{surplus[0]}' is not there"
        counts = f"({len(missing)} names missing, {len(surplus)} unknown)"
        raise GossamerError(f"{path}: these are weights of another model: {told} {counts}; build the model they are of")
    for name, entry in found.items():
        target: Any = own[name]
        if not isinstance(target, Tensor) or target.is_meta:
            raise GossamerError(f"{path}: the model's '{name}' has no memory to load into; call model.to_empty() first")
        if target.layout == torch.strided and shares_elements(target):
            raise GossamerError(f"{path}: elements of the model's '{name}' share memory; make it contiguous() first")
        if tuple(target.shape) != entry.shape:
            shapes = f"{entry.shape} in the file and {tuple(target.shape)} in the model"
            raise GossamerError(f"{path}: '{name}' has the shape {shapes}; build the model as it was written")
        if not _can_hold(target.dtype, entry.dtype):
            held = dtype_name(entry.dtype)
            types = f"{held} in the file and {dtype_name(target.dtype)} in the model"
            way_out = f"call model.to(torch.{held})" if entry.dtype.is_floating_point else "build the model it is of"
            raise GossamerError(f"{path}: '{name}' is {types}, which cannot hold it exactly; {way_out}")


def _can_hold(target: torch.dtype, held: torch.dtype) -> bool:
    """Whether numbers of one type fit another exactly; torch compares no 8-bit floats and no wide unsigned integers."""
    if {target, held} & _INCOMPARABLE:
        return target == held
    return torch.promote_types(target, held) == target


_INCOMPARABLE = {torch.uint16, torch.uint32, torch.uint64} | {
    dtype for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize == 1
}


def _told(progress: Progress | None, label: str) -> Callable[[float], None]:
    return (lambda share: progress(label, share)) if progress else (lambda _: None)
