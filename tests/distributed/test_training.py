"""Distillation, quantization-aware training, mixed precision and activation checkpointing under `fully_shard`."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from gossamer import Manager, gathered_state
from tests.distributed.sharded import same_bits, shard, whole
from tests.distributed.test_methods import odd_network
from tests.loops import sgd, train
from tests.ranks import in_ranks

PRUNING = "!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.5, start_epoch: 0, \
end_epoch: 2, update_frequency: 0.5}"
DISTILLATION = f"""
modifiers:
  - {PRUNING}
  - !DistillationModifier {{start_epoch: 0, hardness: 0.7, temperature: 2.0}}
  - !PerLayerDistillationModifier {{start_epoch: 0, gain: 0.1, student_layer_names: ['3'], teacher_layer_names: ['3']}}
"""
QUANTIZATION = f"""
modifiers:
  - {PRUNING}
  - !QuantizationModifier {{start_epoch: 1}}
"""
STR = "modifiers: [!STRPruningModifier {params: __ALL_PRUNABLE__, start_epoch: 0, end_epoch: 2, final_sparsity: 0.8}]"
STEPS = 9


def attached(recipe: str, model: nn.Module, **options: Any) -> tuple[Manager, torch.optim.Optimizer]:
    manager = Manager(recipe)
    return manager, manager.modify(model, sgd(model), 4, **options)


def worker(rank: int, folder: str) -> None:
    logging.disable(logging.WARNING)
    torch.manual_seed(1)
    same_as_one_process(DISTILLATION, {"distillation_teacher": "self"}, {"distillation_teacher": "self"})
    teacher = odd_network().eval()
    same_as_one_process(DISTILLATION, {"distillation_teacher": teacher}, {"distillation_teacher": teacher})
    split = shard(odd_network().eval())
    same_as_one_process(DISTILLATION, {"distillation_teacher": teacher}, {"distillation_teacher": split})
    same_as_one_process(QUANTIZATION, {}, {})
    checkpointed_activations()
    lower_precision()


def same_as_one_process(recipe: str, alone_options: dict[str, Any], options: dict[str, Any]) -> None:
    alone, model = odd_network(), shard(odd_network())
    reference, alone_optimizer = attached(recipe, alone, **alone_options)
    manager, optimizer = attached(recipe, model, **options)
    for step in range(STEPS):
        train(alone, alone_optimizer, range(step, step + 1))
        train(model, optimizer, range(step, step + 1))
        for name, keep in manager.masks().items():
            assert torch.equal(whole(keep), reference.masks()[name]), (recipe, step, name)
        for name, weight in alone.named_parameters():
            assert same_bits(weight, model.get_parameter(name)), (recipe, step, name)
    state, expected = gathered_state(manager.state_dict()), reference.state_dict()
    assert state.keys() == expected.keys()
    manager.finalize(warn=False)
    reference.finalize(warn=False)


def checkpointed_activations() -> None:
    """Learned thresholds, which layers compute with, are recomputed with them in the backward pass."""
    alone, model = odd_network(), odd_network()
    model[3], model[7] = checkpoint_wrapper(model[3]), checkpoint_wrapper(model[7])
    shard(model)
    params = STR.replace("__ALL_PRUNABLE__", "['0.weight']")
    (reference, alone_optimizer), (manager, optimizer) = attached(params, alone), attached(params, model)
    train(alone, alone_optimizer, range(STEPS))
    train(model, optimizer, range(STEPS))
    assert torch.equal(whole(manager.masks()["0.weight"]), reference.masks()["0.weight"])


def lower_precision() -> None:
    """Layers compute in bfloat16; masks follow the float32 weights, and zeros stay."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = odd_network()
    model[1] = nn.Identity()  # torch's batch norm does not take bfloat16 beside float32 statistics on the CPU
    shard(model, mp_policy=policy)
    manager, optimizer = attached(f"modifiers: [{PRUNING}]", model)
    train(model, optimizer, range(STEPS))
    assert set(manager.sparsity().values()) == {0.5}
    for name, keep in manager.masks().items():
        weight = model.get_parameter(name)
        assert weight.dtype == torch.float32
        assert not bool(whole(weight)[~whole(keep)].any())


def test_training_techniques_work_on_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)
