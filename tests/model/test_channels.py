"""The algebra of channels: what is the same moves together, what is told apart does not change places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gossamer.model.tracing.channels import Channels, Factor, Layouts, Operand


def colours(channels: Channels, *factors: Factor) -> list[list[int]]:
    """Numbers instead of colours, for each position."""
    found = channels.resolve([tuple(factors)])
    names: dict[int, int] = {}
    return [
        [names.setdefault(int(found.colour[root]), len(names)) for root in channels.resolved(factor)[0].reshape(-1)]
        for factor in factors
    ]


def test_channels_of_one_dimension_may_change_places_and_those_of_another_may_not_join_them():
    channels = Channels()
    assert colours(channels, channels.fresh(0, 3), channels.fresh(0, 2)) == [[0, 0, 0], [1, 1]]


def test_a_slice_tells_its_channels_from_the_others():
    channels = Channels()
    whole = channels.fresh(0, 4)
    Layouts(channels).gathered((whole,), 0, slice(1, 3))
    assert colours(channels, whole) == [[0, 1, 1, 0]]


def test_held_channels_have_a_colour_each_and_a_reason():
    channels = Channels()
    whole = channels.fresh(0, 3)
    channels.fix(whole, [0], "because")
    found = channels.resolve([(whole,)])
    assert len(set(found.colour.tolist())) == 3
    assert found.reasons.most_common(np.arange(3)) == "because"


def test_channels_held_along_one_dimension_move_along_the_other():
    channels = Channels()
    block = channels.fresh_over([0, 1], [2, 3])
    channels.fix(block, [0], "in its row")
    assert colours(channels, block) == [[0, 0, 0, 1, 1, 1]]
    found = channels.resolve([(block,)])
    assert found.reasons.most_common(np.arange(6)) is None
    assert found.limits.most_common(np.arange(6)) == "in its row"


def test_halves_that_meet_move_together_and_are_two_copies():
    channels = Channels()
    layouts = Layouts(channels)
    whole = channels.fresh(0, 8)
    left, right = (layouts.gathered((whole,), 0, piece) for piece in (slice(0, 4), slice(4, 8)))
    layouts.combined([Operand(left, (4,)), Operand(right, (4,))], (4,), "met")
    roots, labels = channels.resolved(whole)
    assert roots[:4].tolist() == roots[4:].tolist()
    assert len({*zip(roots.tolist(), labels.tolist(), strict=True)}) == 8
    assert colours(channels, whole) == [[0] * 8]


def test_a_tensor_that_meets_itself_backwards_stays_in_place():
    channels = Channels()
    layouts = Layouts(channels)
    whole = channels.fresh(0, 4)
    back = layouts.gathered((whole,), 0, slice(None, None, -1))
    layouts.combined([Operand((whole,), (4,)), Operand(back, (4,))], (4,), "met")
    (found,) = colours(channels, whole)
    assert found[0] == found[3] != found[1] == found[2]


@given(st.lists(st.integers(2, 4), min_size=2, max_size=4), st.data())
def test_views_there_and_back_give_the_same_channels(shape: list[int], data: st.DataObject):
    channels = Channels()
    layouts = Layouts(channels)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = (channels.fresh(dim, shape[dim]),)
    first = data.draw(st.integers(0, len(shape) - 2))
    merged = (*shape[:first], shape[first] * shape[first + 1], *shape[first + 2 :])
    there = layouts.viewed(start, tuple(shape), merged, "view")
    (back,) = layouts.viewed(there, merged, tuple(shape), "view")
    assert back.dims == (dim,)
    assert (back.atoms == start[0].atoms).all()
    assert (back.copies == start[0].copies).all()


def test_copies_over_merged_dimensions_are_labelled_as_over_each():
    channels = Channels()
    one = channels.fresh(0, 3)
    both = one.spread([0, 1, 2], [3, 2, 5])
    merged = one.spread([0, 1], [3, 10])
    assert (both.copies.reshape(3, 10) == merged.copies).all()


def test_copies_of_copies_have_labels_of_their_own():
    channels = Channels()
    twice = channels.fresh(0, 3).spread([0, 1], [3, 4]).spread([0, 1, 2], [3, 4, 4])
    for channel in range(3):
        assert len(np.unique(twice.copies[channel])) == 16
