"""The configs that the documentation names."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from gossamer.engine import Manager
from gossamer.recipe import load
from gossamer.runner.config import read_config, task_of

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "configs/cls/resnet": ("res18", "res18_amba_sparse", "res18_ampere_sparse"),
    "configs/det/retinanet": (
        "retinanet-r18-improve",
        "retinanet-r18-improve_amba_sparse",
        "retinanet-r18-improve_ampere_sparse",
    ),
    "configs/det/faster_rcnn": (
        "faster_rcnn_r50_fpn_1x",
        "faster_rcnn_r50_fpn_amba_sparse",
        "faster_rcnn_r50_fpn_ampere_sparse",
    ),
}
NINE = [ROOT / folder / f"{name}.yaml" for folder, names in CONFIGS.items() for name in names]
SPARSE = [path for path in NINE if path.stem.endswith("sparse")]
BY_RECIPE = [ROOT / "configs/cls/resnet" / f"{name}.yaml" for name in ("res18_filters_sparse", "res18_int8")]


@pytest.mark.parametrize(("path", "data"), list(product([*NINE, *BY_RECIPE], (None, "tiny"))), ids=str)
def test_each_config_reads_and_its_resolved_text_reads_back_equal(
    path: Path, data: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    loaded = read_config(path, data=data)
    assert task_of(loaded.config) == ("classification" if "cls" in path.parts else "detection")
    copy = tmp_path / "config.yaml"
    copy.write_text(loaded.text)
    assert read_config(copy).config == loaded.config


@pytest.mark.parametrize("path", SPARSE, ids=lambda path: path.stem)
def test_a_sparse_config_trains_on_from_the_run_of_its_float_config(path: Path):
    config, floats = read_config(path).config, [one for one in NINE if one.parent == path.parent and one not in SPARSE]
    assert config.runtime.runner.type == "sparse"
    assert config.saver.pretrain_model == Path("runs") / floats[0].stem
    dense = read_config(floats[0]).config
    assert (config.net, config.dataset, config.num_classes) == (dense.net, dense.dataset, dense.num_classes)
    assert config.sparsity is not None
    assert config.sparsity.scheduler is not None
    kinds = {"amba": "AmbaLevelPruneScheduler", "ampere": "AmpereScheduler"}
    assert config.sparsity.scheduler["type"] == kinds["amba" if "amba" in path.stem else "ampere"]


@pytest.mark.parametrize("data", [None, "tiny"])
@pytest.mark.parametrize("path", BY_RECIPE, ids=lambda path: path.stem)
def test_a_config_with_a_recipe_trains_as_long_as_the_recipe_and_leaves_it_the_learning_rate(
    path: Path, data: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "res18-tiny").mkdir(parents=True)
    loaded = read_config(path, data=data)
    config, dense = loaded.config, read_config(NINE[0], data=data).config
    assert loaded.warnings == []
    assert config.saver.pretrain_model == Path("runs") / ("res18" if data is None else "res18-tiny")
    assert (config.net, config.dataset, config.num_classes) == (dense.net, dense.dataset, dense.num_classes)
    assert config.trainer.lr_scheduler is None
    assert config.sparsity is not None
    manager = Manager(load(str(config.sparsity.recipe), variables=config.sparsity.recipe_variables))
    assert manager.max_epochs == config.trainer.max_epoch
    assert manager.learning_rate_modifiers
    if data == "tiny":
        assert config.trainer.max_epoch == dense.trainer.max_epoch
        assert config.sparsity.recipe_variables["init_lr"] == dense.trainer.optimizer.kwargs["lr"]


@pytest.mark.parametrize("path", NINE, ids=lambda path: path.stem)
def test_on_tiny_data_nothing_is_downloaded_and_the_warm_up_is_short(path: Path):
    config = read_config(path, data="tiny").config
    assert not config.net.kwargs.get("weights_backbone")
    assert config.trainer.lr_scheduler is not None
    assert config.trainer.lr_scheduler.warmup_epochs == 0
    assert config.trainer.lr_scheduler.warmup_iter <= 20
    assert not config.trainer.fp16


@pytest.mark.parametrize("path", [*NINE, *BY_RECIPE], ids=lambda path: path.stem)
def test_every_transform_is_one_of_torchvisions(path: Path):
    from torchvision.transforms import v2

    for data in (None, "tiny"):
        dataset = read_config(path, data=data).config.dataset
        for source in (dataset.train, dataset.test):
            assert source is not None
            for transform in source.transforms:
                name, arguments = (transform, None) if isinstance(transform, str) else next(iter(transform.items()))
                getattr(v2, name)(**(arguments or {}))


def test_no_config_holds_a_path_of_one_machine():
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert os.path.expanduser("~/") not in path.read_text()
        assert ": /" not in path.read_text()
