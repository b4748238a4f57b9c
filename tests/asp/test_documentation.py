"""What the users' documentation shows runs as it is written, with the one import changed.

Its dots stand for the user's own code; the tests fill them in.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.sparse import NM

IMPORT = "from gossamer.asp import ASP"

LOOP = """
ASP.prune_trained_model(model, optimizer)

x, y = DataLoader(args)
for epoch in range(epochs):
    y_pred = model(x)
    loss = loss_function(y_pred, y)
    loss.backward()
    optimizer.step()

torch.save(model.state_dict(), path)
"""

SKETCH = """
model = define_model(args, pretrained=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

from gossamer.asp import ASP
ASP.prune_trained_model(model, optimizer) #pruned a trained model

x, y = DataLoader(args)
for epoch in range(epochs):
    y_pred = model(x)
    loss = criterion(y_pred, y)
    lr_scheduler.step()
    loss.backward()
    optimizer.step()

torch.save(model.state_dict(), path)
"""

WITHOUT_PERMUTATION = """
ASP.init_model_for_pruning(model, mask_calculator="m4n2_1d", verbosity=2, \
whitelist=[torch.nn.Linear, torch.nn.Conv2d], allow_recompute_mask=False, allow_permutation=False)
ASP.init_optimizer_for_pruning(optimizer)
ASP.compute_sparse_masks()
"""


def define_model(*_: Any, pretrained: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4, 16))


@pytest.fixture
def namespace(tmp_path: Path) -> dict[str, Any]:
    model = define_model()
    return {
        "torch": torch,
        "nn": nn,
        "define_model": define_model,
        "DataLoader": lambda _: (torch.randn(8, 16, 4, 4), torch.randint(0, 16, (8,))),
        "args": None,
        "epochs": 4,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "loss_function": nn.CrossEntropyLoss(),
        "path": tmp_path / "checkpoint.pt",
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("snippet", [LOOP, SKETCH], ids=["two lines", "three steps"])
def test_the_training_loop_runs_and_saves_a_sparse_checkpoint_with_its_masks(
    snippet: str, namespace: dict[str, Any]
) -> None:
    exec(IMPORT, namespace)
    exec(snippet, namespace)
    saved = torch.load(namespace["path"], weights_only=True)
    for layer in ("0", "3"):
        assert NM(2, 4).violations(saved[f"{layer}.weight"]) == 0
        assert torch.equal(saved[f"{layer}.weight"] != 0, saved[f"{layer}.__weight_mma_mask"])


def test_the_call_without_permutation_leaves_channels_where_they_are(namespace: dict[str, Any]) -> None:
    exec(IMPORT, namespace)
    dense = [layer.weight.detach().clone() for layer in (namespace["model"][0], namespace["model"][3])]
    exec(WITHOUT_PERMUTATION, namespace)
    for weight, layer in zip(dense, (namespace["model"][0], namespace["model"][3]), strict=True):
        assert torch.equal(layer.weight, weight * NM(2, 4).keep_largest(weight))


SCRIPT = """
import sys, torch
from torch import nn
from gossamer.asp import ASP

def build():
    torch.manual_seed(int(sys.argv[2]))
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm([8, 32]), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm([8, 16]))

def train(first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)
        ((model(x) - y) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

model = build()
optimizer = torch.optim.Adam(model.parameters())
ASP.init_model_for_pruning(model, "m4n2_1d", whitelist=[nn.Linear], verbosity=0)
if sys.argv[1] == "second":
    checkpoint = torch.load("part1.chkp", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    ASP.init_optimizer_for_pruning(optimizer)
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert ASP.is_sparsity_enabled() is True
else:
    ASP.init_optimizer_for_pruning(optimizer)
    train(0, 5)
    ASP.compute_sparse_masks()
    train(5, 10)
    if sys.argv[1] == "first":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "part1.chkp")
        sys.exit()
train(10, 20)
torch.save(model.state_dict(), sys.argv[1] + ".pt")
"""


def test_train_save_new_process_load_train_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for part, seed in (("whole", 0), ("first", 0), ("second", 1)):
        subprocess.run([sys.executable, "script.py", part, str(seed)], cwd=tmp_path, check=True)
    whole, second = (torch.load(tmp_path / f"{part}.pt", weights_only=True) for part in ("whole", "second"))
    assert whole.keys() == second.keys()
    assert all(torch.equal(whole[name], second[name]) for name in whole)
    assert NM(2, 4).violations(second["3.weight"]) == 0


def test_the_toy_example_ends_sparse_and_dense_again(capsys: pytest.CaptureFixture[str]) -> None:
    import runpy

    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "asp_toy.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "zeros 50.0%" in lines[1]
    assert "zeros 50.0%" in lines[2]
    assert "zeros 0.0%" in lines[3]
