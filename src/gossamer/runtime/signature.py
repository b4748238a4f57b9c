"""The arguments of an engine: those of the example, by position or by name, as the model's `forward` takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch.utils._pytree as pytree

from gossamer.errors import GossamerError, nearest


@dataclass(frozen=True)
class Signature:
    """How the arguments of a call become inputs of the graph."""

    args: tuple[Any, ...] = ()
    """The example's arguments by position, with the names of inputs instead of values."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The example's arguments by keyword, likewise."""
    parameters: tuple[str, ...] = ()
    """The names of forward's arguments by position; fewer than `args` if forward takes `*args`."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By input that is not a tensor: its value, which is the same in every call."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By argument that the example leaves out: forward's default, which may be given too."""

    @property
    def names(self) -> list[str]:
        """The arguments for messages."""
        known = self.parameters[: len(self.args)]
        return [*known, *(f"argument {k + 1}" for k in range(len(known), len(self.args))), *self.kwargs]

    @property
    def input_names(self) -> list[str]:
        """The inputs of the graph, in order."""
        return list(_names((self.args, self.kwargs)))

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all inputs. Raises `GossamerError` for arguments that are not those of the example."""
        slots: dict[int | str, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        found: dict[int | str, Any] = {}
        for k, value in enumerate(args):
            name = self.parameters[k] if k < len(self.parameters) else ""
            slot = k if k < len(self.args) else name
            if slot not in slots:
                if self._is_default(name, value):
                    continue
                raise GossamerError(f"{len(args)} arguments were given; {self._expected()}")
            found[slot] = value
        positions = {name: k for k, name in enumerate(self.parameters[: len(self.args)])}
        for name, value in kwargs.items():
            slot = positions.get(name, name)
            if slot not in slots:
                if self._is_default(name, value):
                    continue
                raise GossamerError(f"unexpected argument '{name}'{nearest(name, self.names)}; {self._expected()}")
            if slot in found:
                raise GossamerError(f"argument '{name}' was given twice, by position and by name")
            found[slot] = value
        values: dict[str, Any] = {}
        for (slot, structure), label in zip(slots.items(), self.names, strict=True):
            names = list(_names(structure))
            if slot in found:
                values |= _matched(found[slot], structure, label)
            elif any(name not in self.fixed for name in names):
                raise GossamerError(f"'{label}' is missing; {self._expected()}")
            else:
                values |= {name: self.fixed[name] for name in names}
            for name in names:
                if name in self.fixed and not _same(values[name], self.fixed[name]):
                    expected = self.fixed[name]
                    message = f"'{label}': the engine is compiled for {expected!r}, found {_short(values[name])}"
                    raise GossamerError(f"{message}; compile the model with this value in example_inputs")
        return values

    def _is_default(self, name: str, value: Any) -> bool:
        return name in self.defaults and _same(value, self.defaults[name])

    def _expected(self) -> str:
        return f"the engine takes {', '.join(self.names)}, as in its example_inputs"


def signature_of(
    forward: Callable[..., Any], arguments: tuple[tuple[Any, ...], Mapping[str, Any]], fixed: Mapping[str, Any]
) -> Signature:
    """The signature for an example; `arguments` has the names of inputs instead of values."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters
    args, kwargs = arguments
    names = tuple(name for name, parameter in parameters.items() if parameter.kind in kinds)
    present = {*names[: len(args)], *kwargs}
    absent = {name: parameter.default for name, parameter in parameters.items() if name not in present}
    defaults = {name: default for name, default in absent.items() if isinstance(default, _PLAIN)}
    plain = {name: _plain(value) for name, value in kwargs.items()}
    return Signature(tuple(_plain(value) for value in args), plain, names, fixed, defaults)


def positional(names: Sequence[str]) -> Signature:
    """The signature of a graph whose inputs are its arguments."""
    return Signature(tuple(names), {}, tuple(names))


def _plain(value: Any) -> Any:
    """Names in tuples and dicts, whatever held them."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    parts = cast(Sequence[Any], value) if isinstance(value, list | tuple) else pytree.tree_leaves(value)
    return tuple(_plain(item) for item in parts)


def _names(structure: Any) -> Iterator[str]:
    if isinstance(structure, str):
        yield structure
        return
    parts = cast(Mapping[str, Any], structure).values() if isinstance(structure, Mapping) else structure
    for part in parts:
        yield from _names(part)


def _matched(value: Any, structure: Any, label: str) -> dict[str, Any]:
    """By input: the part of a value that it is."""
    if isinstance(structure, str):
        return {structure: value}
    if isinstance(structure, Mapping):
        expected = cast(Mapping[str, Any], structure)
        if not isinstance(value, Mapping) or set(cast(Mapping[str, Any], value)) != set(expected):
            raise GossamerError(f"'{label}': expected a mapping with the keys {', '.join(map(str, expected))}")
        parts = [(cast(Mapping[str, Any], value)[key], part) for key, part in expected.items()]
    else:
        items = cast(Sequence[Any], value) if isinstance(value, list | tuple) else pytree.tree_leaves(value)
        if len(items) != len(structure):
            raise GossamerError(f"'{label}': expected {len(structure)} values as in the example, found {len(items)}")
        parts = list(zip(items, structure, strict=True))
    return {name: item for part, inner in parts for name, item in _matched(part, inner, label).items()}


def _same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and bool(value == expected)


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


_PLAIN = bool | int | float | str | None
