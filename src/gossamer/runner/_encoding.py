"""Encodes nested states as JSON values and named tensors, and decodes them to the same bits.

JSON types stand for themselves; every other value is an object with one key, its type. Tensors, arrays and long bytes
are stored as tensors. The format is our own because `torch.save` is a pickle: this grammar is closed, so that decoding
a file from someone else runs no code and needs no more memory than the file has.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.io import DTYPES

MODEL = "model"
"""The key of a state whose tensors keep their plain names."""

_DEEPEST = 100
_SHORT = 256
"""Bytes up to this length are written as text."""
MAX_INT = 2**53
"""Integers below this are exact in every JSON reader. No count in a checkpoint is larger."""
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    dtype.str: dtype for code in "?bBhHiIqQefdFD" for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}
"""Numbers only: the bytes of an object array would be used as pointers."""
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype
}
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(?::(\d|[1-9]\d))?")
_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_SAME_HASH = 100
"""More keys of a dict or set with one hash are not a coincidence."""
_DIMENSIONS = 32
"""The maximum of all numpy versions."""


class DecodingError(GossamerError):
    """Values and tensors that `encode` cannot have written; the message names the part."""


def encode(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """JSON values and the tensors that they name, without copies where possible.

    Raises for the first value that cannot be encoded, with its path in the state. A parameter becomes a tensor.
    """
    tensors: dict[str, Tensor] = {}
    model = state.get(MODEL)
    if isinstance(model, Mapping):  # first, so that nothing else takes their names
        for key, value in cast(Mapping[Any, Any], model).items():
            if isinstance(value, Tensor) and _is_plain(key):
                tensors[key] = value
    encoder = _Encoder(tensors)
    return encoder.value(dict(state), (), 0), tensors


def decode(text: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `encode` was given. The tensors are not copied; arrays and bytes are.

    The input may come from anyone: what `encode` cannot have written raises `DecodingError` with its path, and each
    tensor is used exactly once, so that a small file cannot need much memory.
    """
    decoder = _Decoder(dict(tensors))
    value = decoder.value(text, (), 0)
    if decoder.unused:
        raise DecodingError(f"nothing uses the tensor {_shown(next(iter(decoder.unused)))}")
    return value


def format_path(keys: tuple[Any, ...]) -> str:
    """The path of a value in a state.

    >>> format_path(("optimizer", "state", 0))
    "state['optimizer']['state'][0]"
    """
    return "state" + "".join(
        f"[{key!r}]" if type(key) is int and abs(key) < MAX_INT else f"[{_shown(key)}]" for key in keys
    )


def _is_plain(key: Any) -> bool:
    """Whether a name in the model can be a tensor's name in the file."""
    if type(key) is not str or key.startswith("@/") or key == "__metadata__":
        return False
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in key)


class _Encoder:
    """Encodes a state in one pass and adds to `tensors`."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def value(self, value: Any, at: tuple[Any, ...], depth: int) -> Any:
        if depth > _DEEPEST:
            raise _refused(at[:4], f"is nested more than {_DEEPEST} deep, or holds itself", "flatten it")
        kind = cast(type[Any], type(value))
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -MAX_INT < value < MAX_INT else {"int": hex(value)}
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
            layout = "meta" if value.is_meta else value.layout if value.layout != torch.strided else value.dtype
            layout = str(layout).removeprefix("torch.")
            raise _refused(at, f"is a tensor of the kind '{layout}'", "make it a dense tensor of numbers")
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
        name = "@/" + "/".join(_part(key) for key in at).encode("ascii", "backslashreplace").decode()
        free, count = name, 1
        while free in self.tensors:
            count += 1
            free = f"{name}~{count}"
        self.tensors[free] = value
        return free


def _part(key: Any) -> str:
    """A key as part of a tensor's name; Python does not convert integers of thousands of digits."""
    plain = type(key) in (str, bool, float) or key is None or (type(key) is int and abs(key) < MAX_INT)
    return str(key) if plain else cast(type[Any], type(key)).__name__


def _refused(at: tuple[Any, ...], what: str, remedy: str) -> GossamerError:
    return GossamerError(f"{format_path(at)} {what}, which a checkpoint cannot hold; {remedy}")


def _check_array(dtype: np.dtype[Any], at: tuple[Any, ...]) -> None:
    if dtype.str not in _NUMPY_DTYPES:
        raise _refused(at, f"is an array of {dtype}", "make it an array of numbers")


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


class _Decoder:
    """Decodes in one pass and removes from `unused` what it uses."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.unused = tensors

    def value(self, text: Any, at: tuple[Any, ...], depth: int) -> Any:
        if depth > _DEEPEST:
            raise _unreadable(at[:4], f"is nested more than {_DEEPEST} deep")
        if text is None or type(text) in (bool, str):
            return text
        if type(text) is int and -MAX_INT < text < MAX_INT:
            return text
        if type(text) is float and math.isfinite(text):
            return text
        if type(text) is list:
            return self._items(text, at, depth)
        if type(text) is not dict or len(cast(dict[str, Any], text)) != 1:
            raise _unreadable(at, "is not a value")
        ((kind, content),) = cast(dict[str, Any], text).items()
        if kind in _MAPPING_OF:
            return self._mapping(_MAPPING_OF[kind], content, at, depth)
        if kind in _SEQUENCE_OF:
            return self._sequence(_SEQUENCE_OF[kind], content, at, depth)
        reader = _READERS.get(kind)
        if reader is None:
            raise _unreadable(at, f"has the unknown type {_shown(kind)}")
        return reader(self, content, at)

    def _items(self, content: Any, at: tuple[Any, ...], depth: int) -> list[Any]:
        if type(content) is not list:
            raise _unreadable(at, "is not a list")
        return [self.value(item, (*at, index), depth + 1) for index, item in enumerate(cast(list[Any], content))]

    def _mapping(self, kind: type, content: Any, at: tuple[Any, ...], depth: int) -> Any:
        if type(content) is dict:
            pairs = cast(dict[str, Any], content).items()
            return kind({key: self.value(item, (*at, key), depth + 1) for key, item in pairs})
        pairs = self._pairs(content, at)
        keys = [self.value(key, at, depth + 1) for key, _ in pairs]
        self._check_keys(keys, at, "for a key", "has a key twice")
        result = kind()
        for key, (_, item) in zip(keys, pairs, strict=True):
            result[key] = self.value(item, (*at, key), depth + 1)
        return result

    def _pairs(self, content: Any, at: tuple[Any, ...]) -> list[list[Any]]:
        pairs: list[Any] = cast(list[Any], content) if type(content) is list else [None]
        if not all(type(pair) is list and len(cast(list[Any], pair)) == 2 for pair in pairs):
            raise _unreadable(at, "has keys without values")
        return pairs

    def _sequence(self, kind: type[Any], content: Any, at: tuple[Any, ...], depth: int) -> Any:
        items = self._items(content, at, depth)
        if kind is torch.Size and not all(type(item) is int and 0 <= item < MAX_INT for item in items):
            raise _unreadable(at, "is not the size of a tensor")
        if kind in (set, frozenset):
            self._check_keys(items, at, "in a set", "has a value twice in a set")
        return cast(Any, kind)(items)

    def _check_keys(self, keys: list[Any], at: tuple[Any, ...], where: str, twice: str) -> None:
        wrong = next((key for key in keys if not _is_key(key)), None)
        if wrong is not None:
            raise _unreadable(at, f"has a {type(wrong).__name__} {where}")
        # Anyone can compute numbers and tuples with one hash; building a dict or set of n of them takes n² steps.
        if max(Counter(map(hash, keys)).values(), default=0) > _SAME_HASH:
            raise _unreadable(at, f"has more than {_SAME_HASH} keys of one hash")
        if len(set(keys)) != len(keys):
            raise _unreadable(at, twice)

    def read_int(self, content: Any, at: tuple[Any, ...]) -> int:
        if type(content) is not str or not _INT.fullmatch(content) or -MAX_INT < int(content, 16) < MAX_INT:
            raise _unreadable(at, "is not a large integer")
        return int(content, 16)

    def read_float(self, content: Any, at: tuple[Any, ...]) -> float:
        raw = self._hex(content, at)
        value = struct.unpack(">d", raw)[0] if len(raw) == 8 else 0.0
        if math.isfinite(value):
            raise _unreadable(at, "is neither an infinity nor NaN")
        return value

    def read_bytes(self, content: Any, at: tuple[Any, ...]) -> bytes:
        if type(content) is str:
            return self._hex(content, at)
        if type(content) is not list or len(cast(list[Any], content)) != 1:
            raise _unreadable(at, "is not hexadecimal text")
        return self._content(cast(list[Any], content)[0], at)

    def read_bytearray(self, content: Any, at: tuple[Any, ...]) -> bytearray:
        return bytearray(self.read_bytes(content, at))

    def read_tensor(self, content: Any, at: tuple[Any, ...]) -> Tensor:
        if type(content) is not list:
            return self._take(content, at)
        entries = cast(list[Any], content)
        tensor = self._take(entries[0] if len(entries) == 2 and entries[1] == "channels_last" else None, at)
        if tensor.ndim not in _FORMATS:
            raise _unreadable(at, f"has {tensor.ndim} dimensions, and channels are the last of 4 or 5")
        return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])

    def read_array(self, content: Any, at: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        name, kind, shape = self._fields(content, 3, at)
        dtype = self._numbers(kind, at)
        if type(shape) is not list or len(cast(list[Any], shape)) > _DIMENSIONS:
            raise _unreadable(at, "is an array without a shape")
        sizes = cast(list[Any], shape)
        raw = self._content(name, at)
        if not all(type(size) is int and 0 <= size < MAX_INT for size in sizes):
            raise _unreadable(at, "is an array without a shape")
        if math.prod(sizes) * dtype.itemsize != len(raw) or math.prod(max(size, 1) for size in sizes) > MAX_INT:
            raise _unreadable(at, f"is an array of another size than its {len(raw)} bytes")
        return self._array(raw, dtype, at).reshape(sizes)

    def read_number(self, content: Any, at: tuple[Any, ...]) -> np.generic:
        kind, text = self._fields(content, 2, at)
        dtype, raw = self._numbers(kind, at), self._hex(text, at)
        if len(raw) != dtype.itemsize:
            raise _unreadable(at, f"is a number of {len(raw)} bytes instead of {dtype.itemsize}")
        return self._array(raw, dtype, at)[0]

    def read_dtype(self, content: Any, at: tuple[Any, ...]) -> torch.dtype:
        if type(content) is not str or content not in _TORCH_DTYPES:
            raise _unreadable(at, f"is not a dtype: {_shown(content)}")
        return _TORCH_DTYPES[content]

    def read_device(self, content: Any, at: tuple[Any, ...]) -> torch.device:
        match = _DEVICE.fullmatch(content) if type(content) is str else None
        if match is None:
            raise _unreadable(at, f"is not a device: {_shown(content)}")
        return torch.device(match[1]) if match[2] is None else torch.device(match[1], int(match[2]))

    def _fields(self, content: Any, count: int, at: tuple[Any, ...]) -> list[Any]:
        if type(content) is not list or len(cast(list[Any], content)) != count:
            raise _unreadable(at, "is not an array of numbers")
        return cast(list[Any], content)

    def _numbers(self, kind: Any, at: tuple[Any, ...]) -> np.dtype[Any]:
        if type(kind) is not str or kind not in _NUMPY_DTYPES:
            raise _unreadable(at, f"is an array of {_shown(kind)}; arrays are of numbers")
        return _NUMPY_DTYPES[kind]

    def _array(self, raw: bytes, dtype: np.dtype[Any], at: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        if dtype.kind == "b" and raw.strip(b"\0\1"):
            raise _unreadable(at, "has boolean values other than 0 and 1")
        return np.frombuffer(bytearray(raw), dtype)

    def _hex(self, content: Any, at: tuple[Any, ...]) -> bytes:
        if type(content) is not str or not _HEX.fullmatch(content):
            raise _unreadable(at, "is not hexadecimal text")
        return bytes.fromhex(content)

    def _content(self, name: Any, at: tuple[Any, ...]) -> bytes:
        tensor = self._take(name, at)
        if tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise _unreadable(at, "has its bytes in a tensor that is not one of bytes")
        return tensor.numpy().tobytes()

    def _take(self, name: Any, at: tuple[Any, ...]) -> Tensor:
        if type(name) is not str or name not in self.unused:
            raise _unreadable(at, f"names a tensor that is missing or used already: {_shown(name)}")
        return self.unused.pop(name)


def _unreadable(at: tuple[Any, ...], what: str) -> DecodingError:
    return DecodingError(f"{format_path(at)} {what}")


def _shown(value: Any) -> str:
    """A value from a file for a message: short, and without control characters."""
    return f"'{ascii(value)[1:-1][:60]}'" if type(value) is str else type(value).__name__


def _is_key(value: Any) -> bool:
    """Whether a value can be a key of a dict or set: its hash depends on its content."""
    if type(value) in (tuple, frozenset):
        return all(_is_key(item) for item in value)
    return value is None or isinstance(value, _KEYS)


_KEYS = (bool, int, float, str, bytes, torch.Size, np.generic, torch.dtype, torch.device)
_MAPPING_OF = {name: kind for kind, name in _MAPPINGS.items()}
_SEQUENCE_OF = {name: kind for kind, name in _SEQUENCES.items()}
_READERS: dict[str, Callable[[_Decoder, Any, tuple[Any, ...]], Any]] = {
    "int": _Decoder.read_int,
    "float": _Decoder.read_float,
    "bytes": _Decoder.read_bytes,
    "bytearray": _Decoder.read_bytearray,
    "tensor": _Decoder.read_tensor,
    "array": _Decoder.read_array,
    "number": _Decoder.read_number,
    "dtype": _Decoder.read_dtype,
    "device": _Decoder.read_device,
}
