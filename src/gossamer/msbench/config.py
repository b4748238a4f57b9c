"""Check MSBench configs: the classes that a config names, and their arguments.

A config is a dict as in MSBench's documentation and is not changed. All of its problems are raised together.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gossamer.errors import MAX_SUGGESTED, GossamerError, Location, Problems, nearest
from gossamer.quantities import Sparsity
from gossamer.validation import problems_of

PARTS = ("mask_generator", "fake_sparse", "scheduler")
KEYS = (*PARTS, "leaf_module", "fuse_bn", "sparsity")
LOCATION = Location("sparsity_config")
"""The location of problems in messages."""

_NOT_SUPPORTED = {"prun_hw_aware": "it needs a proprietary program of the chip vendor"}
_DEFAULTS = {"mask_generator": "NormalMaskGenerator", "fake_sparse": "FakeSparse", "scheduler": "BaseScheduler"}
_ALIASES = {"DefaultFakeSparse": "FakeSparse"}


class Config:
    """A checked config: for each part its class and the arguments of that class."""

    def __init__(self, given: object, classes: Mapping[str, Mapping[str, type]]) -> None:
        problems = Problems()
        config = _unnested(given)
        for key in [key for key in config if key not in KEYS][:MAX_SUGGESTED]:
            problems.add(f"unknown key{nearest(str(key), KEYS)}", str(key), fix=f"choose one of {', '.join(KEYS)}")
        if config.get("scheduler") is None:
            problems.add("missing key", "scheduler", fix="set {'type': 'AmbaLevelPruneScheduler', 'kwargs': …}")
        if config.get("fuse_bn") is not None and config["fuse_bn"] is not False:
            fix = "fuse with torch.nn.utils.fusion before, or leave it out"
            problems.add("not supported", "fuse_bn", fix=fix)
        self.given = copy_config(config)
        self.types: dict[str, type] = {}
        self.kwargs: dict[str, dict[str, Any]] = {}
        for part in PARTS:
            kind, kwargs = _part(part, config.get(part), classes[part], problems)
            if kind is not None:
                self.types[part] = kind
                self.kwargs[part] = check_arguments(kind, kwargs, problems, part, "kwargs")
        self.leaves: list[Any] = list(_leaves(config.get("leaf_module"), problems))
        self.sparsity: dict[str, Any] = _sparsity(config.get("sparsity"), problems)
        problems.raise_if_any()

    def overridden(self, given: object) -> dict[str, Any]:
        """This config with parts replaced by those of another one; arguments of a part of the same type are merged."""
        merged = {**self.given, **_unnested(given)}
        for part in PARTS:
            own, other = self.given.get(part), merged.get(part)
            if not (isinstance(own, Mapping) and isinstance(other, Mapping)):
                continue
            before, after = cast(Mapping[str, Any], own), cast(Mapping[str, Any], other)
            kwargs: Any = before.get("kwargs") or {}, after.get("kwargs") or {}
            if after.get("type", before.get("type")) == before.get("type") and isinstance(kwargs[1], Mapping):
                merged[part] = {**before, **after, "kwargs": {**kwargs[0], **kwargs[1]}}
        return merged

    def custom_classes(self) -> list[str]:
        """The names of registered classes that do not come with Gossamer."""
        return [kind.__name__ for kind in self.types.values() if not kind.__module__.startswith("gossamer.")]


def _unnested(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise GossamerError(f"expected a dict with the key 'scheduler', found {type(given).__name__}")
    config = cast(Mapping[str, Any], given)
    inner = config.get("sparsity")
    if "scheduler" not in config and isinstance(inner, Mapping) and "scheduler" in inner:
        return dict(cast(Mapping[str, Any], inner))  # the part `sparsity` of a training config
    return dict(config)


def _part(
    part: str, given: object, classes: Mapping[str, type], problems: Problems
) -> tuple[type | None, Mapping[str, Any]]:
    """The class that a part names, and its keyword arguments."""
    if given is None:
        return (None if part == "scheduler" else classes[_DEFAULTS[part]]), {}
    if not isinstance(given, Mapping):
        problems.add(f"expected {{'type': …, 'kwargs': {{…}}}}, found {type(given).__name__}", part)
        return None, {}
    entries = cast(Mapping[str, Any], given)
    for key in [key for key in entries if key not in ("type", "kwargs")][:MAX_SUGGESTED]:
        close = nearest(str(key), ("type", "kwargs"))
        problems.add(f"unknown key{close}", part, str(key), fix="put arguments into 'kwargs'")
    name = entries.get("type", _DEFAULTS[part])
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in classes:
        fix = f"choose one of {', '.join(classes)}"
        problems.add(f"unknown type {name!r}{nearest(str(name), classes)}", part, "type", fix=fix)
        return None, {}
    kwargs: object = {} if entries.get("kwargs") is None else entries["kwargs"]
    if not isinstance(kwargs, Mapping):
        problems.add(f"expected a dict, found {type(kwargs).__name__}", part, "kwargs")
        return classes[name], {}
    return classes[name], cast(Mapping[str, Any], kwargs)


def check_arguments(kind: type, given: Mapping[str, Any], problems: Problems, *key: str) -> dict[str, Any]:
    """Arguments of a class converted to the types that its `__init__` declares; their problems are below `key`."""
    fields = _keyword_fields(kind)
    fix = f"choose one of {', '.join(fields)}" if fields else f"{kind.__name__} takes no arguments"
    for name in [name for name in given if name not in fields][:MAX_SUGGESTED]:
        if name in _NOT_SUPPORTED:
            problems.add(f"not supported: {_NOT_SUPPORTED[name]}", *key, name, fix="leave it out")
        else:
            problems.add(f"unknown key{nearest(str(name), fields)}", *key, str(name), fix=fix)
    values: dict[str, Any] = {}
    for name, (hint, required) in fields.items():
        if name not in given:
            if required:
                problems.add("missing key", *key, name)
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
            values[name] = adapter.validate_python(copy_config(given[name]))
        except ValidationError as error:
            problems.extend(problems_of(error, given[name]), *key, name)
    return values


def _keyword_fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The keyword-only arguments of `__init__` by name, each with its type and whether it is required.

    If `__init__` takes `**kwargs`, the arguments of the base class are included.
    """
    fields: dict[str, tuple[Any, bool]] = {}
    for base in kind.__mro__:
        init = base.__dict__.get("__init__")
        if init is None or base is object:
            continue
        hints = get_type_hints(init, include_extras=True)
        parameters = list(inspect.signature(init).parameters.values())
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY:
                required = parameter.default is parameter.empty
                fields.setdefault(parameter.name, (hints.get(parameter.name, Any), required))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return fields


class _SparsityArguments:
    """The keys of `sparsity` in a config."""

    def __init__(self, *, target_sparsity: Sparsity, uniform: bool = True) -> None: ...


def _leaves(given: object, problems: Problems) -> Sequence[Any]:
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence):
        problems.add(f"expected a list of classes or dotted names, found {given!r}", "leaf_module")
        return []
    return cast(Sequence[Any], given)


def _sparsity(given: object, problems: Problems) -> dict[str, Any]:
    """`{'target_sparsity': 0.9, 'uniform': True}`, which some schedulers use."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.add(f"expected {{'target_sparsity': …, 'uniform': …}}, found {given!r}", "sparsity")
        return {}
    return check_arguments(_SparsityArguments, cast(Mapping[str, Any], given), problems, "sparsity")


def copy_config(value: Any) -> Any:
    """A copy of the dicts and lists of a config; classes and tensors in it are not copied."""
    if isinstance(value, Mapping):
        return {key: copy_config(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [copy_config(inner) for inner in cast(Sequence[Any], value)]
    return value
