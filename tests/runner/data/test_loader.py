"""The batches of each rank: their order, and reading them here or in worker processes."""

from __future__ import annotations

import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Digits, ImageFolder, Scenes
from gossamer.runner.data import Batch, Batches, build_dataset
from gossamer.runner.data.dataset import in_order, packed, shuffled, unpacked
from tests.runner.data.files import noisy_picture, truncated_picture

VARIED = [{"RandomCrop": {"size": 8, "padding": 2}}, "RandomErasing"]


def digits(**settings):
    source = Digits(type="digits", **({"split": "test", "batch_size": 50, "transforms": VARIED} | settings))
    return source, build_dataset(source, task="classification")


def scenes(**settings):
    transforms = ["RandomHorizontalFlip"]
    settings = {"split": "train", "count": 9, "size": 48, "batch_size": 2, "transforms": transforms} | settings
    source = Scenes(type="scenes", **settings)
    return source, build_dataset(source, task="detection")


def same(first: Batch, second: Batch) -> bool:
    if isinstance(first.images, torch.Tensor):
        return torch.equal(first.images, second.images) and torch.equal(first.targets, second.targets)
    return len(first) == len(second) and all(
        torch.equal(a, b) and s.keys() == t.keys() and all(torch.equal(s[key], t[key]) for key in s)
        for a, b, s, t in zip(first.images, second.images, first.targets, second.targets, strict=True)
    )


def all_same(first, second) -> bool:
    return all(same(a, b) for a, b in itertools.zip_longest(first, second))


@pytest.mark.parametrize("kind", [digits, scenes])
def test_an_epoch_from_a_later_batch_is_the_tail_of_the_whole(kind):
    source, data = kind()
    batches = Batches(data, source, train=True, seed=1)
    whole = list(batches.epoch(3))
    assert len(whole) == batches.batches_per_epoch > 2
    assert all_same(batches.epoch(3, start=2), whole[2:])
    assert not same(next(batches.epoch(4)), whole[0])


def test_ranks_share_the_batch_of_one():
    source, data = digits(batch_size=20)
    big = source.model_copy(update={"batch_size": 60})
    alone = Batches(data, big, train=True, seed=1)
    ranks = [Batches(data, source, train=True, seed=1, rank=rank, world=3) for rank in range(3)]
    assert {each.batches_per_epoch for each in ranks} == {alone.batches_per_epoch}
    for whole, *shares in zip(alone.epoch(0), *(each.epoch(0) for each in ranks), strict=True):
        assert torch.equal(torch.cat([share.images for share in shares]), whole.images)


def test_a_test_shows_every_image_once_over_all_ranks():
    source, data = scenes(transforms=[])
    ranks = [Batches(data, source, train=False, seed=1, rank=rank, world=2) for rank in range(2)]
    shown = [target["image_id"].item() for each in ranks for batch in each.epoch(0) for target in batch.targets]
    assert sorted(shown) == list(range(9))
    assert [each.batches_per_epoch for each in ranks] == [3, 2]


def test_workers_give_the_same_batches_and_leave_random_states_alone():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for kind in (digits, scenes):
        source, data = kind()
        here = Batches(data, source, train=True, seed=1)
        workers = Batches(data, source.model_copy(update={"num_workers": 2}), train=True, seed=1)
        assert all_same(workers.epoch(0), here.epoch(0))
        next(workers.epoch(1))  # an epoch that is left early does not disturb the next
        assert all_same(workers.epoch(2, start=1), here.epoch(2, start=1))
        workers.close()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_workers_tell_what_they_skip_and_refuse_in_one_message(tmp_path):
    noisy_picture(tmp_path / "cat" / "a.png")
    truncated_picture(tmp_path / "cat" / "b.png")
    source = ImageFolder(type="image_folder", path=tmp_path, num_workers=1, batch_size=2)
    (batch,) = Batches(build_dataset(source, task="classification"), source, train=False, seed=0).epoch(0)
    assert len(batch) == 1
    assert "b.png: cannot read the image" in batch.skipped[0]
    source = source.model_copy(update={"on_error": "refuse"})
    with pytest.raises(GossamerError, match=r"^\S*b\.png: cannot read the image .*correct it") as caught:
        list(Batches(build_dataset(source, task="classification"), source, train=False, seed=0).epoch(0))
    assert "\n" not in str(caught.value)


def begun_with_a_worker():
    source, data = scenes(num_workers=1, count=40)
    batches = Batches(data, source, train=True, seed=1)
    epoch = batches.epoch(0)
    next(epoch)
    (worker,) = batches._loader._iterator._workers
    return batches, epoch, worker


def test_an_interrupted_worker_goes_on():
    batches, epoch, worker = begun_with_a_worker()
    os.kill(worker.pid, signal.SIGINT)
    assert len(list(epoch)) == batches.batches_per_epoch - 1


@pytest.mark.slow
def test_a_killed_worker_is_one_error():
    _, epoch, worker = begun_with_a_worker()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(GossamerError, match=r"a worker process that reads images ended .*lower 'num_workers'"):
        list(epoch)


def test_a_batch_of_a_detector_survives_its_parcel():
    source, data = scenes()
    for batch in Batches(data, source, train=True, seed=1).epoch(0):
        batch.skipped.append("one")
        again = unpacked(packed(batch))
        assert same(again, batch)
        assert again.skipped == ["one"]


def test_a_batch_moves_with_all_that_it_holds():
    source, data = digits()
    batch = next(Batches(data, source, train=True, seed=1).epoch(0))
    moved = batch.to("meta", channels_last=True)
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert moved.images.device.type == moved.targets.device.type == "meta"
    source, data = scenes()
    moved = next(Batches(data, source, train=True, seed=1).epoch(0)).to("meta", channels_last=True)
    assert {image.device.type for image in moved.images} == {"meta"}
    assert {value.device.type for target in moved.targets for value in target.values()} == {"meta"}


def test_fewer_images_than_a_batch_make_one_batch():
    source, data = digits(limit=5)
    batches = Batches(data, source, train=True, seed=1)
    assert batches.batches_per_epoch == 1
    assert [len(batch) for batch in batches.epoch(0)] == [5]


counts = st.integers(1, 200)
sizes = st.integers(1, 9)
worlds = st.integers(1, 5)


@given(counts, sizes, worlds, st.integers(-3, 3), st.integers(0, 4))
def test_ranks_share_the_global_batches_of_one_rank(count, size, world, seed, epoch):
    alone = shuffled(count, size * world, seed=seed, epoch=epoch)
    shares = [shuffled(count, size, seed=seed, epoch=epoch, rank=rank, world=world) for rank in range(world)]
    assert {len(share) for share in shares} == {len(alone)} == {max(1, count // (size * world))}
    shown = [index for batch in alone for index in batch]
    assert len(shown) == len(set(shown)) > count - size * world
    for number, batch in enumerate(alone):
        assert all(1 <= len(share[number]) <= size for share in shares)
        together = [index for share in shares for index in share[number]]
        assert set(together) == set(batch)
        if count >= world:
            assert len(together) == len(batch)


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
