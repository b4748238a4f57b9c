"""Builds what a config names: the model of `net`, from torchvision, timm, transformers or a function, and the hooks.

A module is imported only if the user trusts it (`trust.py`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.error import URLError

from torch import nn

from gossamer.errors import GossamerError, nearest, within
from gossamer.runner.config.schema import Named, Net
from gossamer.runner.detectors import is_detector, set_anchors
from gossamer.runner.trust import Trust, import_module, imported, reason
from gossamer.runner.weights import file_of, load_backbone

if TYPE_CHECKING:
    from gossamer.runner.trainer import Trainer

T = TypeVar("T")
TaskName = Literal["classification", "detection"]

OWN_DETECTORS = ("retinanet_resnet18_fpn", "fasterrcnn_resnet18_fpn")
"""Models that torchvision lacks, in `detectors.py`."""

OTHER_TARGETS = ("maskrcnn_", "keypointrcnn_")
"""Detectors that are not trained on boxes alone."""

ANCHORS = ("anchor_sizes", "aspect_ratios")
"""Arguments of detectors that torchvision's functions lack."""

ARCHITECTURE = {
    "timm": {"pretrained", "drop_rate", "drop_path_rate", "in_chans", "img_size", "global_pool", "patch_size", "depth"}
    | {"embed_dim", "num_heads", "mlp_ratio"},
    "transformers": {"pretrained", "image_size", "num_channels", "patch_size", "hidden_size", "num_hidden_layers"}
    | {"num_attention_heads", "intermediate_size", "hidden_sizes", "depths", "embed_dim", "num_heads", "window_size"}
    | {"hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "drop_path_rate"},
}
"""Arguments that only describe a model; others may make the library load files or code."""


def build_net(net: Net, num_classes: int, task: str | None = None, *, trust: Trust) -> nn.Module:
    """The model that `net` describes, with random weights unless its kwargs say otherwise.

    `num_classes` does not count the background; `task` is that of the config.
    """
    family, slash, name = net.type.partition("/")
    if slash and family in _FAMILIES:
        trust.check(code_of(net))
        model = _FAMILIES[family](net, name, num_classes, trust.covers(family))
    elif ":" in net.type:
        model = _from_user(net, num_classes, trust)
    else:
        model = _by_name(net, num_classes, trust)
    kind: TaskName = "detection" if is_detector(model) else "classification"
    if task == "classification" and kind == "detection":
        raise GossamerError(f"{net.type} is a detector, but the config is for classification", "net", "type")
    if task == "detection" and kind == "classification":
        raise GossamerError(
            f"{net.type} is not a detector; give a custom detector a method network(images)", "net", "type"
        )
    _check_classes(net, model, num_classes)
    return model


def code_of(net: Net) -> list[tuple[str, str]]:
    """The code that `net` names, with the key: an import path, or a library that may load more code."""
    family, slash, name = net.type.partition("/")
    if slash and family in _FAMILIES:
        keys = [f"net.kwargs.{key}" for key in net.kwargs if key not in ARCHITECTURE[family]]
        by_name = _HUB_NAME.fullmatch(name) and not (family == "transformers" and os.path.exists(name))
        return [(key, family) for key in ([] if by_name else ["net.type"]) + keys]
    return [("net.type", net.type)] if ":" in net.type else []


def builder(name: str, trust: Trust) -> Callable[..., Any]:
    """The function that makes a model; those of torchvision load no pretrained weights by default."""
    if name in OWN_DETECTORS:
        return getattr(import_module("gossamer.runner.detectors", installed=True), name)
    if ":" in name:
        function = imported(name, trust, "function", "net.type")
        if not callable(function):
            raise GossamerError(f"{name}: expected a function that makes a model, found {type(function).__name__}")
        return function
    if importlib.util.find_spec("torchvision") is None:
        raise GossamerError(
            f"{name}: a plain name is a torchvision model, and torchvision is not installed "
            "(pip install 'gossamer[vision]'); a function of your own is package.module:function"
        )
    models: Any = import_module("torchvision.models", installed=True)
    names: list[str] = models.list_models()
    if name not in names:
        near = nearest(name, [*names, *OWN_DETECTORS])
        raise GossamerError(f"{name}: no such torchvision model{near}; your own is package.module:function")
    build: Callable[..., Any] = models.get_model_builder(name)
    # Without these, a model with a backbone downloads its weights.
    untrained = {name: None for name in ("weights", "weights_backbone") if name in inspect.signature(build).parameters}
    return functools.partial(build, **untrained)


def _by_name(net: Net, num_classes: int, trust: Trust) -> nn.Module:
    """A model of torchvision, or one of our detectors."""
    with within("net", "type"):
        make = builder(net.type, trust)
    kwargs = dict(net.kwargs)
    if "num_classes" in kwargs:
        message = "already set by the num_classes of the config; remove it"
        raise GossamerError(message, "net", "kwargs", "num_classes")
    if net.type not in OWN_DETECTORS and _torchvision_task(net.type, make) == "classification":
        return _call(net, make, {"num_classes": num_classes, **kwargs})
    if net.type.startswith(OTHER_TARGETS):
        raise GossamerError(f"{net.type} is not trained on boxes alone; use fasterrcnn_resnet50_fpn", "net", "type")
    backbone = kwargs.get("weights_backbone")
    is_file = isinstance(backbone, str) and Path(backbone).exists()
    if is_file:
        kwargs["weights_backbone"] = None
    anchors = {} if net.type in OWN_DETECTORS else {key: kwargs.pop(key) for key in ANCHORS if key in kwargs}

    def detector(**given: Any) -> Any:
        with within("kwargs"):
            return make(**given)

    model = _call(net, detector, {"num_classes": num_classes + 1, **kwargs})
    with within("net", "kwargs"):
        _check_detector_kwargs(make, model, kwargs)
        if anchors:
            set_anchors(model, **anchors)
        if is_file:
            load_backbone(model, file_of(Path(str(backbone)), "weights_backbone"))
    return model


def _check_detector_kwargs(make: Callable[..., Any], model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise for an argument that torchvision's detectors would silently ignore."""
    known: set[str] = {"fixed_size", "size_divisible", "weights"}
    for function in (getattr(make, "func", make), type(model).__init__):
        known |= set(inspect.signature(function).parameters) - {"self", "kwargs"}
    for key in given:
        if key not in known:
            raise GossamerError(f"unknown argument{nearest(key, known)}", key)


def _from_user(net: Net, num_classes: int, trust: Trust) -> nn.Module:
    with within("net", "type"):
        make = builder(net.type, trust)
    takes_classes = classes_parameter(make) is not None
    return _call(net, make, {"num_classes": num_classes, **net.kwargs} if takes_classes else net.kwargs)


def classes_parameter(make: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter `num_classes` of a function, if it has one."""
    try:
        return inspect.signature(make).parameters.get("num_classes")
    except (TypeError, ValueError):  # a function in C without a signature
        return None


def _from_timm(net: Net, name: str, num_classes: int, _trusted: bool) -> nn.Module:
    timm = _library("timm", net)
    known: bool = timm.is_model(name)
    if not known:
        raise GossamerError(f"timm has no model '{name}'{nearest(name, timm.list_models())}", "net", "type")
    return _call(net, timm.create_model, {"num_classes": num_classes, **net.kwargs}, name)


def _from_transformers(net: Net, name: str, num_classes: int, trusted: bool) -> nn.Module:
    """From the config of a repository. It can name kernels, which are code and need to be trusted."""
    transformers = _library("transformers", net)
    kwargs = dict(net.kwargs)
    if "trust_remote_code" in kwargs:
        fix = "build the model in a function of your own, and name that as package.module:function"
        raise GossamerError(f"code of a repository is never run; {fix}", "net", "kwargs", "trust_remote_code")
    pretrained = kwargs.pop("pretrained", False)
    kind: Any = transformers.AutoModelForImageClassification
    if pretrained and trusted:
        given = {"num_labels": num_classes, "ignore_mismatched_sizes": True, "trust_remote_code": False, **kwargs}
        return _call(net, kind.from_pretrained, given, name)

    def from_config(name: str, **given: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **given)
        if not trusted:
            config._attn_implementation = None
        if pretrained:
            return kind.from_pretrained(name, config=config, ignore_mismatched_sizes=True, trust_remote_code=False)
        return kind.from_config(config, trust_remote_code=False)

    return _call(net, from_config, {"num_labels": num_classes, **kwargs}, name)


_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
"""A model of the Hugging Face Hub, unless a file or folder has that name, which Transformers would load instead."""
_FAMILIES: dict[str, Callable[[Net, str, int, bool], nn.Module]] = {
    "timm": _from_timm,
    "transformers": _from_transformers,
}


def _library(name: str, net: Net) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GossamerError(
            f"{net.type} needs {name}, which is not installed: pip install {name}", "net", "type"
        ) from error


def _call(net: Net, make: Callable[..., Any], kwargs: Mapping[str, Any], *arguments: Any) -> nn.Module:
    with within("net"):
        return call_builder(net.type, make, kwargs, *arguments)


def call_builder(name: str, make: Callable[..., Any], kwargs: Mapping[str, Any], *arguments: Any) -> nn.Module:
    """Call the function that makes a model. Raises `GossamerError` if it fails or returns something else."""
    try:
        model = make(*arguments, **kwargs)
    except GossamerError:
        raise
    except URLError as error:
        message = f"cannot download weights of {name} ({error.reason})"
        fix = "remove net.kwargs.weights, and set net.kwargs.weights_backbone to null, to start from random weights"
        raise GossamerError(f"{message}; {fix}") from error
    except Exception as error:
        call = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        raise GossamerError(f"{name}({call}) failed: {reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise GossamerError(f"{name}: expected a torch.nn.Module, found {type(model).__name__}")
    return model


def _torchvision_task(name: str, make: Any) -> TaskName:
    """What a torchvision model is for, from the module of its function."""
    modules = str(getattr(make, "func", make).__module__).removeprefix("torchvision.models.").split(".")
    if modules[0] == "detection":
        return "detection"
    if len(modules) > 1:
        raise GossamerError(
            f"{name} is a {modules[0]} model; the runner trains classifiers and detectors", "net", "type"
        )
    return "classification"


def _check_classes(net: Net, model: Any, num_classes: int) -> None:
    """Raise if the last layer of a detector has another number of classes; classifiers are checked on a batch."""
    outputs = _detector_outputs(model)
    if outputs is not None and outputs != num_classes + 1:
        message = f"{net.type} has {outputs - 1} classes, but the config has {num_classes}"
        raise GossamerError(f"{message}; num_classes does not count the background", "num_classes")


def _detector_outputs(model: Any) -> int | None:
    """The number of classes of a torchvision detector, with the background; None for other models."""
    head = getattr(getattr(model, "head", None), "classification_head", None)
    for name in ("num_classes", "num_columns"):
        if isinstance(getattr(head, name, None), int):
            return int(getattr(head, name))
    score = getattr(getattr(getattr(model, "roi_heads", None), "box_predictor", None), "cls_score", None)
    return int(score.out_features) if isinstance(score, nn.Linear) else None


# Hooks


ALWAYS_ON = ("auto_save_best", "auto_checkpoint")
"""Hooks of United Perception whose behaviour is built in: the best checkpoint is kept, an interrupted run saves."""


class Hook:
    """Base class of hooks; override the methods that you need. Each process has its own hooks.

    `runner.distributed.first` is True on rank 0; `saved` is called there only.
    """

    def train_begins(self, runner: Trainer) -> None: ...

    def iteration_done(self, runner: Trainer) -> None: ...

    def tested(self, runner: Trainer, metrics: Mapping[str, float]) -> None: ...

    def saved(self, runner: Trainer, path: Path) -> None: ...

    def train_ends(self, runner: Trainer) -> None: ...


def build_hooks(named: Sequence[Named], trust: Trust) -> list[Hook]:
    """The hooks that a config names as `package.module:Class`."""
    hooks: list[Hook] = []
    for index, entry in enumerate(named):
        with within("hooks", index):
            if entry.type not in ALWAYS_ON:
                hooks.append(_build_hook(entry, f"hooks.{index}.type", trust))
    return hooks


def import_subclass(path: str, base: type[T], key: str, trust: Trust, public_name: str) -> type[T]:
    """Import the class `package.module:Class` that a config names, a subclass of `gossamer.runner.{public_name}`."""
    value = imported(path, trust, key=key)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise GossamerError(f"'{path}' is not a subclass of gossamer.runner.{public_name}")
    return value


def _build_hook(entry: Named, key: str, trust: Trust) -> Hook:
    with within("type"):
        if ":" not in entry.type:
            raise GossamerError(
                f"no '{entry.type}'{nearest(entry.type, ALWAYS_ON)}; "
                f"there are {', '.join(ALWAYS_ON)}, and your own as package.module:Class"
            )
        kind = import_subclass(entry.type, Hook, key, trust, "Hook")
    try:
        return kind(**entry.kwargs)
    except TypeError as error:
        raise GossamerError(f"{entry.type}: {error}", "kwargs") from error
