from __future__ import annotations

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import ImageFolder, ImageList
from gossamer.runner.data import build_dataset
from tests.runner.data.files import picture


def folder(path, **settings):
    return ImageFolder(type="image_folder", path=path, **settings)


def listed(path, **settings):
    return ImageList(type="image_list", path=path, **settings)


def test_folders_are_classes_in_the_order_of_their_names(tmp_path):
    picture(tmp_path / "dog" / "deep" / "b.jpg", colour=(0, 0, 0))
    picture(tmp_path / "cat" / "a.PNG", colour=(255, 255, 255))
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".cache").mkdir()
    data = build_dataset(folder(tmp_path), task="classification")
    assert data.classes == ["cat", "dog"]
    assert [data[index][1] for index in range(len(data))] == [0, 1]
    assert data[0][0].shape == (3, 10, 20)
    assert [data[index][0].mean().item() for index in range(2)] == [1, 0]
    assert data.notes == []


def test_test_folders_take_the_classes_of_training_by_name(tmp_path):
    picture(tmp_path / "dog" / "a.png")
    data = build_dataset(folder(tmp_path), task="classification", classes=["ant", "cat", "dog"])
    assert data.classes == ["ant", "cat", "dog"]
    assert data[0][1] == 2


@pytest.mark.parametrize("mode", ["skip", "refuse"])
def test_a_class_that_training_lacks_is_refused(mode, tmp_path):
    picture(tmp_path / "dog" / "a.png")
    picture(tmp_path / "catt" / "a.png")
    told = r"catt: the training set has no class 'catt'; nearest: 'cat'; rename the folder, or remove it from"
    with pytest.raises(GossamerError, match=told):
        build_dataset(folder(tmp_path, on_error=mode), task="classification", classes=["cat", "dog"])


def test_an_empty_class_is_noted_or_refused(tmp_path):
    picture(tmp_path / "dog" / "a.png")
    (tmp_path / "cat").mkdir()
    data = build_dataset(folder(tmp_path), task="classification")
    assert data.classes == ["cat", "dog"]
    assert "no images in this folder" in data.notes[0]
    with pytest.raises(GossamerError, match=r"cat: no images in this folder"):
        build_dataset(folder(tmp_path, on_error="refuse"), task="classification")


def test_a_folder_without_classes_or_without_existence_is_an_error(tmp_path):
    picture(tmp_path / "a.png")
    with pytest.raises(GossamerError, match="no class folders; expected images in"):
        build_dataset(folder(tmp_path), task="classification")
    with pytest.raises(GossamerError, match=r"nowhere: cannot list the folder of images \(No such file"):
        build_dataset(folder(tmp_path / "nowhere"), task="classification")


def test_a_list_names_images_and_labels_and_paths_may_hold_spaces(tmp_path):
    picture(tmp_path / "images" / "my cat.png")
    picture(tmp_path / "images" / "sub" / "dog.png")
    (tmp_path / "train.txt").write_text("my cat.png 0\n\nsub/dog.png\t2\n")
    data = build_dataset(listed(tmp_path / "train.txt", images=tmp_path / "images"), task="classification")
    assert [data[index][1] for index in range(len(data))] == [0, 2]
    assert data.classes == ["0", "1", "2"]


def test_a_list_starts_from_its_own_folder_and_takes_what_the_config_counts(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "train.txt").write_text("a.png 1\n")
    data = build_dataset(listed(tmp_path / "train.txt"), task="classification", num_classes=4)
    assert data.classes == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("line", "note", "sentence"),
    [
        ("a.png", "lines without label", r"train\.txt:2: expected 'path label', found 'a\.png'"),
        ("a.png cat", "labels that are not integers", r"train\.txt:2: the label 'cat' is not an integer"),
        ("a.png 1.5", "labels that are not integers", r"train\.txt:2: the label '1\.5' is not an integer"),
        ("a.png -1", "labels out of range", r"train\.txt:2: the label -1 is not between 0 and 2"),
        ("a.png 3", "labels out of range", r"train\.txt:2: the label 3 is not between 0 and 2"),
        ("b.png 1", "missing images", r"train\.txt:2: no such image: .*b\.png"),
    ],
)
def test_a_bad_line_is_skipped_and_counted_or_refused_with_its_line(tmp_path, line, note, sentence):
    picture(tmp_path / "a.png")
    path = tmp_path / "train.txt"
    path.write_text(f"a.png 0\n{line}\n{line}\na.png 2\n")
    data = build_dataset(listed(path), task="classification", num_classes=3)
    assert [data[index][1] for index in range(len(data))] == [0, 2]
    assert [each.split("; the first: ")[0] for each in data.notes] == [f"{note}, left out: 2"]
    with pytest.raises(GossamerError, match=sentence + "; correct it, or set 'on_error: skip'"):
        build_dataset(listed(path, on_error="refuse"), task="classification", num_classes=3)


def test_a_list_without_any_image_says_why(tmp_path):
    (tmp_path / "train.txt").write_text("a.png 0\n")
    with pytest.raises(GossamerError, match=r"no image can be used; missing images, left out: 1; .*a\.png"):
        build_dataset(listed(tmp_path / "train.txt"), task="classification")


def test_a_list_that_is_not_there_or_no_text_is_an_error(tmp_path):
    with pytest.raises(GossamerError, match=r"train\.txt: cannot read the list of images"):
        build_dataset(listed(tmp_path / "train.txt"), task="classification")
    (tmp_path / "train.txt").write_bytes(b"a.png 1\n\xff\xfe\n")
    with pytest.raises(GossamerError, match="is not UTF-8"):
        build_dataset(listed(tmp_path / "train.txt"), task="classification")
