"""One word for what makes a model: `package.module:function`, or the name of a torchvision model or one of ours.

Names of models are data; a module is imported only if the user vouches for it (`trust.py`). Knows nothing of configs;
nothing is called here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.error import URLError

from torch import nn

from gossamer.errors import GossamerError, nearest
from gossamer.runner.config.schema import Net
from gossamer.runner.detectors import set_anchors
from gossamer.runner.networks import is_detector
from gossamer.runner.start import load_backbone
from gossamer.runner.trust import Trust, import_module, imported, reason

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


TaskName = Literal["classification", "detection"]

OTHER_TARGETS = ("maskrcnn_", "keypointrcnn_")
"""Detectors that learn from more than boxes."""

ANCHORS = ("anchor_sizes", "aspect_ratios")
"""Arguments that torchvision's functions do not take."""

PLAIN = {
    "timm": {"pretrained", "drop_rate", "drop_path_rate", "in_chans", "img_size", "global_pool", "patch_size", "depth"}
    | {"embed_dim", "num_heads", "mlp_ratio"},
    "transformers": {"pretrained", "image_size", "num_channels", "patch_size", "hidden_size", "num_hidden_layers"}
    | {"num_attention_heads", "intermediate_size", "hidden_sizes", "depths", "embed_dim", "num_heads", "window_size"}
    | {"hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "drop_path_rate"},
}
"""Arguments that say how a model is built and nothing else; others may make the library load files or code."""


def build_net(net: Net, num_classes: int, task: str | None = None, *, trust: Trust) -> nn.Module:
    """The model that `net` describes, with random weights unless its kwargs say otherwise.

    `num_classes` does not count the background; `task` is what the config says that the model is for.
    """
    family, slash, name = net.type.partition("/")
    if slash and family in _FAMILIES:
        trust.check(code_of(net))
        model = _FAMILIES[family](net, name, num_classes, trust.covers(family))
    elif ":" in net.type:
        model = _own(net, num_classes, trust)
    else:
        model = _by_name(net, num_classes, trust)
    found: TaskName = "detection" if is_detector(model) else "classification"
    if task == "classification" and found == "detection":
        raise GossamerError(f"net.type: {net.type} is a detector, and the config is for classification")
    if task == "detection" and found == "classification":
        raise GossamerError(
            f"net.type: {net.type} is no detector; one's own has a method network(images) that says what its network is"
        )
    _check_classes(net, model, num_classes)
    return model


def code_of(net: Net) -> list[tuple[str, str]]:
    """The code that a description of a model names, with its key: an import path, or a library that is to load more."""
    family, slash, name = net.type.partition("/")
    if slash and family in _FAMILIES:
        keys = [f"net.kwargs.{key}" for key in net.kwargs if key not in PLAIN[family]]
        by_name = _HUB_NAME.fullmatch(name) and not (family == "transformers" and os.path.exists(name))
        return [(key, family) for key in ([] if by_name else ["net.type"]) + keys]
    return [("net.type", net.type)] if ":" in net.type else []


def _by_name(net: Net, num_classes: int, trust: Trust) -> nn.Module:
    make = _builder(net, trust)
    kwargs = dict(net.kwargs)
    if "num_classes" in kwargs:
        raise GossamerError("net.kwargs.num_classes: the config's own num_classes says it; leave it out here")
    if net.type not in OURS and _task_of_builder(net.type, make) == "classification":
        return _call(net, make, {"num_classes": num_classes, **kwargs})
    if net.type.startswith(OTHER_TARGETS):
        raise GossamerError(f"net.type: {net.type} learns from more than boxes; take fasterrcnn_resnet50_fpn")
    backbone = kwargs.get("weights_backbone")
    of_ones_own = isinstance(backbone, str) and Path(backbone).exists()
    if of_ones_own:
        kwargs["weights_backbone"] = None
    anchors = {} if net.type in OURS else {key: kwargs.pop(key) for key in ANCHORS if key in kwargs}
    try:
        model = _call(net, make, {"num_classes": num_classes + 1, **kwargs})
        _check_arguments(make, model, kwargs)
        if anchors:
            set_anchors(model, **anchors)
        if of_ones_own:
            load_backbone(model, Path(str(backbone)))
    except GossamerError as error:
        if str(error).startswith("net"):
            raise
        raise GossamerError(f"net.kwargs.{error}") from error
    return model


def _check_arguments(make: Callable[..., Any], model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise for an argument that torchvision's detectors would take, and forget."""
    taken: set[str] = {"fixed_size", "size_divisible", "weights"}
    for function in (getattr(make, "func", make), type(model).__init__):
        taken |= set(inspect.signature(function).parameters) - {"self", "kwargs"}
    for key in given:
        if key not in taken:
            raise GossamerError(f"{key}: there is no such argument{nearest(key, taken)}")


def _builder(net: Net, trust: Trust) -> Callable[..., Any]:
    try:
        return builder(net.type, trust)
    except GossamerError as error:
        raise GossamerError(f"net.type: {error}") from error


def _own(net: Net, num_classes: int, trust: Trust) -> nn.Module:
    make = _builder(net, trust)
    try:
        takes = "num_classes" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # written in C, it does not tell
        takes = False
    return _call(net, make, {"num_classes": num_classes, **net.kwargs} if takes else net.kwargs)


def _from_timm(net: Net, name: str, num_classes: int, _vouched: bool) -> nn.Module:
    timm = _library("timm", net)
    known: bool = timm.is_model(name)
    if not known:
        raise GossamerError(f"net.type: timm has no model '{name}'{nearest(name, timm.list_models())}")
    return _call(net, timm.create_model, {"num_classes": num_classes, **net.kwargs}, name)


def _from_transformers(net: Net, name: str, num_classes: int, vouched: bool) -> nn.Module:
    """By the config of a repository, which can name kernels, which are code; only if that is `vouched` for."""
    transformers = _library("transformers", net)
    kwargs = dict(net.kwargs)
    if "trust_remote_code" in kwargs:
        raise GossamerError(
            "net.kwargs.trust_remote_code: code of a repository is not run; build the model in a function of your own, "
            "and name that as package.module:function"
        )
    pretrained = kwargs.pop("pretrained", False)
    kind: Any = transformers.AutoModelForImageClassification
    if pretrained and vouched:
        given = {"num_labels": num_classes, "ignore_mismatched_sizes": True, "trust_remote_code": False, **kwargs}
        return _call(net, kind.from_pretrained, given, name)

    def from_config(name: str, **given: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **given)
        if not vouched:
            config._attn_implementation = None
        if pretrained:
            return kind.from_pretrained(name, config=config, ignore_mismatched_sizes=True, trust_remote_code=False)
        return kind.from_config(config, trust_remote_code=False)

    return _call(net, from_config, {"num_labels": num_classes, **kwargs}, name)


_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
"""A model of the Hugging Face Hub, unless a file or folder has that name, which Transformers would take."""
_FAMILIES: dict[str, Callable[[Net, str, int, bool], nn.Module]] = {
    "timm": _from_timm,
    "transformers": _from_transformers,
}


def _library(name: str, net: Net) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GossamerError(f"net.type: {net.type} needs {name}, which is not installed: pip install {name}") from error


def _call(net: Net, make: Callable[..., Any], kwargs: dict[str, Any], *arguments: Any) -> nn.Module:
    try:
        made = make(*arguments, **kwargs)
    except GossamerError:
        raise
    except URLError as error:
        way_out = "leave out net.kwargs.weights, and set net.kwargs.weights_backbone to null, to begin without"
        raise GossamerError(f"net: weights of {net.type} cannot be downloaded ({error.reason}); {way_out}") from error
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
        raise GossamerError(f"net: {net.type}({shown}) failed: {reason(error)}") from error
    if not isinstance(made, nn.Module):
        raise GossamerError(f"net.type: {net.type}: expected a torch.nn.Module, found {type(made).__name__}")
    return made


def _task_of_builder(word: str, make: Any) -> TaskName:
    """What a torchvision model is for, by the module that its function stands in."""
    place = str(getattr(make, "func", make).__module__).removeprefix("torchvision.models.").split(".")
    if place[0] == "detection":
        return "detection"
    if len(place) > 1:
        raise GossamerError(f"net.type: {word} is a {place[0]} model; the runner trains classifiers and detectors")
    return "classification"


def _check_classes(net: Net, model: Any, num_classes: int) -> None:
    """Raise when a detector's last layer has another number of classes; other models tell in their first batch."""
    found = detector_classes(model)
    if found is not None and found != num_classes + 1:
        raise GossamerError(
            f"num_classes: {net.type} tells {found - 1} classes and the background apart, and the config "
            f"has {num_classes} classes; make the two agree (num_classes does not count the background)"
        )


def detector_classes(model: Any) -> int | None:
    """How many classes a torchvision detector tells apart, with the background; None for other models."""
    head = getattr(getattr(model, "head", None), "classification_head", None)
    for owner, name in ((head, "num_classes"), (head, "num_columns")):
        if isinstance(getattr(owner, name, None), int):
            return int(getattr(owner, name))
    score = getattr(getattr(getattr(model, "roi_heads", None), "box_predictor", None), "cls_score", None)
    return int(score.out_features) if isinstance(score, nn.Linear) else None
