from __future__ import annotations

import json
import math

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Coco
from gossamer.runner.data import Batches, build_dataset
from tests.runner.data.files import annotation, coco, picture


def read(path, classes=None, num_classes=None, **settings):
    source = Coco(type="coco", path=path, **settings)
    return build_dataset(source, task="detection", classes=classes, num_classes=num_classes)


def boxes(data, index=0):
    target = data[index][1]
    return target["boxes"].tolist(), target["labels"].tolist()


def test_boxes_become_corners_and_labels_follow_the_ids_of_categories(tmp_path):
    path = coco(tmp_path, [annotation((2, 3, 5, 4)), annotation((0, 0, 1.5, 2), id=2, category_id=7)])
    data = read(path)
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
    data = read(coco(tmp_path, found, images), images=tmp_path / "images")
    assert [[box[0] for box in boxes(data, index)[0]] for index in range(3)] == [[2], [4], [1, 3]]
    assert [data[index][1]["image_id"].item() for index in range(3)] == [0, 1, 2]
    first = read(tmp_path / "boxes.json", images=tmp_path / "images", limit=2)
    assert [[box[0] for box in boxes(first, index)[0]] for index in range(len(first))] == [[2], [4]]


BAD = [
    (annotation((2, 3, 0, 4)), "boxes without area, left out", r"annotation 1: the box \[2, 3, 2, 7\] .* has no area"),
    (annotation((2, 3, 5, -4)), "boxes without area, left out", "annotation 1: the box .* has no area"),
    (annotation((math.nan, 3, 5, 4)), "boxes with NaN or infinity, left out", "annotation 1: the box .* is not finite"),
    (annotation((2, 3, math.inf, 4)), "boxes with NaN or infinity, left out", "annotation 1: the box .* is not finite"),
    (annotation((2, 3, 5)), "boxes that are not four numbers, left out", r"annotation 1: the box \[2, 3, 5\] is not"),
    (annotation(["2", 3, 5, 4]), "boxes that are not four numbers, left out", "annotation 1: the box .* is not four"),
    (
        annotation([10**400, 3, 5, 4]),
        "boxes that are not four numbers, left out",
        "annotation 1: the box .* is not four",
    ),
    (
        annotation(None),
        "boxes that are not four numbers, left out",
        "annotation 1: the box nothing is not",
    ),
    (
        annotation((25, 3, 5, 4)),
        "boxes outside their image, left out",
        "annotation 1: .* lies outside its image of 20 × 10",
    ),
    (annotation(category_id=4), "annotations of unknown categories, left out", "annotation 1: unknown category 4"),
    (annotation(category_id=[]), "annotations of unknown categories, left out", "annotation 1: unknown category"),
    (annotation(image_id=2), "annotations of unknown images, left out", "annotation 1: unknown image 2"),
    (annotation(id=9), "annotations with a repeated id, left out", "annotation 9: the id is used twice"),
    ("text", "annotations that are not objects, left out", "annotation number 2: expected an object"),
]


@pytest.mark.parametrize(("bad", "note", "sentence"), BAD)
def test_a_bad_annotation_is_skipped_and_counted_or_refused_by_its_id(tmp_path, bad, note, sentence):
    path = coco(tmp_path, [annotation((1, 1, 2, 2), id=9), bad])
    data = read(path)
    assert boxes(data) == ([[1, 1, 3, 3]], [1])
    assert [each.split("; ")[0] for each in data.notes] == [f"{note}: 1"]
    with pytest.raises(GossamerError, match=rf"boxes\.json: {sentence}"):
        read(path, on_error="refuse")


def test_a_box_partly_outside_is_clamped_and_counted_or_refused(tmp_path):
    path = coco(tmp_path, [annotation((-3, 3, 8, 4)), annotation((15, 5, 10, 10), id=2)])
    data = read(path)
    assert boxes(data)[0] == [[0, 3, 5, 7], [15, 5, 20, 10]]
    assert data.notes[0].startswith("boxes partly outside their image, clamped: 2; the first: ")
    with pytest.raises(GossamerError, match=r"annotation 1: .* reaches outside its image of 20 × 10"):
        read(path, on_error="refuse")


def test_a_box_that_rounding_pushed_outside_is_clamped_and_counted_in_both_modes(tmp_path):
    path = coco(tmp_path, [annotation((15, 5, 5.4, 5))])
    for mode in ("skip", "refuse"):
        data = read(path, on_error=mode)
        assert boxes(data)[0] == [[15, 5, 20, 10]]
        assert "by rounding" in data.notes[0]


def test_an_image_without_boxes_left_stays_as_a_negative(tmp_path):
    data = read(coco(tmp_path, [annotation((2, 3, 0, 4))]))
    target = data[0][1]
    assert target["boxes"].shape == (0, 4)
    assert target["labels"].shape == target["iscrowd"].shape == (0,)


def test_a_missing_image_is_counted_once_however_many_boxes_it_has(tmp_path):
    picture(tmp_path / "a.png")
    images = [{"id": 1, "file_name": "gone.png"}, {"id": 2, "file_name": "a.png"}]
    path = coco(tmp_path, [annotation(id=1), annotation(id=2), annotation(id=3, image_id=2)], images)
    data = read(path)
    assert len(data) == 1
    assert boxes(data)[1] == [1]
    assert [note.split("; ")[0] for note in data.notes] == ["missing images, left out: 1"]
    with pytest.raises(GossamerError, match=r"boxes\.json: image 1: no such image: .*gone\.png"):
        read(path, on_error="refuse")


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
    assert [each.split("; ")[0] for each in read(path).notes] == [note]
    with pytest.raises(GossamerError, match=r"boxes\.json: image "):
        read(path, on_error="refuse")


def test_a_wrong_declared_size_is_noted_with_the_batch_or_refused(tmp_path):
    picture(tmp_path / "a.png", width=16, height=10)
    path = coco(tmp_path, [annotation((2, 3, 18, 4))], [{"id": 1, "file_name": "a.png", "width": 20, "height": 10}])
    source = Coco(type="coco", path=path)
    data = read(path)
    (batch,) = Batches(data, source, train=True, seed=0).epoch(0)
    assert batch.notes == [f"{tmp_path}/a.png: the image is 16 × 10 pixels, but its annotation says 20 × 10"]
    assert batch.targets[0]["boxes"].tolist() == [[2, 3, 16, 7]]
    refusing = read(path, on_error="refuse")
    with pytest.raises(GossamerError, match="annotation says 20 × 10"):
        refusing[0]


def test_boxes_outside_an_image_of_undeclared_size_are_noted_when_it_is_read(tmp_path):
    picture(tmp_path / "a.png")
    found = [annotation((15, 3, 18, 4)), annotation((30, 3, 5, 4), id=2), annotation((0, 0, 2, 2), id=3)]
    path = coco(tmp_path, found, [{"id": 1, "file_name": "a.png"}])
    (batch,) = Batches(read(path), Coco(type="coco", path=path), train=True, seed=0).epoch(0)
    assert batch.targets[0]["boxes"].tolist() == [[15, 3, 20, 7], [0, 0, 2, 2]]
    assert batch.notes == [f"{tmp_path}/a.png: 2 of its boxes reach outside the image of 20 × 10 pixels"]


def test_crowds_are_passed_to_tests_and_kept_from_training(tmp_path):
    path = coco(tmp_path, [annotation((2, 3, 5, 4), iscrowd=1), annotation((0, 0, 2, 2), id=2, category_id=7)])
    source = Coco(type="coco", path=path)
    data = read(path)
    (test,) = Batches(data, source, train=False, seed=0).epoch(0)
    (train,) = Batches(data, source, train=True, seed=0).epoch(0)
    assert test.targets[0]["iscrowd"].tolist() == [1, 0]
    assert test.targets[0]["labels"].tolist() == [1, 2]
    assert train.targets[0]["labels"].tolist() == [2]
    assert train.targets[0]["boxes"].tolist() == [[0, 0, 2, 2]]


def test_a_test_set_takes_the_classes_of_training_by_name(tmp_path):
    path = coco(tmp_path, [annotation(category_id=7), annotation(id=2, category_id=3)])
    data = read(path, classes=["bird", "dog", "cow"])
    assert data.classes == ["bird", "dog", "cow"]
    assert boxes(data)[1] == [2]
    assert "the training set has no class 'cat'" in data.notes[0]
    with pytest.raises(GossamerError, match=r"annotation 2: the training set has no class 'cat'"):
        read(path, classes=["bird", "dog", "cow"], on_error="refuse")


def test_two_categories_of_one_name_stay_two_classes(tmp_path):
    path = coco(tmp_path, [annotation()], categories=[{"id": 3, "name": "cat"}, {"id": 5, "name": "cat"}, {"id": 6}])
    assert read(path).classes == ["cat (3)", "cat (5)", "6"]


@pytest.mark.parametrize(
    ("text", "sentence"),
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
def test_a_file_that_is_not_coco_is_refused_in_both_modes(tmp_path, text, sentence):
    (tmp_path / "boxes.json").write_text(text)
    for mode in ("skip", "refuse"):
        with pytest.raises(GossamerError, match=sentence):
            read(tmp_path / "boxes.json", on_error=mode)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    with pytest.raises(GossamerError, match=r"cannot read the annotations \(No such file"):
        read(tmp_path / "boxes.json")
    (tmp_path / "boxes.json").write_bytes(json.dumps({"images": []}).encode("utf-16"))
    with pytest.raises(GossamerError, match="the text is not UTF-8"):
        read(tmp_path / "boxes.json")


def test_more_categories_than_the_config_counts_is_an_error(tmp_path):
    with pytest.raises(GossamerError, match=r"has 2 classes, but num_classes is 1; set 'num_classes: 2'"):
        read(coco(tmp_path, [annotation()]), num_classes=1)
