"""Run a model on random inputs in float64, and tell whether another version of it computes the same.

The inputs differ in numbers, batch and size from the example, as far as the model takes them; results are compared
layer by layer and not only in the end, and once more in the model's own type, where rounding counts. The model is
left as it was. Nothing here knows what is removed.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from gossamer.model.inputs import as_arguments, guesses
from gossamer.model.parameters import named_state, own_tensors, prunable
from gossamer.model.thin.inputs import Example, loud, negative
from gossamer.model.thin.watch import Known, Observed, Trace, Watch
from gossamer.model.tracing.tensors import tensors_in
from gossamer.model.tracing.tracer import Arguments, storage_of
from gossamer.model.tracing.undisturbed import undisturbed

_SEED = 7
_EXACT, _ROUNDED, _COARSE = 1e-9, 1e-4, 2e-2
"""What two versions may differ by, of the largest: in float64, in float32, in half precision."""

State = Mapping[str, Tensor]
Prepare = Callable[[], None]


class Runner:
    """Runs a model, or the model with other tensors, always on the same inputs."""

    def __init__(self, module: nn.Module, example_inputs: Any) -> None:
        self.module = module
        self.names = {id(tensor): name for name, tensor in named_state(module)}
        self.own = {name: tensor.dtype for name, tensor in named_state(module)}
        self.dtype, self.tolerance = torch.float64, _EXACT
        self.trains = False
        """Whether some weights are used in training only, so that both modes are run."""
        self.runs: list[tuple[Arguments, Observed]] = []
        """Inputs, and what the model does with them."""
        tried = [example_inputs] if example_inputs is not None else guesses(module)
        failure: Exception | None = None
        for inputs in tried:
            for dtype, tolerance in ((torch.float64, _EXACT), (None, 1e-3)):  # some models insist on their own type
                self.dtype, self.tolerance = dtype, tolerance
                example = Example(as_arguments(inputs), dtype)
                arguments = example.filled(_SEED)
                try:
                    first = self.run(arguments, self.state())
                    self.trains = not set(prunable(module)) <= first.used
                    first = self.run(arguments, self.state()) if self.trains else first
                except Exception as error:  # noqa: BLE001  (any model, any reason)
                    failure = error
                    continue
                self.runs = [(arguments, first)]
                self._vary(example)
                self.traced = self._traced(self.runs[-1][0])
                self.rounded = self._rounded(Example(example.arguments, None).filled(_SEED))
                return
        raise failure or RuntimeError("no input is known that it takes; give example_inputs")

    def state(self) -> dict[str, Tensor]:
        """The model's tensors in the type that is run in."""
        return {
            name: tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor.clone()
            for name, tensor in ((name, tensor.detach()) for name, tensor in named_state(self.module))
        }

    def observed(self) -> Observed:
        """What the model does on all inputs together."""
        found = Observed()
        for one in [*(observed for _, observed in self.runs), *self.traced]:
            found.products += one.products
            found.otherwise |= one.otherwise
            found.used |= one.used
        return found

    def difference(self, state: State, kept: Mapping[str, Tensor], prepare: Prepare) -> str | None:
        """In what the model with these tensors differs, as the end of a sentence.

        `kept`: the output channels that weights have left; `prepare` may change numbers in layers, which are put back.
        """
        for arguments, before in self.runs:
            reason = self._compared(before, self.run(arguments, state, prepare), kept)
            if reason is not None:
                return reason
        if self.rounded is None:
            return None
        arguments, wanted = self.rounded
        after = self.run(arguments, {name: tensor.to(self.own[name]) for name, tensor in state.items()}, prepare)
        if len(wanted) != len(after.outputs):
            return "the model would return something else"
        for (exact, most), rounded in zip(wanted, after.outputs, strict=True):
            if exact.shape != rounded.shape or not bool(((exact - rounded.to(exact)).abs() <= most).all()):
                return "rounding in the model's own type of numbers would change what it returns"
        return None

    def run(self, arguments: Arguments, state: State, prepare: Prepare = lambda: None) -> Observed:
        """Run with these tensors, also as in training where some weights are used only there."""
        observed = self._once(state, arguments, prepare, training=False)
        if self.trains:
            try:
                trained = self._once(state, arguments, prepare, training=True)
            except Exception:  # noqa: BLE001  (a detector wants answers to train, which nobody gave)
                return observed
            observed.products += trained.products
            observed.outputs += trained.outputs
            observed.otherwise |= trained.otherwise
            observed.used |= trained.used
        return observed

    def _vary(self, example: Example) -> None:
        """Run on other inputs, those that the model takes."""
        for number, bounds in example.whole_numbers():
            for bound in bounds:
                varied = example.varying(number, bound)
                if self._takes(varied.filled(_SEED + 1, largest=True)):
                    example = varied
                    break
        batch = example.another_batch()
        if not self._takes(example.filled(_SEED + 2, loud, batch)):
            self._takes(example.filled(_SEED + 2, loud))
            self._takes(example.filled(_SEED + 2, negative, batch))
            batch = {}
        # A large batch is run as it is only once.
        few = {(number, dim): size for (number, dim), size in batch.items() if size < len(example.tensors()[number])}
        taken: set[tuple[int, int]] = set()
        for sizes in example.other_sizes():
            changed: set[tuple[int, int]] = set()
            for one in sizes:
                if not changed & set(one) and self._takes(example.filled(_SEED + 3, negative, few | one)):
                    changed |= set(one)
            taken |= changed
        if not taken:
            self._takes(example.filled(_SEED + 3, negative, few))

    def _takes(self, arguments: Arguments) -> bool:
        """Run on this input as well, if that works and says something."""
        try:
            observed = self.run(arguments, self.state())
        except Exception:  # noqa: BLE001  (any model, any reason)
            return False
        finite = [bool(tensor.isfinite().all()) for tensor in observed.outputs]
        known = all(tensor.isfinite().all() for tensor in self.runs[0][1].outputs)
        if known and not all(finite):
            return False
        self.runs.append((arguments, observed))
        return True

    def _traced(self, arguments: Arguments) -> list[Observed]:
        """What depends on the input, where that can be followed."""

        def unknown(tensor: Tensor) -> Tensor:
            return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor

        nothing, found = cast(Arguments, pytree.tree_map_only(Tensor, unknown, arguments)), list[Observed]()
        for truth in (False, True):
            try:
                kind = functools.partial(Trace, truth=truth)
                found.append(self._once(self.state(), nothing, lambda: None, training=False, kind=kind))
            except Exception:  # noqa: BLE001  (any model, any reason)
                continue
        return found

    def _rounded(self, arguments: Arguments) -> tuple[Arguments, list[tuple[Tensor, float]]] | None:
        """Input in the model's own type, with the exact outputs and by how much others may differ from them."""
        if self.dtype is None or set(self.own.values()) <= {torch.float64}:
            return None
        share = _COARSE if {torch.float16, torch.bfloat16} & set(self.own.values()) else _ROUNDED
        found: list[tuple[Tensor, float]] = []
        try:
            exact = self.runs[0][1]  # on the same numbers
            own = self.run(arguments, {name: tensor.detach() for name, tensor in named_state(self.module)})
            for output, rounded in zip(exact.outputs, own.outputs, strict=True):
                wanted = output.double()
                scale = float(wanted.abs().max()) if wanted.numel() else 0.0
                error = float((wanted - rounded.double()).abs().max()) if wanted.numel() else 0.0
                # What rounding does to the model as it is cannot be asked of another version.
                found.append((wanted, max(share * scale, 4 * error)))
        except Exception:  # noqa: BLE001  (any model, any reason; another number of detections, for one)
            return None
        return (arguments, found) if all(math.isfinite(most) for _, most in found) else None

    def _once(
        self,
        state: State,
        arguments: Arguments,
        prepare: Prepare,
        training: bool,
        kind: Callable[[Known], Watch] = Watch,
    ) -> Observed:
        module = self.module
        own = own_tensors(module)
        # Not written to: batch norm keeps still, but a model may count.
        tensors = {id(tensor): state[self.names[id(tensor)]] for _, tensor in own}
        tensors = {key: t if t.is_floating_point() and t.dim() else t.clone() for key, t in tensors.items()}
        watch = kind({storage_of(tensor): (self.names[key], tensor) for key, tensor in tensors.items()})
        with undisturbed(module), torch.inference_mode(False), torch.no_grad():
            prepare()
            for child in module.modules():
                child.training = training and not isinstance(child, _BatchNorm | _DropoutNd)
            args, kwargs = copy.deepcopy(arguments)
            watch.begin([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
            with torch.random.fork_rng(devices=[]), watch:
                torch.manual_seed(_SEED)
                substitutes = {name: tensors[id(tensor)] for name, tensor in own}
                output = torch.func.functional_call(module, substitutes, args, kwargs, tie_weights=False)
        watch.observed.outputs += [leaf.detach().clone() for leaf in _leaves(output)]
        return watch.observed

    def _compared(self, mine: Observed, other: Observed, kept: Mapping[str, Tensor]) -> str | None:
        """In what another version differs on one input."""
        if len(mine.products) != len(other.products):
            return "the model would take another path without them"
        for before, after in zip(mine.products, other.products, strict=True):
            leaving = before.leaving
            if before.name in kept:
                leaving = leaving.index_select(1, kept[before.name])
            if before.name != after.name or not self._close(leaving, after.leaving, before.leaving[1:2]):
                return f"what '{before.name}' computes would change"
        if len(mine.outputs) != len(other.outputs):
            return "the model would return something else"
        for before, after in zip(mine.outputs, other.outputs, strict=True):
            if not self._close(before, after, before):
                return "what the model returns would change"
        return None

    def _close(self, a: Tensor, b: Tensor, scale: Tensor) -> bool:
        if a.shape != b.shape:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        largest = float(scale.nan_to_num(0, 0, 0).abs().max()) if scale.numel() else 0.0
        return torch.allclose(
            a.double(), b.double(), rtol=self.tolerance, atol=self.tolerance * largest, equal_nan=True
        )


def _leaves(output: Any) -> list[Tensor]:
    found: list[Any] = pytree.tree_leaves(output)
    if not any(isinstance(leaf, Tensor) for leaf in found):  # a class of the model's own
        found = list(cast(dict[str, Any], getattr(output, "__dict__", {})).values())
    return tensors_in(found)
