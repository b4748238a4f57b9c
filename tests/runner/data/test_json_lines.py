from __future__ import annotations

import math

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import JsonLines
from gossamer.runner.data import Batches, build_dataset
from tests.runner.data.files import instance, json_lines, picture, record


@pytest.fixture
def folder(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    return tmp_path


def read(path, classes=None, num_classes=None, **settings):
    source = JsonLines(type="json_lines", path=path, **settings)
    return build_dataset(source, task="detection", classes=classes, num_classes=num_classes)


def boxes(data, index=0):
    target = data[index][1]
    return target["boxes"].tolist(), target["labels"].tolist()


def test_each_line_is_an_image_with_its_boxes(folder):
    path = json_lines(
        folder, record(instance((2, 3, 7, 7), 1), instance((0, 0, 4, 4), 3)), "", record(filename="b.png")
    )
    data = read(path)
    assert len(data) == 2
    assert boxes(data, 0) == ([[2, 3, 7, 7], [0, 0, 4, 4]], [1, 3])
    assert boxes(data, 1) == ([], [])
    assert data.classes == ["1", "2", "3"]


def test_labels_may_count_from_zero(folder):
    data = read(json_lines(folder, record(instance(label=0), instance(label=1))), first_label=0)
    assert boxes(data)[1] == [1, 2]
    assert data.classes == ["0", "1"]


def test_ignored_boxes_are_passed_to_tests_and_kept_from_training(folder):
    path = json_lines(folder, record(instance(is_ignored=True), instance((0, 0, 4, 4), 2, is_ignored=False)))
    source = JsonLines(type="json_lines", path=path)
    (test,) = Batches(read(path), source, train=False, seed=0).epoch(0)
    (train,) = Batches(read(path), source, train=True, seed=0).epoch(0)
    assert test.targets[0]["iscrowd"].tolist() == [1, 0]
    assert train.targets[0]["labels"].tolist() == [2]


BAD_INSTANCES = [
    (instance((2, 3, 2, 7)), "boxes without area, left out", r"the box \[2, 3, 2, 7\] \(x1, y1, x2, y2\) has no area"),
    (instance((7, 3, 2, 7)), "boxes without area, left out", "has no area"),
    (instance((2, 3, math.nan, 7)), "boxes with NaN or infinity, left out", "is not finite"),
    (instance((2, 3, 7)), "boxes that are not four numbers, left out", "is not four numbers"),
    (instance((30, 3, 40, 7)), "boxes outside their image, left out", "lies outside its image of 20 × 10"),
    (instance(label=0), "labels out of range, left out", "the label 0 is not between 1 and 2"),
    (instance(label=3), "labels out of range, left out", "the label 3 is not between 1 and 2"),
    (instance(label="cat"), "labels that are not integers, left out", "the label 'cat' is not an integer"),
    (instance(label=1.5), "labels that are not integers, left out", "the label 1.5 is not an integer"),
    (instance(label=None), "labels that are not integers, left out", "the label None is not an integer"),
    (5, "instances that are not objects, left out", "expected an instance, found 5"),
]


@pytest.mark.parametrize(("bad", "note", "sentence"), BAD_INSTANCES)
def test_a_bad_instance_is_skipped_and_counted_or_refused_with_its_line(folder, bad, note, sentence):
    path = json_lines(folder, record(filename="b.png"), record(instance((0, 0, 2, 2), 2), bad))
    data = read(path, num_classes=2)
    assert boxes(data, 1) == ([[0, 0, 2, 2]], [2])
    assert [each.split("; ")[0] for each in data.notes] == [f"{note}: 1"]
    with pytest.raises(GossamerError, match=rf"boxes\.jsonl:2: .*{sentence}"):
        read(path, num_classes=2, on_error="refuse")


BAD_LINES = [
    (record(filename="gone.png"), "missing images, left out", "no such image: .*gone.png"),
    (record(), "repeated images, left out", "is listed twice"),
    ({"instances": []}, "lines without filename or instances, left out", "expected an object with 'filename'"),
    ({"filename": "b.png", "instances": 3}, "lines without filename or instances, left out", "a list 'instances'"),
    ([], "lines without filename or instances, left out", "expected an object with 'filename'"),
]


@pytest.mark.parametrize(("bad", "note", "sentence"), BAD_LINES)
def test_a_bad_line_is_skipped_and_counted_or_refused_with_its_line(folder, bad, note, sentence):
    path = json_lines(folder, record(instance()), bad)
    data = read(path)
    assert len(data) == 1
    assert [each.split("; ")[0] for each in data.notes] == [f"{note}: 1"]
    with pytest.raises(GossamerError, match=rf"boxes\.jsonl:2: .*{sentence}"):
        read(path, on_error="refuse")


def test_a_box_partly_outside_is_clamped_and_counted_or_refused(folder):
    path = json_lines(folder, record(instance((-5, 3, 7, 70))))
    data = read(path)
    assert boxes(data)[0] == [[0, 3, 7, 10]]
    assert data.notes[0].startswith("boxes partly outside their image, clamped: 1")
    with pytest.raises(GossamerError, match=r"boxes\.jsonl:1: .* reaches outside"):
        read(path, on_error="refuse")


def test_a_size_that_is_none_is_counted_and_boxes_are_clamped_to_the_file(folder):
    path = json_lines(folder, record(instance((2, 3, 70, 7)), height=-1))
    data = read(path)
    assert data.notes[0].startswith("invalid sizes, ignored: 1")
    assert boxes(data)[0] == [[2, 3, 20, 7]]


def test_a_line_that_is_not_json_is_refused_in_both_modes(folder):
    path = json_lines(folder, record(), '{"filename": "b.png", }')
    for mode in ("skip", "refuse"):
        with pytest.raises(GossamerError, match=r"boxes\.jsonl:2:\d+: not valid JSON"):
            read(path, on_error=mode)


def test_a_test_set_has_no_more_classes_than_training(folder):
    data = read(json_lines(folder, record(instance(label=1), instance(label=3))), classes=["cat", "dog"])
    assert data.classes == ["cat", "dog"]
    assert boxes(data)[1] == [1]
