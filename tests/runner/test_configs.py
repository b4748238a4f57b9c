"""The configs of the repository: each reads, trains, is interrupted, goes on, is evaluated and exported."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from gossamer.engine import Manager
from gossamer.recipe import load
from gossamer.runner.config import read_config, task_of
from gossamer.runner.data.transforms import Pipeline
from gossamer.runner.display import Display
from gossamer.runner.records import read_records
from gossamer.runner.runs import evaluate, export, resume, run

ROOT = Path(__file__).parents[2]
CONFIGS = [
    "cls/resnet/res18.yaml",
    "cls/resnet/res18_amba_sparse.yaml",
    "cls/resnet/res18_ampere_sparse.yaml",
    "cls/resnet/res18_filters_sparse.yaml",
    "cls/resnet/res18_int8.yaml",
    "det/retinanet/retinanet-r18-improve.yaml",
    "det/retinanet/retinanet-r18-improve_amba_sparse.yaml",
    "det/retinanet/retinanet-r18-improve_ampere_sparse.yaml",
    "det/faster_rcnn/faster_rcnn_r50_fpn_1x.yaml",
    "det/faster_rcnn/faster_rcnn_r50_fpn_amba_sparse.yaml",
    "det/faster_rcnn/faster_rcnn_r50_fpn_ampere_sparse.yaml",
]
RECIPES = {
    "cls/resnet/res18_filters_sparse.yaml": ("num_epochs=1", "update_frequency=0.25"),
    "cls/resnet/res18_int8.yaml": ("num_epochs=1", "quantization_start=0.25"),
}
"""Variables of their recipes, for a training of one epoch."""
LENGTHS = {"cls": 8, "det": 4}
"""Iterations: one for each level of sparsity at least."""
TINY = {
    "cls": ["dataset.train.limit=64", "dataset.train.batch_size=8", "dataset.test.limit=16"],
    "det": ["dataset.train.count=16", "dataset.test.count=4", "dataset.train.size=64", "dataset.test.size=64"],
}
SMALL = ["net.kwargs.min_size=64", "net.kwargs.max_size=64", "dataset.train.batch_size=2", "dataset.test.batch_size=2"]


BY_RECIPE = [ROOT / "configs" / name for name in RECIPES]
NINE = [ROOT / "configs" / name for name in CONFIGS if name not in RECIPES]
"""Those of the users' documentation."""
SPARSE = [path for path in NINE if path.stem.endswith("sparse")]


def short(length: int) -> list[str]:
    frequencies = [f"trainer.{key}={length}" for key in ("max_iter", "test_freq", "save_freq")]
    return [*frequencies, "trainer.log_freq=1"]


def test_there_is_no_other() -> None:
    found = {str(path.relative_to(ROOT / "configs")) for path in ROOT.glob("configs/[cd]*/**/*.yaml")}
    assert found == set(CONFIGS)


LONG = [name for name in CONFIGS if (name.startswith("det") and "amba" in name) or name in RECIPES]
"""Of detectors these take most of a minute each, and classifiers show the same method; recipes have tests of theirs."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in CONFIGS])
def test_a_config_trains_stops_goes_on_evaluates_and_exports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, quiet, length = ROOT / "configs" / name, Display(shown=False), LENGTHS[name[:3]]
    sets = [*short(length), *TINY[name[:3]], *(SMALL if name.startswith("det") else [])]
    sets += [f"sparsity.recipe_variables.{variable}" for variable in RECIPES.get(name, ())]
    stop = "hooks=[{type: 'tests.runner.nets:Interrupt', kwargs: {at: 3}}]"

    first = run(config, [*sets, stop], "tiny", display=quiet)
    assert not first.complete
    assert first.iteration == 3
    last = resume(first.folder, ["hooks=[]"], display=quiet)
    assert last.complete
    assert last.iteration == length
    assert [line["iteration"] for line in read_records(first.folder) if line["kind"] == "train"] == list(
        range(1, length + 1)
    )

    checked = evaluate(config, sets, "tiny", display=quiet)
    assert checked.metrics == last.metrics
    assert set(checked.metrics) >= ({"top1", "top5"} if name.startswith("cls") else {"mAP", "mAP50", "mAR100"})
    if "sparse" in name:
        wanted = 0.5 if "ampere" in name or "filters" in name else 0.9 if name.startswith("cls") else 0.8
        assert checked.sparsity_of_pruned_layers == pytest.approx(wanted, abs=1e-3)

    files = export(first.folder, formats=["safetensors", "onnx"], display=quiet).files
    weights = load_file(files[0])
    assert not [key for key in weights if "_mma_" in key]
    for path in files[1:]:
        session = onnxruntime.InferenceSession(path)
        taken = {
            part.name: torch.rand([size if isinstance(size, int) else 1 for size in part.shape])
            for part in session.get_inputs()
        }
        assert session.run(None, {key: value.numpy() for key, value in taken.items()})
    assert len(files) == (3 if "faster_rcnn" in name else 2)
    if name.startswith("det"):
        assert sorted(path.name for path in (first.folder / "pictures").iterdir())[-1] == f"iter_{length:08d}.png"


def test_the_script_of_the_documentation_trains_and_evaluates(tmp_path: Path) -> None:
    config = ROOT / "configs" / CONFIGS[2]
    sets = [f"--set={word}" for word in (*short(8), *TINY["cls"], f"saver.save_dir={tmp_path / 'run'}")]
    for more in ([], ["-e"]):
        done = subprocess.run(
            ["sh", "train_sparse.sh", config, "1", *more, "--data", "tiny", *sets],
            cwd=ROOT / "scripts",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "top1" in done.stdout


@pytest.mark.parametrize(("path", "data"), list(product([*NINE, *BY_RECIPE], (None, "tiny"))), ids=str)
def test_each_config_reads_and_its_resolved_text_reads_back_equal(
    path: Path, data: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = read_config(path, data=data)
    assert task_of(loaded.config) == ("classification" if "cls" in path.parts else "detection")
    copy = tmp_path / "config.yaml"
    copy.write_text(loaded.text)
    assert read_config(copy).config == loaded.config


@pytest.mark.parametrize("path", SPARSE, ids=lambda path: path.stem)
def test_a_sparse_config_trains_on_from_the_run_of_its_float_config(path: Path) -> None:
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
) -> None:
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


@pytest.mark.parametrize("path", [*NINE, *BY_RECIPE], ids=lambda path: path.stem)
def test_transforms_are_torchvisions_and_tiny_settings_are_for_a_laptop(path: Path) -> None:
    for data in (None, "tiny"):
        config = read_config(path, data=data).config
        for source in (config.dataset.train, config.dataset.test):
            assert source is not None
            Pipeline(source.transforms)
    assert not config.net.kwargs.get("weights_backbone"), "nothing is downloaded"
    assert not config.trainer.fp16
    scheduler = config.trainer.lr_scheduler
    assert scheduler is None or (scheduler.warmup_epochs == 0 and scheduler.warmup_iter <= 20)


def test_no_config_holds_a_path_of_one_machine() -> None:
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert ": /" not in path.read_text()
