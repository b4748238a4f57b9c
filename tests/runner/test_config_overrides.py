"""`--set`: settings from the command line over those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config import Config, read_config

TEXT = """
net: {type: resnet18, kwargs: {zero_init_residual: true}}
num_classes: 1000
dataset:
  train:
    type: image_folder
    path: data/train
    batch_size: 256
    transforms: [{RandomResizedCrop: {size: 224}}, RandomHorizontalFlip]
trainer: {max_epoch: 100, lr_scheduler: {type: MultiStepLR, warmup_epochs: 1, kwargs: {milestones: [30]}}}
hooks: [{type: one}, {type: two}]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    return path


def config(path: Path, *sets: str) -> Config:
    return read_config(path, sets).config


def message(path: Path, *sets: str) -> str:
    with pytest.raises(GossamerError) as caught:
        read_config(path, sets)
    return str(caught.value)


def test_values_are_yaml(path: Path):
    sets = ["num_classes=10", "trainer.fp16=true", "saver.save_dir=runs/a: b", "net.kwargs={a: [1, 2.5], b: x}"]
    found = config(path, *sets[:2], "saver.save_dir=runs/a", sets[3])
    assert (found.num_classes, found.trainer.fp16, found.saver.save_dir) == (10, True, Path("runs/a"))
    assert found.net.kwargs == {"a": [1, 2.5], "b": "x"}
    assert config(path, "net.type='3'").net.type == "3"
    assert config(path, "net.type=shop.models:tiny").net.type == "shop.models:tiny"


def test_a_path_goes_into_lists_by_index(path: Path):
    found = config(path, "hooks.1.type=three", "dataset.train.transforms.0.RandomResizedCrop.size=32")
    assert [hook.type for hook in found.hooks] == ["one", "three"]
    assert found.dataset.train is not None
    assert found.dataset.train.transforms[0] == {"RandomResizedCrop": {"size": 32}}


def test_null_removes_a_setting_and_is_a_value_among_arguments(path: Path):
    found = config(
        path, "num_classes=null", "trainer.lr_scheduler=", "hooks.0=null", "net.kwargs.zero_init_residual=null"
    )
    assert (found.num_classes, found.trainer.lr_scheduler) == (None, None)
    assert [hook.type for hook in found.hooks] == ["two"]
    assert found.net.kwargs == {"zero_init_residual": None}


def test_the_last_of_two_counts(path: Path):
    assert config(path, "num_classes=3", "num_classes=4").num_classes == 4


def test_a_length_in_other_units_takes_the_place_of_the_files(path: Path):
    loaded = read_config(path, ["trainer.max_iter=4", "trainer.lr_scheduler.warmup_iter=2"])
    trainer = loaded.config.trainer
    assert (trainer.max_epoch, trainer.max_iter) == (None, 4)
    assert trainer.lr_scheduler is not None
    assert (trainer.lr_scheduler.warmup_epochs, trainer.lr_scheduler.warmup_iter) == (0, 2)
    assert loaded.warnings == [
        "trainer is timed by --set in iterations, and so are now lr_scheduler.kwargs.milestones of the file"
    ]
    assert config(path, "trainer.max_epoch=3").trainer.max_epoch == 3


def test_both_lengths_on_the_command_line_are_a_mistake(path: Path):
    told = "--set trainer.max_iter=4: trainer.max_iter: max_epoch is given too; keep one of the two"
    assert message(path, "trainer.max_iter=4", "trainer.max_epoch=3") == told


@pytest.mark.parametrize("turned", [False, True])
def test_another_type_of_data_keeps_only_what_all_sources_share(path: Path, turned: bool):
    sets = ["dataset.train.type=digits", "dataset.train.split=train"]
    train = config(path, *(reversed(sets) if turned else sets)).dataset.train
    assert train is not None
    assert (train.type, train.batch_size, len(train.transforms)) == ("digits", 256, 2)


def test_given_keys_are_told_with_those_inside_mappings(path: Path):
    loaded = read_config(path, ["saver={resume_model: x}", "num_classes=null"])
    assert loaded.given == {"saver", "saver.resume_model", "num_classes"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("trainer.max_itr=4", "unknown key 'trainer.max_itr'; nearest: 'max_iter'"),
        ("triner.max_iter=4", "unknown key 'triner'; nearest: 'trainer'"),
        ("trainer.max_epoch=x", "trainer.max_epoch: expected a whole number, found 'x'"),
        ("hooks.2.type=x", "hooks is a list of 2; '2' is no index into it"),
        ("hooks.type=x", "hooks is a list of 2; 'type' is no index into it"),
        ("num_classes.x=3", "num_classes is 1000, which has no 'x' inside"),
        ("dataset.train.type=digits", "dataset.train: missing 'split'"),
        ("num_classes", "expected a setting and its value, as in --set trainer.max_epoch=3"),
        ("a..b=3", "expected a setting and its value, as in --set trainer.max_epoch=3"),
        ("net.kwargs={a: 1", "not valid YAML: while parsing a flow mapping"),
        ("net.kwargs=*a", "no anchor '&a' before '*a'"),
        ("hooks=!x []", "unknown tag '!x'; there is !include"),
        ("net.type=!include none.yaml", "!include none.yaml: no such file"),
        ("num_classes=!!int x", "expected !!int, found 'x'"),
        ("num_classes=1\n- 2", "expected one value behind '=', found several"),
    ],
)
def test_a_wrong_override_is_told_by_its_own_words(path: Path, given: str, told: str):
    found = message(path, given)
    assert found.startswith(f"--set {given}: {told}")
    assert len(found.splitlines()) == 1 + given.count("\n")
