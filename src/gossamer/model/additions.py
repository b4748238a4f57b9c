"""What sparse training adds to a model: ASP's mask buffers, MSBench's sparsers, weights that are replaced in `forward`.

This module holds the only list of their names. A `Substitution` replaces a weight by another tensor while the model
computes; the parameter itself stays registered under its name, for the optimizer and for checkpoints. `uncompiled` and
`recompile` make hooks work with `torch.compile`.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.model.distribution import fully_sharded
from gossamer.model.parameters import first_names, get_module, unwrap

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")
Substitute = Callable[[nn.Module, Tensor], Tensor]
"""From the layer that holds the weight, and the weight, to the tensor to compute with."""


class Substitution:
    """Replaces a weight, under all its names, while a module that uses it computes."""

    def __init__(self, module: nn.Module, name: str, substitute: Substitute) -> None:
        self._handles: list[RemovableHandle] = []
        self._callers: list[weakref.ref[nn.Module]] = []
        sharded = {id(part) for part in fully_sharded(module)}
        for caller, path, leaf in _users(module, name):
            if sharded and not _has_whole_weight(caller, path, module, sharded):
                continue
            hooks = _Hooks(path, leaf, substitute)
            # Before the hooks that compute a layer's weight from the one that is replaced, and after those of
            # `fully_shard`, which gather the weight.
            self._handles.append(caller.register_forward_pre_hook(hooks.enter, prepend=not sharded))
            self._handles.append(caller.register_forward_hook(hooks.leave, always_call=True))
            self._callers += [weakref.ref(caller), weakref.ref(get_module(caller, path))]
        self._recompile()

    def remove(self) -> None:
        """Compute with the weight itself again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recompile()

    def _recompile(self) -> None:
        recompile(caller for reference in self._callers if (caller := reference()) is not None)


def remove_substitutions(module: nn.Module) -> None:
    """End every substitution in a model, also in a copy of one or in one that was unpickled."""
    for layer in module.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, kind))
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Hooks)]:
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)  # pyright: ignore[reportPrivateUsage]
    recompile(module.modules())


def is_substituted(module: nn.Module) -> bool:
    """Whether some weight of a model is replaced while it computes."""
    return any(True for layer in module.modules() for _ in _hooks_on(layer))


def substituted(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Every weight that is replaced, with its substitute in the current mode of its layer."""
    found: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for layer in module.modules():
        for hooks in _hooks_on(layer):
            owner = get_module(layer, hooks.path)
            weight = owner._parameters.get(hooks.leaf)  # pyright: ignore[reportPrivateUsage]
            if weight is not None and id(weight) not in found:
                found[id(weight)] = weight, hooks.substitute(owner, weight)
    return list(found.values())


def _hooks_on(layer: nn.Module) -> Iterator[_Hooks]:
    hooks = cast(dict[int, object], layer._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    for hook in hooks.values():
        if isinstance(found := getattr(hook, "__self__", None), _Hooks):
            yield found


class _Hooks:
    """The two hooks on a module. They keep no reference to it, so that a copied or unpickled model works on its own."""

    def __init__(self, path: str, leaf: str, substitute: Substitute) -> None:
        self.path, self.leaf, self.substitute = path, leaf, substitute
        self.depth, self.replica = f"_{leaf}_substituted", f"_{leaf}_of_replica"

    def enter(self, caller: nn.Module, args: object) -> None:
        owner = get_module(caller, self.path)
        depth = owner.__dict__.get(self.depth, 0)
        if depth == 0:
            # A replica of DataParallel holds its weights as attributes.
            replica = owner.__dict__.get(self.leaf)
            weight = owner._parameters.get(self.leaf) if replica is None else replica  # pyright: ignore[reportPrivateUsage]
            if weight is not None:
                # An attribute of the instance comes before the parameter, which stays registered.
                owner.__dict__[self.leaf] = self.substitute(owner, weight)
            if replica is not None:
                owner.__dict__[self.replica] = replica
        owner.__dict__[self.depth] = depth + 1

    def leave(self, caller: nn.Module, args: object, output: object) -> None:
        owner = get_module(caller, self.path)
        owner.__dict__[self.depth] = owner.__dict__.get(self.depth, 1) - 1
        if owner.__dict__[self.depth] <= 0:
            owner.__dict__.pop(self.leaf, None)
            del owner.__dict__[self.depth]
            if self.replica in owner.__dict__:
                owner.__dict__[self.leaf] = owner.__dict__.pop(self.replica)


def _users(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Modules whose call may use the weight, with the path from there to its owner, and the leaf.

    The layer itself; its parent, because attention uses its projections' weights without calling them; and the model,
    because any of its code may use the weight.
    """
    for alias, first in first_names(module).items():
        if first == name:
            path, _, leaf = alias.rpartition(".")
            above, _, last = path.rpartition(".")
            users = {path: "", above: last if path else "", "": path}
            for user, inner in users.items():
                yield get_module(unwrap(module), user), inner, leaf


def _has_whole_weight(caller: nn.Module, path: str, module: nn.Module, sharded: Container[int]) -> bool:
    """Whether `fully_shard` has gathered a weight at `path` by the time that the caller computes."""
    owner = get_module(caller, path)
    if owner is caller:
        return True
    return caller is not unwrap(module) and id(owner) not in sharded


# Hooks and torch.compile


def uncompiled(function: F) -> F:
    """Decorator: the compiler calls the function as it is. Imports the compiler, which takes a second."""
    return cast(F, torch.compiler.disable(function))


def recompile(modules: Iterable[nn.Module]) -> None:
    """Have compiled code that uses these modules compiled again when it is next called.

    torch.compile does not notice hooks that come and go. It does check the types of the dicts in which it looks up
    parameters, buffers and children, so each module gets dicts of a new type. Other models are not affected.
    """
    if "torch._dynamo" not in sys.modules:
        return
    kind = cast(type[_Registry], type("_Registry", (_Registry,), {}))
    for module in modules:
        if not isinstance(module, torch.jit.ScriptModule):
            for name in ("_parameters", "_buffers", "_modules"):
                vars(module)[name] = kind(vars(module)[name])


class _Registry(dict[str, Any]):
    """A module's parameters, buffers or children; copied and pickled as the plain dict that it stands for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


# Names


MASK, PRUNED = "mask", "pruned_p"
"""ASP's two buffers: where a weight is kept, and the values that are masked."""
SPARSER = "_fake_sparse"
"""Behind a weight's name: the module of MSBench that decides what the layer computes with."""
_BUFFER = re.compile(rf"(.*\.)?__.+_mma_({MASK}|{PRUNED})")


def buffer_name(leaf: str, kind: str) -> str:
    """The name of ASP's buffer beside a weight; old checkpoints have these names.

    >>> buffer_name("weight", MASK)
    '__weight_mma_mask'
    """
    return f"__{leaf}_mma_{kind}"


def is_buffer(name: str) -> bool:
    """Whether an entry of a state dict is one of ASP's buffers."""
    return _BUFFER.fullmatch(name) is not None


def is_added(name: str) -> bool:
    """Whether an entry of a state dict is not the model's own.

    >>> [is_added(name) for name in ("0.weight", "0.__weight_mma_mask", "0.weight_fake_sparse.s")]
    [False, True, True]
    """
    return is_buffer(name) or any(part.endswith(SPARSER) for part in name.split("."))


def holds_sparsers(state: Mapping[str, Any]) -> bool:
    """Whether the weights of a state dict are not those that its model computes with."""
    return any(SPARSER in name and is_added(name) for name in state)


def without_additions(state: Mapping[str, V]) -> dict[str, V]:
    """A state dict with the model's own entries only."""
    return {name: value for name, value in state.items() if not is_added(name)}


@torch.no_grad()
def evaluated(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Every weight that the model replaces while it computes, with its substitute in evaluation mode."""
    if not is_substituted(model):
        return []
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return [(weight, torch.where(value == 0, 0.0, value)) for weight, value in substituted(model)]
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def strip(model: nn.Module) -> nn.Module:
    """Remove from a model, in place, all that training has added; its weights become what it evaluates with.

    Meant for a copy: training cannot go on with a model that was stripped.
    """
    values = evaluated(model)
    remove_substitutions(model)
    for weight, value in values:
        weight.copy_(value)
    drop_buffers(model)
    for layer in model.modules():
        for name in [name for name, _ in layer.named_children() if name.endswith(SPARSER)]:
            del layer._modules[name]  # pyright: ignore[reportPrivateUsage]
    return model


def drop_buffers(model: nn.Module) -> None:
    """Remove ASP's buffers; the zeros stay."""
    for layer in model.modules():
        for name in [name for name, _ in layer.named_buffers(recurse=False) if _BUFFER.fullmatch(name)]:
            del layer._buffers[name]  # pyright: ignore[reportPrivateUsage]
