"""Trace a model with torch.fx if the graph is the same model; otherwise the model is used as it is.

MSBench's users expect a `GraphModule`. The graph must have the same parameters in the same order, be the same in
training and evaluation, and hold no constant that the user's code could change later. This is not the tracer of
`gossamer.model.tracing`, which finds coupled channels and returns no graph. A pickled `GraphModule` refers to `_Tracer`
by its module and name, so both stay.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import fx, nn

from gossamer.errors import GossamerError, nearest, within
from gossamer.model import first_names, named_modules, prunable
from gossamer.model.preserve import preserved
from gossamer.msbench.config import LOCATION

Leaf = type[nn.Module] | str
logger = logging.getLogger("gossamer.msbench")


class _NotSameModelError(Exception):
    """Why a graph would not be the same model."""


def as_graph_module(model: nn.Module, leaves: Sequence[Leaf]) -> nn.Module:
    """The model as a `torch.fx.GraphModule` with the same layers and names, or the model itself."""
    if isinstance(model, fx.GraphModule):
        return model
    try:
        _check_modules(model, leaves)
        result = _graph(model, leaves)
        _check_same(model, result)
    except _NotSameModelError as reason:
        logger.warning("the model is not traced with torch.fx: %s (list modules not to enter in leaf_module)", reason)
        return model
    for key, value in vars(model).items():  # attributes of the user's class, such as a config
        if not key.startswith("_") and not isinstance(value, nn.Module | torch.Tensor) and key not in vars(result):
            setattr(result, key, value)
    return result.train(model.training)


def check_leaves(models: Sequence[nn.Module], leaves: Sequence[Leaf]) -> None:
    """Raise unless each leaf is a class, or names a class or a module of the models."""
    known = {name for model in models for path, module in named_modules(model) for name in _names_of(path, module)}
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


def _graph(model: nn.Module, leaves: Sequence[Leaf]) -> fx.GraphModule:
    try:
        with preserved(model):
            before = _random_states()
            graphs = [_Tracer(leaves).trace(model.train(mode)) for mode in (not model.training, model.training)]
            is_random = _random_states() != before
    except Exception as error:  # of the user's forward, or of torch.fx
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _NotSameModelError(f"torch.fx cannot trace it: {reason}") from error
    if graphs[0].python_code("self").src != graphs[1].python_code("self").src:
        raise _NotSameModelError("it computes differently in training and evaluation")
    if is_random:
        raise _NotSameModelError("it draws random numbers, which a graph would make constant")
    return fx.GraphModule(model, graphs[-1], type(model).__name__)


def _random_states() -> tuple[object, ...]:
    return bytes(torch.get_rng_state().numpy()), random.getstate(), str(np.random.get_state())


def _check_modules(model: nn.Module, leaves: Sequence[Leaf]) -> None:
    """Raise for code that a graph would not call, and for values that it would fix."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise _NotSameModelError("its forward takes optional arguments")
    tracer = _Tracer(leaves)
    for path, module in named_modules(model):
        if path and tracer.is_leaf_module(module, path):
            continue
        shown = path or type(model).__name__
        if module._forward_hooks or module._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
            raise _NotSameModelError(f"'{shown}' has forward hooks, which a graph would not call")
        methods = ((module.train, nn.Module.train), (module.eval, nn.Module.eval))
        if any(getattr(method, "__func__", None) is not own for method, own in methods):
            raise _NotSameModelError(f"'{shown}' overrides train() or eval(), which a graph would not call")
        if number := _float_read(module):
            raise _NotSameModelError(f"'{shown}' computes with its attribute '{number}', which a graph would fix")
    if len({module.training for module in model.modules() if next(module.children(), None) is None}) > 1:
        raise _NotSameModelError("some of its layers are in evaluation mode and others in training mode")


def _float_read(module: nn.Module) -> str | None:
    """A float of the module or its class that forward reads; other numbers are sizes and flags, which rarely change."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    for name in code.co_names if code is not None else ():
        with contextlib.suppress(Exception):  # a property is the user's code
            if isinstance(getattr(module, name), float):
                return name
    return None


def _check_same(model: nn.Module, result: fx.GraphModule) -> None:
    """Raise unless the graph has the layers, parameters and buffers of the model, in its order."""
    names = set(prunable(model))
    if set(prunable(result)) != names:
        raise _NotSameModelError("a graph would split a layer")
    if _state_names(result) != _state_names(model):
        raise _NotSameModelError("its forward pass does not use all of its parameters")
    if [name for name, _ in result.named_parameters()] != [name for name, _ in model.named_parameters()]:
        raise _NotSameModelError("a graph would have its parameters in another order, which optimizer states depend on")
    known = first_names(model)
    for node in result.graph.nodes:
        # Substitution would need hooks on the model itself, which copies of a GraphModule lose.
        if node.op == "get_attr" and known.get(str(node.target)) in names:
            raise _NotSameModelError(f"its forward pass uses '{node.target}' without calling the layer")


def _state_names(model: nn.Module) -> set[str]:
    """The names of all parameters and buffers."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
