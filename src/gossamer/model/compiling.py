"""What torch's compiler has to be told of code that watches a model: to leave it alone, and to look again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorator: the compiler calls the function as it is. Imports the compiler, which takes a second."""
    return cast(F, torch.compiler.disable(function))


def compile_anew() -> None:
    """Compiled code takes no notice of hooks that come and go; thrown away, it is made anew when called."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
