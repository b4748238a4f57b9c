"""Encodes nested states as JSON values and named tensors, and decodes them to the same bits.

JSON types stand for themselves; every other value is an object with one key, its type. The format is our own because
`torch.save` is a pickle: this grammar is closed, so that decoding a file from someone else runs no code and needs no
more memory than the file has.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.io import DTYPES

MODEL = "model"
"""The key of a state whose tensors keep their plain names."""
MAX_INT = 2**53
"""Integers below this are exact in every JSON reader. No count in a checkpoint is larger."""

_DEEPEST = 100
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered"}
_MAPPING_OF = {name: kind for kind, name in _MAPPINGS.items()}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_FLOAT = re.compile(r"[0-9a-f]{16}")


class DecodingError(GossamerError):
    """Values and tensors that `encode` cannot have written; the message names the part."""


def encode(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """JSON values and the tensors that they name, without copies.

    Raises for the first value that cannot be encoded, with its path in the state. A parameter becomes a tensor.
    """
    tensors: dict[str, Tensor] = {}
    model = state.get(MODEL)
    if isinstance(model, Mapping):  # first, so that nothing else takes their names
        for key, value in cast(Mapping[Any, Any], model).items():
            if isinstance(value, Tensor) and _is_plain(key):
                tensors[key] = value
    return _encode(dict(state), (), tensors), tensors


def decode(text: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `encode` was given. The tensors are not copied.

    The input may come from anyone: what `encode` cannot have written raises `DecodingError` with its path, and each
    tensor is used exactly once, so that a small file cannot need much memory.
    """
    unused = dict(tensors)
    value = _decode(text, (), unused)
    if unused:
        raise DecodingError(f"nothing uses the tensor {_shown(next(iter(unused)))}")
    return value


def _encode(value: Any, at: tuple[Any, ...], tensors: dict[str, Tensor]) -> Any:
    if len(at) > _DEEPEST:
        raise _refused(at[:4], f"is nested more than {_DEEPEST} deep, or holds itself", "flatten it")
    kind = cast(type[Any], type(value))
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -MAX_INT < value < MAX_INT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is list or kind is tuple:
        items = [_encode(item, (*at, index), tensors) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in _MAPPINGS:
        entries = [(key, _encode(item, (*at, key), tensors)) for key, item in value.items() if _check_key(key, at)]
        named = all(type(key) is str for key, _ in entries)
        return {_MAPPINGS[kind]: dict(entries) if named else [list(entry) for entry in entries]}
    if isinstance(value, Tensor):
        return _encode_tensor(value, at, tensors)
    raise _refused(at, f"is of type {kind.__name__}", "give numbers, text, tensors, or lists and dicts of these")


def _check_key(key: Any, at: tuple[Any, ...]) -> bool:
    if type(key) is str or (type(key) is int and abs(key) < MAX_INT):
        return True
    raise _refused(at, f"has a key of type {type(key).__name__}", "give it a name or a number")


def _encode_tensor(value: Tensor, at: tuple[Any, ...], tensors: dict[str, Tensor]) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise _refused(at, f"is a tensor of the class {type(value).__name__}", "gather it to a plain tensor first")
    if value.layout != torch.strided or value.is_meta or value.dtype not in DTYPES:
        kind = f"{value.layout}, {value.dtype}, {value.device}"
        raise _refused(at, f"is a tensor of the kind '{kind}'", "make it a dense tensor of numbers")
    if len(at) == 2 and at[0] == MODEL and _is_plain(at[1]):
        name = at[1]
    else:
        plain = "@/" + "/".join(map(str, at)).encode("ascii", "backslashreplace").decode()
        name, count = plain, 1
        while name in tensors:
            count += 1
            name = f"{plain}~{count}"
        tensors[name] = value
    order = _FORMATS.get(value.ndim)
    if order is not None and not value.is_contiguous() and value.is_contiguous(memory_format=order):
        return {"tensor": [name, "channels_last"]}
    return {"tensor": name}


def _decode(text: Any, at: tuple[Any, ...], unused: dict[str, Tensor]) -> Any:
    if len(at) > _DEEPEST:
        raise _unreadable(at[:4], f"is nested more than {_DEEPEST} deep")
    if text is None or type(text) in (bool, str):
        return text
    if (type(text) is int and -MAX_INT < text < MAX_INT) or (type(text) is float and math.isfinite(text)):
        return text
    if type(text) is list:
        return [_decode(item, (*at, index), unused) for index, item in enumerate(cast(list[Any], text))]
    if type(text) is not dict or len(cast(dict[str, Any], text)) != 1:
        raise _unreadable(at, "is not a value")
    ((kind, content),) = cast(dict[str, Any], text).items()
    if kind in _MAPPING_OF:
        return _MAPPING_OF[kind](
            (key, _decode(item, (*at, key), unused)) for key, item in _decoded_entries(content, at)
        )
    if kind == "tuple" and type(content) is list:
        return tuple(_decode(content, at, unused))
    if kind == "tensor":
        return _decode_tensor(content, at, unused)
    if kind == "int" and type(content) is str and _INT.fullmatch(content) and abs(int(content, 16)) >= MAX_INT:
        return int(content, 16)
    if kind == "float" and type(content) is str and _FLOAT.fullmatch(content):
        value: float = struct.unpack(">d", bytes.fromhex(content))[0]
        if not math.isfinite(value):
            return value
    raise _unreadable(at, f"is not a value of the type {_shown(kind)}")


def _decoded_entries(content: Any, at: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Keys and encoded values of a dict. Integers below 2**53 have distinct hashes, so that no key takes long."""
    if type(content) is dict:
        return list(cast(dict[str, Any], content).items())
    pairs: list[Any] = cast(list[Any], content) if type(content) is list else [None]
    if not all(type(pair) is list and len(cast(list[Any], pair)) == 2 for pair in pairs):
        raise _unreadable(at, "has keys without values")
    keys: list[Any] = [key for key, _ in pairs]
    if not all(type(key) is str or (type(key) is int and abs(key) < MAX_INT) for key in keys):
        raise _unreadable(at, "has a key that is neither text nor a number")
    if len(set(keys)) != len(keys):
        raise _unreadable(at, "has a key twice")
    return pairs


def _decode_tensor(content: Any, at: tuple[Any, ...], unused: dict[str, Tensor]) -> Tensor:
    entries = cast(list[Any], content) if type(content) is list else [content]
    name = entries[0] if entries[1:] in ([], ["channels_last"]) and entries else None
    if type(name) is not str or name not in unused:
        raise _unreadable(at, f"names a tensor that is missing or used already: {_shown(name)}")
    tensor = unused.pop(name)
    if len(entries) == 1:
        return tensor
    if tensor.ndim not in _FORMATS:
        raise _unreadable(at, f"has {tensor.ndim} dimensions, and channels are the last of 4 or 5")
    return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])


def _is_plain(key: Any) -> bool:
    """Whether a name in the model can be a tensor's name in the file."""
    if type(key) is not str or key.startswith("@/") or key == "__metadata__":
        return False
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in key)


def _refused(at: tuple[Any, ...], what: str, remedy: str) -> GossamerError:
    return GossamerError(f"{_path(at)} {what}, which a checkpoint cannot hold; {remedy}")


def _unreadable(at: tuple[Any, ...], what: str) -> DecodingError:
    return DecodingError(f"{_path(at)} {what}")


def _path(keys: tuple[Any, ...]) -> str:
    """The path of a value, as `state['optimizer']['state'][0]`."""
    return "state" + "".join(f"[{key}]" if type(key) is int else f"[{_shown(key)}]" for key in keys)


def _shown(value: Any) -> str:
    """A value from a file for a message: short, and without control characters."""
    return f"'{ascii(value)[1:-1][:60]}'" if type(value) is str else type(value).__name__
