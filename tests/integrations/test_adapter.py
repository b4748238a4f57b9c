"""What holds for all adapters, whichever library they are for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gossamer
from gossamer.errors import GossamerError
from gossamer.integrations.adapter import STATE_FILE, Adapter, read_state, write_state
from tests.integrations.digits import RECIPE, network

LIBRARIES = ("lightning", "transformers", "accelerate")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_named_with_the_line_that_installs_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"gossamer.integrations.{library}", raising=False)
    with pytest.raises(GossamerError, match=rf"install it with: pip install 'gossamer\[{library}\]'") as caught:
        __import__(f"gossamer.integrations.{library}")
    assert isinstance(caught.value, ImportError)


def test_the_package_itself_imports_none_of_the_libraries() -> None:
    code = f"import sys, gossamer.integrations.adapter; print({set(LIBRARIES)} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_recipe_may_be_a_path_a_text_a_name_or_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, "utf-8")
    for given in (path, str(path), RECIPE, gossamer.load(RECIPE)):
        assert [modifier.name for modifier in Adapter(given).recipe.modifiers] == ["GMPruningModifier"]
    assert Adapter("builtin:gmp-90", variables={"num_epochs": 7}).recipe.max_epochs == 7


def test_variables_beside_a_finished_recipe_are_refused() -> None:
    with pytest.raises(GossamerError, match="a Recipe is already evaluated"):
        Adapter(gossamer.load(RECIPE), variables={"epochs": 3})


def test_groups_that_the_recipe_leaves_alone_follow_the_scheduler() -> None:
    model = network()
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in (model[0], model[2])], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    manager = gossamer.Manager(
        "modifiers: [!SetLearningRateModifier {learning_rate: 0.3, start_epoch: 1, param_groups: [1]}]"
    )
    manager.modify(model, optimizer, 2)
    manager.hold_rates()
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    for _ in range(4):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert seen == [[1.0, 1.0], [0.5, 0.5], [0.25, 0.3], [0.125, 0.3]]
    manager.finalize()
    optimizer.step()
    assert seen[-1] == [0.0625, 0.15]


def test_a_file_of_a_future_format_and_one_of_something_else_are_refused(tmp_path: Path) -> None:
    write_state(tmp_path, {"step": 1}, "mark")
    assert read_state(tmp_path) == ({"step": 1}, "mark")
    torch.save({"format": 2, "mark": "", "state": {}}, tmp_path / STATE_FILE)
    with pytest.raises(GossamerError, match="has format 2; this version of Gossamer reads up to 1"):
        read_state(tmp_path)
    torch.save([1, 2], tmp_path / STATE_FILE)
    with pytest.raises(GossamerError, match="not a recipe state"):
        read_state(tmp_path)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 1, "mark": "", "state": pytest.raises}, tmp_path / STATE_FILE)
    with pytest.raises(GossamerError, match="not a recipe state, or damaged"):
        read_state(tmp_path)
