"""One word for a model: `package.module:function`, or the name of a torchvision model.

The user names the module, so importing it is what they asked for; whatever
goes wrong there is told in one sentence with the module's name.
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
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError, nearest

if TYPE_CHECKING:
    from torch import nn


def load_model(word: str) -> nn.Module:
    """Make the model that `word` names, without pretrained weights."""
    from torch import nn

    module_name, colon, function_name = word.partition(":")
    make = _function(module_name, function_name, word) if colon else _from_torchvision(word)
    try:
        made = make()
    except Exception as error:
        raise GossamerError(f"{word}: calling it without arguments failed: {_reason(error)}") from error
    if not isinstance(made, nn.Module):
        raise GossamerError(f"{word}: expected a torch.nn.Module, found {type(made).__name__}")
    return made


def import_module(name: str) -> ModuleType:
    """Import a module of the user's, looking in the current folder first."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise GossamerError(f"cannot import '{name}': {_reason(error)}") from error


def _function(module_name: str, function_name: str, word: str) -> Callable[[], Any]:
    if module_name.endswith(".py"):
        name = module_name.removesuffix(".py").replace("/", ".")
        raise GossamerError(f"{word}: expected a module, not a file: write {name}:{function_name}")
    if not module_name or not function_name:
        raise GossamerError(f"{word}: expected package.module:function, as in 'my_package.models:small_net'")
    found: Any = import_module(module_name)
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise GossamerError(f"{word}: '{module_name}' has no '{part}'{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise GossamerError(f"{word}: expected a function that makes a model, found {type(found).__name__}")
    return found


def _from_torchvision(word: str) -> Callable[[], Any]:
    if importlib.util.find_spec("torchvision") is None:
        raise GossamerError(
            f"{word}: a plain name is a torchvision model, and torchvision is not installed "
            "(pip install 'gossamer[vision]'); or name your own as package.module:function"
        )
    models = import_module("torchvision.models")
    names: list[str] = models.list_models()
    if word not in names:
        raise GossamerError(
            f"{word}: no torchvision model of that name{nearest(word, names)}; your own is package.module:function"
        )

    build: Callable[..., Any] = models.get_model_builder(word)
    # A model with a backbone would download it unless told not to.
    untrained = {name: None for name in ("weights", "weights_backbone") if name in inspect.signature(build).parameters}
    return functools.partial(build, **untrained)


def _reason(error: BaseException) -> str:
    """What went wrong, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
