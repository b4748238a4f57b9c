"""Class folders, image lists, IDX and NPZ files: what they hold, and what is skipped or refused."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile

import numpy as np
import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.runner.config.schema import Idx, ImageFolder, ImageList, Npz
from gossamer.runner.data import Batches, build_dataset
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
    expected = r"catt: the training set has no class 'catt'; nearest: 'cat'; rename the folder, or remove it from"
    with pytest.raises(GossamerError, match=expected):
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
    ("line", "note", "message"),
    [
        ("a.png", "lines without path and label", r"train\.txt:2: expected 'path label', .*, found 'a\.png'"),
        ("a.png cat", "lines without path and label", r"train\.txt:2: .*, found 'a\.png cat'"),
        ("a.png -1", "lines without path and label", r"train\.txt:2: .* a label from 0 to 2, found 'a\.png -1'"),
        ("a.png 3", "lines without path and label", r"train\.txt:2: .* a label from 0 to 2, found 'a\.png 3'"),
        ("b.png 1", "missing images", r"train\.txt:2: no such image: .*b\.png"),
    ],
)
def test_a_bad_line_is_skipped_and_counted_or_refused_with_its_line(tmp_path, line, note, message):
    picture(tmp_path / "a.png")
    path = tmp_path / "train.txt"
    path.write_text(f"a.png 0\n{line}\n{line}\na.png 2\n")
    data = build_dataset(listed(path), task="classification", num_classes=3)
    assert [data[index][1] for index in range(len(data))] == [0, 2]
    assert [each.split("; the first: ")[0] for each in data.notes] == [f"{note}, left out: 2"]
    with pytest.raises(GossamerError, match=message + "; correct it, or set 'on_error: skip'"):
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


GREYS = np.arange(3 * 2 * 4, dtype=np.uint8).reshape(3, 2, 4)


def idx_bytes(values: np.ndarray, code: int = 0x08) -> bytes:
    header = struct.pack(">HBB", 0, code, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()


def idx_header(*shape: int) -> bytes:
    return struct.pack(">HBB", 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape)


def read_idx(folder, images: bytes, labels: bytes, **settings):
    (folder / "images").write_bytes(images)
    (folder / "labels").write_bytes(labels)
    source = Idx(type="idx", images=folder / "images", labels=folder / "labels", **settings)
    return build_dataset(source, task="classification", num_classes=None)


def read_npz(folder, *, num_classes=None, on_error="skip", image_key="images", **arrays):
    np.savez(folder / "a.npz", **arrays)
    source = Npz(type="npz", path=folder / "a.npz", on_error=on_error, image_key=image_key)
    return build_dataset(source, task="classification", num_classes=num_classes)


@pytest.mark.parametrize("packing", [bytes, gzip.compress])
def test_idx_files_are_read_plain_and_packed(tmp_path, packing):
    data = read_idx(tmp_path, packing(idx_bytes(GREYS)), packing(idx_bytes(np.array([2, 0, 1], np.uint8))))
    assert len(data) == 3
    assert data.classes == ["0", "1", "2"]
    assert [data[index][1] for index in range(3)] == [2, 0, 1]
    assert torch.equal(data[1][0], torch.from_numpy(GREYS[1]).expand(3, 2, 4) / 255)


def test_idx_labels_of_several_bytes_have_the_most_significant_first(tmp_path):
    data = read_idx(tmp_path, idx_bytes(GREYS), idx_bytes(np.array([0, 300, 1], ">i4"), 0x0C))
    assert data[1][1] == 300


LABELS = idx_bytes(np.array([2, 0, 1], np.uint8))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"", LABELS, "images: the IDX file ends within its header"),
        (b"PNG" + idx_bytes(GREYS), LABELS, "images: not an IDX file of up to 4 dimensions"),
        (idx_bytes(GREYS)[:-1], LABELS, r"declares 24 bytes of \(3, 2, 4\); the file has another number"),
        (idx_bytes(GREYS) + b"x", LABELS, "declares 24 bytes .* another number"),
        (gzip.compress(idx_bytes(GREYS), mtime=0)[:-9], LABELS, "images: cannot read the file"),
        (idx_bytes(GREYS[:2]), LABELS, "labels: 3 labels for 2 images"),
        (LABELS, LABELS, r"expected images of shape .* found \(3, 1\)|expected images of shape .* found \(3,\)"),
        (idx_bytes(GREYS), idx_bytes(GREYS), r"labels: expected numbers of shape \(n,\)"),
        (idx_bytes(GREYS[:, :0]), LABELS, "have no pixels"),
        (idx_header(*[1] * 255), LABELS, "not an IDX file of up to 4 dimensions"),
        (idx_header(*[2**32 - 1] * 3), LABELS, "the file has another number"),
        (gzip.compress(idx_header(2**20, 2**20), mtime=0), LABELS, "declares 1099511627776 bytes .* another number"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_damaged_idx_file_is_refused_in_both_modes(tmp_path, images, labels, message):
    for mode in ("skip", "refuse"):
        with pytest.raises(GossamerError, match=message):
            read_idx(tmp_path, images, labels, on_error=mode)


def test_a_missing_idx_file_is_named(tmp_path):
    source = Idx(type="idx", images=tmp_path / "images", labels=tmp_path / "labels")
    with pytest.raises(GossamerError, match=r"images: cannot read the file \(No such file"):
        build_dataset(source, task="classification")


def test_npz_arrays_of_colours_are_read(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 2, 4, 3)).astype(np.uint8)
    data = read_npz(tmp_path, images=pixels, labels=np.array([[1], [0], [1]]))
    assert torch.equal(data[2][0], torch.from_numpy(pixels[2]).permute(2, 0, 1) / 255)
    assert [data[index][1] for index in range(3)] == [1, 0, 1]


def test_a_batch_of_arrays_is_what_its_samples_are(tmp_path):
    transforms = [{"Resize": {"size": [5, 7]}}, {"Normalize": {"mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}}]
    np.savez(tmp_path / "a.npz", images=GREYS, labels=np.array([2, 0, 1]))
    source = Npz(type="npz", path=tmp_path / "a.npz", transforms=transforms, batch_size=3)
    data = build_dataset(source, task="classification")
    (batch,) = Batches(data, source, train=False, seed=0).epoch(0)
    assert torch.equal(batch.images, torch.stack([data[index][0] for index in range(3)]))
    assert batch.targets.tolist() == [2, 0, 1]
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous()


@pytest.mark.parametrize(
    ("labels", "shown"), [([0, 5, 1], "5"), ([0, -1, 1], "-1"), ([0, 0.5, 1], "0.5"), ([0, np.nan, 1], "nan")]
)
def test_a_bad_label_is_skipped_and_counted_or_refused_by_its_number(tmp_path, labels, shown):
    data = read_npz(tmp_path, images=GREYS, labels=labels, num_classes=2)
    assert [data[index][1] for index in range(len(data))] == [0, 1]
    assert torch.equal(data[1][0][0], torch.from_numpy(GREYS[2]) / 255)
    assert data.notes[0].startswith("invalid labels, left out: 1;")
    with pytest.raises(GossamerError, match=f"labels: image 1: expected a label from 0 to 1, found {shown}"):
        read_npz(tmp_path, images=GREYS, labels=labels, num_classes=2, on_error="refuse")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": GREYS}, r"no array 'labels' among \['images'\]; set 'label_key'"),
        ({"image": GREYS, "labels": [0, 1, 2]}, "no array 'images' .* nearest: 'image'"),
        ({"images": GREYS / 255, "labels": [0, 1, 2]}, "expected integers from 0 to 255, found float64"),
        ({"images": GREYS.astype(int) + 250, "labels": [0, 1, 2]}, "expected integers from 0 to 255"),
        ({"images": np.array([None] * 3), "labels": [0, 1, 2]}, "not an NPZ file of plain arrays"),
        ({"images": GREYS, "labels": ["a", "b", "c"]}, r"expected numbers of shape \(n,\)"),
        ({"images": GREYS[..., None].repeat(2, -1), "labels": [0, 1, 2]}, "with 1 or 3 channels, found"),
    ],
)
def test_unfit_npz_arrays_are_refused(tmp_path, arrays, message):
    with pytest.raises(GossamerError, match=message):
        read_npz(tmp_path, **{key: np.asarray(value) for key, value in arrays.items()})


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    source = Npz(type="npz", path=tmp_path / "a.npz")
    with pytest.raises(GossamerError, match="cannot read the file"):
        build_dataset(source, task="classification")
    source.path.write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(GossamerError, match=r"a\.npz: not an NPZ file"):
        build_dataset(source, task="classification")
    with source.path.open("wb") as file:
        np.save(file, GREYS)
    with pytest.raises(GossamerError, match="not an NPZ file of plain arrays"):
        build_dataset(source, task="classification")


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(100)


def shaped(shape: str) -> bytes:
    return npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n")


def encrypted(content: bytes) -> bytes:
    """An archive whose first file says that it is encrypted."""
    changed = bytearray(content)
    changed[6] |= 1
    changed[changed.find(b"PK\x01\x02") + 8] |= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("images", "change", "message"),
    [
        (shaped("(1, 99999999, 99999999)"), bytes, "not an NPZ file of plain arrays"),
        (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1,\n"), bytes, "not an NPZ file"),
        (npy("(" * 3000), bytes, "not an NPZ file of plain arrays"),
        (b"abc", encrypted, "not an NPZ file of plain arrays .*encrypted"),
        (b"abc", bytes, "images: expected images of shape"),
    ],
    ids=["huge shape", "cut header", "deep header", "encrypted", "no array"],
)
def test_a_damaged_npz_file_is_refused(tmp_path, images, change, message):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("images.npy", images)
        archive.writestr("labels.npy", shaped("(1,)"))
    (tmp_path / "a.npz").write_bytes(change(content.getvalue()))
    with pytest.raises(GossamerError, match=rf"a\.npz: {message}"):
        build_dataset(Npz(type="npz", path=tmp_path / "a.npz"), task="classification")
