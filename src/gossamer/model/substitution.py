"""Weights that layers see changed while they compute: learned thresholds and masks need that.

The parameter itself stays where it is, under its name, for the optimizer and
for checkpoints. Only while the model, or a part of it, computes, another
tensor stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.model.compiling import compile_anew
from gossamer.model.parameters import first_names, get_module, unwrap

Substitute = Callable[[nn.Module, Tensor], Tensor]
"""From the layer that holds the weight, and the weight, to what is computed with."""


class Substitution:
    """A weight under all its names, replaced while whoever uses it computes."""

    def __init__(self, module: nn.Module, name: str, substitute: Substitute) -> None:
        self._handles: list[RemovableHandle] = []
        for caller, path, leaf in _users(module, name):
            hooks = _Hooks(path, leaf, substitute)
            # Before the hooks that compute a layer's weight from the one that is replaced.
            self._handles.append(caller.register_forward_pre_hook(hooks.enter, prepend=True))
            self._handles.append(caller.register_forward_hook(hooks.leave, always_call=True))
        compile_anew()

    def remove(self) -> None:
        """Let everything compute with the weight itself again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        compile_anew()


def withdraw_all(module: nn.Module) -> None:
    """End every substitution in a model, also in a copy of one or in one that was unpickled."""
    for layer in module.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, kind))
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Hooks)]:
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)  # pyright: ignore[reportPrivateUsage]
    compile_anew()


def is_substituted(module: nn.Module) -> bool:
    """Whether some weight of a model is replaced while it computes."""
    return any(True for layer in module.modules() for _ in _hooks_on(layer))


def substituted(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Every weight that is replaced, with what stands in its place in the mode that its layer is in now."""
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
    """The two hooks on a module; they keep no reference to it, so that a copied or unpickled model works alone."""

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

    The layer itself; the module around it, for attention uses its projections' weights without calling them; and the
    model, for whatever else uses a weight from afar.
    """
    for alias, first in first_names(module).items():
        if first == name:
            path, _, leaf = alias.rpartition(".")
            above, _, last = path.rpartition(".")
            users = {path: "", above: last if path else "", "": path}
            for user, inner in users.items():
                yield get_module(unwrap(module), user), inner, leaf
