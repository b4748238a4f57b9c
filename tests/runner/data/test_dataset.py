from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Digits, ImageFolder, Scenes
from gossamer.runner.data import Batches, build_dataset
from tests.runner.data.files import noisy_picture, picture, truncated_picture

VARIED = [{"RandomCrop": {"size": 8, "padding": 2}}, {"ColorJitter": {"brightness": 0.5}}, "RandomErasing"]


def digits(transforms=(), **settings):
    source = Digits(type="digits", split="test", transforms=list(transforms), **settings)
    return source, build_dataset(source, task="classification", seed=5)


def test_augmentation_is_the_same_for_an_epoch_and_index_and_differs_between_epochs():
    _, data = digits(VARIED)
    first = data[(2, 7)][0]
    data[(0, 0)]
    assert torch.equal(data[(2, 7)][0], first)
    assert not torch.equal(data[(3, 7)][0], first)
    other = build_dataset(Digits(type="digits", split="test", transforms=VARIED), task="classification", seed=6)
    assert not torch.equal(other[(2, 7)][0], first)


def test_neighbours_are_augmented_differently():
    source = Scenes(type="scenes", split="train", size=64, transforms=["RandomHorizontalFlip"])
    data = build_dataset(source, task="detection")
    plain = build_dataset(source.model_copy(update={"transforms": []}), task="detection")
    flipped = [not torch.equal(data[(0, index)][0], plain[index][0]) for index in range(20)]
    assert 3 < sum(flipped) < 17


@pytest.mark.parametrize("transforms", [[], VARIED])
def test_reading_leaves_the_global_random_states_alone(transforms):
    source, data = digits(transforms)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    data[(1, 2)]
    list(Batches(data, source, train=True, seed=3).epoch(0))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_the_random_state_is_restored_when_a_transform_fails():
    _, data = digits([{"RandomCrop": {"size": 9}}])
    state = torch.get_rng_state()
    with pytest.raises(GossamerError, match=r"digits, test: image 3: the transforms fail on this image: .*crop size"):
        data[3]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_is_what_its_samples_are():
    _, data = digits([*VARIED, {"Resize": {"size": [12, 12]}}, {"Normalize": {"mean": [0.5] * 3, "std": [0.2] * 3}}])
    keys = [(1, index) for index in range(10)]
    batch = data.read_batch(keys, train=True)
    assert torch.equal(batch.images, torch.stack([data[key][0] for key in keys]))
    assert batch.targets.tolist() == [data[key][1] for key in keys]


def test_torchs_own_loader_takes_the_dataset():
    _, data = digits()
    images, labels = next(iter(DataLoader(data, batch_size=4)))
    assert images.shape == (4, 3, 8, 8)
    assert labels.dtype == torch.int64
    with pytest.raises(IndexError):
        data[len(data)]


def folder(path, **settings):
    source = ImageFolder(type="image_folder", path=path, **settings)
    return source, build_dataset(source, task="classification")


def test_a_truncated_image_is_left_out_of_its_batch_and_reported_or_refused(tmp_path):
    noisy_picture(tmp_path / "cat" / "a.png")
    truncated_picture(tmp_path / "cat" / "b.png")
    noisy_picture(tmp_path / "dog" / "c.png")
    source, data = folder(tmp_path)
    (batch,) = Batches(data, source, train=False, seed=0).epoch(0)
    assert len(batch) == 2
    assert batch.targets.tolist() == [0, 1]
    assert len(batch.skipped) == 1
    assert "b.png: cannot read the image" in batch.skipped[0]
    source, data = folder(tmp_path, on_error="refuse")
    with pytest.raises(GossamerError, match=r"b\.png: cannot read the image .*; correct it, or set 'on_error: skip'"):
        list(Batches(data, source, train=False, seed=0).epoch(0))


def test_an_image_that_goes_away_during_a_run_is_reported(tmp_path):
    gone = picture(tmp_path / "cat" / "a.png")
    picture(tmp_path / "cat" / "b.png")
    source, data = folder(tmp_path)
    gone.unlink()
    (batch,) = Batches(data, source, train=False, seed=0).epoch(0)
    assert batch.skipped == [f"{gone}: no such image"]


def test_in_training_the_next_image_stands_in_for_a_batch_that_cannot_be_read(tmp_path):
    truncated_picture(tmp_path / "cat" / "a.png")
    picture(tmp_path / "cat" / "b.png")
    source, data = folder(tmp_path, batch_size=1)
    batches = list(Batches(data, source, train=True, seed=0).epoch(0))
    assert [len(batch) for batch in batches] == [1, 1]
    assert torch.equal(batches[0].images, batches[1].images)
    assert sum(len(batch.skipped) for batch in batches) == 1


def test_in_a_test_a_batch_that_cannot_be_read_is_empty(tmp_path):
    truncated_picture(tmp_path / "cat" / "a.png")
    source, data = folder(tmp_path)
    (batch,) = Batches(data, source, train=False, seed=0).epoch(0)
    assert len(batch) == 0
    assert len(batch.skipped) == 1


def test_data_without_any_image_left_are_an_error(tmp_path):
    truncated_picture(tmp_path / "cat" / "a.png")
    source, data = folder(tmp_path)
    with pytest.raises(GossamerError, match=r"none of the 1 images can be read; the first: .*truncated"):
        list(Batches(data, source, train=True, seed=0).epoch(0))


def test_images_of_several_sizes_need_a_transform_that_ends_in_one(tmp_path):
    picture(tmp_path / "cat" / "a.png", width=20)
    picture(tmp_path / "cat" / "b.png", width=30)
    source, data = folder(tmp_path)
    with pytest.raises(GossamerError, match=r"differ in shape: \(3, 10, 20\) and \(3, 10, 30\); add a transform"):
        list(Batches(data, source, train=True, seed=0).epoch(0))
    source, data = folder(tmp_path, transforms=["RandomVerticalFlip", {"Resize": {"size": [5, 5]}}])
    (batch,) = Batches(data, source, train=True, seed=0).epoch(0)
    assert batch.images.shape == (2, 3, 5, 5)


def test_a_source_of_the_other_task_is_an_error():
    with pytest.raises(GossamerError, match=r"'digits' data is not for detection; use one of coco, json_lines, scenes"):
        build_dataset(Digits(type="digits", split="test"), task="detection")


def test_a_limit_keeps_the_first_images():
    _, whole = digits()
    _, first = digits(limit=7)
    assert len(first) == 7
    assert all(torch.equal(first[index][0], whole[index][0]) for index in range(7))
