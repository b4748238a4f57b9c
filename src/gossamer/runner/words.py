"""One word for what makes a model: `package.module:function`, or the name of a torchvision model or one of ours.

Names of models are data; a module is imported only if the user vouches for it (`trust.py`). Knows nothing of configs;
nothing is called here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from gossamer.errors import GossamerError, nearest
from gossamer.runner.trust import Trust, import_module, imported

OURS = ("retinanet_resnet18_fpn", "fasterrcnn_resnet18_fpn")
"""Models that torchvision lacks, in `detectors.py`."""


def builder(word: str, trust: Trust) -> Callable[..., Any]:
    """What makes the model that `word` names; a torchvision model gets no pretrained weights unless told."""
    if word in OURS:
        return getattr(import_module("gossamer.runner.detectors", installed=True), word)
    return _function(word, trust) if ":" in word else _from_torchvision(word)


def _function(word: str, trust: Trust) -> Callable[..., Any]:
    found = imported(word, trust, "function", "net.type")
    if not callable(found):
        raise GossamerError(f"{word}: expected a function that makes a model, found {type(found).__name__}")
    return found


def _from_torchvision(word: str) -> Callable[..., Any]:
    if importlib.util.find_spec("torchvision") is None:
        raise GossamerError(
            f"{word}: a plain name is a torchvision model, and torchvision is not installed "
            "(pip install 'gossamer[vision]'); or name your own as package.module:function"
        )
    models: Any = import_module("torchvision.models", installed=True)
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
