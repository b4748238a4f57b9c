"""Mask generators, sparsers and schedulers of the user's own, registered and named in a config; and the presets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.msbench import BaseScheduler, FakeSparse, MaskGenerator, build_sparse_scheduler, register
from gossamer.msbench.config import Config
from gossamer.msbench.generators import NormalMaskGenerator
from tests.loops import PRUNABLE, batch, network, sgd, through_disk, zeros
from tests.msbench.configs import TOTAL, levels, loop, prepared


class EveryOther(MaskGenerator):
    """Keeps a stripe; the offset says which."""

    def __init__(self, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.asked: list[float | None] = []

    def generate_mask(self, weight: Tensor) -> Tensor:
        self.asked.append(self.sparsity)
        mask = torch.zeros(weight.numel())
        mask[self.offset :: 2] = 1.0
        return mask.reshape(weight.shape)


class Halved(FakeSparse):
    """Half of the weight, scaled by something that is learned."""

    def __init__(self, weight: Tensor, generator: MaskGenerator, *, start: float = 1.0) -> None:
        super().__init__(weight, generator)
        self.gain = nn.Parameter(torch.tensor(start))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(weight > 0, weight * self.gain, 0.0)


class Cubic(BaseScheduler):
    """A constant sparsity that the config names, pruned when it is asked to; counts what happens around it."""

    def __init__(self, config: Config, *, target: float, patience: int = 2, **excluded: Any) -> None:
        super().__init__(config, **excluded)
        self.target, self.patience = target, patience
        self.after = 0

    def advance(self, model: nn.Module, iteration: int) -> None:
        if iteration == self.patience:
            self.update_sparsity_per_layer(model, self.target)

    def after_step(self) -> None:
        self.after += 1


def test_a_mask_generator_makes_the_masks_of_each_level() -> None:
    register(EveryOther)
    config = levels()
    config["mask_generator"] = {"type": "EveryOther", "kwargs": {"offset": 1}}
    scheduler, model = prepared(config)
    loop(scheduler, model, sgd(model), range(TOTAL))
    for name in PRUNABLE:
        kept = (model.get_parameter(name).detach() != 0).flatten()
        assert bool(kept[1::2].all())
        assert not bool(kept[::2].any())
    assert scheduler.generator.asked == [0.3] * 3 + [0.6] * 3 + [0.9] * 3
    assert scheduler.compute_sparse_rate(model) == 0.5


def test_a_mask_generator_that_extends_one_of_ours_is_asked_for_its_own_masks() -> None:
    @register
    class Largest(NormalMaskGenerator):
        def generate_mask(self, weight: Tensor) -> Tensor:
            return weight.abs() < weight.abs().median()

    scheduler, model = prepared(levels("Largest"))
    scheduler.prune_model(model, 0)
    kept = model.get_parameter("3.weight").detach()
    dense = network()[3].weight.detach()
    assert torch.equal(kept != 0, dense.abs() < dense.abs().median())


@pytest.mark.parametrize("wrong", [None, torch.ones(3)])
def test_a_mask_generator_that_returns_something_else_is_an_error_with_its_name(wrong: Any) -> None:
    @register
    class Broken(MaskGenerator):
        def generate_mask(self, weight: Tensor) -> Tensor:
            return wrong

    scheduler, model = prepared(levels("Broken"))
    with pytest.raises(
        GossamerError, match=r"Broken.generate_mask: expected a mask of shape \(8, 4, 3, 3\) for '0.weig"
    ):
        scheduler.prune_model(model, 0)


def test_a_custom_sparser_replaces_the_weight_and_its_parameters_are_trained() -> None:
    register(Halved)
    config = {"fake_sparse": {"type": "Halved", "kwargs": {"start": 2.0}}, "scheduler": {"type": "BaseScheduler"}}
    dense = network()
    scheduler, model = prepared(config)
    assert torch.equal(model.get_parameter("3.weight_fake_sparse.gain"), torch.tensor(2.0))
    loop(scheduler, model, sgd(model), range(3))
    assert not torch.equal(model.get_parameter("3.weight_fake_sparse.gain"), torch.tensor(2.0))
    inputs = batch(20)[0]
    expected = model.eval()(inputs)
    rate = scheduler.compute_sparse_rate(model)
    scheduler.export_sparse_model(model)
    assert torch.allclose(model(inputs), expected, atol=1e-6)
    assert scheduler.compute_sparse_rate(model) == rate
    assert 0.3 < rate < 0.7
    assert list(model.state_dict()) == list(dense.state_dict())


def test_a_custom_scheduler_decides_when_to_prune_and_sees_steps() -> None:
    register(Cubic)
    config = {"scheduler": {"type": "Cubic", "kwargs": {"target": 0.75, "no_prune_layer": "7"}}}
    scheduler, model = prepared(config)
    rates = []
    optimizer = sgd(model)
    for iteration in range(4):
        loop(scheduler, model, optimizer, range(iteration, iteration + 1))
        rates.append(scheduler.compute_sparse_rate(model))
    assert rates == [0, 0, 0.75, 0.75]
    assert [zeros(model.get_parameter(name)) for name in PRUNABLE] == [216, 432, 0]
    assert scheduler.after == 4
    assert through_disk(scheduler.state_dict())["scheduler"] == "Cubic"


def test_arguments_of_custom_classes_are_checked() -> None:
    register(Cubic)
    register(EveryOther)
    config = {
        "mask_generator": {"type": "EveryOther", "kwargs": {"ofset": 1}},
        "scheduler": {"type": "Cubic", "kwargs": {"target": "high", "patience": 1.5}},
    }
    with pytest.raises(GossamerError) as error:
        build_sparse_scheduler(config)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert "ofset: unknown key; nearest: 'offset'" in lines[0]
    assert "target" in lines[1]
    assert "patience" in lines[2]


@pytest.mark.parametrize("wrong", [nn.Linear, EveryOther()])
def test_only_subclasses_of_the_three_bases_can_be_registered(wrong: Any) -> None:
    with pytest.raises(GossamerError, match="expected a subclass of one of MaskGenerator, FakeSparse, BaseScheduler"):
        register(wrong)


@pytest.mark.parametrize("kind", ["EveryOther", "Cubic", "Halved"])
def test_custom_parts_cannot_be_written_into_a_recipe(kind: str) -> None:
    for part in (EveryOther, Cubic, Halved):
        register(part)
    config: dict[str, Any] = {"scheduler": {"type": "BaseScheduler"}}
    if kind == "EveryOther":
        config = levels("EveryOther")
    elif kind == "Cubic":
        config = {"scheduler": {"type": "Cubic", "kwargs": {"target": 0.5}}}
    else:
        config["fake_sparse"] = {"type": "Halved"}
    with pytest.raises(GossamerError, match=f"recipe: {kind} cannot be written into a recipe"):
        build_sparse_scheduler(config).recipe()


# Presets
