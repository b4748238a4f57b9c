"""Writes the files of this folder. Run once, with version 0.1.0 and torch 2.15, from the top of the repository:

    PYTHONPATH=src:. OMP_NUM_THREADS=1 python tests/data/compat/write.py

It is kept to show how the files were made. Files that are written anew say nothing about what older versions wrote:
`tests/test_compat.py` is for the files as they are, and a format that changes gets files of its own beside them.

- `managers/`: `Manager.state_dict()` of recipes in the middle of training, with the states of model and optimizer
- `msbench/`: the same of MSBench's schedulers, and the file of a level
- `asp/`: state dicts with the mask buffers of ASP
- `exports/`: weights in each format of `gossamer.export`
- `run-dense/`, `run-levels/`, `run-recipe/`: folders of runs that were interrupted
- `lightning.ckpt`, `transformers/`, `accelerate/`: checkpoints of these libraries
- `ends/`: the weights at which each training ends that goes on from one of these
- `expected.json`: digests of what is loaded, and other figures
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gossamer
from gossamer.export import THINNED, read_integers, save, thin
from gossamer.runner import evaluate, export, resume, run
from tests.data.compat import cases

FOLDER = cases.FOLDER


def write_end(name: str, state: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None = None) -> None:
    """Write where a training ends that went on; it has to be where one ends that was never interrupted."""
    assert whole is None or cases.digests(state) == cases.digests(whole), name
    path = FOLDER / "ends" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(cases.copied(state), path)


def write_managers() -> dict[str, Any]:
    expected = {}
    (FOLDER / "managers").mkdir(exist_ok=True)
    for family in cases.RECIPES:
        whole = cases.RecipeTraining.new(family)
        whole.train(cases.SAVED_AT)
        torch.save(whole.save(), FOLDER / "managers" / f"{family}.pt")
        whole.train(cases.STEPS)
        again = cases.RecipeTraining.new(family, cases.read(f"managers/{family}.pt"))
        loaded = again.manager
        found = {
            "model": cases.digests(again.model.state_dict()),
            "masks": cases.digests(loaded.masks()),
            "sparsity": loaded.sparsity(),
        }
        again.train(cases.STEPS)
        found["sparsity_at_end"] = loaded.sparsity()
        expected[family] = found
        for manager in (whole.manager, again.manager):
            manager.finalize()
        write_end(f"manager-{family}", again.model.state_dict(), whole.model.state_dict())
    return expected


def write_msbench(scratch: Path) -> dict[str, Any]:
    expected = {}
    (FOLDER / "msbench").mkdir(exist_ok=True)
    for method in cases.MSBENCH:
        whole = cases.MSBenchTraining.new(method, save_dir=scratch / method)
        whole.train(range(cases.MSBENCH_SAVED_AT))
        torch.save(whole.save(), FOLDER / "msbench" / f"{method}.pt")
        whole.train(range(cases.MSBENCH_SAVED_AT, cases.MSBENCH_TOTAL))
        again = cases.MSBenchTraining.new(method, cases.read(f"msbench/{method}.pt"))
        found = {
            "model": cases.digests(again.model.state_dict()),
            "sparse_rate": again.scheduler.compute_sparse_rate(again.model),
        }
        again.train(range(cases.MSBENCH_SAVED_AT, cases.MSBENCH_TOTAL))
        for training in (whole, again):
            training.scheduler.export_sparse_model(training.model)
        found["sparse_rate_at_end"] = again.scheduler.compute_sparse_rate(again.model)
        expected[method] = found
        write_end(f"msbench-{method}", again.model.state_dict(), whole.model.state_dict())
    shutil.copy(scratch / "levels" / cases.LEVEL, FOLDER / "msbench" / cases.LEVEL)
    level = cases.read(f"msbench/{cases.LEVEL}")
    expected[cases.LEVEL] = {**level, "model": cases.digests(level["model"])}
    return expected


def write_asp() -> dict[str, Any]:
    expected = {}
    (FOLDER / "asp").mkdir(exist_ok=True)
    for kind in cases.ASPS:
        model, optimizer = cases.new_asp(kind)
        cases.train_asp(kind, model, optimizer, range(cases.ASP_SAVED_AT))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, FOLDER / "asp" / f"{kind}.pt")
        cases.train_asp(kind, model, optimizer, range(cases.ASP_SAVED_AT, cases.ASP_STEPS))
        again, optimizer = cases.new_asp(kind, cases.read(f"asp/{kind}.pt"))
        expected[kind] = cases.digests(again.state_dict())
        cases.train_asp(kind, again, optimizer, range(cases.ASP_SAVED_AT, cases.ASP_STEPS))
        write_end(f"asp-{kind}", again.state_dict(), model.state_dict())
    return expected


def write_exports() -> dict[str, Any]:
    folder, expected = FOLDER / "exports", {}
    folder.mkdir(exist_ok=True)
    model = cases.sparse_network()
    about = {"model": "a network with zeros"}
    for kind in ("safetensors", "bitmask", "sparse24"):
        save(model, folder / f"{kind}.safetensors", kind, about=about)
        for dtype in (torch.float16, torch.bfloat16):
            half = cases.sparse_network().to(dtype)
            save(half, folder / f"{kind}-{str(dtype).removeprefix('torch.')}.safetensors", kind)
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    save(tied, folder / "tied.safetensors", "bitmask")
    images = cases.digits()[0][:4]
    smaller, _ = thin(model, images)
    for kind in ("safetensors", "bitmask"):
        save(smaller, folder / f"thin-{kind}.safetensors", kind, about=THINNED)
    training = cases.RecipeTraining.new("quantization")
    training.train(cases.STEPS)
    for kind in ("safetensors", "bitmask", "sparse24"):
        save(training.model, folder / f"quantized-{kind}.safetensors", kind)
    for path in sorted(folder.glob("*.safetensors")):
        found: dict[str, Any] = {"state": cases.digests(gossamer.load(path))}
        if path.stem.startswith("quantized-") and path.stem != "quantized-safetensors":
            found["integers"] = {
                name: [cases.digest(integers), cases.digest(scales)]
                for name, (integers, scales) in sorted(read_integers(path).items())
            }
        expected[path.stem] = found
    plain = gossamer.load(folder / "quantized-bitmask.safetensors", cases.network()).eval()
    with torch.no_grad():
        write_end("quantized", {"outputs": plain(images)}, {"outputs": training.model.eval()(images)})
    training.manager.finalize()
    return expected


def write_runs(scratch: Path) -> dict[str, Any]:
    from typer.testing import CliRunner

    from gossamer.cli import app

    expected: dict[str, Any] = {}
    os.chdir(scratch)
    Path("recipe.yaml").write_text(cases.RUN_RECIPE)
    for name in cases.RUNS:
        Path("config.yaml").write_text(cases.run_config(name))
        assert run("config.yaml").iteration == cases.RUN_SAVED_AT
        # Neither the page, which commands make anew, nor the lock.
        shutil.copytree(name, FOLDER / name, ignore=shutil.ignore_patterns("report.html", "train.lock"))
        tested = evaluate(name, weights=f"{name}/checkpoints/iter_{cases.RUN_SAVED_AT:08}.safetensors")
        found: dict[str, Any] = {"metrics": tested.metrics, "sparsity": tested.sparsity}
        for checkpoint in sorted(Path(name, "checkpoints").glob("*.safetensors")):
            files = export(name, weights=checkpoint, formats=["safetensors", "bitmask"], output=Path("out")).files
            found[checkpoint.stem] = {file.name: cases.digests(gossamer.load(file)) for file in files}
        compared = json.loads(CliRunner().invoke(app, ["compare", name, "--json"]).stdout)
        found["compare"] = compared
        resume(name)
        last = f"{name}/checkpoints/iter_{cases.RUN_LENGTH:08}.safetensors"
        file = export(name, weights=last, formats=["safetensors"], output=Path("out")).files[0]
        Path("config.yaml").write_text(cases.run_config(name))
        run("config.yaml", ["hooks=[]", f"saver.save_dir={name}-whole"])
        whole = export(f"{name}-whole", weights=last.replace(name, f"{name}-whole"), formats=["safetensors"]).files[0]
        write_end(name, gossamer.load(file), gossamer.load(whole))
        expected[name] = found
    return expected


def write_lightning() -> dict[str, Any]:
    import lightning.pytorch as pl

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == cases.SAVED_EPOCHS - 1:
                trainer.save_checkpoint(FOLDER / "lightning.ckpt")

    whole = cases.lightning_fit(0, [Save()])
    again = cases.lightning_fit(1, [], ckpt_path=FOLDER / "lightning.ckpt")
    write_end("lightning", again.state_dict(), whole.state_dict())
    return {"state": cases.digests(cases.read("lightning.ckpt")["state_dict"])}


def write_transformers(scratch: Path) -> dict[str, Any]:
    whole = cases.bert_trainer(scratch / "whole", 0)
    whole.train()
    checkpoint = f"checkpoint-{cases.TRANSFORMERS_SAVED_AT}"
    # The arguments are a pickle, which nothing reads.
    ignored = shutil.ignore_patterns("training_args.bin")
    shutil.copytree(scratch / "whole" / checkpoint, FOLDER / "transformers", ignore=ignored)
    again = cases.bert_trainer(scratch / "again", 1, resume_from=FOLDER / "transformers")
    again.train(resume_from_checkpoint=str(FOLDER / "transformers"))
    write_end("transformers", again.model.state_dict(), whole.model.state_dict())
    return {"state": cases.digests(gossamer.load(FOLDER / "transformers" / "model.safetensors"))}


def write_accelerate() -> dict[str, Any]:
    whole = cases.AccelerateTraining(0)
    whole.train(cases.SAVED_EPOCHS)
    whole.accelerator.save_state(str(FOLDER / "accelerate"))
    whole.train(cases.EPOCHS - cases.SAVED_EPOCHS)
    whole.sparsity.finalize()
    again = cases.AccelerateTraining(1)
    again.accelerator.load_state(str(FOLDER / "accelerate"))
    found = {"state": cases.digests(again.plain.state_dict()), "step": again.sparsity.manager.step}
    again.train(cases.EPOCHS - cases.SAVED_EPOCHS)
    again.sparsity.finalize()
    write_end("accelerate", again.plain.state_dict(), whole.plain.state_dict())
    return found


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for old in FOLDER.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        os.environ["GOSSAMER_STATE_DIR"] = str(scratch / "state")
        expected = {
            "managers": write_managers(),
            "msbench": write_msbench(scratch),
            "asp": write_asp(),
            "exports": write_exports(),
            "runs": write_runs(scratch),
            "lightning": write_lightning(),
            "transformers": write_transformers(scratch),
            "accelerate": write_accelerate(),
        }
        os.chdir(FOLDER)
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
