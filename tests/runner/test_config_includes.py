"""`!include`, anchors and merge keys: one config from several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.config import read_config

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


def message(path: Path) -> str:
    with pytest.raises(GossamerError) as caught:
        read_config(path)
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


def test_a_mistake_is_told_with_the_file_and_line_where_it_stands(tmp_path: Path):
    own = "\n<<: !include base.yaml\nnum_clases: 3\n"
    told = message(write(tmp_path, own=own, base="net: {type: resnet18}\ntrainer:\n  max_epoc: 3\n")).splitlines()
    assert told == [
        "base.yaml:3: unknown key 'trainer.max_epoc'; nearest: 'max_epoch'",
        "own.yaml:3: unknown key 'num_clases'; nearest: 'num_classes'",
    ]


def test_a_mistake_behind_an_alias_is_told_where_it_is_written(tmp_path: Path):
    own = "x-kind: &kind\n  type: digts\nnet: {type: resnet18}\ndataset:\n  train: *kind\n"
    assert message(write(tmp_path, own=own)).startswith("own.yaml:2: dataset.train.type: unknown type 'digts'")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("\n<<: !include bas.yaml", "own.yaml:2: !include bas.yaml: no such file; nearest: 'base.yaml'"),
        ("net:\n  <<: !include own.yaml", "own.yaml:2: the config includes itself: own.yaml includes own.yaml"),
        (
            "net: !include mutual.yaml",
            "mutual.yaml:1: the config includes itself: own.yaml includes mutual.yaml includes own.yaml",
        ),
        ("\nnet: !include ''", "own.yaml:2: expected the name of a file, as in '!include base.yaml'"),
        ("net: !include [a.yaml]", "own.yaml:1: expected the name of a file, as in '!include base.yaml'"),
        ("net: !include .", "own.yaml:1: expected a config file, found the folder"),
        ("<<: !include list.yaml", "own.yaml:1: expected a mapping behind '<<', as in '<<: !include base.yaml'"),
        ("<<: !include broken.yaml", "broken.yaml:2:1: not valid YAML"),
        (
            "<<: !include none/../base.yaml\nnum_clases: 1",
            "own.yaml:2: unknown key 'num_clases'; nearest: 'num_classes'",
        ),
        ("<<: !include a0.yaml", "yaml:1: expected at most 100 included files, found more"),
    ],
)
def test_an_include_that_cannot_be_is_told_with_its_line(tmp_path: Path, own: str, told: str):
    doubling = {f"a{n}": f"hooks: [!include a{n + 1}.yaml, !include a{n + 1}.yaml]\n" for n in range(9)}
    many = {**doubling, "a9": "- 1\n"}
    mutual = "a: !include own.yaml\n"
    path = write(tmp_path, own=own, base=BASE, list="- 1\n", broken="a: [1\n", mutual=mutual, **many)
    assert told in message(path).splitlines()[0]


def test_a_chain_of_files_cannot_nest_without_end(tmp_path: Path):
    deep = "".join(f"{' ' * n}a:\n" for n in range(60))
    one = deep + " " * 60 + "a: !include two.yaml\n"
    path = write(tmp_path, one=one, two=deep + " " * 60 + "a: 1\n")
    assert "the config comes to more than 100 levels" in message(path)
