"""Bad input: one clear error each, with its place, and the model untouched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import GossamerError, Manager, Modifier, Recipe, register
from gossamer.modifiers import GMPruningModifier
from tests.loops import loss_at, network, sgd, train

GMP = """modifiers:
  - !GMPruningModifier
    params: {params}
    init_sparsity: 0.5
    final_sparsity: 0.9
    start_epoch: 0
    end_epoch: 2
    update_frequency: 0.5
"""


def attach(recipe: str, model: nn.Module, steps_per_epoch: object = 4, optimizer: object = None) -> None:
    Manager(recipe).modify(model, optimizer or sgd(model), steps_per_epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (GMP.format(params="['fc9.weight']"), "<recipe>:3: params: 'fc9.weight' matches none of 8 parameters"),
        (GMP.format(params="['re:.*fc9']"), "<recipe>:3: params: 're:.*fc9' matches none of 8 parameters"),
        (GMP.format(params="['net/conv/w']"), "PyTorch engine"),
        (
            GMP.format(params="['0.weight']").replace("0.9", "0.5") + "    mask_type: 3:8\n",
            "<recipe>:9:16: final_sparsity: mask_type 3:8 means 0.625, found 0.5",
        ),
        (
            GMP.format(params="['0.weight']").replace("0.9", "0.625") + "    mask_type: 3:8\n",
            "mask_type 3:8 does not fit '0.weight': 4 input channels do not divide by 8",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_says_where_and_leaves_it_untouched(recipe: str, message: str) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(GossamerError) as caught:
        attach(recipe, model)
    assert message.rsplit(":", maxsplit=1)[-1].strip() in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("value", [0, float("nan"), "ten", True])
def test_steps_per_epoch_must_be_a_positive_number(value: object) -> None:
    model = network()
    before = model[0].weight.detach().clone()
    with pytest.raises(GossamerError, match=f"steps_per_epoch: expected .* found {re.escape(repr(value))}"):
        attach(GMP.format(params="__ALL_PRUNABLE__"), model, value)
    assert torch.equal(model[0].weight.detach(), before)


def test_a_loader_for_steps_per_epoch_is_refused_with_what_to_pass() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch_size=2)
    with pytest.raises(GossamerError, match=r"steps_per_epoch: .* found a DataLoader; pass len\(loader\)"):
        attach(GMP.format(params="__ALL_PRUNABLE__"), network(), loader)
    model = network()
    with pytest.raises(GossamerError, match=r"pass len\(loader\)"):
        gossamer.create.initialize(model, sgd(model), loader)  # type: ignore[arg-type]


def test_weights_that_hold_nan_are_refused_before_anything_happens() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = float("nan")
    before = model[0].weight.detach().clone()
    with pytest.raises(GossamerError, match=r"<recipe>:3: GMPruningModifier.params: '3.weight' contains NaN"):
        attach(GMP.format(params="__ALL_PRUNABLE__"), model)
    assert torch.equal(model[0].weight.detach(), before)


def test_weights_that_become_nan_are_named_with_the_step() -> None:
    model = network()
    manager = Manager(GMP.format(params="__ALL_PRUNABLE__"))
    optimizer = manager.modify(model, sgd(model), 4)
    train(model, optimizer, range(1))
    loss_at(model, 0).backward()
    model[3].weight.grad.fill_(float("nan"))
    with pytest.raises(GossamerError, match=r"'3.weight' cannot be pruned at step 2: \d+ of 576 scores are NaN"):
        optimizer.step()
    assert bool((model[0].weight.detach()[~manager.masks()["0.weight"]] == 0).all())


@pytest.mark.parametrize("optimizer", ["sgd", [1, 2]])
def test_what_is_not_an_optimizer_or_a_model_is_refused(optimizer: object) -> None:
    with pytest.raises(GossamerError, match=r"expected a torch.optim.Optimizer, found"):
        attach(GMP.format(params="__ALL_PRUNABLE__"), network(), optimizer=optimizer)
    with pytest.raises(GossamerError, match=r"expected a torch.nn.Module, found list"):
        Manager(GMP.format(params="__ALL__")).modify([], sgd(network()), 4)  # type: ignore[arg-type]


def test_attaching_twice_is_refused() -> None:
    model = network()
    manager = Manager(GMP.format(params="__ALL_PRUNABLE__"))
    manager.modify(model, sgd(model), 4)
    with pytest.raises(GossamerError, match="attached already; call finalize"):
        manager.modify(model, sgd(model), 4)


def test_a_failing_beginning_puts_everything_back() -> None:
    def broken(_: nn.Module):
        raise RuntimeError("no data")
        yield

    model = network()
    optimizer = sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = GMP.format(params="['0.weight']") + (
        "  - !SetParamModifier {params: ['7.bias'], val: 3.0}\n"
        "  - !SetLearningRateModifier {learning_rate: 9.0}\n"
        "  - !TrainableParamsModifier {params: __ALL__, trainable: false}\n"
        "  - !OBSPruningModifier {params: ['3.weight'], init_sparsity: 0.1, final_sparsity: 0.2, start_epoch: 0, "
        "end_epoch: 1, update_frequency: 1}\n"
    )
    with pytest.raises(RuntimeError, match="no data"):
        Manager(recipe).modify(model, optimizer, 4, grad_sampler=broken)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert all(parameter.requires_grad for parameter in model.parameters())
    train(model, optimizer, range(1))
    assert not bool((model[0].weight == 0).any())


def test_a_sampler_of_the_wrong_kind_is_refused() -> None:
    recipe = GMP.format(params="['3.weight']").replace("GMP", "OBSP")
    for sampler in (3, {"loss_function": None}):
        with pytest.raises(GossamerError, match="grad_sampler: "):
            Manager(recipe).modify(model := network(), sgd(model), 4, grad_sampler=sampler)


def test_a_users_own_modifier_is_used_by_its_name_and_gets_the_same_errors() -> None:
    @register
    class HalvingModifier(Modifier):
        """Halves the first bias at its start."""

        name_of_bias: str
        factor: float = 0.5

        def bind(self, run):
            run.weights.parameter(self.name_of_bias)
            return [self.name_of_bias]

        def start(self, run):
            run.weights.write(self.name_of_bias, run.weights.parameter(self.name_of_bias).detach() * self.factor)

    model = network()
    bias = model[0].bias.detach().clone()
    Manager("modifiers: [!HalvingModifier {name_of_bias: '0.bias'}]").modify(model, sgd(model), 4)
    assert torch.equal(model[0].bias.detach(), bias / 2)
    with pytest.raises(
        GossamerError, match=r"<recipe>:1:\d+: HalvingModifier.facter: unknown field; nearest: 'factor'"
    ):
        Manager("modifiers: [!HalvingModifier {name_of_bias: '0.bias', facter: 2}]")
    with pytest.raises(GossamerError, match=r"not a subclass of gossamer\.Modifier"):
        register(dict)  # type: ignore[type-var]


def test_fields_without_effect_are_accepted_and_said() -> None:
    modifier = GMPruningModifier(
        params="__ALL__", init_sparsity=0, final_sparsity=0.5, start_epoch=0, end_epoch=1, update_frequency=1,
        log_types="none", epsilon=0.1,
    )  # fmt: skip
    assert [str(warning) for warning in modifier.warnings()] == [
        "log_types: has no effect in Gossamer",
        "epsilon: has no effect in Gossamer: counts are exact",
    ]


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(GossamerError, match="the optimizer holds none of the model's parameters"):
        attach(GMP.format(params="__ALL_PRUNABLE__"), network(), optimizer=sgd(network()))


def test_every_name_that_matches_nothing_is_reported() -> None:
    with pytest.raises(GossamerError) as caught:
        attach(GMP.format(params="['a.weight', '0.weight', 'b.weight']"), network())
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["a.weight", "b.weight"]
    assert all(line.startswith("<recipe>:3: GMPruningModifier.params: ") for line in str(caught.value).splitlines())


@pytest.mark.parametrize("epoch", ["a", float("nan")])
def test_an_epoch_must_be_a_number(epoch: object) -> None:
    model = network()
    with pytest.raises(GossamerError, match="epoch: expected the epoch at which to start"):
        Manager(GMP.format(params="__ALL__")).modify(model, sgd(model), 4, epoch=epoch)  # type: ignore[arg-type]


def test_holding_zeros_of_a_dense_model_is_said(caplog: pytest.LogCaptureFixture) -> None:
    attach("modifiers: [!ConstantPruningModifier {params: __ALL_PRUNABLE__}]", network())
    assert "has no effect: its weights have no zeros" in caplog.text


def test_a_weight_that_stays_dense_because_the_pattern_does_not_fit_is_said(caplog: pytest.LogCaptureFixture) -> None:
    recipe = GMP.format(params="__ALL_PRUNABLE__").replace("0.9", "0.625") + "    mask_type: 3:8\n"
    attach(recipe, network())
    assert "leaves '0.weight' alone: mask_type 3:8 does not fit: 4 input channels do not divide by 8" in caplog.text
    assert "bias" not in caplog.text


def test_the_earlier_names_of_a_run_still_work_and_warn() -> None:
    model = nn.Linear(4, 2)

    @register
    class EarlierModifier(Modifier):
        def start(self, run: Any) -> None:
            run.write("weight", torch.ones_like(run.parameter("weight")))
            run.set_mask("weight", torch.arange(8).reshape(2, 4) > run.step)

    with pytest.deprecated_call(match=r"run\.\w+ is deprecated; use run\.\w+\.\w+"):
        Manager(Recipe.of([EarlierModifier()])).apply(model)
    assert model.weight.flatten().tolist() == [0.0] + [1.0] * 7
