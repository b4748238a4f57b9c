"""The configs of the users' documentation: each trains, is interrupted, goes on, is evaluated and exported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

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
