"""Exports hold the model and nothing that training added to it, in every format, and fit the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel

import gossamer
from gossamer import Manager
from gossamer.asp import ASP
from gossamer.errors import GossamerError
from gossamer.export import read_state, save, thin
from gossamer.export.saving import state_bytes
from tests.loops import batch
from tests.msbench.configs import probmask, str_config, trained


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 32),
    )


def pruned_by_asp() -> nn.Sequential:
    model = network()
    ASP.init_model_for_pruning(model, verbosity=0, allow_recompute_mask=True, allow_permutation=False)
    ASP.compute_sparse_masks(model)
    return model


def own(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "_mma_" not in name}


@pytest.mark.parametrize("format", ["safetensors", "sparse24", "bitmask"])
def test_a_file_after_asp_is_that_of_the_plain_model_and_loads_into_it(format: str, tmp_path: Path) -> None:
    model = pruned_by_asp()
    assert any("_mma_" in name for name in model.state_dict())
    plain = network()
    plain.load_state_dict(own(model))
    found = save(model, tmp_path / "asp.safetensors", format)
    expected = save(plain, tmp_path / "plain.safetensors", format)
    assert found.path.read_bytes() == expected.path.read_bytes()
    assert found.dense_bytes == expected.dense_bytes == state_bytes(model)
    loaded = gossamer.load(found.path, network())
    assert all(torch.equal(tensor, own(model)[name]) for name, tensor in loaded.state_dict().items())


def test_programs_after_asp_hold_no_masks(tmp_path: Path) -> None:
    model, example = pruned_by_asp().eval(), torch.randn(2, 1, 8, 8)
    save(model, tmp_path / "model.pt2", "pt2", example_inputs=example)
    assert not any("mma" in name for name in torch.export.load(tmp_path / "model.pt2").state_dict)
    assert not any("mma" in name for name in thin(model, example)[0].state_dict())
    assert any("mma" in name for name in model.state_dict()), "the model itself goes on training"


def test_a_file_with_masks_loads_into_the_plain_model_and_a_plain_one_into_the_pruned(tmp_path: Path) -> None:
    model = pruned_by_asp()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "all.safetensors")
    loaded = gossamer.load(tmp_path / "all.safetensors", network())
    assert torch.equal(loaded[3].weight, model[3].weight)
    save(loaded, tmp_path / "plain.safetensors", "bitmask")
    masks = model[3].__getattr__("__weight_mma_mask").clone()
    gossamer.load(tmp_path / "plain.safetensors", model)
    assert torch.equal(model[3].__getattr__("__weight_mma_mask"), masks)


@pytest.mark.parametrize("config", [lambda: str_config(-3.0), probmask], ids=["STR", "ProbMask"])
def test_a_model_prepared_by_msbench_is_written_as_it_evaluates(config: Any, tmp_path: Path) -> None:
    _, model = trained(config())
    found = save(model, tmp_path / "model.safetensors", "bitmask")
    assert found.zeros > 10
    state = read_state(found.path)
    assert not any("fake_sparse" in name for name in state)
    assert model.training
    inputs = batch(50)[0]
    with torch.no_grad():
        expected = model.eval()(inputs)
    from tests.loops import network as plain

    loaded = gossamer.load(found.path, plain()).eval()
    with torch.no_grad():
        assert torch.equal(loaded(inputs), expected)


RECIPE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0, end_epoch: 4}
  - !STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 4, s_init: -3.0}
"""


def test_learned_thresholds_of_a_recipe_are_in_the_file_before_finalize_too(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(RECIPE)
    manager.modify(model, optimizer, steps_per_epoch=2)
    images = torch.randn(4, 1, 8, 8)
    model(images).sum().backward()
    optimizer.step()
    save(model, tmp_path / "model.safetensors", "bitmask")
    with torch.no_grad():
        assert torch.equal(
            gossamer.load(tmp_path / "model.safetensors", network()).eval()(images), model.eval()(images)
        )


# State dicts


@pytest.mark.parametrize("format", ["safetensors", "sparse24"])
@pytest.mark.parametrize("wrap", [lambda model: model, DataParallel, AveragedModel], ids=["plain", "DP", "average"])
def test_a_state_dict_is_written_as_its_model_is(format: str, wrap: Any, tmp_path: Path) -> None:
    model = pruned_by_asp()
    expected = save(model, tmp_path / "model.safetensors", format)
    found = save(wrap(model).state_dict(), tmp_path / "state.safetensors", format)
    assert found.path.read_bytes() == expected.path.read_bytes()
    assert (found.weights, found.zeros, found.notes) == (expected.weights, expected.zeros, expected.notes)


def test_a_program_needs_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(GossamerError, match=r"the format pt2 needs the model, not its state dict; safetensors"):
        save(network().state_dict(), path, "pt2", example_inputs=torch.zeros(1, 1, 8, 8))
    assert not path.exists()


def test_a_state_dict_whose_weights_are_not_those_of_the_network_is_refused(tmp_path: Path) -> None:
    _, model = trained(str_config(-3.0))
    with pytest.raises(GossamerError, match=r"prepared for training, .* pass the model, or call export_sparse_model"):
        save(model.state_dict(), tmp_path / "state.safetensors", "bitmask")


@pytest.mark.parametrize("given", [{}, {0: torch.zeros(2)}, {"epoch": 3}])
def test_a_mapping_that_is_no_state_dict_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"state\.safetensors: "):
        save(given, tmp_path / "state.safetensors", "bitmask")


class _Holder(nn.Module):
    """A model with a child that is really called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 2)


def test_the_state_dict_of_a_model_with_a_child_called_module_loads_back(tmp_path: Path) -> None:
    model, path = _Holder(), tmp_path / "state.safetensors"
    for given in (model.state_dict(), model):
        save(given, path, "safetensors")
        assert torch.equal(gossamer.load(path, _Holder()).module.weight, model.module.weight)
    save_file(model.state_dict(), path)  # by another tool, from a model under DDP
    assert torch.equal(gossamer.load(path, nn.Linear(4, 2)).weight, model.module.weight)
