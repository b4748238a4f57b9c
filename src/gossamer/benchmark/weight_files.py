"""Files of weights, which hold no program: what is timed is reading them into tensors, with the checks that go with it.

The file comes from the system's cache and not from the disk, since it is read again and again. Nothing here makes a
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from gossamer.benchmark.candidates import Candidate, Program, Run, Settings
from gossamer.benchmark.contents import Contents, contents_of_tensors
from gossamer.benchmark.inputs import Array
from gossamer.errors import GossamerError
from gossamer.export.weights.reading import is_model_file, read_state


def loading(candidate: Candidate, _settings: Settings) -> Program:
    """Reading a file, as something that can be run."""
    assert isinstance(candidate, Path), "a model in memory is not loaded"
    path = candidate
    if not path.is_file():
        raise GossamerError(f"{path}: there is no such file; gossamer export writes one")

    def bind(_arrays: Sequence[Array]) -> Run:
        return lambda: _in_memory(path)

    def contents() -> Contents:
        distinct = {id(tensor): tensor for tensor in read_state(path).values()}  # Tied weights are one in the file.
        return contents_of_tensors(path.stat().st_size, distinct.values())

    return Program((), bind, lambda _found: [], contents)


def _in_memory(path: Path) -> list[Tensor]:
    """Every tensor; those of other tools' files are only mapped into the memory, and are read when copied."""
    tensors = list(read_state(path).values())
    return tensors if is_model_file(path) else [tensor.clone() for tensor in tensors]
