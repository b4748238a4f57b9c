"""Runs malformed inputs and checks what must hold for every one of them.

An input is accepted or refused by a `GossamerError`; nothing else may happen. Limits are in processor time and address
space, so that a busy machine does not change the result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisWarning
from hypothesis.strategies import SearchStrategy
from torch import nn

from gossamer.errors import GossamerError

T = TypeVar("T")

SECONDS = 2.0
"""Processor time that one input may take."""
MEMORY = 1 << 30
"""Bytes of address space that one input may take beyond what the process has."""
CANARY = "tests.fuzz.canary"
"""A module that no input may import; inputs name it as an import path."""

_RUNS_CODE = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class")
_WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


class LimitError(BaseException):
    """An input did what no input may do; not an `Exception`, so that the code under test cannot catch it."""


@dataclass
class Outcome:
    """How many inputs were accepted and refused."""

    accepted: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        return self.accepted + self.refused


def fuzz(inputs: SearchStrategy[T], examples: int, action: Callable[[T], Any], folder: Path | None = None) -> Outcome:
    """Give `examples` inputs to `action` under the limits; `folder` is the only one that may be written to.

    A hundred or fewer are the same on every run; more are drawn anew, and a failure prints the smallest input.
    """
    outcome = Outcome()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples <= 100,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(inputs)
    def run(value: T) -> None:
        if attempt(lambda: action(value), folder):
            outcome.accepted += 1
        else:
            outcome.refused += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)  # that an input is long; it hides the error
        run()
    assert outcome.total >= examples, f"the strategy gives no more than {outcome.total} inputs"
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    print(f"{test}: {outcome.total} inputs, {outcome.accepted} accepted, {outcome.refused} refused")  # noqa: T201
    return outcome


def attempt(action: Callable[[], Any], folder: Path | None = None) -> bool:
    """Run one action under the limits; whether it was accepted. Errors other than `GossamerError` are raised."""
    with _watched(folder), _limited_memory(), _limited_time():
        try:
            action()
        except GossamerError:
            return False
    return True


def fingerprint(model: nn.Module) -> str:
    """A digest of everything a refused input may not change in a model: values, structure, modes and hooks."""
    found = hashlib.sha256()
    for name, module in model.named_modules():
        hooks = [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)]
        found.update(repr((name, type(module).__qualname__, module.training, hooks)).encode())
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.update(repr((name, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)).encode() + values)
    return found.hexdigest()


@contextlib.contextmanager
def _limited_time() -> Generator[None]:
    def stop(*_: object) -> None:
        raise LimitError(f"took more than {SECONDS} seconds of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _limited_memory() -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass
class _Watch:
    """What the audit hook, which cannot be removed, checks at the moment."""

    active: bool = False
    folder: Path | None = None
    broken: str | None = None


_watch = _Watch()


@contextlib.contextmanager
def _watched(folder: Path | None) -> Generator[None]:
    _install_hook()
    _watch.active, _watch.folder, _watch.broken = True, folder.resolve() if folder is not None else None, None
    try:
        yield
    finally:
        _watch.active = False
    if CANARY in sys.modules:
        raise LimitError("imported a module that the input names")
    if _watch.broken is not None:
        raise LimitError(_watch.broken)


@functools.cache
def _install_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watch.active:
        return
    broken: str | None = None
    if event.startswith(_RUNS_CODE):
        broken = f"ran code: {event}{arguments[:1]}"
    elif event in _WRITES or (event == "open" and _for_writing(arguments)):
        broken = _outside(event, arguments[0])
    if broken is not None:
        _watch.broken = broken
        raise LimitError(broken)


def _for_writing(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _outside(event: str, path: object) -> str | None:
    if not isinstance(path, str | bytes | os.PathLike):
        return None  # a descriptor that is open already
    found = Path(os.fsdecode(path))
    if "__pycache__" in found.parts or str(found) == os.devnull:
        return None
    if _watch.folder is not None and found.resolve().is_relative_to(_watch.folder):
        return None
    return f"wrote outside the folder: {event} {found}"
