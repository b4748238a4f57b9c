"""Every bit of a tensor comes back from a mask and values, whatever its numbers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.export.weights import packing
from gossamer.sparse import NM

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool]


class Bytes:
    """What a file gives, piece by piece."""

    def __init__(self, pieces: list[np.ndarray]) -> None:
        self.content = np.concatenate([piece.view(np.uint8) for piece in pieces])
        self.at = 0

    def __call__(self, count: int) -> np.ndarray:
        self.at += count
        assert self.at <= len(self.content)
        return self.content[self.at - count : self.at]


def masked(tensor: Tensor) -> Tensor:
    numbers = packing.bits(tensor)
    out = torch.full_like(numbers, 77).reshape(-1)  # what was there before must not matter
    mask, values = Bytes(list(packing.mask_chunks(numbers))), Bytes(list(packing.nonzero_chunks(numbers)))
    packing.unpack_masked(out.numpy(), mask, values)
    assert (mask.at, values.at) == (len(mask.content), len(values.content))
    assert packing.count_set_bits(mask.content) * tensor.element_size() == len(values.content)
    return out.reshape(tensor.shape)


def halved(tensor: Tensor, axis: int) -> Tensor:
    numbers = packing.bits(tensor)
    moved = numbers.movedim(axis, -1)
    out = torch.full_like(numbers, 77).reshape(-1)
    positions = Bytes(list(packing.position_chunks(numbers, axis)))
    values = Bytes(list(packing.half_chunks(numbers, axis)))
    assert packing.are_positions(positions.content)
    assert len(values.content) * 2 == tensor.numel() * tensor.element_size()
    packing.unpack_halves(out.numpy(), positions, values)
    return out.reshape(moved.shape).movedim(-1, axis)


@given(st.sampled_from(DTYPES), st.integers(1, 70), st.integers(0, 2**32), st.floats(0, 1))
def test_any_bits_come_back_from_a_mask(dtype: torch.dtype, count: int, seed: int, share: float) -> None:
    chance = np.random.default_rng(seed)
    content = chance.integers(0, 2 if dtype == torch.bool else 256, count * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(content).view(dtype)
    packing.bits(tensor)[torch.from_numpy(chance.random(count) < share)] = 0
    assert torch.equal(masked(tensor), packing.bits(tensor))


@given(st.sampled_from(DTYPES[:6]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_any_bits_with_two_of_four_come_back_from_halves(
    dtype: torch.dtype, rows: int, groups: int, kernel: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    content = chance.integers(0, 256, rows * groups * 4 * kernel * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(content).view(dtype).reshape(rows, groups * 4, kernel)
    order = torch.from_numpy(chance.random((rows, groups, 4, kernel)).argsort(2)).reshape(tensor.shape)
    kept = int(chance.integers(0, 3))  # groups with fewer than two as well
    packing.bits(tensor)[order >= kept] = 0
    assert packing.is_two_of_four(packing.bits(tensor), 1)
    assert torch.equal(halved(tensor, 1), packing.bits(tensor))
    turned = tensor.transpose(0, 1).contiguous()
    assert torch.equal(halved(turned, 0), packing.bits(turned))


def test_tensors_larger_than_a_piece_come_back() -> None:
    weight = torch.randn(3, 4 * (packing.CHUNK // 8 + 3))
    weight = torch.where(NM(2, 4).keep_largest(weight), weight, 0.0)
    assert weight.numel() > packing.CHUNK
    assert torch.equal(masked(weight), packing.bits(weight))
    assert torch.equal(halved(weight, 1), packing.bits(weight))


@pytest.mark.parametrize(("row", "fits"), [([1, 0, 0, 2], True), ([0, 0, 0, 0], True), ([1, 2, 0, 3], False)])
def test_two_of_four_is_told_apart(row: list[float], fits: bool) -> None:
    assert packing.is_two_of_four(packing.bits(torch.tensor([[1.0, 2, 0, 0, *row]])), 1) is fits


def test_minus_zero_counts_as_a_number() -> None:
    row = torch.tensor([[1.0, 2.0, -0.0, 0.0]])
    assert not packing.is_two_of_four(packing.bits(row), 1)
    assert torch.count_nonzero(packing.bits(row)) == 3
    assert torch.equal(masked(row), packing.bits(row))


def test_places_out_of_order_are_no_positions() -> None:
    good = np.array([0b0100_0100], np.uint8)  # 0 and 1, twice
    assert packing.are_positions(good)
    for byte in (0b0100_0001, 0b0000_0100, 0b0101_0100):
        assert not packing.are_positions(np.array([byte], np.uint8))
