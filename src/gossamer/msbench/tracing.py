"""Trace a model with torch.fx if the graph is the same model; otherwise the model is used as it is.

MSBench's users expect a traced model. The graph must have the same parameters in the same order, be the same in
training and evaluation, and hold no constant that the user's code could change later.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from gossamer.errors import GossamerError, nearest, within
from gossamer.model import first_names, named_modules, prunable
from gossamer.model.tracing.tracer import preserved
from gossamer.msbench.config import LOCATION

Leaf = type[nn.Module] | str
logger = logging.getLogger("gossamer.msbench")


def traced(model: nn.Module, leaves: Sequence[Leaf]) -> nn.Module:
    """The model as a `torch.fx.GraphModule` with the same layers and names, or the model itself."""
    check_leaves(model, leaves)
    if isinstance(model, fx.GraphModule):
        return model
    reason = _obstacle(model, leaves)
    if reason is None:
        graphs: list[fx.Graph] = []
        try:
            with preserved(model):
                before = _random_states()
                for training in (not model.training, model.training):
                    graphs.append(_graph(model, training, leaves))
                is_random = _random_states() != before
        except Exception as error:  # noqa: BLE001  (forward is the user's code, and fx raises whatever it raises)
            reason = f"torch.fx cannot trace it: {' '.join(str(error).split()) or type(error).__name__}"
        else:
            result = fx.GraphModule(model, graphs[-1], type(model).__name__)
            if graphs[0].python_code("self").src != graphs[1].python_code("self").src:
                reason = "it computes differently in training and evaluation"
            elif is_random:
                reason = "it draws random numbers, which a graph would make constant"
            else:
                reason = _difference(model, result)
            if reason is None:
                _keep_attributes(model, result)
                result.train(model.training)
                return result
    logger.warning("the model is not traced with torch.fx: %s (list modules not to enter in leaf_module)", reason)
    return model


def leaf_names(model: nn.Module) -> set[str]:
    """What `leaf_module` may name in a model: paths of modules, and classes with and without package."""
    return {name for path, module in named_modules(model) for name in _names_of(path, module)}


def check_leaves(model: nn.Module, leaves: Sequence[Leaf], more: Set[str] = frozenset()) -> None:
    """Raise unless each leaf is a class, names a class or a module of the model, or is one of `more`."""
    known = leaf_names(model) | more
    for leaf in leaves:
        with within("leaf_module", location=LOCATION):
            if not isinstance(leaf, str | type):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise GossamerError(f"expected classes of modules or dotted names, found {leaf!r}")
            if isinstance(leaf, str) and leaf not in known:
                raise GossamerError(f"the model has no module or class '{leaf}'{nearest(leaf, known)}")


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Sequence[Leaf] = ()) -> None:
        """torch.fx creates one without leaves when it unpickles a graph."""
        super().__init__()
        self._classes = tuple(leaf for leaf in leaves if not isinstance(leaf, str))
        self._names = {leaf for leaf in leaves if isinstance(leaf, str)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Modules without children are leaves too: some of them act only in training."""
        named = bool(self._names & _names_of(module_qualified_name, m))
        whole = isinstance(m, self._classes) or next(m.children(), None) is None
        return named or whole or super().is_leaf_module(m, module_qualified_name)


def _names_of(path: str, module: nn.Module) -> set[str]:
    """The names of a module: its path, and its class with and without package."""
    kind = type(module)
    return {path, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} - {""}


def _graph(model: nn.Module, training: bool, leaves: Sequence[Leaf]) -> fx.Graph:
    return _Tracer(leaves).trace(model.train(training))


def _random_states() -> tuple[object, ...]:
    return bytes(torch.get_rng_state().numpy()), random.getstate(), str(np.random.get_state())


def _obstacle(model: nn.Module, leaves: Sequence[Leaf]) -> str | None:
    """Why a graph would not be the same model; None if nothing is known against it."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return "its forward takes optional arguments"
    tracer = _Tracer(leaves)
    for path, module in named_modules(model):
        if path and tracer.is_leaf_module(module, path):
            continue
        shown = path or type(model).__name__
        if module._forward_hooks or module._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
            return f"'{shown}' has forward hooks, which a graph would not call"
        for method, own in (("train", nn.Module.train), ("eval", nn.Module.eval)):
            if getattr(getattr(module, method), "__func__", None) is not own:
                return f"'{shown}' overrides {method}(), which a graph would not call"
        if number := _float_read(module):
            return f"'{shown}' computes with its attribute '{number}', which a graph would fix at its current value"
    if len({module.training for module in model.modules() if next(module.children(), None) is None}) > 1:
        return "some of its layers are in evaluation mode and others in training mode"
    return None


def _float_read(module: nn.Module) -> str | None:
    """A float attribute that forward reads; other numbers are sizes and flags, which rarely change."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    for name in code.co_names if code is not None else ():
        with contextlib.suppress(Exception):  # a property is the user's code
            if isinstance(getattr(module, name), float):
                return name
    return None


def _difference(model: nn.Module, result: fx.GraphModule) -> str | None:
    """Why the graph is not the same model; None if it is."""
    names = set(prunable(model))
    if set(prunable(result)) != names:
        return "a graph would split a layer"
    if _state_names(result) != _state_names(model):
        return "its forward pass does not use all of its parameters"
    if [name for name, _ in result.named_parameters()] != [name for name, _ in model.named_parameters()]:
        return "a graph would have its parameters in another order, which optimizer states depend on"
    known = first_names(model)
    for node in result.graph.nodes:
        # Substitution would need hooks on the model itself, which copies of a GraphModule lose.
        if node.op == "get_attr" and known.get(str(node.target)) in names:
            return f"its forward pass uses '{node.target}' without calling the layer"
    return None


def _state_names(model: nn.Module) -> set[str]:
    """The names of all parameters and buffers."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))}


def _keep_attributes(model: nn.Module, result: fx.GraphModule) -> None:
    """Copy plain attributes of the user's class, such as a config."""
    for key, value in vars(model).items():
        plain: Any = value
        if not key.startswith("_") and not isinstance(plain, nn.Module | torch.Tensor) and key not in vars(result):
            setattr(result, key, plain)
