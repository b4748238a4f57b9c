"""The random numbers of a process: seeding them, saving and restoring where they are."""

from __future__ import annotations

import math
import random
import struct
from typing import Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

_LENGTH = 624
"""Integers in the state of a Mersenne Twister, which all three draw from."""


_TORCH_BYTES = 5056
"""Length of the state of torch's generator: seed, numbers left, whether seeded, next number, the integers, and more."""


class RandomStates(TypedDict):
    """Where Python's, numpy's and torch's random numbers are."""

    python: tuple[Any, ...]
    numpy: list[Any]
    torch: Tensor
    cuda: list[Tensor]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> RandomStates:
    """Where Python's, numpy's and torch's random numbers are."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def checked_random_states(value: Any) -> RandomStates:
    """A value that `random_states` may have returned; raises `ValueError` for any other.

    The libraries check little themselves: a position behind the end would have them read memory that is not theirs.
    """
    if not isinstance(value, dict) or set(cast(dict[Any, Any], value)) != set(RandomStates.__annotations__):
        raise ValueError("expected those of python, numpy, torch and cuda")
    states = cast(dict[str, Any], value)
    for key, fits in (("python", _is_python), ("numpy", _is_numpy), ("torch", _is_torch), ("cuda", _is_cuda)):
        if not fits(states[key]):
            raise ValueError(f"that of {key} is none")
    return cast(RandomStates, states)


def restore_random_states(states: RandomStates) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][0].cpu())


def _is_python(value: Any) -> bool:
    if not isinstance(value, tuple) or len(cast(tuple[Any, ...], value)) != 3:
        return False
    version, internal, gauss = cast(tuple[Any, ...], value)
    if version != 3 or not isinstance(internal, tuple) or len(cast(tuple[Any, ...], internal)) != _LENGTH + 1:
        return False
    *keys, position = cast(tuple[Any, ...], internal)
    return all(type(key) is int and 0 <= key < 2**32 for key in keys) and _is_position(position) and _is_gauss(gauss)


def _is_numpy(value: Any) -> bool:
    if not isinstance(value, list) or len(cast(list[Any], value)) != 5:
        return False
    kind, keys, position, has_gauss, gauss = cast(list[Any], value)
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or keys.shape != (_LENGTH,):
        return False
    if int(keys.min()) < 0 or int(keys.max()) >= 2**32:
        return False
    fits = type(has_gauss) is int and has_gauss in (0, 1) and gauss is not None
    return kind == "MT19937" and _is_position(position) and fits and _is_gauss(gauss)


def _is_torch(value: Any) -> bool:
    """Whether this is the state of torch's generator on the CPU, whose next number is one of those it holds."""
    expected = torch.get_rng_state()
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != expected.shape:
        return False
    if value.numel() != _TORCH_BYTES:
        return True  # a layout that is not known here
    left, seeded, following = struct.unpack_from("=iiQ", value.contiguous().numpy().tobytes(), 8)
    return seeded == 1 and 1 <= left <= _LENGTH and following <= (_LENGTH if left == 1 else _LENGTH + 1 - left)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(state, Tensor) and state.dtype == torch.uint8 and state.shape == _cuda_shape()
        for state in cast(list[Any], value)
    )


def _cuda_shape() -> torch.Size:
    return torch.cuda.get_rng_state().shape if torch.cuda.is_available() else torch.Size((16,))


def _is_position(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LENGTH


def _is_gauss(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value))
