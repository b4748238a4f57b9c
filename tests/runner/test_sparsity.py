"""Sparse runs beside the straight way: recipes against configs, half precision, layouts, layers that are not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.errors import GossamerError
from gossamer.runner.checkpoint import Checkpoints
from gossamer.runner.notes import PlanNote, read_note
from gossamer.runner.records import read_records
from gossamer.runner.runs import Result
from tests.runner.running_on_digits import (
    SPARSITIES,
    config,
    evaluated,
    final_state,
    interrupted,
    resumed,
    same,
    trained,
)

GMP = "!GMPruningModifier {{params: {params}, init_sparsity: 0.1, final_sparsity: {final}, start_epoch: 0, "
GMP += "end_epoch: {end}, update_frequency: 0.5}}"
TARGETS = {"amba": 0.8, "ampere": 0.5, "probmask": 0.7, "admm": 0.6, "gmp": 0.8, "qat": 0.6}


def by_recipe(folder: Path, *modifiers: str, sets: tuple[str, ...] = ()) -> Result:
    path = config(folder, "qat")
    (folder / "qat.yaml").write_text("modifiers:\n" + "".join(f"  - {modifier}\n" for modifier in modifiers))
    return trained(path, *sets)


def pruning(params: str = "__ALL_PRUNABLE__", final: float = 0.8, end: float = 2.0) -> str:
    return GMP.format(params=params, final=final, end=end)


def log(folder: Path) -> str:
    return (folder / "run" / "log.txt").read_text()


# What is evaluated


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_each_checkpoint_evaluates_to_what_training_said_of_it(sparsity: str, tmp_path: Path) -> None:
    path = config(tmp_path, sparsity)
    trained(path)
    reported = {line["iteration"]: line["top1"] for line in read_records(tmp_path / "run") if line["kind"] == "test"}
    assert len(reported) == 3
    for iteration, top1 in reported.items():
        weights = tmp_path / "run" / "checkpoints" / f"iter_{iteration:08d}.safetensors"
        assert evaluated(path, weights=weights).metrics["top1"] == top1, iteration


# Ways to compute


@pytest.mark.parametrize("sparsity", TARGETS)
def test_half_precision_channels_last_and_determinism_go_with_each_method(sparsity: str, tmp_path: Path) -> None:
    sets = ("trainer.fp16=true", "runtime.channels_last=true", "runtime.deterministic=true", "ema.enable=true")
    result = trained(config(tmp_path, sparsity), *sets)
    assert result.sparsity_of_pruned_layers == pytest.approx(TARGETS[sparsity], abs=2e-3)
    assert "ema" in log(tmp_path).lower()
    assert final_state(tmp_path / "run")["ema"] is None


@pytest.mark.parametrize("sparsity", ["dense", "amba", "ampere", "str", "gmp"])
def test_layers_that_are_not_used_do_not_matter(sparsity: str, tmp_path: Path) -> None:
    path = config(tmp_path, sparsity, net={"type": "tests.runner.nets:Unused"})
    result = trained(path, "trainer.clip_grad_norm=1.0", "trainer.accumulate=2")
    assert result.complete
    if sparsity in TARGETS:
        assert result.sparsity_of_pruned_layers == pytest.approx(TARGETS[sparsity], abs=2e-3)


@pytest.mark.parametrize("sparsity", ["ampere", "gmp"])
def test_half_precision_continues_to_the_bit(sparsity: str, tmp_path: Path) -> None:
    sets = ("trainer.fp16=true", "runtime.channels_last=true", "trainer.accumulate=2")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        path = config(tmp_path / name, sparsity)
        if name == "whole":
            trained(path, *sets)
        else:
            interrupted(path, 4, *sets)
            resumed(tmp_path / name / "run")
    same(final_state(tmp_path / "parts" / "run"), final_state(tmp_path / "whole" / "run"))


# Recipes


def test_a_recipe_that_sets_the_rate_says_that_the_scheduler_does_not(tmp_path: Path) -> None:
    by_recipe(tmp_path, pruning(), "!SetLearningRateModifier {learning_rate: 0.05}")
    assert {line["lr"] for line in read_records(tmp_path / "run") if line["kind"] == "train"} == {0.05}
    assert "trainer.lr_scheduler has no effect: the recipe sets the learning rate" in log(tmp_path)


def test_the_length_of_a_run_is_that_of_its_recipe_unless_the_config_says_one(tmp_path: Path) -> None:
    result = by_recipe(tmp_path, pruning(end=1.5), sets=("trainer.max_epoch=null",))
    assert result.iteration == 12
    assert result.sparsity == pytest.approx(0.8, abs=2e-3)


def test_a_recipe_without_an_end_wants_one_from_the_config(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"has no end; give trainer.max_epoch or max_iter"):
        by_recipe(tmp_path, "!ConstantPruningModifier {params: __ALL__}", sets=("trainer.max_epoch=null",))


def test_a_recipe_that_is_longer_than_the_run_is_reported(tmp_path: Path) -> None:
    result = by_recipe(tmp_path, pruning(end=30))
    assert result.sparsity is not None
    assert result.sparsity < 0.5
    assert "18 of 180 steps (epoch 3 of 30), sparsity" in log(tmp_path)


def test_layers_under_one_threshold_have_a_target_together(tmp_path: Path) -> None:
    result = by_recipe(tmp_path, pruning().replace("final_sparsity", "global_sparsity: true, final_sparsity"))
    assert result.sparsity == pytest.approx(0.8, abs=2e-3)
    assert Checkpoints(tmp_path / "run" / "checkpoints", 3).best() is not None
    plan = read_note(tmp_path / "run", "plan", PlanNote)
    assert plan is not None
    assert {layer.target for layer in plan.layers.values()} == {None}
    assert plan.course[-1][1] == pytest.approx(0.8)


def test_a_recipe_of_the_package_is_kept_with_the_run(tmp_path: Path) -> None:
    path = config(tmp_path, "gmp")
    sets = ("sparsity.recipe=builtin:gmp-90", "trainer.max_iter=6", "trainer.save_freq=2")
    interrupted(path, 3, *sets)
    assert (tmp_path / "run" / "recipe.yaml").is_file()
    assert resumed(tmp_path / "run").iteration == 6
    with pytest.raises(GossamerError, match=r"sparsity.recipe: builtin:gmp-9: .*nearest: 'gmp-90'"):
        trained(path, "sparsity.recipe=builtin:gmp-9")


def test_variables_of_a_recipe_hold_over_a_resume(tmp_path: Path) -> None:
    path = config(tmp_path, "gmp")
    (tmp_path / "gmp.yaml").write_text(
        "final: 0.8\nmodifiers:\n  - " + pruning(final=0.123, end=2).replace("0.123", "eval(final)")
    )
    sets = ("sparsity.recipe_variables={final: 0.6}", "trainer.max_epoch=2")
    interrupted(path, 3, *sets)
    (tmp_path / "gmp.yaml").unlink()
    assert resumed(tmp_path / "run").sparsity == pytest.approx(0.6, abs=2e-3)


def test_sparse_training_without_sparsity_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"sparse training needs 'sparsity'"):
        trained(config(tmp_path), "runtime.runner.type=sparse")


@pytest.mark.parametrize(
    ("sparsity", "reported"),
    [
        ("{scheduler: {type: AmpereScheduller}}", "nearest: 'AmpereScheduler'"),
        ("{recipe: nope.yaml}", r"nope\.yaml"),
        ("{recipe: gmp.yaml, scheduler: {type: AmpereScheduler}}", "keep the recipe or the MSBench config"),
        ("{leaf_module: []}", "set 'recipe: file.yaml'"),
    ],
)
def test_what_is_wrong_with_sparsity_is_reported_before_anything_is_written(
    sparsity: str, reported: str, tmp_path: Path
) -> None:
    with pytest.raises(GossamerError, match=reported):
        trained(config(tmp_path, "amba", net={"type": "resnet18"}), f"sparsity={sparsity}")
    assert not (tmp_path / "run").exists()
