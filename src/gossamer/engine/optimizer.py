"""The user's optimizer and GradScaler: hooks on their steps, the loss scale, and the options that modifiers change.

Nothing wraps the optimizer. The GradScaler alone is replaced by a subclass that shares its state, because the hooks of
an optimizer do not run on a step that the scaler skips.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gossamer.sparse.sharding import counts

if TYPE_CHECKING:
    from gossamer.engine.run import TrainingRun

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of an optimizer step, which a pre-step hook may replace."""

GROUP_OPTIONS = {"learning_rate": "lr", "optimizer": "weight_decay"}
"""By family of modifiers: the option of parameter groups that they set.

The one modifier of the family `optimizer` is SetWeightDecayModifier.
"""


def group_options(
    optimizer: torch.optim.Optimizer | None, families: Collection[str] = tuple(GROUP_OPTIONS)
) -> list[dict[str, float]]:
    """By parameter group: the options that modifiers of these families set."""
    keys = [key for family, key in GROUP_OPTIONS.items() if family in families]
    groups = optimizer.param_groups if optimizer is not None else []
    return [{key: float(group[key]) for key in keys if key in group} for group in groups]


def only_initializes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes nothing: `torch.distributed.checkpoint` makes one to initialize an optimizer's state.

    It has learning rates and gradients of zero, and the optimizer no state yet.
    """
    if optimizer.state or any(float(group.get("lr", 1.0)) != 0 for group in optimizer.param_groups):
        return False
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    gradients = [one.grad for one in trained if one.grad is not None]
    return len(gradients) == len(trained) > 0 and not any(counts(gradients))


def restore_group_options(optimizer: torch.optim.Optimizer | None, saved: Sequence[Mapping[str, float]]) -> None:
    """Restore what `group_options` returned, in place where the optimizer holds tensors."""
    groups = optimizer.param_groups if optimizer is not None else []
    for group, values in zip(groups, saved, strict=False):
        for key, value in values.items():
            if key in group:
                set_option(group, key, value)


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a parameter group, in place where it is a tensor."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = value


def call_after_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], callback: Callable[[], None], *, every: bool = False
) -> StepArguments | None:
    """For a pre-step hook: call `callback` when the gradients are computed.

    That is now, or, with a closure, after its first call (after each one with `every`); then this returns the arguments
    to step with, the closure wrapped. `args` begin with the optimizer itself, as torch passes them.
    """
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        callback()
        return None
    called = False

    def observed() -> Any:
        nonlocal called
        loss = closure()
        if every or not called:
            called = True
            callback()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": observed}
    return (*args[:1], observed, *args[2:]), kwargs


class GlobalStepHooks:
    """Calls `before` and `after`, bound methods of one owner, around the steps of every optimizer that trains a model.

    For front ends that are not given the optimizer. Keeps neither the model nor the owner alive.
    """

    def __init__(
        self,
        module: nn.Module,
        before: Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], StepArguments | None],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._module = weakref.ref(module)
        self._before = weakref.WeakMethod(before)
        self._after = weakref.WeakMethod(after)
        self._trains: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        # torch keeps global hooks alive, so they refer to this object weakly.
        pre, post = weakref.WeakMethod(self._pre), weakref.WeakMethod(self._post)

        def before_any(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> StepArguments | None:
            call = pre()
            return call(optimizer, args, kwargs) if call is not None else None

        def after_any(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            call = post()
            if call is not None:
                call(optimizer)

        handles = [register_optimizer_step_pre_hook(before_any), register_optimizer_step_post_hook(after_any)]
        self.remove = weakref.finalize(self, _remove, handles)

    def _pre(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        before = self._before()
        return before(optimizer, args, kwargs) if before is not None and self._trains_model(optimizer) else None

    def _post(self, optimizer: torch.optim.Optimizer) -> None:
        after = self._after()
        if after is not None and self._trains_model(optimizer):
            after(optimizer)

    def _trains_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds a parameter of the model; cached until its number of parameters changes."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._trains.get(optimizer)
        if known is None or known[0] != count:
            module = self._module()
            trained = {id(parameter) for parameter in module.parameters()} if module is not None else set[int]()
            shared = any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"])
            known = self._trains[optimizer] = (count, shared)
        return known[1]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


# GradScaler


class LossScale:
    """The loss scale of a run, and whether the current step uses it."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self.scaler = scaler
        self.of_gradients = 1.0
        """The scale of the gradients that the parameters hold now."""
        self.overflowed = False
        self.uses_scaler = True
        """Whether the step that is about to be made goes through the scaler, if there is one."""
        self._loss_scaled: bool | None = None
        """Whether the scaler that `modify` returned has scaled a loss since the last step; None if never."""

    @property
    def of_losses(self) -> float:
        """The scale of a loss whose backward pass runs now."""
        # A user who stops using the scaler, as when quantization begins, trains on plain losses.
        return 1.0 if self.scaler is None or self._loss_scaled is False else self.scaler.get_scale()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        self.of_gradients = 1.0 if scale is None else float(scale)
        self.overflowed = found_inf is not None and float(found_inf) > 0
        self.uses_scaler = _goes_through(self.scaler, optimizer)

    def after_step(self) -> None:
        self.of_gradients, self.overflowed = 1.0, False
        self._forget_scaled_loss()

    def after_skipped_step(self) -> None:
        self._forget_scaled_loss()

    def _forget_scaled_loss(self) -> None:
        self._loss_scaled = None if self._loss_scaled is None else False

    def loss_scaled(self) -> None:
        self._loss_scaled = True


def _goes_through(scaler: GradScaler | None, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that the optimizer is about to make goes through the scaler; True without one in use.

    torch has no public way to ask. The scaler keeps an entry for each optimizer since the last `update`, which
    `unscale_` and `step` create.
    """
    if scaler is None or not scaler.is_enabled() or not hasattr(scaler, "_per_optimizer_states"):
        return True
    stages: dict[int, dict[str, Any]] = scaler._per_optimizer_states  # pyright: ignore[reportPrivateUsage]
    return id(optimizer) in stages and stages[id(optimizer)]["stage"] is not OptState.STEPPED


def counting_scaler(scaler: GradScaler, run: TrainingRun) -> GradScaler:
    """The user's scaler, which also reports the steps that it skips; a copy of it is a plain scaler."""
    kind = type(scaler)
    plain: type[GradScaler] = getattr(kind, "plain_class", kind)

    class Counting(kind):
        plain_class = plain

        def scale(self, outputs: Any) -> Any:
            run.loss_scale.loss_scaled()
            return cast(Any, super()).scale(outputs)

        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
            calls = run.hook_calls
            result = super().step(optimizer, *args, **kwargs)
            if optimizer is run.optimizer and run.hook_calls == calls:
                run.count_skipped()
            return result

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _plain, (plain, self.__getstate__())

    Counting.__name__ = Counting.__qualname__ = kind.__name__
    result = Counting.__new__(Counting)
    result.__dict__ = scaler.__dict__
    return result


def _plain(kind: type[GradScaler], state: dict[str, Any]) -> GradScaler:
    scaler = kind.__new__(kind)
    scaler.__setstate__(state)
    return scaler
