from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gossamer.runner.data.loader import full_batches, in_order, shuffled

counts = st.integers(1, 200)
sizes = st.integers(1, 9)
worlds = st.integers(1, 5)


@given(counts, sizes, worlds, st.integers(-3, 3), st.integers(0, 4))
def test_ranks_share_the_global_batches_of_one_rank(count, size, world, seed, epoch):
    alone = shuffled(count, size * world, seed=seed, epoch=epoch)
    shares = [shuffled(count, size, seed=seed, epoch=epoch, rank=rank, world=world) for rank in range(world)]
    assert {len(share) for share in shares} == {len(alone)} == {full_batches(count, size, world)}
    for number, batch in enumerate(alone):
        together = [index for share in shares for index in share[number]]
        assert set(together) == set(batch)
        if count >= world:
            assert len(together) == len(batch)


@given(counts, sizes, worlds)
def test_no_rank_is_without_an_image_in_training(count, size, world):
    for rank in range(world):
        for batch in shuffled(count, size, seed=0, epoch=0, rank=rank, world=world):
            assert 1 <= len(batch) <= size


@given(counts, sizes)
def test_an_epoch_of_training_shows_no_image_twice(count, size):
    shown = [index for batch in shuffled(count, size, seed=0, epoch=3) for index in batch]
    assert len(shown) == len(set(shown)) > count - size


@given(counts, sizes, worlds)
def test_a_test_shows_each_image_on_one_rank_once(count, size, world):
    shown = [
        index for rank in range(world) for batch in in_order(count, size, rank=rank, world=world) for index in batch
    ]
    assert sorted(shown) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [shuffled(50, 50, seed=seed, epoch=epoch)[0] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert shuffled(50, 50, seed=1, epoch=1) == [orders[3]]
