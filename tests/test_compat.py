"""Files that version 0.1.0 wrote load to the same bits, and training goes on from them to the same weights.

The files are in `tests/data/compat`, beside the script that wrote them. What is loaded is compared by digests. What is
trained on may differ in the last bits between processors: weights are compared closely, zeros exactly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import gossamer
from gossamer.asp import ASP
from gossamer.cli import app
from gossamer.export import read_about, read_integers, save
from gossamer.runner import evaluate, export
from tests.data.compat import cases
from tests.data.compat.cases import FOLDER, digest, digests

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
ROUNDED = {"rtol": 1e-2, "atol": 2e-3}
"""For training in emulated integers, where a last bit may decide which way a number is rounded."""

families = pytest.mark.parametrize("family", cases.RECIPES)
methods = pytest.mark.parametrize("method", cases.MSBENCH)
asps = pytest.mark.parametrize("kind", cases.ASPS)
runs = pytest.mark.parametrize("name", cases.RUNS)
EXPORTS = sorted(EXPECTED["exports"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ends_as_expected(name: str, state: Mapping[str, Tensor], **tolerance: float) -> None:
    """The same names, types, shapes and zeros, and weights that are close."""
    expected = load_file(FOLDER / "ends" / f"{name}.safetensors")
    assert sorted(state) == sorted(expected)
    for key, value in expected.items():
        assert torch.equal(state[key] == 0, value == 0), f"{key} has other zeros"
        torch.testing.assert_close(state[key].detach(), value, msg=lambda text, key=key: f"{key}: {text}", **tolerance)


def test_every_file_is_expected_by_a_test() -> None:
    assert sorted(path.stem for path in (FOLDER / "managers").iterdir()) == sorted(EXPECTED["managers"])
    assert sorted(path.stem for path in (FOLDER / "exports").iterdir()) == EXPORTS
    assert sorted(path.stem for path in (FOLDER / "asp").iterdir()) == sorted(EXPECTED["asp"])
    assert {path.name for path in (FOLDER / "msbench").iterdir()} == {
        cases.LEVEL,
        *(f"{method}.pt" for method in cases.MSBENCH),
    }


# Recipes


@families
def test_the_state_of_a_manager_loads_to_the_same_masks(family: str) -> None:
    training, expected = (
        cases.RecipeTraining.new(family, cases.read(f"managers/{family}.pt")),
        EXPECTED["managers"][family],
    )
    assert training.manager.step == cases.SAVED_AT
    assert digests(training.model.state_dict()) == expected["model"]
    assert digests(training.manager.masks()) == expected["masks"]
    assert training.manager.sparsity() == expected["sparsity"]
    training.manager.finalize(warn=False)


@families
def test_the_state_of_a_manager_is_saved_again_as_it_was(family: str) -> None:
    saved = cases.read(f"managers/{family}.pt")
    training = cases.RecipeTraining.new(family, saved)
    assert cases.same(training.manager.state_dict(), saved["manager"])
    training.manager.finalize(warn=False)


@families
def test_nothing_of_the_state_of_a_manager_is_left_over(family: str) -> None:
    saved = cases.read(f"managers/{family}.pt")
    training = cases.RecipeTraining.new(family, saved)
    assert training.manager.load_state_dict(saved["manager"]) == []
    training.manager.finalize(warn=False)


@families
def test_training_with_a_recipe_goes_on_to_the_same_weights(family: str) -> None:
    training = cases.RecipeTraining.new(family, cases.read(f"managers/{family}.pt"))
    training.train(cases.STEPS)
    assert training.manager.step == cases.STEPS
    assert training.manager.sparsity() == EXPECTED["managers"][family]["sparsity_at_end"]
    training.manager.finalize()
    ends_as_expected(f"manager-{family}", training.model.state_dict(), **(ROUNDED if family == "quantization" else {}))


# MSBench


@methods
def test_the_state_of_a_scheduler_loads_to_the_same_bits(method: str) -> None:
    saved = cases.read(f"msbench/{method}.pt")
    training, expected = cases.MSBenchTraining.new(method, saved), EXPECTED["msbench"][method]
    assert digests(training.model.state_dict()) == expected["model"]
    assert training.scheduler.compute_sparse_rate(training.model) == expected["sparse_rate"]
    assert cases.same(training.scheduler.state_dict(), saved["scheduler"])


@methods
def test_training_with_a_scheduler_goes_on_to_the_same_weights(method: str) -> None:
    training = cases.MSBenchTraining.new(method, cases.read(f"msbench/{method}.pt"))
    training.train(range(cases.MSBENCH_SAVED_AT, cases.MSBENCH_TOTAL))
    training.scheduler.export_sparse_model(training.model)
    assert training.scheduler.compute_sparse_rate(training.model) == EXPECTED["msbench"][method]["sparse_rate_at_end"]
    ends_as_expected(f"msbench-{method}", training.model.state_dict())


def test_the_file_of_a_level_begins_the_next_one() -> None:
    level, expected = cases.read(f"msbench/{cases.LEVEL}"), EXPECTED["msbench"][cases.LEVEL]
    assert {**level, "model": digests(level["model"])} == expected
    training = cases.MSBenchTraining.new("levels")
    training.model.load_state_dict(level["model"])
    assert training.scheduler.compute_sparse_rate(training.model) == pytest.approx(0.3, abs=1e-3)
    training.scheduler.prune_model(training.model, 4)
    assert training.scheduler.compute_sparse_rate(training.model) == pytest.approx(0.6, abs=1e-3)
    pruned = training.model.state_dict()
    assert all(bool((pruned[name][value == 0] == 0).all()) for name, value in level["model"].items() if value.dim() > 1)


def test_a_level_is_written_as_it_was(tmp_path: Path) -> None:
    training = cases.MSBenchTraining.new("levels", save_dir=tmp_path)
    training.train(range(5))
    written, level = torch.load(tmp_path / cases.LEVEL, weights_only=True), cases.read(f"msbench/{cases.LEVEL}")
    assert list(written) == list(level)
    assert list(written["model"]) == list(level["model"])
    assert {**written, "model": None} == {**level, "model": None}


# ASP


@asps
def test_masks_of_asp_load_to_the_same_bits(kind: str) -> None:
    model, _ = cases.new_asp(kind, cases.read(f"asp/{kind}.pt"))
    assert digests(model.state_dict()) == EXPECTED["asp"][kind]
    assert ASP.is_sparsity_enabled(model)
    for name in ("1", "3"):
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight != 0, layer.get_buffer("__weight_mma_mask").bool())


@asps
def test_training_with_asp_goes_on_to_the_same_weights(kind: str) -> None:
    model, optimizer = cases.new_asp(kind, cases.read(f"asp/{kind}.pt"))
    cases.train_asp(kind, model, optimizer, range(cases.ASP_SAVED_AT, cases.ASP_STEPS))
    ends_as_expected(f"asp-{kind}", model.state_dict())


# Exported files


def built_for(name: str) -> nn.Module:
    if name == "tied":
        tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        tied[1].weight = tied[0].weight
        return tied
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(name.rpartition("-")[2], torch.float32)
    return cases.network().to(dtype).eval()


@pytest.mark.parametrize("name", EXPORTS)
def test_an_exported_file_loads_to_the_same_bits(name: str) -> None:
    path, expected = FOLDER / "exports" / f"{name}.safetensors", EXPECTED["exports"][name]["state"]
    assert digests(gossamer.load(path)) == expected
    model = gossamer.load(path, built_for(name))
    assert digests(model.state_dict()) == expected


@pytest.mark.parametrize("name", ["quantized-bitmask", "quantized-sparse24"])
def test_an_exported_file_has_the_same_integers(name: str) -> None:
    path = FOLDER / "exports" / f"{name}.safetensors"
    found = {key: [digest(integers), digest(scales)] for key, (integers, scales) in read_integers(path).items()}
    assert found == EXPECTED["exports"][name]["integers"]


@pytest.mark.parametrize("name", ["quantized-bitmask", "quantized-sparse24"])
def test_a_quantized_file_lets_a_model_compute_the_same(name: str) -> None:
    model = gossamer.load(FOLDER / "exports" / f"{name}.safetensors", cases.network()).eval()
    with torch.no_grad():
        outputs = model(cases.digits()[0][:4])
    ends_as_expected("quantized", {"outputs": outputs}, rtol=1e-2, atol=1e-2)
    gossamer.quantization.withdraw(model)
    with torch.no_grad():
        assert not torch.equal(model(cases.digits()[0][:4]), outputs)


@pytest.mark.parametrize("name", ["safetensors", "bitmask", "sparse24", "tied", "quantized-bitmask"])
def test_a_model_is_written_again_as_it_was(name: str, tmp_path: Path) -> None:
    path = FOLDER / "exports" / f"{name}.safetensors"
    model = gossamer.load(path, built_for(name))
    about = {"model": read_about(path)["model"]} if "model" in read_about(path) else None
    kind = "bitmask" if name == "tied" else name.removeprefix("quantized-")
    save(model, tmp_path / "again.safetensors", kind, about=about)
    (written, tensors), (before, expected) = contents(tmp_path / "again.safetensors"), contents(path)
    assert tensors == expected
    # The digest of the text covers the version.
    assert {**written, "digest": "", "gossamer": ""} == {**before, "digest": "", "gossamer": ""}


def contents(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The text and the digests of the tensors in a safetensors file, as anybody reads it."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: digest(file.get_tensor(name)) for name in sorted(file.keys())}


# Runs


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with copies of the runs."""
    for name in cases.RUNS:
        shutil.copytree(FOLDER / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def last(name: str, iteration: int) -> Path:
    return Path(name, "checkpoints", f"iter_{iteration:08}.safetensors")


@runs
def test_the_checkpoints_of_a_run_load_to_the_same_bits(at: Path, name: str) -> None:
    for checkpoint in sorted((at / name / "checkpoints").iterdir()):
        files = export(
            name,
            weights=checkpoint,
            formats=["safetensors", "bitmask"],
            output=at / "out",
            imports=[cases.NAME],
        ).files
        found = {file.name: digests(gossamer.load(file)) for file in files}
        assert found == EXPECTED["runs"][name][checkpoint.stem]


@runs
def test_the_checkpoint_of_a_run_is_tested_with_the_same_result(at: Path, name: str) -> None:
    result = evaluate(name, weights=last(name, cases.RUN_SAVED_AT), imports=[cases.NAME])
    assert result.iteration == cases.RUN_SAVED_AT
    assert result.metrics == pytest.approx(EXPECTED["runs"][name]["metrics"])
    assert result.sparsity == EXPECTED["runs"][name]["sparsity"]


@runs
def test_a_run_is_resumed_to_the_same_weights(at: Path, name: str) -> None:
    begun = (at / name / "metrics.jsonl").read_text()
    text, tensors = contents(at / last(name, cases.RUN_SAVED_AT))
    result = json.loads(command("resume", name, "--import", cases.NAME, "--json"))
    assert result["complete"]
    assert result["iteration"] == cases.RUN_LENGTH
    end = last(name, cases.RUN_LENGTH)
    files = export(name, weights=end, formats=["safetensors"], output=at / "out", imports=[cases.NAME]).files
    ends_as_expected(name, gossamer.load(files[0]), **(ROUNDED if name == "run-recipe" else {}))

    lines = (at / name / "metrics.jsonl").read_text()
    assert lines.startswith(begun)
    assert min(json.loads(line)["iteration"] for line in lines[len(begun) :].splitlines()) >= cases.RUN_SAVED_AT

    written, now = contents(at / end)
    assert written.keys() == text.keys()
    assert sorted(now) == sorted(tensors)


@runs
def test_commands_read_the_folder_of_a_run(at: Path, name: str) -> None:
    compared = json.loads(command("compare", name, "--json"))
    assert compared == EXPECTED["runs"][name]["compare"]
    command("report", name)
    page = (at / name / "report.html").read_text()
    assert name in page
    assert compared[0]["model"].partition(":")[0] in page
    assert f"stopped at iteration {cases.RUN_SAVED_AT} of {cases.RUN_LENGTH}" in page
    assert "0.weight" in command("analyze", name, "--import", cases.NAME, "--json")


def test_the_file_of_a_level_of_a_run_is_exported(at: Path) -> None:
    level = at / "run-levels" / "levels" / "global_sparse_rate_0.6.pth.tar"
    files = export("run-levels", weights=level, formats=["safetensors"], output=at / "out", imports=[cases.NAME]).files
    saved = torch.load(level, weights_only=True)
    assert saved["sparse_rate"] == 0.6
    assert digests(gossamer.load(files[0])) == digests(saved["model"])


# Lightning, Transformers and Accelerate


def test_a_checkpoint_of_lightning_goes_on_to_the_same_weights() -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    from gossamer.integrations.lightning import SparsityCallback

    seen: list[Any] = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            sparsity = next(one for one in trainer.callbacks if isinstance(one, SparsityCallback))
            seen.append((sparsity.manager.step, trainer.global_step, digests(pl_module.state_dict())))

    module = cases.lightning_fit(1, [Watch()], ckpt_path=FOLDER / "lightning.ckpt")
    step = cases.SAVED_EPOCHS * len(cases.loader())
    assert seen == [(step, step, EXPECTED["lightning"]["state"])]
    ends_as_expected("lightning", module.state_dict())


@pytest.mark.parametrize("moved", [False, True], ids=["in its place", "moved"])
def test_a_checkpoint_of_transformers_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    seen: list[Any] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not seen:
                seen.append((state.global_step, digests(kwargs["model"].state_dict())))

    checkpoint = tmp_path / ("moved" if moved else f"trained/checkpoint-{cases.TRANSFORMERS_SAVED_AT}")
    shutil.copytree(FOLDER / "transformers", checkpoint)
    trainer = cases.bert_trainer(tmp_path / "trained", 1, resume_from=checkpoint if moved else None)
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert seen == [(cases.TRANSFORMERS_SAVED_AT, EXPECTED["transformers"]["state"])]
    ends_as_expected("transformers", trainer.model.state_dict())


@pytest.fixture
def accelerate() -> Iterator[None]:
    """Accelerate keeps one state for a whole process, which other tests have changed and others will."""
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    from accelerate.state import AcceleratorState, GradientState

    for when in ("before", "after"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if when == "before":
            yield


@pytest.mark.usefixtures("accelerate")
def test_a_state_of_accelerate_goes_on_to_the_same_weights() -> None:
    training, expected = cases.AccelerateTraining(1), EXPECTED["accelerate"]
    training.accelerator.load_state(str(FOLDER / "accelerate"))
    assert digests(training.plain.state_dict()) == expected["state"]
    assert training.sparsity.manager.step == expected["step"]
    training.train(cases.EPOCHS - cases.SAVED_EPOCHS)
    training.sparsity.finalize()
    ends_as_expected("accelerate", training.plain.state_dict())
