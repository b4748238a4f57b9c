"""Hooks and `torch.compile`: keep hooks out of compiled code, and have a model compiled again when its hooks change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorator: the compiler calls the function as it is. Imports the compiler, which takes a second."""
    return cast(F, torch.compiler.disable(function))


class _Registry(dict[str, Any]):
    """A module's parameters, buffers or children; copied and pickled as the plain dict that it stands for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


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
