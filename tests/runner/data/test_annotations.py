"""COCO files and JSON lines: their boxes, and what is skipped or refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Coco, JsonLines
from gossamer.runner.data import Batches, build_dataset
from tests.runner.data.files import annotation, coco, instance, json_lines, picture, record


def read_coco(path, classes=None, num_classes=None, **settings):
    source = Coco(type="coco", path=path, **settings)
    return build_dataset(source, task="detection", classes=classes, num_classes=num_classes)


def boxes(data, index=0):
    target = data[index][1]
    return target["boxes"].tolist(), target["labels"].tolist()


def test_boxes_become_corners_and_labels_follow_the_ids_of_categories(tmp_path):
    path = coco(tmp_path, [annotation((2, 3, 5, 4)), annotation((0, 0, 1.5, 2), id=2, category_id=7)])
    data = read_coco(path)
    assert data.classes == ["cat", "dog"]
    assert boxes(data) == ([[2, 3, 7, 7], [0, 0, 1.5, 2]], [1, 2])
    assert data[0][0].shape == (3, 10, 20)
    assert data.notes == []


def test_boxes_find_their_images_whatever_the_order(tmp_path):
    images = [{"id": name, "file_name": f"{name}.png"} for name in (30, 10, 20)]
    for each in images:
        picture(tmp_path / "images" / each["file_name"])
    marks = [(20, 1), (30, 2), (20, 3), (10, 4)]
    found = [annotation((x, 0, 2, 2), id=number, image_id=image) for number, (image, x) in enumerate(marks)]
    data = read_coco(coco(tmp_path, found, images), images=tmp_path / "images")
    assert [[box[0] for box in boxes(data, index)[0]] for index in range(3)] == [[2], [4], [1, 3]]
    assert [data[index][1]["image_id"].item() for index in range(3)] == [0, 1, 2]
    first = read_coco(tmp_path / "boxes.json", images=tmp_path / "images", limit=2)
    assert [[box[0] for box in boxes(first, index)[0]] for index in range(len(first))] == [[2], [4]]


NOT_NUMBERS = "boxes that are not four finite numbers, left out"
BAD = [
    (annotation((2, 3, 0, 4)), "boxes without area, left out", r"annotation 1: the box \[2, 3, 0, 4\] has no area"),
    (annotation((math.nan, 3, 5, 4)), NOT_NUMBERS, "annotation 1: the box .* is not four finite numbers"),
    (annotation((2, 3, 5)), NOT_NUMBERS, r"annotation 1: the box \[2, 3, 5\] is not"),
    (annotation([10**400, 3, 5, 4]), NOT_NUMBERS, "annotation 1: the box .* is not four"),
    (annotation(None), NOT_NUMBERS, "annotation 1: the box nothing is not"),
    (annotation((25, 3, 5, 4)), "boxes outside their image, left out", "annotation 1: .* lies outside .* 20 × 10"),
    (annotation(category_id=4), "annotations of unknown categories, left out", "annotation 1: unknown category 4"),
    (annotation(image_id=2), "annotations of unknown images, left out", "annotation 1: unknown image 2"),
    (annotation(id=9), "annotations with a repeated id, left out", "annotation 9: the id is used twice"),
    ("text", "annotations that are not objects, left out", "annotation number 2: expected an object"),
]


@pytest.mark.parametrize(("bad", "note", "message"), BAD)
def test_a_bad_annotation_is_skipped_and_counted_or_refused_by_its_id(tmp_path, bad, note, message):
    path = coco(tmp_path, [annotation((1, 1, 2, 2), id=9), bad])
    data = read_coco(path)
    assert boxes(data) == ([[1, 1, 3, 3]], [1])
    assert [each.split("; ")[0] for each in data.notes] == [f"{note}: 1"]
    with pytest.raises(GossamerError, match=rf"boxes\.json: {message}"):
        read_coco(path, on_error="refuse")


def test_a_box_partly_outside_is_clamped_and_counted_or_refused(tmp_path):
    path = coco(tmp_path, [annotation((-3, 3, 8, 4)), annotation((15, 5, 10, 10), id=2)])
    data = read_coco(path)
    assert boxes(data)[0] == [[0, 3, 5, 7], [15, 5, 20, 10]]
    assert data.notes[0].startswith("boxes partly outside their image, clamped: 2; the first: ")
    with pytest.raises(GossamerError, match=r"annotation 1: .* reaches outside its image of 20 × 10"):
        read_coco(path, on_error="refuse")


def test_a_box_that_rounding_pushed_outside_is_clamped_in_both_modes(tmp_path):
    path = coco(tmp_path, [annotation((15, 5, 5.4, 5))])
    for mode in ("skip", "refuse"):
        data = read_coco(path, on_error=mode)
        assert boxes(data)[0] == [[15, 5, 20, 10]]
        assert data.notes == []


def test_an_image_without_boxes_left_stays_as_a_negative(tmp_path):
    data = read_coco(coco(tmp_path, [annotation((2, 3, 0, 4))]))
    target = data[0][1]
    assert target["boxes"].shape == (0, 4)
    assert target["labels"].shape == target["iscrowd"].shape == (0,)


def test_a_missing_image_is_counted_once_however_many_boxes_it_has(tmp_path):
    picture(tmp_path / "a.png")
    images = [{"id": 1, "file_name": "gone.png"}, {"id": 2, "file_name": "a.png"}]
    path = coco(tmp_path, [annotation(id=1), annotation(id=2), annotation(id=3, image_id=2)], images)
    data = read_coco(path)
    assert len(data) == 1
    assert boxes(data)[1] == [1]
    assert [note.split("; ")[0] for note in data.notes] == ["missing images, left out: 1"]
    with pytest.raises(GossamerError, match=r"boxes\.json: image 1: no such image: .*gone\.png"):
        read_coco(path, on_error="refuse")


@pytest.mark.parametrize(
    ("image", "note"),
    [
        ({"id": 1, "file_name": "a.png"}, "images with a repeated id, left out: 1"),
        ({"id": 2}, "images without id or file_name, left out: 1"),
        ({"file_name": "a.png"}, "images without id or file_name, left out: 1"),
        ({"id": 2, "file_name": "a.png", "width": "20", "height": 10}, "invalid sizes, ignored: 1"),
    ],
)
def test_a_bad_image_record_is_counted_or_refused(tmp_path, image, note):
    picture(tmp_path / "a.png")
    path = coco(tmp_path, [], [{"id": 1, "file_name": "a.png"}, image])
    assert [each.split("; ")[0] for each in read_coco(path).notes] == [note]
    with pytest.raises(GossamerError, match=r"boxes\.json: image "):
        read_coco(path, on_error="refuse")


def test_a_wrong_declared_size_is_noted_with_the_batch_or_refused(tmp_path):
    picture(tmp_path / "a.png", width=16, height=10)
    path = coco(tmp_path, [annotation((2, 3, 18, 4))], [{"id": 1, "file_name": "a.png", "width": 20, "height": 10}])
    source = Coco(type="coco", path=path)
    data = read_coco(path)
    (batch,) = Batches(data, source, train=True, seed=0).epoch(0)
    assert batch.notes == [f"{tmp_path}/a.png: the image is 16 × 10 pixels, but its annotation says 20 × 10"]
    assert batch.targets[0]["boxes"].tolist() == [[2, 3, 16, 7]]
    refusing = read_coco(path, on_error="refuse")
    with pytest.raises(GossamerError, match="annotation says 20 × 10"):
        refusing[0]


def test_boxes_outside_an_image_of_undeclared_size_are_noted_when_it_is_read(tmp_path):
    picture(tmp_path / "a.png")
    found = [annotation((15, 3, 18, 4)), annotation((30, 3, 5, 4), id=2), annotation((0, 0, 2, 2), id=3)]
    path = coco(tmp_path, found, [{"id": 1, "file_name": "a.png"}])
    (batch,) = Batches(read_coco(path), Coco(type="coco", path=path), train=True, seed=0).epoch(0)
    assert batch.targets[0]["boxes"].tolist() == [[15, 3, 20, 7], [0, 0, 2, 2]]
    assert batch.notes == [f"{tmp_path}/a.png: 2 of its boxes reach outside the image of 20 × 10 pixels"]


def test_crowds_are_passed_to_tests_and_kept_from_training(tmp_path):
    path = coco(tmp_path, [annotation((2, 3, 5, 4), iscrowd=1), annotation((0, 0, 2, 2), id=2, category_id=7)])
    source = Coco(type="coco", path=path)
    data = read_coco(path)
    (test,) = Batches(data, source, train=False, seed=0).epoch(0)
    (train,) = Batches(data, source, train=True, seed=0).epoch(0)
    assert test.targets[0]["iscrowd"].tolist() == [1, 0]
    assert test.targets[0]["labels"].tolist() == [1, 2]
    assert train.targets[0]["labels"].tolist() == [2]
    assert train.targets[0]["boxes"].tolist() == [[0, 0, 2, 2]]


def test_a_test_set_takes_the_classes_of_training_by_name(tmp_path):
    path = coco(tmp_path, [annotation(category_id=7), annotation(id=2, category_id=3)])
    data = read_coco(path, classes=["bird", "dog", "cow"])
    assert data.classes == ["bird", "dog", "cow"]
    assert boxes(data)[1] == [2]
    assert "the training set has no class 'cat'" in data.notes[0]
    with pytest.raises(GossamerError, match=r"annotation 2: the training set has no class 'cat'"):
        read_coco(path, classes=["bird", "dog", "cow"], on_error="refuse")


def test_two_categories_of_one_name_stay_two_classes(tmp_path):
    path = coco(tmp_path, [annotation()], categories=[{"id": 3, "name": "cat"}, {"id": 5, "name": "cat"}, {"id": 6}])
    assert read_coco(path).classes == ["cat (3)", "cat (5)", "6"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": [],\n "annotations": [}', r"boxes\.json:2:18: not valid JSON: expecting value"),
        ("", r"boxes\.json:1:1: not valid JSON"),
        ("[" * 100_000, r"boxes\.json:1: cannot parse the JSON"),
        ("[]", "expected a COCO object with images, annotations and categories"),
        (
            '{"images": [], "annotation": [], "categories": []}',
            "expected a list 'annotations'; nearest: 'annotation'",
        ),
        ('{"images": [], "annotations": [], "categories": [{"name": "a"}]}', "the id of a category is not an integer"),
        ('{"images": [], "annotations": [], "categories": [{"id": 1}, {"id": 1}]}', "two categories have the id 1"),
        ('{"images": [], "annotations": [], "categories": []}', "no image can be used"),
    ],
)
def test_a_file_that_is_not_coco_is_refused_in_both_modes(tmp_path, text, message):
    (tmp_path / "boxes.json").write_text(text)
    for mode in ("skip", "refuse"):
        with pytest.raises(GossamerError, match=message):
            read_coco(tmp_path / "boxes.json", on_error=mode)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    with pytest.raises(GossamerError, match=r"cannot read the annotations \(No such file"):
        read_coco(tmp_path / "boxes.json")
    (tmp_path / "boxes.json").write_bytes(json.dumps({"images": []}).encode("utf-16"))
    with pytest.raises(GossamerError, match="the text is not UTF-8"):
        read_coco(tmp_path / "boxes.json")


def test_more_categories_than_the_config_counts_is_an_error(tmp_path):
    with pytest.raises(GossamerError, match=r"has 2 classes, but num_classes is 1; set 'num_classes: 2'"):
        read_coco(coco(tmp_path, [annotation()]), num_classes=1)


@pytest.fixture
def folder(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    return tmp_path


def read_lines(path, classes=None, num_classes=None, **settings):
    source = JsonLines(type="json_lines", path=path, **settings)
    return build_dataset(source, task="detection", classes=classes, num_classes=num_classes)


def test_each_line_is_an_image_with_its_boxes(folder):
    path = json_lines(
        folder, record(instance((2, 3, 7, 7), 1), instance((0, 0, 4, 4), 3)), "", record(filename="b.png")
    )
    data = read_lines(path)
    assert len(data) == 2
    assert boxes(data, 0) == ([[2, 3, 7, 7], [0, 0, 4, 4]], [1, 3])
    assert boxes(data, 1) == ([], [])
    assert data.classes == ["1", "2", "3"]


def test_labels_may_count_from_zero_and_boxes_be_ignored(folder):
    records = record(instance(label=0, is_ignored=True), instance(label=1.0))
    data = read_lines(json_lines(folder, records), first_label=0)
    assert boxes(data)[1] == [1, 2]
    assert data[0][1]["iscrowd"].tolist() == [1, 0]
    assert data.classes == ["0", "1"]


BAD_INSTANCES = [
    (instance((2, 3, 2, 7)), "boxes without area, left out", r"the box \[2, 3, 2, 7\] has no area"),
    (instance(label=0), "invalid labels, left out", "expected a label from 1 to 2, found 0"),
    (instance(label=3), "invalid labels, left out", "expected a label from 1 to 2, found 3"),
    (instance(label="cat"), "invalid labels, left out", "expected a label from 1 to 2, found 'cat'"),
    (instance(label=1.5), "invalid labels, left out", "expected a label from 1 to 2, found 1.5"),
    (5, "instances that are not objects, left out", "expected an instance, found 5"),
]


@pytest.mark.parametrize(("bad", "note", "message"), BAD_INSTANCES)
def test_a_bad_instance_is_skipped_and_counted_or_refused_with_its_line(folder, bad, note, message):
    path = json_lines(folder, record(filename="b.png"), record(instance((0, 0, 2, 2), 2), bad))
    data = read_lines(path, num_classes=2)
    assert boxes(data, 1) == ([[0, 0, 2, 2]], [2])
    assert [each.split("; ")[0] for each in data.notes] == [f"{note}: 1"]
    with pytest.raises(GossamerError, match=rf"boxes\.jsonl:2: .*{message}"):
        read_lines(path, num_classes=2, on_error="refuse")


BAD_LINES = [
    (record(filename="gone.png"), "missing images, left out", "no such image: .*gone.png"),
    (record(), "repeated images, left out", "is listed twice"),
    ({"instances": []}, "lines without filename or instances, left out", "expected an object with 'filename'"),
    ([], "lines without filename or instances, left out", "expected an object with 'filename'"),
]


@pytest.mark.parametrize(("bad", "note", "message"), BAD_LINES)
def test_a_bad_line_is_skipped_and_counted_or_refused_with_its_line(folder, bad, note, message):
    path = json_lines(folder, record(instance()), bad)
    data = read_lines(path)
    assert len(data) == 1
    assert [each.split("; ")[0] for each in data.notes] == [f"{note}: 1"]
    with pytest.raises(GossamerError, match=rf"boxes\.jsonl:2: .*{message}"):
        read_lines(path, on_error="refuse")


def test_a_size_that_is_none_is_counted_and_boxes_are_clamped_to_the_file(folder):
    path = json_lines(folder, record(instance((2, 3, 70, 7)), height=-1))
    data = read_lines(path)
    assert data.notes[0].startswith("invalid sizes, ignored: 1")
    assert boxes(data)[0] == [[2, 3, 20, 7]]


def test_a_line_that_is_not_json_is_refused_in_both_modes(folder):
    path = json_lines(folder, record(), '{"filename": "b.png", }')
    for mode in ("skip", "refuse"):
        with pytest.raises(GossamerError, match=r"boxes\.jsonl:2:\d+: not valid JSON"):
            read_lines(path, on_error=mode)


def test_a_test_set_has_no_more_classes_than_training(folder):
    data = read_lines(json_lines(folder, record(instance(label=1), instance(label=3))), classes=["cat", "dog"])
    assert data.classes == ["cat", "dog"]
    assert boxes(data)[1] == [1]


numbers = st.floats(-50, 50, width=16)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=30))
def test_boxes_are_kept_exactly_if_they_meet_their_image_and_lie_inside_it_then(folder, added):
    data = read_lines(json_lines(folder, record(*(instance(box) for box in added))))
    cut = [
        [min(max(x1, 0), 20), min(max(y1, 0), 10), min(max(x2, 0), 20), min(max(y2, 0), 10)] for x1, y1, x2, y2 in added
    ]
    assert boxes(data)[0] == [box for box in cut if box[0] < box[2] and box[1] < box[3]]
