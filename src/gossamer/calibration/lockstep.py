"""Run a model on several batches that wait for each other before chosen layers.

When all batches have arrived at a layer, its inputs are known completely; the layer is changed, and all batches go on
with the changed layer. So one forward pass serves the whole model. Each batch runs in a thread of its own, because only
a thread can be suspended inside a `forward` that others wrote; one runs at a time, in a fixed order.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gossamer.errors import GossamerError, short_error
from gossamer.model.example_inputs import Arguments

S = TypeVar("S", bound=Hashable)


class _StoppedError(BaseException):
    """Ends the forward pass of a batch; not an `Exception`, which a model may catch."""


class Walker(Generic[S]):
    """One batch on its way through the model."""

    def __init__(self, number: int, arguments: Arguments) -> None:
        self.number = number
        self.arguments = arguments
        self.stop: S | None = None
        """Where it waits."""
        self.inputs: Any = None
        """What it waits with; the layer is called with it, changed or not."""
        self.output: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.resume = threading.Semaphore(0)
        self.thread: threading.Thread | None = None


class Lockstep(Generic[S]):
    """The batches of one pass. Hooks of the model call `arrive`; `run` calls `process` for each stop in turn."""

    def __init__(self, module: nn.Module, batches: Sequence[Arguments], process: Callable[[S, list[Walker[S]]], None]):
        self._module = module
        self._process = process
        self._paused = threading.Semaphore(0)
        self._order: dict[S, int] = {}
        self._ending = False
        self.walkers = [Walker[S](number, arguments) for number, arguments in enumerate(batches, start=1)]
        self.current = self.walkers[0] if self.walkers else None
        """The batch that runs now."""

    def run(self, stops: Sequence[S]) -> list[Any]:
        """The outputs of all batches; None for those that `end` has ended. `stops` has the order of the model."""
        self._order = {stop: position for position, stop in enumerate(stops)}
        try:
            going = list(self.walkers)
            while going:
                for walker in going:
                    self._advance(walker)
                active = [walker for walker in self.walkers if not walker.done]
                if not active:
                    break
                # Batches that take different ways wait at different layers: the first layer goes on.
                stop = min((walker.stop for walker in active if walker.stop is not None), key=self._order.__getitem__)
                going = [walker for walker in active if walker.stop == stop]
                self._process(stop, going)
            return [walker.output for walker in self.walkers]
        finally:
            self._stop_all()

    def end(self) -> None:
        """The rest of the model is not needed: batches end where they are."""
        self._ending = True

    def check(self) -> None:
        """Called by a hook: end here if `end` was called."""
        if self._ending:
            raise _StoppedError

    def arrive(self, stop: S, inputs: Any) -> Any:
        """Called by a hook: wait until the stop was processed, and return the inputs to go on with."""
        walker = self.current
        assert walker is not None
        walker.stop, walker.inputs = stop, inputs
        self._paused.release()
        walker.resume.acquire()
        self.check()
        walker.stop, inputs, walker.inputs = None, walker.inputs, None
        return inputs

    def _advance(self, walker: Walker[S]) -> None:
        """Let a batch run to its next stop or to its end."""
        self.current = walker
        if walker.thread is None:
            context = contextvars.copy_context()
            walker.thread = threading.Thread(target=context.run, args=(self._walk, walker), daemon=True)
            walker.thread.start()
        else:
            walker.resume.release()
        self._paused.acquire()
        if walker.error is not None:
            error, walker.error = walker.error, None
            if isinstance(error, GossamerError) or not isinstance(error, Exception):
                raise error
            raise GossamerError(
                f"data: the model does not run on batch {walker.number} ({short_error(error)}); give tensors, pairs of "
                "inputs and labels, or dicts of the arguments of forward"
            ) from error

    def _walk(self, walker: Walker[S]) -> None:
        try:
            with torch.no_grad():
                args, kwargs = walker.arguments
                walker.output = self._module(*args, **kwargs)
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 # handed to the thread that waits
            walker.error = error
        finally:
            walker.done = True
            self._paused.release()

    def _stop_all(self) -> None:
        """End the batches that still wait, so that no thread is left."""
        self._ending = True
        for walker in self.walkers:
            if walker.thread is None:
                continue
            if not walker.done:
                walker.resume.release()
            walker.thread.join()
            walker.thread = None
            walker.arguments = ((), {})


@contextmanager
def removed(handle: RemovableHandle) -> Generator[None]:
    """Remove a hook at the end."""
    try:
        yield
    finally:
        handle.remove()
