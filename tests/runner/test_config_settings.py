"""One config from several files and the command line: `!include`, anchors, merge keys and `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config import Config, read_config

BASE = """
net: {type: resnet18, kwargs: {zero_init_residual: true}}
trainer:
  max_epoch: 100
  optimizer: {type: SGD, kwargs: {lr: 0.1, momentum: 0.9}}
  lr_scheduler: {type: MultiStepLR, warmup_epochs: 1, kwargs: {milestones: [30]}}
"""


def write(folder: Path, **files: str) -> Path:
    """Files by name, of which the first is returned."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


def message(path: Path, *sets: str) -> str:
    with pytest.raises(GossamerError) as caught:
        read_config(path, sets)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_own_keys_win_over_those_of_an_included_file_at_every_depth(tmp_path: Path):
    own = "<<: !include base.yaml\ntrainer: {optimizer: {kwargs: {lr: 0.5}}}\n"
    config = read_config(write(tmp_path, own=own, base=BASE)).config
    assert config.trainer.optimizer.kwargs == {"lr": 0.5, "momentum": 0.9}
    assert config.trainer.max_epoch == 100


def test_settings_of_another_type_do_not_mix(tmp_path: Path):
    own = "<<: !include base.yaml\ntrainer: {optimizer: {type: AdamW, kwargs: {lr: 1.0e-3}}}\n"
    assert read_config(write(tmp_path, own=own, base=BASE)).config.trainer.optimizer.kwargs == {"lr": 1e-3}


def test_a_length_in_other_units_takes_the_place_of_the_included_one(tmp_path: Path):
    own = "<<: !include base.yaml\ntrainer: {max_iter: 7, lr_scheduler: {warmup_iter: 3}}\n"
    trainer = read_config(write(tmp_path, own=own, base=BASE)).config.trainer
    assert (trainer.max_epoch, trainer.max_iter) == (None, 7)
    assert trainer.lr_scheduler is not None
    assert (trainer.lr_scheduler.warmup_epochs, trainer.lr_scheduler.warmup_iter) == (0, 3)


def test_null_takes_an_included_setting_away_and_is_a_value_among_arguments(tmp_path: Path):
    own = "<<: !include base.yaml\ntrainer: {lr_scheduler: null}\nnet: {kwargs: {zero_init_residual: null}}\n"
    config = read_config(write(tmp_path, own=own, base=BASE)).config
    assert config.trainer.lr_scheduler is None
    assert config.net.kwargs == {"zero_init_residual": None}


def test_an_included_file_can_be_a_value_or_be_merged_below_the_top(tmp_path: Path):
    own = "net: !include net.yaml\ntrainer:\n  <<: !include trainer.yaml\n  save_freq: 5\nhooks: !include hooks.yaml\n"
    files = {"net": "type: resnet18\n", "trainer": "{max_epoch: 3, save_freq: 1}\n", "hooks": "- {type: log}\n"}
    config = read_config(write(tmp_path, own=own, **files)).config
    assert config.net.type == "resnet18"
    assert (config.trainer.max_epoch, config.trainer.save_freq) == (3, 5)
    assert config.hooks[0].type == "log"


def test_of_several_included_files_the_first_wins(tmp_path: Path):
    own = "<<: [!include one.yaml, !include two.yaml]\nnet: {type: resnet18}\n"
    one, two = "trainer: {max_epoch: 1}\n", "trainer: {max_epoch: 2, save_freq: 2}\n"
    trainer = read_config(write(tmp_path, own=own, one=one, two=two)).config.trainer
    assert (trainer.max_epoch, trainer.save_freq) == (1, 2)


def test_paths_start_at_the_file_they_stand_in(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path, base="num_classes: 7\n")
    write(tmp_path / "deep", middle="<<: !include ../base.yaml\nnet: {type: resnet18}\n")
    own = write(tmp_path / "deep" / "er", own="<<: !include ../middle.yaml\n")
    assert read_config(own).config.num_classes == 7


def test_anchors_and_merge_keys_work_and_x_keys_hold_them(tmp_path: Path):
    own = """
x-source: &source {type: digits, batch_size: 16}
net: {type: resnet18}
dataset:
  train: {<<: *source, split: train, batch_size: 8}
  test: {<<: *source, split: test}
"""
    dataset = read_config(write(tmp_path, own=own)).config.dataset
    assert dataset.train is not None
    assert dataset.test is not None
    assert (dataset.train.batch_size, dataset.test.batch_size) == (8, 16)


def test_a_mistake_is_reported_with_the_file_and_line_where_it_stands(tmp_path: Path):
    own = "\n<<: !include base.yaml\nnum_clases: 3\n"
    expected = message(write(tmp_path, own=own, base="net: {type: resnet18}\ntrainer:\n  max_epoc: 3\n")).splitlines()
    assert expected == [
        "base.yaml:3: trainer.max_epoc: unknown key; nearest: 'max_epoch'",
        "own.yaml:3: num_clases: unknown key; nearest: 'num_classes'",
    ]


def test_a_mistake_behind_an_alias_is_reported_where_it_is_written(tmp_path: Path):
    own = "x-kind: &kind\n  type: digts\nnet: {type: resnet18}\ndataset:\n  train: *kind\n"
    assert message(write(tmp_path, own=own)).startswith("own.yaml:2: dataset.train.type: unknown type 'digts'")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("\n<<: !include bas.yaml", "own.yaml:2: !include: bas.yaml: no such file; nearest: 'base.yaml'"),
        ("net:\n  <<: !include own.yaml", "own.yaml:2: the config includes itself: own.yaml includes own.yaml"),
        (
            "net: !include mutual.yaml",
            "mutual.yaml:1: the config includes itself: own.yaml includes mutual.yaml includes own.yaml",
        ),
        ("\nnet: !include ''", "own.yaml:2: expected a file name, as in '!include base.yaml'"),
        ("net: !include [a.yaml]", "own.yaml:1: expected a file name, as in '!include base.yaml'"),
        ("net: !include .", "own.yaml:1: expected a config file, found the folder"),
        ("<<: !include list.yaml", "own.yaml:1: expected a mapping after '<<', as in '<<: !include base.yaml'"),
        ("<<: !include broken.yaml", "broken.yaml:2:1: not valid YAML"),
        (
            "<<: !include none/../base.yaml\nnum_clases: 1",
            "own.yaml:2: num_clases: unknown key; nearest: 'num_classes'",
        ),
        ("<<: !include a0.yaml", "yaml:1: expected at most 100 included files, found more"),
    ],
)
def test_an_include_that_cannot_be_is_reported_with_its_line(tmp_path: Path, own: str, expected: str):
    doubling = {f"a{n}": f"hooks: [!include a{n + 1}.yaml, !include a{n + 1}.yaml]\n" for n in range(9)}
    many = {**doubling, "a9": "- 1\n"}
    mutual = "a: !include own.yaml\n"
    path = write(tmp_path, own=own, base=BASE, list="- 1\n", broken="a: [1\n", mutual=mutual, **many)
    assert expected in message(path).splitlines()[0]


def test_a_chain_of_files_cannot_nest_without_end(tmp_path: Path):
    deep = "".join(f"{' ' * n}a:\n" for n in range(60))
    one = deep + " " * 60 + "a: !include two.yaml\n"
    path = write(tmp_path, one=one, two=deep + " " * 60 + "a: 1\n")
    assert "the config has more than 100 levels" in message(path)


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


def test_values_are_yaml(path: Path):
    sets = ["num_classes=10", "trainer.fp16=true", "saver.save_dir=runs/a: b", "net.kwargs={a: [1, 2.5], b: x}"]
    found = config(path, *sets[:2], "saver.save_dir=runs/a", sets[3])
    assert (found.num_classes, found.trainer.fp16, found.saver.save_dir) == (10, True, Path("runs/a"))
    assert found.net.kwargs == {"a": [1, 2.5], "b": "x"}
    assert config(path, "net.type='3'").net.type == "3"
    assert config(path, "net.type=shop.models:tiny").net.type == "shop.models:tiny"


def test_a_path_goes_into_lists_by_index(path: Path):
    assert config(path, "hooks[1].type=three").hooks[1].type == "three"  # as errors render it
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
        "--set trainer.max_iter counts iterations; these settings of the file now do too: "
        "lr_scheduler.kwargs.milestones"
    ]
    assert config(path, "trainer.max_epoch=3").trainer.max_epoch == 3


def test_both_lengths_on_the_command_line_are_a_mistake(path: Path):
    expected = "--set trainer.max_iter=4: trainer.max_iter: max_epoch is given too; keep one of the two"
    assert message(path, "trainer.max_iter=4", "trainer.max_epoch=3") == expected


@pytest.mark.parametrize("turned", [False, True])
def test_another_type_of_data_keeps_only_what_all_sources_share(path: Path, turned: bool):
    sets = ["dataset.train.type=digits", "dataset.train.split=train"]
    train = config(path, *(reversed(sets) if turned else sets)).dataset.train
    assert train is not None
    assert (train.type, train.batch_size, len(train.transforms)) == ("digits", 256, 2)


def test_given_keys_are_reported_with_those_inside_mappings(path: Path):
    loaded = read_config(path, ["saver={resume_model: x}", "num_classes=null"])
    assert loaded.given == {"saver", "saver.resume_model", "num_classes"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("trainer.max_itr=4", "trainer.max_itr: unknown key; nearest: 'max_iter'"),
        ("triner.max_iter=4", "triner: unknown key; nearest: 'trainer'"),
        ("trainer.max_epoch=x", "trainer.max_epoch: expected a whole number, found 'x'"),
        ("hooks.2.type=x", "hooks: a list of 2 items has no index '2'"),
        ("hooks.type=x", "hooks: a list of 2 items has no index 'type'"),
        ("num_classes.x=3", "num_classes: 1000 has no key 'x'"),
        ("dataset.train.type=digits", "dataset.train.split: missing key"),
        ("num_classes", "expected a setting and its value, as in --set trainer.max_epoch=3"),
        ("a..b=3", "expected a setting and its value, as in --set trainer.max_epoch=3"),
        ("net.kwargs={a: 1", "not valid YAML: while parsing a flow mapping"),
        ("net.kwargs=*a", "no anchor '&a' before '*a'"),
        ("hooks=!x []", "unknown tag '!x'; only !include is known"),
        ("net.type=!include none.yaml", "!include: none.yaml: no such file"),
        ("num_classes=!!int x", "expected !!int, found 'x'"),
        ("num_classes=1\n- 2", "expected one value after '=', found several"),
    ],
)
def test_a_wrong_override_is_reported_with_its_text(path: Path, given: str, expected: str):
    found = message(path, given)
    assert found.startswith(f"--set {given}: {expected}")
    assert len(found.splitlines()) == 1 + given.count("\n")
