"""One word for what makes a model: `package.module:function`, or the name of a torchvision model or one of ours.

The user names the module, so importing it is what they asked for; whatever
goes wrong there is told in one sentence with the module's name. Knows nothing
of configs; nothing is called here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gossamer.errors import GossamerError, nearest

OURS = {name: f"gossamer.runner.detectors:{name}" for name in ("retinanet_resnet18_fpn", "fasterrcnn_resnet18_fpn")}
"""Models that torchvision lacks."""


def builder(word: str) -> Callable[..., Any]:
    """What makes the model that `word` names; a torchvision model gets no pretrained weights unless told."""
    word = OURS.get(word, word)
    return _function(word) if ":" in word else _from_torchvision(word)


def imported(word: str, noun: str = "name") -> Any:
    """What `package.module:name` names."""
    module_name, _, name = word.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".")
        raise GossamerError(f"{word}: expected a module, not a file: write {dotted}:{name}")
    if not module_name or not name:
        raise GossamerError(f"{word}: expected package.module:{noun}, as in 'my_package.models:small_net'")
    found: Any = import_module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise GossamerError(f"{word}: '{module_name}' has no '{part}'{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def import_module(name: str) -> ModuleType:
    """Import a module of the user's, looking in the current folder first."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise GossamerError(f"cannot import '{name}': {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What went wrong, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def _function(word: str) -> Callable[..., Any]:
    found = imported(word, "function")
    if not callable(found):
        raise GossamerError(f"{word}: expected a function that makes a model, found {type(found).__name__}")
    return found


def _from_torchvision(word: str) -> Callable[..., Any]:
    if importlib.util.find_spec("torchvision") is None:
        raise GossamerError(
            f"{word}: a plain name is a torchvision model, and torchvision is not installed "
            "(pip install 'gossamer[vision]'); or name your own as package.module:function"
        )
    models = import_module("torchvision.models")
    names: list[str] = models.list_models()
    if word not in names:
        known = [*names, *OURS]
        raise GossamerError(
            f"{word}: no torchvision model of that name{nearest(word, known)}; your own is package.module:function"
        )
    build: Callable[..., Any] = models.get_model_builder(word)
    # A model with a backbone would download it unless told not to.
    untrained = {name: None for name in ("weights", "weights_backbone") if name in inspect.signature(build).parameters}
    return functools.partial(build, **untrained)
