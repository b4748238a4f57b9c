"""`--data`: other data than a config names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config import Loaded, read_config

CLASSIFIER = """
net: {type: resnet18}
num_classes: 1000
dataset:
  train:
    {type: image_list, path: list.txt, images: x, batch_size: 7, on_error: refuse, transforms: [RandomHorizontalFlip]}
  test: {type: image_list, path: test.txt, batch_size: 9}
trainer: {max_epoch: 3}
saver: {pretrain_model: runs/float/model.safetensors}
"""
DETECTOR = (
    "net: {type: fasterrcnn_resnet50_fpn, kwargs: {weights_backbone: IMAGENET1K_V1}}\ntrainer: {max_iter: 90000}\n"
)
MNIST = [
    f"{part}-{kind}-{idx}-ubyte" for part in ("train", "t10k") for kind, idx in (("images", "idx3"), ("labels", "idx1"))
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *sets: str, data: str) -> Loaded:
    Path("a.yaml").write_text(text)
    return read_config("a.yaml", sets, data)


def folder(*names: str) -> str:
    """A folder of empty files; a name that ends in a slash is a folder."""
    for name in names:
        path = Path("data", name)
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return "data"


def sources(loaded: Loaded) -> list[dict[str, object]]:
    train, test = loaded.config.dataset.train, loaded.config.dataset.test
    assert train is not None
    assert test is not None
    shared = {"batch_size", "num_workers", "transforms", "on_error", "limit"}
    return [
        {key: str(value) for key, value in part.model_dump(exclude=shared).items() if value} for part in (train, test)
    ]


def test_a_folder_replaces_the_source_alone():
    loaded = read(CLASSIFIER, data=folder("train/cat/", "val/cat/", "notes.txt"))
    assert sources(loaded) == [
        {"type": "image_folder", "path": "data/train"},
        {"type": "image_folder", "path": "data/val"},
    ]
    train, test = loaded.config.dataset.train, loaded.config.dataset.test
    assert train is not None
    assert test is not None
    assert (train.batch_size, train.on_error, train.transforms) == (7, "refuse", ["RandomHorizontalFlip"])
    assert test.batch_size == 9
    assert loaded.config.num_classes is None
    assert loaded.config.saver.pretrain_model == Path("runs/float/model.safetensors")


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("family", ["", "emnist-letters-"])
def test_idx_files_are_recognised_plain_and_packed(packed: str, family: str):
    found = sources(read(CLASSIFIER, data=folder(*(f"{family}{name}{packed}" for name in MNIST))))
    assert found[0] == {
        "type": "idx",
        "images": f"data/{family}train-images-idx3-ubyte{packed}",
        "labels": f"data/{family}train-labels-idx1-ubyte{packed}",
    }
    assert found[1]["labels"] == f"data/{family}t10k-labels-idx1-ubyte{packed}"


def test_of_plain_and_packed_idx_files_the_plain_ones_are_read():
    names = folder(*MNIST, *(f"{name}.gz" for name in MNIST))
    assert sources(read(CLASSIFIER, data=names))[0]["images"] == "data/train-images-idx3-ubyte"


def test_npz_files_are_recognised():
    found = sources(read(CLASSIFIER, data=folder("train.npz", "test.npz")))
    assert [part["path"] for part in found] == ["data/train.npz", "data/test.npz"]


def test_coco_files_are_recognised_and_val_is_for_tests():
    found = sources(read(DETECTOR, data=folder("train.json", "val.json", "test.json", "images/")))
    assert found == [
        {"type": "coco", "path": "data/train.json", "images": "data/images"},
        {"type": "coco", "path": "data/val.json", "images": "data/images"},
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.png"], "the folder holds no data of a known kind; expected IDX files"),
        (["train/cat/"], "the folder holds no data of a known kind"),
        (["train/", "val/"], "the folder holds no data of a known kind"),
        (["train.json", "val.json"], "the folder holds data of the kind coco, but the config is for classification"),
        (["train-images-idx3-ubyte"], "train-images-idx3-ubyte is there, but train-labels-idx1-ubyte is missing"),
        ([*MNIST, "train.npz", "test.npz"], "the folder holds data of several kinds: idx and npz; keep one"),
        (
            [f"{family}-{name}" for family in "ab" for name in MNIST],
            "the folder holds several sets of IDX files: 'b-', 'a-'",
        ),
    ],
)
def test_a_folder_that_is_not_recognised_is_reported(names: list[str], expected: str):
    with pytest.raises(GossamerError) as caught:
        read(CLASSIFIER, data=folder(*names))
    assert str(caught.value).startswith(f"--data data: {expected}")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train/cat/", "val/cat/"], "of the kind class folders, but the config is for detection"),
        (["train.json", "val.json"], "train.json is there, but the folder images/ is missing"),
    ],
)
def test_a_folder_that_is_not_for_detectors_is_reported(names: list[str], expected: str):
    with pytest.raises(GossamerError, match=expected):
        read(DETECTOR, data=folder(*names))


def test_a_word_that_is_no_folder_is_reported():
    with pytest.raises(GossamerError, match=r"^--data tinny: expected 'tiny' or an existing folder"):
        read(CLASSIFIER, data="tinny")


def test_tiny_brings_data_and_settings_to_match():
    loaded = read(CLASSIFIER, data="tiny")
    config = loaded.config
    assert [part["type"] for part in sources(loaded)] == ["digits", "digits"]
    assert config.num_classes == 10
    assert config.saver.save_dir == Path("runs/a-tiny")
    detector = read(DETECTOR, data="tiny")
    assert [part["type"] for part in sources(detector)] == ["scenes", "scenes"]
    assert detector.config.trainer.max_iter is None
    assert detector.config.net.kwargs["weights_backbone"] is None


def test_set_counts_more_than_data():
    loaded = read(CLASSIFIER, "trainer.max_iter=2", "dataset.train.limit=5", "saver.save_dir=x", data="tiny")
    assert (loaded.config.trainer.max_iter, loaded.config.trainer.max_epoch) == (2, None)
    assert loaded.config.dataset.train is not None
    assert loaded.config.dataset.train.limit == 5
    assert loaded.config.saver.save_dir == Path("x")


def test_the_net_of_set_decides_which_tiny_data_it_is():
    assert sources(read(CLASSIFIER, "net.type=retinanet_resnet18_fpn", data="tiny"))[0]["type"] == "scenes"


def test_tiny_begins_with_the_weights_of_a_tiny_run_where_there_is_one():
    loaded = read(CLASSIFIER, data="tiny")
    assert loaded.config.saver.pretrain_model is None
    assert loaded.warnings[0].startswith("--data tiny: starting from random weights because runs/float-tiny")
    weights = Path("runs/float-tiny/model.safetensors")
    weights.parent.mkdir(parents=True)
    weights.touch()
    loaded = read(CLASSIFIER, data="tiny")
    assert (loaded.config.saver.pretrain_model, loaded.warnings) == (weights, [])


def test_weights_that_are_named_on_the_command_line_are_kept_as_they_are():
    loaded = read(CLASSIFIER, "saver.pretrain_model=mine.safetensors", data="tiny")
    assert (loaded.config.saver.pretrain_model, loaded.warnings) == (Path("mine.safetensors"), [])


def test_a_detector_of_ones_own_gets_tiny_data_and_no_arguments_of_torchvisions():
    loaded = read("net: {type: 'shop:detector'}\ntask: detection\n", data="tiny")
    assert sources(loaded)[0]["type"] == "scenes"
    assert loaded.config.net.kwargs == {}


def test_an_unknown_task_is_reported():
    with pytest.raises(
        GossamerError, match=r"^--data tiny: task: expected classification or detection, found 'detecton'"
    ):
        read("net: {type: 'shop:detector'}\ntask: detecton\n", data="tiny")
