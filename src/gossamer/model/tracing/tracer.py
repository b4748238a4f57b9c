"""Run a network on tensors without values, and see which of its channels belong together.

Shapes are enough: parameters, buffers and inputs become fake tensors, and the
operations are watched as torch performs them, below all Python code of the
model. Both modes are watched, for some layers work only in training. Whatever
the model keeps, returns or stores is held in place. Uses torch's
FakeTensorMode and TorchDispatchMode, which are not public but have no public
equal.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.model.parameters import named_state, own_tensors, unwrap
from gossamer.model.tracing.channels import Channels, Classes, Layout
from gossamer.model.tracing.rules import observe
from gossamer.model.tracing.tensors import Tensors, tensors_in
from gossamer.model.tracing.undisturbed import forget, undisturbed
from gossamer.model.weights import hooks_that_compute

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a `forward`."""


@dataclass(frozen=True)
class Coupling:
    """Which channels of a model's parameters and buffers are the same, by clean name."""

    layouts: Mapping[str, Layout]
    classes: Classes
    channels: Channels
    note: str | None = None
    """What was done when the model could not be followed as a whole."""
    leaving: frozenset[int] = frozenset()
    """Classes of channels that the model, or a part that was followed on its own, returns or keeps."""


class Follower:
    """Follows a model, or parts of it, and gathers what couples its channels."""

    def __init__(self, model: nn.Module, fake: FakeTensorMode | None = None) -> None:
        self.module = unwrap(model)
        self.fake = fake or FakeTensorMode(allow_non_fake_inputs=True)
        self.tensors = Tensors(Channels())
        self._leaving: set[str] = set()
        self.state = dict(named_state(self.module))
        self.names = {id(tensor): name for name, tensor in self.state.items()}
        self.leaves: dict[int, Tensor] = {id(tensor): self.faked(tensor) for tensor in self.state.values()}

    def follow(self, part: nn.Module, inputs: Sequence[Arguments], entering: str, leaving: str) -> None:
        """Run a part of the model in both modes; raises whatever the part raises.

        `entering` names its input, `leaving` is the reason to give for what it returns or keeps.
        """
        self._leaving.add(leaving)
        computed = [
            (layer, leaf, vars(layer)[leaf])
            for layer in part.modules()
            for leaf in hooks_that_compute(layer)
            if leaf in vars(layer)
        ]
        with undisturbed(self.module):
            for training in (False, True):
                _set_mode(self.module, training)
                for args, kwargs in inputs:
                    output = self._run(part, args, kwargs, entering)
                    for layer, leaf, value in computed:  # weights that a hook computed are the layer's own
                        vars(layer)[leaf] = value
                    returned = {id(tensor) for tensor in pytree.tree_leaves(output)}
                    if any(id(tensor) not in returned for tensor in self.tensors.remaining()):
                        gc.collect()
                    self.tensors.hold_remaining(leaving)
                    del output
        own = {id(tensor) for tensor in pytree.tree_leaves(inputs)}
        if left := [t for t in (*self.tensors.remaining(), *self.tensors.without_channels()) if id(t) not in own]:
            forget(left)

    def hold(self, name: str, why: str) -> None:
        self.tensors.hold_leaf(name, why)

    def coupling(self, note: str | None = None) -> Coupling:
        """What has been found; what cannot be reordered on its own stays in place."""
        for name, why in (*self._unsaved(), *_overlapping(self.state)):
            self.hold(name, why)
        self.tensors.hold_leaves()
        layouts = {name: self.tensors.leaves.get(name, ()) for name in self.state}
        channels = self.tensors.channels
        classes = channels.resolve(list(layouts.values()))
        return Coupling(layouts, classes, channels, note, frozenset(channels.fixed_because(self._leaving).tolist()))

    def faked(self, value: Any) -> Any:
        """Every tensor in a value without its numbers."""
        return pytree.tree_map_only(
            Tensor, lambda t: t if isinstance(t, FakeTensor) else self.fake.from_tensor(t.detach()), value
        )

    def _unsaved(self) -> Iterator[tuple[str, str]]:
        """A buffer that a checkpoint leaves out is made anew by the model's code, in its own order."""
        for owner in self.module.modules():
            unsaved: set[str] = vars(owner).get("_non_persistent_buffers_set", set())
            for leaf, buffer in owner.named_buffers(recurse=False):
                if leaf in unsaved:
                    yield self.names[id(buffer)], "it meets a buffer that checkpoints leave out and code makes anew"

    def _run(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entering: str) -> Any:
        with self.fake:  # new ones in each run, so that those which the model keeps can be told
            leaves = {key: leaf.detach() for key, leaf in self.leaves.items()}
        for key, leaf in leaves.items():
            self.tensors.add_leaf(self.names[key], leaf)
        fake_args, fake_kwargs = self.faked((args, kwargs))
        for tensor in pytree.tree_leaves((fake_args, fake_kwargs)):
            if isinstance(tensor, Tensor):
                self.tensors.add_input(tensor, entering)
        substitutes = {name: leaves[id(tensor)] for name, tensor in own_tensors(part)}
        # In inference mode operations would arrive in one piece.
        seed = torch.initial_seed()
        with torch.inference_mode(False), torch.no_grad(), self.fake, _Watch(self, leaves):
            output = torch.func.functional_call(part, substitutes, fake_args, fake_kwargs, tie_weights=False)
        if torch.initial_seed() != seed:
            raise RuntimeError("it seeds the random numbers that it draws, which makes them weights in disguise")
        return output


class _Watch(TorchDispatchMode):
    """Tells the rules of every operation.

    A parameter that the model reaches by another way than its name (a list, a view made earlier) is recognised by
    itself or by its memory. What the model writes into a tensor of its own is not written.
    """

    def __init__(self, follower: Follower, leaves: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.follower, self.tensors, self.leaves = follower, follower.tensors, leaves
        self.storages: dict[int, list[str]] = {}
        for name, tensor in follower.state.items():
            self.storages.setdefault(storage_of(tensor), []).append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors_in([args, list(kwargs.values())])):
            args, kwargs = pytree.tree_map_only(Tensor, self._leaf, (args, kwargs))
            if func._schema.is_mutable:
                args, kwargs = self.follower.faked((args, kwargs))
        still = func is torch.ops.aten.as_strided_.default and _only_spelled_anew(*args)
        result = func(*args, **kwargs)
        if not still:
            observe(self.tensors, func, args, kwargs, result)
        return result

    def _leaf(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        leaf = self.leaves.get(id(tensor))
        if leaf is None:
            for name in self.storages.get(storage_of(tensor), ()):
                self.tensors.hold_leaf(name, "the model also reaches its memory by another name")
        return tensor if leaf is None else leaf


def _only_spelled_anew(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether an `as_strided_` changes nothing but strides of dimensions of size 1, as pooling does."""
    moved = offset is not None and offset != tensor.storage_offset()
    strides = zip(tensor.shape, tensor.stride(), stride, strict=False)
    return not moved and list(size) == list(tensor.shape) and all(n == 1 or old == new for n, old, new in strides)


def _set_mode(module: nn.Module, training: bool) -> None:
    """Train or evaluate; torch's batch norm evaluates, which treats channels alike and asks for no second sample."""
    usual = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    for child in module.modules():
        child.training = training and not (isinstance(child, _BatchNorm) and type(child).forward in usual)


def _overlapping(state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Parameters and buffers that cannot be reordered without changing others, with the reason."""
    spans = sorted((*_span(tensor), name) for name, tensor in state.items() if tensor.numel())
    reach, holder = (-1, -1), ""
    for storage, first, last, name in spans:
        if (storage, first) < reach:
            yield name, "it shares memory with another parameter or buffer"
            yield holder, "it shares memory with another parameter or buffer"
        if last - first < state[name].numel():
            yield name, "its memory holds some of its numbers more than once"
        if (storage, last) > reach:
            reach, holder = (storage, last), name


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and its first and one after its last element there."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage_of(tensor), first, int(last) + 1


def storage_of(tensor: Tensor) -> int:
    """The memory of a tensor, which its views share."""
    return int(cast(Any, tensor.untyped_storage())._cdata)
