"""Whole runs on digits: they reach the end, go on to the bit after an interrupt, and end with the model in files."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

import gossamer
from gossamer.errors import GossamerError
from gossamer.runner import SparseRunner
from gossamer.runner.config import read_config
from gossamer.runner.data import Batches, build_dataset
from gossamer.runner.display import Display
from gossamer.runner.distributed import init_distributed
from tests.runner.nets import Diary, Frozen, small
from tests.runner.running_on_digits import (
    LENGTH,
    SPARSITIES,
    config,
    evaluated,
    final_state,
    interrupted,
    resumed,
    same,
    trained,
)


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_an_interrupted_run_continues_to_the_bit(sparsity: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = trained(config(tmp_path / "whole", sparsity))
    assert whole.complete
    assert whole.iteration == LENGTH
    for stop in (1, 8, 15):
        folder = tmp_path / str(stop)
        folder.mkdir()
        interrupted(config(folder, sparsity), stop)
        result = resumed(folder / "run")
        assert result.complete
        same(final_state(folder / "run"), final_state(tmp_path / "whole" / "run"))
        assert result.metrics == whole.metrics


@pytest.mark.parametrize("sparsity", ["amba", "ampere", "str", "probmask", "admm", "gmp", "qat"])
def test_a_sparse_run_reaches_its_target_and_evaluates_to_what_it_said(sparsity: str, tmp_path: Path) -> None:
    path = config(tmp_path, sparsity, saver={"save_dir": str(tmp_path / "run"), "export": ["safetensors", "onnx"]})
    result = trained(path)
    wanted = {"amba": 0.8, "probmask": 0.7, "admm": 0.6, "gmp": 0.8, "qat": 0.6}.get(sparsity)
    assert result.sparsity is not None
    if wanted is not None:
        assert result.sparsity_of_pruned_layers == pytest.approx(wanted, abs=2e-3)
    elif sparsity == "ampere":
        assert result.sparsity_of_pruned_layers == 0.5
    checked = evaluated(path)
    assert checked.metrics == result.metrics
    assert checked.model == result.model
    assert checked.sparsity == pytest.approx(result.sparsity)
    if sparsity != "qat":  # whose integers only the ONNX file has
        assert evaluated(path, weights=tmp_path / "run" / "model.safetensors").metrics == result.metrics
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert not [name for name in weights if "_mma_" in name or "fake_sparse" in name]
    session = onnxruntime.InferenceSession(tmp_path / "run" / "model.onnx")
    data = build_dataset(read_config(path).config.dataset.test, task="classification")
    right = 0
    for image, label in (data[index] for index in range(len(data))):
        scores = session.run(None, {session.get_inputs()[0].name: image.unsqueeze(0).numpy()})[0]
        right += int(scores.argmax() == label)
    assert 100 * right / len(data) == pytest.approx(result.metrics["top1"], abs=5 if sparsity == "qat" else 1e-6)


def test_amp_accumulation_clipping_and_averages_go_on_to_the_bit_too(tmp_path: Path) -> None:
    trainer = {"fp16": True, "accumulate": 2, "clip_grad_norm": 1.0, "label_smoothing": 0.1}
    for name, stop in (("whole", None), ("parts", 4)):
        folder = tmp_path / name
        folder.mkdir()
        path = config(folder)
        sets = [f"trainer.{key}={value}" for key, value in trainer.items()]
        sets += ["ema.enable=true", "ema.decay=0.9", "runtime.deterministic=true", "runtime.channels_last=true"]
        if stop is None:
            result = trained(path, *sets)
            assert result.iteration == 9
        else:
            interrupted(path, stop, *sets)
            assert resumed(folder / "run").metrics == result.metrics
    same(final_state(tmp_path / "parts" / "run"), final_state(tmp_path / "whole" / "run"))


@pytest.mark.parametrize(("sparsity", "sets"), [("probmask", []), ("dense", ["ema.enable=true", "ema.decay=0.9"])])
def test_weights_that_were_not_trained_get_statistics_of_their_own(
    sparsity: str, sets: list[str], tmp_path: Path
) -> None:
    path = config(tmp_path, sparsity)
    trained(path, *sets, "trainer.max_epoch=1")
    model = small()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    source = read_config(path).config.dataset.train
    data = Batches(build_dataset(source, task="classification"), source, train=True, seed=0)
    gossamer.recalibrate(model, [(batch.images, batch.targets) for batch in data.epoch(0)])
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=1e-5, atol=1e-6)


def test_accumulated_batches_make_the_step_of_one_large_batch(tmp_path: Path) -> None:
    nets = []
    for name, size, batches in (("large", 64, 1), ("small", 32, 2)):
        (tmp_path / name).mkdir()
        path = config(tmp_path / name, net={"type": "tests.runner.nets:plain"})
        trained(path, f"dataset.train.batch_size={size}", f"trainer.accumulate={batches}", "trainer.max_epoch=1")
        nets.append(load_file(tmp_path / name / "run" / "model.safetensors"))
    for name in nets[0]:
        torch.testing.assert_close(nets[0][name], nets[1][name], rtol=1e-4, atol=1e-6)


def test_a_run_from_an_average_starts_from_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    trained(config(first), "ema.enable=true", "ema.decay=0.9")
    path = config(second, "amba")
    averaged = load_file(first / "run" / "model.safetensors")
    assert not torch.equal(averaged["0.weight"], final_state(first / "run")["model"]["0.weight"])
    loaded = read_config(path, [f"saver.pretrain_model={first / 'run'}", "ema.enable=true"])
    with init_distributed("cpu") as place:
        runner = SparseRunner(loaded, place, display=Display(shown=False))
        runner.build()
    assert torch.equal(runner.model.state_dict()["0.weight"], averaged["0.weight"])
    assert runner.average is None


def test_hooks_are_reported_of_the_turns_of_a_run(tmp_path: Path) -> None:
    Diary.pages.clear()
    trained(
        config(tmp_path), "hooks=[{type: 'tests.runner.nets:Diary'}, {type: auto_save_best}]", "trainer.max_epoch=2"
    )
    assert Diary.pages == [
        "begins",
        "tested at 6",
        "saved iter_00000006.safetensors",
        "tested at 12",
        "saved iter_00000012.safetensors",
        "ends",
    ]


def test_a_runner_of_ones_own_replaces_a_step(tmp_path: Path) -> None:
    result = trained(config(tmp_path), "runtime.runner.type=tests.runner.nets:Frozen", "trainer.max_epoch=1")
    state = final_state(result.folder)["model"]
    torch.manual_seed(0)
    assert torch.equal(state["0.weight"], Frozen.first)


def test_a_loss_that_is_not_a_number_ends_the_run_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"is nan at iteration 4: lower trainer.optimizer.kwargs.lr"):
        trained(config(tmp_path, net={"type": "tests.runner.nets:Unlucky"}))


def test_what_a_killed_process_left_of_its_files_goes_when_the_run_continues(tmp_path: Path) -> None:
    interrupted(config(tmp_path, "amba"), 8)
    folder = tmp_path / "run"
    names = (
        "model.safetensors",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "checkpoints/iter_00000008.safetensors",
    )
    more = ("levels/global_sparse_rate_0.3.pth.tar", "analysis/plan.json", "pictures/iter_00000006.png")
    left = [(folder / name).with_name(f".{'0f' * 16}.{Path(name).name}") for name in (*names, *more)]
    others = [folder / ".gitignore", folder / "mine" / f".{'0f' * 16}.a", tmp_path / f".{'0f' * 16}.a"]
    for path in (*left, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_text("half of it")
    resumed(folder)
    assert not [path for path in left if path.exists()]
    assert all(path.exists() for path in others), "files of others stay"
