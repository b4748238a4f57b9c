"""Configs of short runs on the embedded digits, for the tests of whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from gossamer.runner.checkpoint import Checkpoints, read_checkpoint
from gossamer.runner.display import Display
from gossamer.runner.runs import Result, evaluate, resume, run
from gossamer.runner.trust import remember, remembered

NETS = "tests.runner.nets"
"""The code that these configs name."""
LENGTH = 18
"""Iterations of a run: three epochs of six."""

SPARSITIES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "amba": {
        "mask_generator": {"type": "NormalMaskGenerator"},
        "fake_sparse": {"type": "FakeSparse"},
        "scheduler": {"type": "AmbaLevelPruneScheduler", "kwargs": {"sparsity_table": [30, 60, 80]}},
    },
    "ampere": {"scheduler": {"type": "AmpereScheduler", "kwargs": {"allow_permutation": True}}},
    "str": {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse", "kwargs": {"sInit_value": -3}},
        "scheduler": {"type": "STRScheduler"},
    },
    "probmask": {
        "mask_generator": {"type": "ProbMaskGenerator"},
        "fake_sparse": {"type": "ProbMaskFakeSparse"},
        "scheduler": {"type": "ProbMaskPruneScheduler", "kwargs": {"prune_rate": 0.7}},
    },
    "admm": {
        "sparsity": {"target_sparsity": 0.6, "uniform": True},
        "scheduler": {"type": "ADMMScheduler", "kwargs": {"iters_per_epoch": 3}},
    },
    "gmp": {"recipe": "gmp.yaml"},
    "qat": {"recipe": "qat.yaml"},
}

RECIPES = {
    "gmp.yaml": """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 3}
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0.5,
                        end_epoch: 2.5, update_frequency: 0.5}
  - !LearningRateFunctionModifier {start_epoch: 0, end_epoch: 3, lr_func: cosine, init_lr: 0.1, final_lr: 0.001}
""",
    "str.yaml": """
modifiers:
  - !STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, final_sparsity: 0.8}
""",
    "qat.yaml": """
modifiers:
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.6, start_epoch: 0,
                        end_epoch: 1, update_frequency: 0.3}
  - !DistillationModifier {start_epoch: 0, end_epoch: 3, hardness: 0.5, temperature: 2.0}
  - !QuantizationModifier {start_epoch: 1.5, freeze_bn_stats_epoch: 2.5}
""",
}


def config(folder: Path, sparsity: str = "dense", **changed: Any) -> Path:
    """Write a config for a run in `folder`; keywords such as `trainer={"fp16": True}` are laid over its parts."""
    given = SPARSITIES[sparsity]
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
    if given is not None and "recipe" in given:
        given = {"recipe": str(folder / given["recipe"])}
    source = {"type": "digits", "batch_size": 32, "transforms": [{"RandomAffine": {"degrees": 10}}]}
    parts: dict[str, Any] = {
        "num_classes": 10,
        "dataset": {
            "train": {**source, "split": "train", "limit": 200},
            "test": {**source, "split": "test", "limit": 60, "transforms": []},
        },
        "net": {"type": "tests.runner.nets:small"},
        "trainer": {
            "max_epoch": 3,
            "test_freq": 1,
            "log_freq": 2,
            "optimizer": {"type": "SGD", "kwargs": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}},
            "lr_scheduler": {"type": "CosineAnnealingLR", "warmup_iter": 2},
        },
        "saver": {"save_dir": str(folder / "run")},
        "runtime": {"runner": {"type": "base" if given is None else "sparse"}, "tensorboard": False},
    }
    if given is not None:
        parts["sparsity"] = given
    if sparsity == "gmp":
        del parts["trainer"]["lr_scheduler"], parts["trainer"]["max_epoch"]
    for name, values in changed.items():
        parts[name] = {**parts[name], **values} if isinstance(values, dict) and name in parts else values
    path = folder / "config.yaml"
    path.write_text(json.dumps(parts, indent=1))
    return path


def trained(path: Path, *sets: str) -> Result:
    return run(path, sets, display=Display(shown=False))


def interrupted(path: Path, at: int, *sets: str) -> Result:
    """A run that gets Ctrl-C behind an iteration."""
    hook = f"hooks=[{{type: 'tests.runner.nets:Interrupt', kwargs: {{at: {at}}}}}]"
    result = run(path, [*sets, hook], display=Display(shown=False))
    assert not result.complete
    assert result.iteration == at
    return result


def resumed(folder: Path, *sets: str) -> Result:
    return resume(folder, [*sets, "hooks=[]"], imports=[NETS], display=Display(shown=False))


def evaluated(path: Path, *sets: str, weights: Path | str | None = None) -> Result:
    return evaluate(path, sets, weights=weights, imports=[NETS], display=Display(shown=False))


def copied_run(run: Path, folder: Path) -> Path:
    """A run folder in another place, as one's own: commands on it need no --import."""
    shutil.copytree(run, folder)
    remember(folder, sorted(remembered(run)))
    return folder


def final_state(folder: Path) -> dict[str, Any]:
    """What the last checkpoint of a run holds, without times and the config's text."""
    latest = Checkpoints(folder / "checkpoints", keep=3).latest()
    assert latest is not None
    state = dict(read_checkpoint(latest).state)
    return {key: value for key, value in state.items() if key not in ("config",)}


def same(one: Any, other: Any, place: str = "state") -> None:
    """Assert that two states are equal to the bit."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        assert one.shape == other.shape, place
        assert torch.equal(*bits), place
    elif isinstance(one, dict):
        assert list(one) == list(other), place
        for key in one:
            same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            same(mine, theirs, f"{place}[{index}]")
    else:
        assert repr(one) == repr(other), place
