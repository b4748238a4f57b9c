"""An MSBench config, checked: which classes it names, and with which arguments.

The config is a dict as in MSBench's documentation. It is never changed; all
that is wrong with it is raised together, each problem with its place and the
nearest known name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from torch import Tensor

from gossamer.errors import MAX_SUGGESTED, GossamerError, nearest
from gossamer.quantities import Sparsity
from gossamer.recipe.wording import complaint_words, found_words

PARTS = ("mask_generator", "fake_sparse", "scheduler")
KEYS = (*PARTS, "leaf_module", "fuse_bn", "sparsity")
NAME = "sparsity_config"
T = TypeVar("T")


class Config:
    """A checked config: for each part its class and the arguments that were given to it."""

    def __init__(self, given: Mapping[str, Any], classes: Mapping[str, Mapping[str, type]]) -> None:
        problems: list[str] = []
        config = _unnested(given)
        for key in [key for key in config if key not in KEYS][:MAX_SUGGESTED]:
            problems.append(f"{NAME}: unknown key '{key}'{nearest(str(key), KEYS)}; there are {', '.join(KEYS)}")
        if config.get("scheduler") is None:
            problems.append(f"{NAME}: 'scheduler' is missing; give {{'type': 'AmbaLevelPruneScheduler', 'kwargs': …}}")
        if config.get("fuse_bn") is not None and config["fuse_bn"] is not False:
            problems.append(f"{NAME}: fuse_bn is not offered; fuse with torch.nn.utils.fusion before, or leave it out")
        self.given = copied(config)
        self.types: dict[str, type] = {}
        self.kwargs: dict[str, dict[str, Any]] = {}
        for part in PARTS:
            kind, kwargs = _part(part, config.get(part), classes[part], problems)
            if kind is not None:
                self.types[part] = kind
                self.kwargs[part] = arguments(kind, kwargs, f"{NAME}: {part}.kwargs", problems)
        self.leaves: list[Any] = list(_sequence(config.get("leaf_module"), problems))
        self.sparsity: dict[str, Any] = _sparsity(config.get("sparsity"), problems)
        if problems:
            raise GossamerError("\n".join(problems))

    def overridden(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """This config with the parts that another one names in place of its own."""
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"{NAME}: expected a dict, found {type(given).__name__}")
        merged = {**self.given, **_unnested(given)}
        for part in PARTS:
            own, other = self.given.get(part), merged.get(part)
            if isinstance(own, Mapping) and isinstance(other, Mapping) and other is not own:
                merged[part] = _overlaid(cast(Mapping[str, Any], own), cast(Mapping[str, Any], other))
        return merged


REFUSED = {"prun_hw_aware": "is not offered, for it needs a closed program of the chip's maker; leave it out"}
DEFAULTS = {"mask_generator": "NormalMaskGenerator", "fake_sparse": "FakeSparse"}
ALIASES = {"DefaultFakeSparse": "FakeSparse"}


def _overlaid(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A part with the arguments of another over its own, unless that one is of another type."""
    if other.get("type", own.get("type")) != own.get("type"):
        return dict(other)
    kwargs: Any = (own.get("kwargs") or {}, other.get("kwargs") or {})
    merged = {**kwargs[0], **kwargs[1]} if all(isinstance(part, Mapping) for part in kwargs) else other.get("kwargs")
    return {**own, **other, "kwargs": merged}


def _unnested(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise GossamerError(f"{NAME}: expected a dict with the key 'scheduler', found {type(given).__name__}")
    config = cast(Mapping[str, Any], given)
    inner = config.get("sparsity")
    if "scheduler" not in config and isinstance(inner, Mapping) and "scheduler" in inner:
        return dict(cast(Mapping[str, Any], inner))  # a whole training config, of which this is the part `sparsity`
    return dict(config)


def _part(
    part: str, given: Any, classes: Mapping[str, type], problems: list[str]
) -> tuple[type | None, Mapping[str, Any]]:
    """The class that a part names, and the keyword arguments beside it."""
    if given is None and part in DEFAULTS:
        return classes[DEFAULTS[part]], {}
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        problems.append(f"{NAME}: {part}: expected {{'type': …, 'kwargs': {{…}}}}, found {type(given).__name__}")
        return None, {}
    entries = cast(Mapping[str, Any], given)
    for key in [key for key in entries if key not in ("type", "kwargs")][:MAX_SUGGESTED]:
        close = nearest(str(key), ("type", "kwargs"))
        problems.append(f"{NAME}: {part}: unknown key '{key}'{close}; arguments go into 'kwargs'")
    name = entries.get("type", "BaseScheduler" if part == "scheduler" else DEFAULTS[part])
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in classes:
        known = ", ".join(classes)
        problems.append(f"{NAME}: {part}: unknown type {name!r}{nearest(str(name), classes)}; there are {known}")
        return None, {}
    kwargs: object = {} if entries.get("kwargs") is None else entries["kwargs"]
    if not isinstance(kwargs, Mapping):
        problems.append(f"{NAME}: {part}.kwargs: expected a dict, found {type(kwargs).__name__}")
        return classes[name], {}
    return classes[name], cast(Mapping[str, Any], kwargs)


def arguments(kind: type, given: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The keyword arguments, converted to the types that the class's `__init__` declares."""
    fields = _fields(kind)
    offered = f"there are {', '.join(fields)}" if fields else f"{kind.__name__} takes none"
    for key in [key for key in given if key not in fields][:MAX_SUGGESTED]:
        if key in REFUSED:
            problems.append(f"{where}.{key}: {REFUSED[key]}")
        else:
            problems.append(f"{where}: unknown key '{key}'{nearest(str(key), fields)}; {offered}")
    found: dict[str, Any] = {}
    for key, (hint, required) in fields.items():
        if key not in given:
            problems += [f"{where}.{key}: is missing"] if required else []
            continue
        if kind.__module__.startswith("gossamer.") and hint is not Any and _holds_tensor(given[key]):
            problems.append(f"{where}.{key}: expected plain numbers or text, found a tensor; write its .tolist()")
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
            found[key] = adapter.validate_python(copied(given[key]))
        except ValidationError as error:
            problems.append(f"{where}.{key}: {sentence(error.errors(include_url=False), given[key])}")
    return found


def complaint(details: ErrorDetails) -> str:
    """What a check of several values together found."""
    expected, told = complaint_words(details)
    return told or f"expected {expected}"


def sentence(complaints: Sequence[ErrorDetails], found: object) -> str:
    """What was wrong with one value; the branches of a union become one sentence."""
    words = [complaint_words(details) for details in complaints]
    expected = dict.fromkeys(expected for expected, _ in words if expected is not None)
    if expected:
        return f"expected {' or '.join(expected)}, found {found_words(found)}"
    return f"{words[0][1]}, found {found_words(found)}"


def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """By name, type and whether it must be given: what `__init__` takes as keywords, `**kwargs` being the base's."""
    found: dict[str, tuple[Any, bool]] = {}
    for base in kind.__mro__:
        init = base.__dict__.get("__init__")
        if init is None or base is object:
            continue
        hints = get_type_hints(init, include_extras=True)
        parameters = list(inspect.signature(init).parameters.values())
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY:
                required = parameter.default is parameter.empty
                found.setdefault(parameter.name, (hints.get(parameter.name, Any), required))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def _sequence(given: Any, problems: list[str]) -> Sequence[Any]:
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence):
        problems.append(f"{NAME}: leaf_module: expected a list of classes or dotted names, found {given!r}")
        return []
    return cast(Sequence[Any], given)


def _sparsity(given: Any, problems: list[str]) -> dict[str, Any]:
    """`{'target_sparsity': 0.9, 'uniform': True}`, which some schedulers take."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append(f"{NAME}: sparsity: expected {{'target_sparsity': …, 'uniform': …}}, found {given!r}")
        return {}

    def declared(*, target_sparsity: Sparsity, uniform: bool = True) -> None: ...

    holder = type("sparsity", (), {"__init__": declared})
    return arguments(holder, cast(Mapping[str, Any], given), f"{NAME}: sparsity", problems)


def _holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor or a list with one, which would be taken for the numbers in it."""
    if isinstance(value, list | tuple):
        return any(_holds_tensor(inner) for inner in cast(Sequence[Any], value))
    return isinstance(value, Tensor)


def copied(value: Any) -> Any:
    """A copy of the dicts and lists of a config; what they hold besides (classes, tensors) is the user's own."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [copied(inner) for inner in cast(Sequence[Any], value)]
    return value
