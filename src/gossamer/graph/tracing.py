"""Run a network on tensors without values, and see which of its channels belong together.

Shapes are enough: parameters, buffers and inputs become fake tensors, and the
operations are watched as torch performs them, below all Python code of the
model. Both modes are watched, for some layers work only in training. Whatever
the model keeps, returns or stores is held in place.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.errors import GossamerError
from gossamer.graph.channels import Channels, Classes, Factor, Layout
from gossamer.graph.inputs import guesses
from gossamer.graph.parameters import named_state, unwrap
from gossamer.graph.rules import Rules


@dataclass(frozen=True)
class Coupling:
    """Which channels of a model's parameters and buffers are the same, by clean name."""

    layouts: Mapping[str, Layout]
    classes: Classes
    channels: Channels


class Untraceable(GossamerError):
    """The model cannot be followed; the message says why."""


def couple(model: nn.Module, example_inputs: Any = None) -> Coupling:
    """Follow the model once in each mode; raises `Untraceable`.

    `example_inputs`: a tensor, or a tuple of arguments for `forward` (a dict: keyword arguments). Only shapes and
    types matter. Without them common shapes are tried.
    """
    module = unwrap(model)
    tried = [example_inputs] if example_inputs is not None else guesses(module)
    failure = "it has no layer from which the shape of its input could be guessed"
    for inputs in tried:
        try:
            return _follow(module, inputs)
        except Exception as error:  # noqa: BLE001  (any model, any reason)
            failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    told = "" if example_inputs is not None else " (give example_inputs)"
    raise Untraceable(f"the model could not be followed{told}: {failure}")


def _follow(module: nn.Module, inputs: Any) -> Coupling:
    channels = Channels()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    real = dict(named_state(module))
    unique = {id(tensor): fake.from_tensor(tensor.detach(), static_shapes=True) for tensor in real.values()}
    rules = Rules(channels)
    for tensor in unique.values():
        rules.add_leaf(tensor)
    substitutes = {name: unique[id(tensor)] for name, tensor in _own_names(module) if id(tensor) in unique}
    args, kwargs = arguments(inputs)
    with undisturbed(module), _eager():
        for training in (False, True):
            _set_mode(module, training)
            fake_args, fake_kwargs = pytree.tree_map_only(
                Tensor, lambda t: fake.from_tensor(t.detach(), static_shapes=True), (args, kwargs)
            )
            with torch.no_grad(), fake, _Watch(rules):
                output = torch.func.functional_call(module, substitutes, fake_args, fake_kwargs)
            del fake_args, fake_kwargs
            gc.collect()
            rules.fix_remaining("it leaves the network: it is returned or kept")
            del output
    layouts = {name: rules.leaf_layout(unique[id(tensor)]) for name, tensor in real.items()}
    return Coupling(layouts, channels.resolve(list(layouts.values())), channels)


class _Watch(TorchDispatchMode):
    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        still = func is torch.ops.aten.as_strided_.default and _only_spelled_anew(*args)
        result = func(*args, **(kwargs or {}))
        if still:
            return result
        self.rules.observe(func, args, kwargs or {}, result)
        return result


def _only_spelled_anew(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether an `as_strided_` changes nothing but strides of dimensions of size 1, as pooling does."""
    moved = offset is not None and offset != tensor.storage_offset()
    strides = zip(tensor.shape, tensor.stride(), stride, strict=False)
    return not moved and list(size) == list(tensor.shape) and all(n == 1 or old == new for n, old, new in strides)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for `forward`."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _own_names(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by every name that torch knows them by."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _set_mode(module: nn.Module, training: bool) -> None:
    """Train or evaluate; synchronised batch norm cannot talk to other processes here, and evaluates."""
    for child in module.modules():
        child.training = training and not isinstance(child, nn.SyncBatchNorm)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Put everything back that running the model leaves in its modules: modes, counters, caches."""
    before = [(child, dict(child.__dict__), _copied(child.__dict__)) for child in module.modules()]
    try:
        yield
    finally:
        for child, attributes, registries in before:
            child.__dict__.clear()
            child.__dict__.update(attributes)
            for key, content in registries.items():
                child.__dict__[key].clear()
                child.__dict__[key].update(content)


def _copied(attributes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: dict(value) for key, value in attributes.items() if key in ("_parameters", "_buffers", "_modules")}


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled parts run as they were written, and attention without its fused short cut."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
