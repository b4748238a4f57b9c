"""Nested states as text and tensors, and back to the bit.

What has a name in JSON stands for itself; everything else is an object with one key, which says what it is. Tensors,
arrays and long bytes are taken out and named. Nothing here knows files, or what a state is for.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.sealed import DTYPES

MODEL = "model"
"""The key of a state whose tensors keep their plain names."""

_DEEPEST = 100
_SHORT = 256
"""Bytes up to this length stand in the text."""
_SAFE = 2**53
"""Integers below this are exact in every reader of JSON."""
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def encode(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Text-like values that `json` can write, and the tensors that they name; nothing is copied that need not be.

    Raises for the first thing that cannot be written, with its place in the state. A parameter becomes a tensor.
    """
    tensors: dict[str, Tensor] = {}
    model = state.get(MODEL)
    if isinstance(model, Mapping):  # these go first, so that nothing else takes their names
        for key, value in cast(Mapping[Any, Any], model).items():
            if isinstance(value, Tensor) and _is_plain(key):
                tensors[key] = value
    encoder = _Encoder(tensors)
    return encoder.value(dict(state), (), 0), tensors


def decode(text: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given. The tensors are used as they are, not copied."""
    if not isinstance(text, dict):
        return [decode(item, tensors) for item in cast(list[Any], text)] if isinstance(text, list) else text
    ((kind, content),) = cast(dict[str, Any], text).items()
    return _READERS[kind](content, tensors)


def place(keys: tuple[Any, ...]) -> str:
    """How one gets to a value inside a state.

    >>> place(("optimizer", "state", 0))
    "state['optimizer']['state'][0]"
    """
    return "state" + "".join(f"[{key!r}]" for key in keys)


def _is_plain(key: Any) -> bool:
    """Whether a name of the model can be a tensor's name in the file."""
    if type(key) is not str or key.startswith("@/") or key == "__metadata__":
        return False
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in key)


class _Encoder:
    """One pass over a state; `tensors` grows on the way."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, value: Any, at: tuple[Any, ...], depth: int) -> Any:
        if depth > _DEEPEST:
            raise _refused(at[:4], f"is nested more than {_DEEPEST} deep, or holds itself", "flatten it")
        kind = cast(type[Any], type(value))
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SAFE < value < _SAFE else {"int": hex(value)}
        if kind is float:
            return value if value - value == 0 else {"float": struct.pack(">d", value).hex()}
        if kind is list:
            return self._items(value, at, depth)
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self._pairs(value, at, depth)}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(list(value), at, depth)}
        if kind is bytes or kind is bytearray:
            return self._bytes(value, at)
        if isinstance(value, Tensor):
            return self._tensor(value, at)
        if isinstance(value, np.ndarray) and kind is np.ndarray:
            return self._array(cast("np.ndarray[Any, Any]", value), at)
        if isinstance(value, np.generic):
            number = cast(Any, value)
            _check_array(number.dtype, at)
            return {"number": [number.dtype.str, number.tobytes().hex()]}
        if kind is torch.dtype or kind is torch.device:
            return {kind.__name__: str(cast(object, value)).removeprefix("torch.")}
        raise _refused(at, f"is of type {kind.__name__}", "give numbers, text, tensors, or lists and dicts of these")

    def _items(self, values: list[Any], at: tuple[Any, ...], depth: int) -> list[Any]:
        return [self.value(item, (*at, index), depth + 1) for index, item in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], at: tuple[Any, ...], depth: int) -> Any:
        if all(type(key) is str for key in values):
            return {key: self.value(item, (*at, key), depth + 1) for key, item in values.items()}
        pairs: list[Any] = []
        for key, item in values.items():
            if isinstance(key, Tensor):
                raise _refused(at, "has a tensor for a key", "give it a number or a name")
            pairs.append([self.value(key, (*at, key), depth + 1), self.value(item, (*at, key), depth + 1)])
        return pairs

    def _bytes(self, value: bytes | bytearray, at: tuple[Any, ...]) -> Any:
        kind = type(value).__name__
        if len(value) <= _SHORT:
            return {kind: value.hex()}
        return {kind: [self._name(_tensor_of(bytes(value)), at)]}

    def _tensor(self, value: Tensor, at: tuple[Any, ...]) -> Any:
        if value.layout != torch.strided or value.is_meta or value.dtype not in DTYPES:
            words = "meta" if value.is_meta else value.layout if value.layout != torch.strided else value.dtype
            words = str(words).removeprefix("torch.")
            raise _refused(at, f"is a tensor of the kind '{words}'", "make it a dense tensor of numbers")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise _refused(at, f"is a tensor of the class {type(value).__name__}", "gather it to a plain tensor first")
        name = at[1] if len(at) == 2 and at[0] == MODEL and _is_plain(at[1]) else self._name(value, at)
        order = _FORMATS.get(value.ndim)
        if order is not None and not value.is_contiguous() and value.is_contiguous(memory_format=order):
            return {"tensor": [name, "channels_last"]}
        return {"tensor": name}

    def _array(self, value: np.ndarray[Any, Any], at: tuple[Any, ...]) -> Any:
        _check_array(value.dtype, at)
        name = self._name(_tensor_of(np.ascontiguousarray(value).tobytes()), at)
        return {"array": [name, value.dtype.str, list(value.shape)]}

    def _name(self, value: Tensor, at: tuple[Any, ...]) -> str:
        name = "@/" + "/".join(str(key) for key in at).encode("ascii", "backslashreplace").decode()
        free, count = name, 1
        while free in self.tensors:
            count += 1
            free = f"{name}~{count}"
        self.tensors[free] = value
        return free


def _refused(at: tuple[Any, ...], what: str, remedy: str) -> GossamerError:
    return GossamerError(f"{place(at)} {what}, which a checkpoint cannot hold; {remedy}")


def _check_array(dtype: np.dtype[Any], at: tuple[Any, ...]) -> None:
    if dtype.kind not in "biufcmMSU" or not dtype.itemsize:
        raise _refused(at, f"is an array of {dtype}", "make it an array of numbers")


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _bytes_of(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    return tensors[name].numpy().tobytes()


def _read_mapping(make: Callable[[], dict[Any, Any]]) -> Callable[[Any, Mapping[str, Tensor]], Any]:
    def read(content: Any, tensors: Mapping[str, Tensor]) -> Any:
        found = make()
        pairs = cast(dict[str, Any], content).items() if isinstance(content, dict) else content
        for key, item in pairs:
            found[key if type(key) is str else decode(key, tensors)] = decode(item, tensors)
        return found

    return read


def _read_bytes(content: Any, tensors: Mapping[str, Tensor]) -> bytes:
    return bytes.fromhex(content) if isinstance(content, str) else _bytes_of(content[0], tensors)


def _read_tensor(content: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    if isinstance(content, str):
        return tensors[content]
    tensor = tensors[content[0]]
    return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])


def _read_array(content: Any, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    name, dtype, shape = content
    return np.ndarray(tuple(shape), np.dtype(dtype), bytearray(_bytes_of(name, tensors)))


def _read_number(content: Any, _: Mapping[str, Tensor]) -> np.generic:
    dtype, text = content
    return np.frombuffer(bytes.fromhex(text), np.dtype(dtype))[0]


def _read_dtype(content: Any, _: Mapping[str, Tensor]) -> torch.dtype:
    found: object = getattr(torch, content)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{content} is no type of numbers")
    return found


_READERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "int": lambda content, _: int(content, 16),
    "float": lambda content, _: struct.unpack(">d", bytes.fromhex(content))[0],
    "dict": _read_mapping(dict),
    "ordered": _read_mapping(OrderedDict),
    "counter": _read_mapping(Counter),
    "tuple": lambda content, tensors: tuple(decode(content, tensors)),
    "size": lambda content, tensors: torch.Size(decode(content, tensors)),
    "set": lambda content, tensors: set(decode(content, tensors)),
    "frozenset": lambda content, tensors: frozenset(decode(content, tensors)),
    "bytes": _read_bytes,
    "bytearray": lambda content, tensors: bytearray(_read_bytes(content, tensors)),
    "tensor": _read_tensor,
    "array": _read_array,
    "number": _read_number,
    "dtype": _read_dtype,
    "device": lambda content, _: torch.device(content),
}
