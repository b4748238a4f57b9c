"""Every bit of a tensor comes back from a mask and values, whatever its numbers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.export.weights import file

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool]


def masked(tensor: Tensor) -> Tensor:
    numbers = file.bits(tensor)
    out = torch.full_like(numbers, 77).reshape(-1)  # what was there before must not matter
    mask, values = file.pack_mask(numbers)
    assert len(values) == int(torch.count_nonzero(numbers))
    file.unpack_mask(out.numpy(), mask, values.view(np.uint8))
    return out.reshape(tensor.shape)


def halved(tensor: Tensor, axis: int) -> Tensor:
    numbers = file.bits(tensor)
    moved = numbers.movedim(axis, -1)
    out = torch.full_like(numbers, 77).reshape(-1)
    positions, values = file.pack_pairs(numbers, axis)
    assert file.are_positions(positions)
    assert len(values) * 2 == tensor.numel()
    file.unpack_mask(out.numpy(), file._MASKS[positions], values.view(np.uint8))
    return out.reshape(moved.shape).movedim(-1, axis)


@given(st.sampled_from(DTYPES), st.integers(1, 70), st.integers(0, 2**32), st.floats(0, 1))
def test_any_bits_are_restored_from_a_mask(dtype: torch.dtype, count: int, seed: int, share: float) -> None:
    chance = np.random.default_rng(seed)
    content = chance.integers(0, 2 if dtype == torch.bool else 256, count * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(content).view(dtype)
    file.bits(tensor)[torch.from_numpy(chance.random(count) < share)] = 0
    assert torch.equal(masked(tensor), file.bits(tensor))


@given(st.sampled_from(DTYPES[:6]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_any_bits_with_two_of_four_are_restored_from_halves(
    dtype: torch.dtype, rows: int, groups: int, kernel: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    content = chance.integers(0, 256, rows * groups * 4 * kernel * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(content).view(dtype).reshape(rows, groups * 4, kernel)
    order = torch.from_numpy(chance.random((rows, groups, 4, kernel)).argsort(2)).reshape(tensor.shape)
    kept = int(chance.integers(0, 3))  # groups with fewer than two as well
    file.bits(tensor)[order >= kept] = 0
    assert file.is_two_of_four(file.bits(tensor), 1)
    assert torch.equal(halved(tensor, 1), file.bits(tensor))
    turned = tensor.transpose(0, 1).contiguous()
    assert torch.equal(halved(turned, 0), file.bits(turned))


@pytest.mark.parametrize(("row", "fits"), [([1, 0, 0, 2], True), ([0, 0, 0, 0], True), ([1, 2, 0, 3], False)])
def test_two_of_four_is_recognized(row: list[float], fits: bool) -> None:
    assert file.is_two_of_four(file.bits(torch.tensor([[1.0, 2, 0, 0, *row]])), 1) is fits


def test_minus_zero_counts_as_a_number() -> None:
    row = torch.tensor([[1.0, 2.0, -0.0, 0.0]])
    assert not file.is_two_of_four(file.bits(row), 1)
    assert torch.count_nonzero(file.bits(row)) == 3
    assert torch.equal(masked(row), file.bits(row))


def test_places_out_of_order_are_no_positions() -> None:
    good = np.array([0b0100_0100], np.uint8)  # 0 and 1, twice
    assert file.are_positions(good)
    for byte in (0b0100_0001, 0b0000_0100, 0b0101_0100):
        assert not file.are_positions(np.array([byte], np.uint8))
