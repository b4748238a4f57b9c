"""Configs from files: what is read, and the messages for what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.errors import GossamerError
from gossamer.runner.config import Config, config_text, read_config, task_of

SPARSE = """
runtime: {runner: {type: sparse}}
sparsity:
  scheduler:
    type: AmbaLevelPruneScheduler
    kwargs:
      sparsity_table: [30, 50]
"""


def written(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *sets: str, data: str | None = None) -> list[str]:
    with pytest.raises(GossamerError) as caught:
        read_config(path, sets, data)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


def test_a_config_is_read_with_its_name_and_defaults(tmp_path: Path):
    loaded = read_config(written(tmp_path, "net: {type: resnet18}\nsaver: {save_dir: runs/x}\n", "my.net.yaml"))
    assert loaded.name == "my.net"
    assert loaded.config.net.type == "resnet18"
    assert loaded.config.saver.save_dir == Path("runs/x")
    assert loaded.config.trainer.save_freq is None
    assert (loaded.given, loaded.warnings) == (frozenset(), [])


def test_all_mistakes_are_reported_together_with_their_lines(tmp_path: Path):
    text = """
net:
  type: resnet18
  kwrgs: {}
num_clases: 10
trainer:
  max_epoch: ten
  lr_scheduler:
    warmup_ratio: 0
    warmup_type: liner
saver: {export: [onx], save_dir: 7}
runtime:
  channels_last: autto
hooks: 3
dataset:
  train:
    type: image_folder
    path: x
    transforms: [3, {Resize: 3}, {Resize: {size: 3}}]
    batch_size: 0
"""
    assert problems(written(tmp_path, text)) == [
        "a.yaml:4: net.kwrgs: unknown key; nearest: 'kwargs'",
        "a.yaml:5: num_clases: unknown key; nearest: 'num_classes'",
        "a.yaml:7: trainer.max_epoch: expected a whole number, found 'ten'",
        "a.yaml:9: trainer.lr_scheduler.warmup_ratio: expected a number > 0, found 0",
        "a.yaml:10: trainer.lr_scheduler.warmup_type: expected 'linear', 'exp' or 'constant', found 'liner'; "
        "nearest: 'linear'",
        "a.yaml:11: saver.save_dir: expected a path, found 7",
        "a.yaml:11: saver.export[0]: expected 'safetensors', 'bitmask', 'sparse24', 'onnx', 'pt2' or 'thin', "
        "found 'onx'; nearest: 'onnx'",
        "a.yaml:13: runtime.channels_last: expected true or false or 'auto', found 'autto'; nearest: 'auto'",
        "a.yaml:14: hooks: expected a list, found 3",
        "a.yaml:19: dataset.train.transforms[0]: expected text or a mapping, found 3",
        "a.yaml:19: dataset.train.transforms[1].Resize: expected a mapping, found 3",
        "a.yaml:20: dataset.train.batch_size: expected a number >= 1, found 0",
    ]


SOURCES = "; choose one of image_folder, image_list, coco, json_lines, idx, npz, digits, scenes"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "dataset:\n  train: {type: digts}",
            f"2: dataset.train.type: unknown type 'digts'; nearest: 'digits'{SOURCES}",
        ),
        ("dataset:\n  test:\n    path: x", f"2: dataset.test.type: missing key{SOURCES}"),
        ("dataset:\n  test:\n    type: digits", "3: dataset.test.split: missing key"),
        (
            "dataset:\n  train: {type: coco, path: x,\n    imags: y}",
            "3: dataset.train.imags: unknown key; nearest: 'images'",
        ),
        ("dataset: {train: 3}", "1: dataset.train: expected a mapping, found 3"),
        ("trainer:\n  max_epoch: 3\n  max_iter: 4", "3: trainer.max_iter: max_epoch is given too; keep one of the two"),
        ("1: 2", "1: expected text as key; put it in quotes"),
        ("ema: {enable: true}\nema: {enable: false}", "2: ema: duplicate key, first in line 1; keep one of them"),
        ("hooks: !hook []", "1: unknown tag '!hook'; only !include is known"),
        ("num_classes: !!int ten", "1: expected !!int, found 'ten'"),
        ("runtime:\n  runner:\n    type: sparce", "3: runtime.runner.type: unknown type 'sparce'; nearest: 'sparse'"),
        (
            "runtime:\n  runner:\n    type: sparse",
            "3: runtime.runner.type: sparse training needs 'sparsity': an MSBench config, or",
        ),
        ("sparsity: {leaf_module: []}", "1: sparsity: set 'recipe: file.yaml', or an MSBench config with 'scheduler'"),
        ("sparsity:\n  recipe: none.yaml", "2: sparsity.recipe: none.yaml: no such file"),
        (
            "sparsity:\n  recipe: builtin:gmp-9",
            "2: sparsity.recipe: builtin:gmp-9: no built-in recipe has that name; nearest: 'gmp-90'",
        ),
        (
            "sparsity:\n  scheduler:\n    type: AmpereSchedule",
            "3: sparsity.scheduler.type: unknown type 'AmpereSchedule'; nearest: 'AmpereScheduler'",
        ),
        (
            "sparsity:\n  scheduler:\n    type: AmpereScheduler\n    kwargs: {\n      mask_calculator: m4n2_3d}",
            "5: sparsity.scheduler.kwargs.mask_calculator: unknown pattern 'm4n2_3d'; known: ",
        ),
        (
            SPARSE.strip() + "\n      sparsity_tabel: 3",
            "7: sparsity.scheduler.kwargs.sparsity_tabel: unknown key; nearest: 'sparsity_table'",
        ),
        (
            SPARSE.strip() + "\n      verbose: 3",
            "7: sparsity.scheduler.kwargs.verbose: expected true or false, found 3",
        ),
    ],
)
def test_a_wrong_value_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, expected: str):
    found = problems(written(tmp_path, f"{text}\nnet: {{type: resnet18}}\n"))
    assert len(found) == 1
    assert found[0].startswith(f"a.yaml:{expected}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a.yaml:1:1: expected a mapping, found nothing; the config is empty or text"),
        ("resnet18", "a.yaml:1:1: expected a mapping, found a single value; the config is empty or text"),
        ("- net", "a.yaml:1: expected a mapping such as 'net: {type: resnet18}', found a list"),
        ("num_classes: 3", "a.yaml:1: net: missing key"),
        ("a: [1", "a.yaml:1:6: not valid YAML"),
        (
            "net: !!python/object:os.system {}",
            "a.yaml:1:6: the tag '!!python/object:os.system' is not allowed in a config",
        ),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, expected: str):
    found = problems(written(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_missing_file_and_a_folder_are_reported(tmp_path: Path):
    written(tmp_path, "net: {type: resnet18}", "res18.yaml")
    assert problems(tmp_path / "res81.yaml") == ["res81.yaml: no such file; nearest: 'res18.yaml'"]
    with pytest.raises(GossamerError, match="expected a config file, found the folder"):
        read_config(tmp_path)


def test_a_config_of_united_perceptions_form_is_reported_what_to_write_instead(tmp_path: Path):
    text = """
runtime: {task_names: sparse}
dataset:
  train:
    dataset: {type: coco, kwargs: {}}
  dataloader: {type: base}
saver: {results_dir: x}
net:
  - {name: backbone, type: resnet18}
"""
    found = problems(written(tmp_path, text))
    assert [line.partition(": a setting of United")[0] for line in found] == [
        "a.yaml:2: runtime.task_names",
        "a.yaml:5: dataset.train.dataset",
        "a.yaml:6: dataset.dataloader",
        "a.yaml:7: saver.results_dir",
        "a.yaml:8: net",
    ]
    assert "name one model: 'net: {type: resnet18}'" in found[-1]


def test_classes_that_the_models_module_may_register_are_not_called_unknown(tmp_path: Path):
    text = "net: {type: 'shop.models:tiny'}\nruntime: {runner: {type: sparse}}\nsparsity: {scheduler: {type: Mine}}\n"
    assert read_config(written(tmp_path, text)).config.sparsity is not None


def test_lengths_that_the_runner_fills_in_may_be_missing(tmp_path: Path):
    text = """
net: {type: resnet18}
runtime: {runner: {type: sparse}}
sparsity:
  mask_generator: {type: ProbMaskGenerator}
  fake_sparse: {type: ProbMaskFakeSparse}
  scheduler: {type: ProbMaskPruneScheduler, kwargs: {prune_rate: 0.5}}
"""
    assert read_config(written(tmp_path, text)).config.sparsity is not None
    assert problems(written(tmp_path, text.replace("prune_rate: 0.5", ""))) == [
        "a.yaml:7: sparsity.scheduler.kwargs.prune_rate: missing key"
    ]


def test_settings_without_effect_are_warned_of(tmp_path: Path):
    text = f"net: {{type: resnet18}}\nema: {{enable: true}}\n{SPARSE}"
    assert read_config(written(tmp_path, text)).warnings == ["EMA is off in sparse training; remove 'ema'"]
    dense = read_config(written(tmp_path, text), ["runtime.runner.type=base"])
    assert dense.warnings == ["sparsity has no effect because runtime.runner.type is base; set it to sparse"]


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("net: {type: resnet18}", "classification"),
        ("net: {type: resnet18}\ndataset: {train: {type: scenes, split: train}}", "classification"),
        ("net: {type: retinanet_resnet18_fpn}", "detection"),
        ("net: {type: ssdlite320_mobilenet_v3_large}", "detection"),
        ("net: {type: 'shop:net'}", "classification"),
        ("net: {type: 'shop:net'}\ndataset: {test: {type: coco, path: x}}", "detection"),
        ("net: {type: 'shop:net'}\ntask: detection", "detection"),
    ],
)
def test_the_task_is_what_is_said_or_what_the_net_or_the_data_are_for(tmp_path: Path, text: str, task: str):
    assert task_of(read_config(written(tmp_path, text)).config) == task


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@given(kwargs=st.dictionaries(texts, values, max_size=4), lr=st.floats(1e-9, 1e9))
def test_the_resolved_text_reads_back_to_an_equal_config(
    tmp_path_factory: pytest.TempPathFactory, kwargs: dict, lr: float
):
    config = Config.model_validate(
        {"net": {"type": "resnet18", "kwargs": kwargs}, "trainer": {"optimizer": {"kwargs": {"lr": lr}}}}
    )
    path = written(tmp_path_factory.mktemp("text"), config_text(config))
    assert read_config(path).config == config
