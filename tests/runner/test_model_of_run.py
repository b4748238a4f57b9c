"""The model of a run is one thing: its best checkpoint at the target, wherever it is shown, tested or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossamer import load
from gossamer.errors import GossamerError
from gossamer.export import read_integers
from gossamer.model.additions import evaluated as as_evaluated
from gossamer.models import load_model
from gossamer.quantization import is_emulated
from gossamer.runner import trainer
from gossamer.runner.checkpoint import Checkpoints, read_checkpoint
from gossamer.runner.reporting import report, run_content
from gossamer.runner.runs import export
from gossamer.runner.summary import comparison, run_summary
from tests.cli.conftest import Run, run  # noqa: F401
from tests.runner.nets import small
from tests.runner.running_on_digits import SPARSITIES, config, copied_run, evaluated, interrupted, resumed, trained

SCRIPTED = "runtime.runner.type=tests.runner.nets:Scripted"  # which is best at iteration 12 of 18
PRUNED = (nn.Conv2d, nn.Linear)
BEST = "best checkpoint, iteration 12: top1 90.00"


def written(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scripted")
    result = trained(config(place), SCRIPTED, "runtime.report.enable=true")
    assert (result.model, result.metrics, result.iteration) == (BEST, {"top1": 90.0}, 18)
    return place / "run"


def test_every_file_is_the_best_checkpoint(folder: Path, tmp_path: Path) -> None:
    best = read_checkpoint(folder / "checkpoints" / "best.safetensors")
    last = read_checkpoint(folder / "checkpoints" / "iter_00000018.safetensors")
    assert best.iteration == 12
    assert not torch.equal(best.weights["3.weight"], last.weights["3.weight"])
    export(folder, formats=["safetensors"], output=tmp_path)
    for file in (folder / "model.safetensors", tmp_path / "model.safetensors"):
        found = written(file)
        assert all(torch.equal(tensor, best.weights[name]) for name, tensor in found.items()), file
    loaded = load_model(str(folder))
    assert loaded.checkpoint == BEST
    assert torch.equal(loaded.model[3].weight, best.weights["3.weight"])


def test_it_is_named_wherever_it_is_shown(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert run_summary(folder)["model"]["title"] == BEST
    (row,) = comparison([folder])
    assert (row["value"], row["last"], row["model"]) == (90.0, 50.0, BEST)
    assert "best 12" in run("compare", folder).output
    for command in (("export", folder, "-f", "bitmask", "-o", "files"), ("analyze", folder, "--quick")):
        done = run(*command)
        assert done.exit_code == 0, done.output
        assert BEST in " ".join(done.output.split()), command
    page = report([folder], "page.html").read_text()
    assert "best checkpoint, iteration 12" in page


def test_eval_tests_it_and_says_which(tmp_path: Path, run: Run) -> None:  # noqa: F811
    trained(config(tmp_path))
    found = Checkpoints(tmp_path / "run" / "checkpoints", 3).model()
    assert found is not None
    assert found.title in " ".join(run("eval", tmp_path / "run").output.split())
    reported = json.loads(run("eval", tmp_path / "run", "--json").stdout)
    assert (reported["model"], reported["metrics"]) == (found.title, found.metrics)


def test_without_tests_it_is_the_last(tmp_path: Path) -> None:
    result = trained(config(tmp_path, dataset={"test": None}))
    assert result.model == "last checkpoint, iteration 18"
    last = read_checkpoint(tmp_path / "run" / "checkpoints" / "iter_00000018.safetensors")
    found = written(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(tensor, last.weights[name]) for name, tensor in found.items())


@pytest.mark.parametrize("sparsity", ["gmp", "global", "str", "qat", "thin"])
def test_a_model_on_its_way_is_never_the_best(sparsity: str, tmp_path: Path) -> None:
    """The first test gives 30, the second 90, the third 50: the second is at no target, in floats or not thinned."""
    path = config(tmp_path, {"global": "gmp", "thin": "qat"}.get(sparsity, sparsity))
    (tmp_path / "qat.yaml").write_text(THIN if sparsity == "thin" else LATE)
    if sparsity == "global":
        text = (tmp_path / "gmp.yaml").read_text()
        (tmp_path / "gmp.yaml").write_text(text.replace("init_sparsity", "global_sparsity: true, init_sparsity"))
    result = trained(path, "runtime.runner.type=tests.runner.nets:ScriptedSparse")
    assert result.model == "best checkpoint, iteration 18: top1 50.00"


TO_A_TARGET: dict[str, dict[str, Any]] = {
    "recipe": {"recipe": "str.yaml"},
    "config": {
        "mask_generator": {"type": "STRMaskGenerator"},
        "fake_sparse": {"type": "STRFakeSparse"},
        "scheduler": {"type": "STRScheduler", "kwargs": {"prune_rate": 0.8, "total_iterations": 18}},
    },
}


@pytest.mark.parametrize("sparsity", TO_A_TARGET)
def test_learned_thresholds_are_exported_as_they_were_tested(
    sparsity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests: list[dict[str, torch.Tensor]] = []

    evaluate = trainer.Trainer.evaluate

    def recorded(tested: trainer.Trainer) -> dict[str, float]:
        model = tested.outcome.eval()
        values = {id(weight): value for weight, value in as_evaluated(model)}
        layers = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, PRUNED)}
        tests.append({f"{n}.weight": values.get(id(w), w).detach().clone() for n, w in layers.items()})
        return evaluate(tested)

    monkeypatch.setattr(trainer.Trainer, "evaluate", recorded)
    monkeypatch.setitem(SPARSITIES, sparsity, TO_A_TARGET[sparsity])
    path = config(tmp_path, sparsity, trainer={"max_epoch": 3, "test_freq": 1})
    result = trained(path)
    found = Checkpoints(tmp_path / "run" / "checkpoints", 3).model()
    assert found is not None
    file = tmp_path / "run" / "model.safetensors"
    weights = written(file)
    for name, value in tests[found.iteration // 6 - 1].items():
        assert torch.equal(weights[name], value), name
    assert evaluated(path, weights=file).metrics == result.metrics


def test_the_small_file_of_a_quantized_run_holds_integers_and_is_tested_as_the_run_was(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    path = config(tmp_path, "qat", saver={"save_dir": str(tmp_path / "run"), "export": ["bitmask", "safetensors"]})
    result = trained(path)
    small_file, plain = (tmp_path / "run" / name for name in ("model-bitmask.safetensors", "model.safetensors"))
    assert read_integers(small_file)
    assert not read_integers(plain)
    assert small_file.stat().st_size < plain.stat().st_size
    assert evaluated(path, weights=small_file).metrics == result.metrics
    for command in (("eval", path), ("export", path, "-f", "bitmask", "-o", "floats")):
        for file, warned in ((plain, True), (small_file, False)):
            done = " ".join(run(*command, "--weights", file).output.split())
            assert ("has float weights, and the recipe quantizes" in done) == warned, done
    done = run("export", tmp_path / "run", "-f", "bitmask", "-o", "files")
    assert done.exit_code == 0, done.output
    assert "its weights are integers with scales" in " ".join(done.output.split())
    assert Path("files/model-bitmask.safetensors").read_bytes() == small_file.read_bytes()
    loaded = load_model("tests.runner.nets:small", weights=small_file)
    assert is_emulated(loaded.model)
    with torch.no_grad():
        image = torch.rand(1, 3, 8, 8)
        assert torch.equal(loaded.model(image), load_model(str(tmp_path / "run")).model(image))


@pytest.mark.parametrize("where", [0, -1])
def test_a_damaged_best_checkpoint_is_refused_and_never_another_model(
    where: int,
    folder: Path,
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """Damaged in a tensor, or in the header that `compare` reads."""
    copy = tmp_path / "copy"
    copied_run(folder, copy)
    best = copy / "checkpoints" / "best.safetensors"
    content = bytearray(best.read_bytes())
    content[where] ^= 1
    best.unlink()
    best.write_bytes(content)
    for command in (("eval", copy), ("export", copy, "-f", "bitmask", "-o", "files")):
        done = run(*command)
        assert done.exit_code == 1, done.output
        assert "best.safetensors" in done.output
        assert "remove it to use the last checkpoint instead" in " ".join(done.output.split())
    shown = run("compare", copy)
    assert ("best 12" in shown.output) if where else (shown.exit_code == 1), shown.output


def test_damage_to_a_file_that_is_both_best_and_last_is_reported_with_what_helps(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """The best is a hard link to the last: removing it would lead from one damaged file to the next."""
    trained(config(tmp_path, trainer={"test_freq": 3}))
    checkpoints = tmp_path / "run" / "checkpoints"
    last, best = checkpoints / "iter_00000018.safetensors", checkpoints / "best.safetensors"
    before = read_checkpoint(last)
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert best.samefile(last)
    for removed in ([], [best]):
        for path in removed:
            path.unlink()
        done = run("eval", tmp_path / "run")
        message = " ".join(done.output.split())
        assert done.exit_code == 1, done.output
        assert "remove it" not in message
        assert f"gossamer resume {tmp_path / 'run'}" in message
        assert f"--weights {checkpoints / 'iter_00000012.safetensors'}" in message
    assert run("eval", tmp_path / "run", "--weights", checkpoints / "iter_00000012.safetensors").exit_code == 0
    done = run("resume", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert f"Resuming from iteration 12 of {checkpoints / 'iter_00000012.safetensors'}." in " ".join(
        done.output.split()
    )
    assert all(torch.equal(tensor, before.weights[name]) for name, tensor in read_checkpoint(best).weights.items())
    assert run("eval", tmp_path / "run").exit_code == 0


@pytest.mark.parametrize("sets", [(), ("ema.enable=true", "ema.decay=0.5")])
def test_every_command_has_the_same_sparsity_of_a_model_with_computed_weights(
    sets: tuple[str, ...],
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """80 % of the 17024 weights that can be pruned are zero, and 4096 cannot be."""
    result = trained(config(tmp_path, "gmp", net={"type": "tests.runner.nets:parametrized"}), *sets)
    folder = tmp_path / "run"
    assert result.sparsity_of_pruned_layers == pytest.approx(0.8, abs=1e-3)
    assert result.sparsity == pytest.approx(0.8 * 17024 / 21120, abs=1e-3)
    summary = run_summary(folder)
    assert summary["weights"] == 21120
    analysis = json.loads(run("analyze", folder, "--quick", "--json").stdout)
    total = analysis["total"]
    assert (total["parameters"], total["left_dense_parameters"]) == (21120, 4096)
    tested = json.loads(run("eval", folder, "--json").stdout)
    (compared,) = json.loads(run("compare", folder, "--json").stdout)
    figures = [result.sparsity, summary["sparsity"], total["now"]["sparsity"], tested["sparsity"], compared["sparsity"]]
    assert figures == pytest.approx([result.sparsity] * 5, abs=1e-12)
    shown = run("analyze", folder, "--quick").output
    assert "5.parametrizations.weight.original" in shown
    assert "64.5 % sparse" in " ".join(shown.split())


@pytest.mark.parametrize("sparsity", ["amba", "str", "probmask"])
def test_methods_of_msbench_have_one_sparsity_too(sparsity: str, tmp_path: Path) -> None:
    result = trained(config(tmp_path, sparsity))
    summary, tested = run_summary(tmp_path / "run"), evaluated(tmp_path / "run")
    assert result.sparsity is not None
    assert [summary["sparsity"], tested.sparsity] == pytest.approx([result.sparsity] * 2, abs=1e-12)


def test_the_end_of_a_run_repeats_no_warning_and_dates_its_model(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    path = config(tmp_path, "qat")
    (tmp_path / "qat.yaml").write_text(WARNS)
    done = run("train", path, "--json", "--set", "runtime.runner.type=tests.runner.nets:ScriptedSparse")
    found = json.loads(done.stdout)
    assert (found["iteration"], found["model_iteration"], found["metrics"]) == (18, 12, {"top1": 90.0})
    assert (tmp_path / "run" / "log.txt").read_text().count("exclude: 're:nowhere' matches nothing") == 1


def test_a_run_that_only_quantizes_is_not_described_as_a_sparse_one(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    path = config(tmp_path, "qat")
    (tmp_path / "qat.yaml").write_text("modifiers: [!QuantizationModifier {start_epoch: 1}]")
    done = " ".join(run("train", path).output.split())
    assert "best checkpoint" in done
    assert "target sparsity" not in done
    (tmp_path / "qat.yaml").write_text("modifiers: [!QuantizationModifier {start_epoch: 5}]")
    done = " ".join(run("train", path, "--set", f"saver.save_dir={tmp_path}/late").output.split())
    assert "the recipe quantizes the model, and it is not quantized; was the training long enough?" in done
    assert "less sparse" not in done


def test_a_format_that_is_refused_does_not_hide_the_files_of_others(tmp_path: Path, run: Run) -> None:  # noqa: F811
    trained(config(tmp_path, "qat"))
    done = run("export", tmp_path / "run", "-f", "pt2", "-f", "bitmask", "-o", "files")
    assert done.exit_code == 1
    assert Path("files/model-bitmask.safetensors").is_file()
    shown = "".join(done.output.split())
    assert "model.pt2" in shown
    assert "written:files/model-bitmask.safetensors" in shown


@pytest.fixture(scope="module")
def thin_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("thin")
    path = config(place, "qat", saver={"save_dir": str(place / "run"), "export": ["safetensors"]})
    (place / "qat.yaml").write_text(THIN)
    trained(path, "runtime.report.enable=true")
    return place / "run"


def test_every_file_of_a_thinned_run_loads_into_the_network_of_its_code(thin_run: Path, run: Run) -> None:  # noqa: F811
    for source, name in ((thin_run, "bitmask"), (None, "safetensors")):
        words = (thin_run,) if source else ("tests.runner.nets:small", "--weights", thin_run / "model.safetensors")
        done = run("export", *words, "-f", name, "-o", name)
        assert done.exit_code == 0, done.output
        (file,) = Path(name).glob("*.safetensors")
        restored = load(file, small())
        assert restored[0].out_channels == 8
        with torch.no_grad():
            image = torch.rand(1, 3, 8, 8)
            assert torch.equal(restored.eval()(image), load_model(str(thin_run)).model(image))


@pytest.mark.parametrize("file", ["model.safetensors", "checkpoint"])
def test_a_report_shows_the_weights_of_a_thinned_run(file: str, thin_run: Path, tmp_path: Path) -> None:
    copied_run(thin_run, tmp_path / "run")
    if file == "checkpoint":
        (tmp_path / "run" / "model.safetensors").unlink()
    found = run_content(tmp_path / "run", "run")
    assert [layer.shape for layer in found.layers][:2] == [(8, 3, 3, 3), (16, 8, 3, 3)]
    assert found.missing["masks"] == "The model is dense: there are no masks."


def test_a_run_starts_from_a_thinned_file_and_continues(thin_run: Path, tmp_path: Path) -> None:
    file = thin_run / "model.safetensors"
    found = evaluated(config(tmp_path), weights=file)
    assert found.metrics == evaluated(thin_run).metrics
    saver = {"save_dir": str(tmp_path / "run"), "pretrain_model": str(file)}
    interrupted(config(tmp_path, saver=saver), 8)
    result = resumed(tmp_path / "run")
    assert load(tmp_path / "run" / "model.safetensors", small())[0].out_channels == 8
    assert evaluated(tmp_path / "run").metrics == result.metrics
    with pytest.raises(GossamerError, match="another number of classes"):
        evaluated(config(tmp_path, num_classes=12), weights=file)
    more = {"save_dir": str(tmp_path / "more"), "pretrain_model": str(file), "pretrain_except": ["9."]}
    trained(config(tmp_path, num_classes=12, saver=more), "trainer.max_epoch=1")


LATE = """
modifiers:
  - !GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.6, start_epoch: 0,
                        end_epoch: 1, update_frequency: 0.3}
  - !QuantizationModifier {start_epoch: 2.5}
"""
THIN = """
modifiers:
  - !StructuredPruningModifier {params: ['0.weight', '3.weight'], init_sparsity: 0.1, final_sparsity: 0.5,
                                start_epoch: 0, end_epoch: 1, update_frequency: 0.5}
  - !LayerThinningModifier {start_epoch: 2.5}
"""
WARNS = """
modifiers:
  - !ConstantPruningModifier {params: __ALL_PRUNABLE__, exclude: ['re:nowhere']}
"""


def test_without_an_intact_checkpoint_the_message_says_to_start_again(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    path = kept.save({"model": {"w": torch.ones(3)}}, iteration=1, epoch=0.0, metrics={}, best=True)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        GossamerError, match=r"damaged: .*; it is the model of the run: no other .* is intact; start again"
    ):
        kept.load_model()
