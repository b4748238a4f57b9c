"""Weights that layers see changed while they compute: learned thresholds and masks need that.

The parameter itself stays where it is, under its name, for the optimizer and
for checkpoints. Only between entering and leaving a layer another tensor
stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.graph.parameters import first_names, get_module

Substitute = Callable[[nn.Module, Tensor], Tensor]
"""From the layer that holds the weight, and the weight, to what is computed with."""


class Substitution:
    """A weight under all its names, replaced while the layers that use it compute."""

    def __init__(self, module: nn.Module, name: str, substitute: Substitute) -> None:
        self._handles: list[RemovableHandle] = []
        for caller, path, leaf in _uses(module, name):
            hooks = _Hooks(path, leaf, substitute)
            self._handles.append(caller.register_forward_pre_hook(hooks.enter))
            self._handles.append(caller.register_forward_hook(hooks.leave, always_call=True))

    def remove(self) -> None:
        """Let the layers compute with the weight itself again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hooks:
    """The two hooks on a layer; they keep no reference to it, so that a copied or unpickled model works alone."""

    def __init__(self, path: str, leaf: str, substitute: Substitute) -> None:
        self.path, self.leaf, self.substitute = path, leaf, substitute

    def enter(self, caller: nn.Module, args: object) -> None:
        owner = get_module(caller, self.path)
        weight = owner._parameters[self.leaf]  # pyright: ignore[reportPrivateUsage]
        if weight is not None:
            # An attribute of the instance comes before the parameter, which stays registered.
            owner.__dict__[self.leaf] = self.substitute(owner, weight)

    def leave(self, caller: nn.Module, args: object, output: object) -> None:
        get_module(caller, self.path).__dict__.pop(self.leaf, None)


def _uses(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Each layer whose call uses the weight, with the path from there to its owner, and the leaf."""
    for alias, first in first_names(module).items():
        if first != name:
            continue
        path, _, leaf = alias.rpartition(".")
        above, _, last = path.rpartition(".")
        parent = get_module(module, above) if path else module
        if last == "out_proj" and isinstance(parent, nn.MultiheadAttention):
            yield parent, last, leaf  # attention computes with its output projection without calling it
        else:
            yield get_module(module, path), "", leaf


def withdraw_all(module: nn.Module) -> None:
    """End every substitution in a model, also in a copy of one or in one that was unpickled."""
    for layer in module.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = cast(dict[int, object], getattr(layer, kind))
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Hooks)]:
                del hooks[key]
                layer._forward_hooks_always_called.pop(key, None)  # pyright: ignore[reportPrivateUsage]
