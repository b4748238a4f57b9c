"""The runtimes that are known, and which of them take a file: a new one is one adapter and one line in `RUNTIMES`.

An adapter loads a candidate and says how to call it. It stands here only when it was tried with the runtime itself.
Nothing here imports a runtime before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from gossamer.benchmark import onnx_programs, torch_programs, weight_files
from gossamer.benchmark.candidates import Candidate, Program, Settings, name_of, suffix_of
from gossamer.errors import GossamerError, nearest


@dataclass(frozen=True)
class Runtime:
    """Something that runs programs."""

    name: str
    package: str
    """What is imported."""
    install: str
    """What pip is told to install."""
    takes: tuple[str, ...]
    """Endings of files; the empty one stands for a model in memory."""
    open: Callable[[Candidate, Settings], Program]
    """The candidate as a program."""

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    @property
    def version(self) -> str:
        try:
            return version(self.package).split("+")[0]
        except PackageNotFoundError:
            return ""


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("onnxruntime", "onnxruntime", "'gossamer[onnx]'", (".onnx",), onnx_programs.in_onnxruntime),
        Runtime("openvino", "openvino", "openvino", (".onnx",), onnx_programs.in_openvino),
        Runtime("torch", "torch", "torch", (".pt2", ""), torch_programs.in_torch),
        Runtime("load", "safetensors", "safetensors", (".safetensors",), weight_files.loading),
    )
}
"""By name. `load` runs nothing: a file of weights holds no program, so it is read, and that is timed."""


def chosen(candidates: Sequence[Candidate], names: Sequence[str] | None) -> list[tuple[Runtime, Candidate]]:
    """Each candidate with each runtime that takes it: those that are named, or all that are installed."""
    wanted = [_named(name) for name in names] if names else [one for one in RUNTIMES.values() if one.is_installed]
    for candidate in candidates:
        _check(candidate, wanted)
    pairs = [(one, candidate) for one in wanted for candidate in candidates if suffix_of(candidate) in one.takes]
    idle = [one.name for one in wanted if names and one not in (runtime for runtime, _ in pairs)]
    if idle:
        endings = " and ".join(ending or "models" for ending in RUNTIMES[idle[0]].takes)
        raise GossamerError(f"--runtime: '{idle[0]}' takes {endings}, and none of the files is that; leave it out")
    return pairs


def _named(name: str) -> Runtime:
    if name not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise GossamerError(f"--runtime: there is no '{name}'{nearest(name, RUNTIMES)}; there are {known}")
    runtime = RUNTIMES[name]
    if not runtime.is_installed:
        raise GossamerError(f"--runtime: {name} is not installed: pip install {runtime.install}")
    return runtime


def _check(candidate: Candidate, wanted: Sequence[Runtime]) -> None:
    suffix, name = suffix_of(candidate), name_of(candidate)
    able = [one for one in RUNTIMES.values() if suffix in one.takes]
    if not able:
        known = ", ".join(sorted({ending for one in RUNTIMES.values() for ending in one.takes if ending}))
        found = f"found '{suffix}'" if suffix else "found none"
        raise GossamerError(f"{name}: expected a file that ends in {known}, {found}; gossamer export writes them")
    if any(one in wanted for one in able):
        return
    if any(one.is_installed for one in able):
        names = " or ".join(one.name for one in able if one.is_installed)
        raise GossamerError(f"{name}: none of the runtimes that were asked for takes it; add --runtime {names}")
    raise GossamerError(f"{name}: no runtime for it is installed: pip install {able[0].install}")
