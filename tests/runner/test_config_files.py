"""The nine configs that the documentation names."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("path", "data"), list(product(NINE, (None, "tiny"))), ids=str)
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


@pytest.mark.parametrize("path", NINE, ids=lambda path: path.stem)
def test_on_tiny_data_nothing_is_downloaded_and_the_warm_up_is_short(path: Path):
    config = read_config(path, data="tiny").config
    assert not config.net.kwargs.get("weights_backbone")
    assert config.trainer.lr_scheduler is not None
    assert config.trainer.lr_scheduler.warmup_epochs == 0
    assert config.trainer.lr_scheduler.warmup_iter <= 20
    assert not config.trainer.fp16


@pytest.mark.parametrize("path", NINE, ids=lambda path: path.stem)
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
