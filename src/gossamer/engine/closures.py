"""Seeing the gradients of an optimizer's step, also when the step computes them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_gradients(
    args: tuple[Any, ...], kwargs: dict[str, Any], look: Callable[[], None], *, every: bool = False
) -> Arguments | None:
    """For a pre-step hook: call `look` when the gradients are there.

    That is at once, or, with a closure, after its first call (after each one with `every`); then the arguments to
    step with are returned, the closure wrapped. `args` begin with the optimizer itself, as torch passes them.
    """
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        look()
        return None
    seen = False

    def observed() -> Any:
        nonlocal seen
        loss = closure()
        if every or not seen:
            seen = True
            look()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": observed}
    return (*args[:1], observed, *args[2:]), kwargs
