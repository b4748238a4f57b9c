"""The same promises on an accelerator; run where there is one."""

from __future__ import annotations

import pytest
import torch

from gossamer import Manager
from gossamer.sparse import NM, Block, Unstructured, global_masks, zero_where
from tests.loops import batch, network, sgd, zeros

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4), Block(1, 4)])
def test_masks_are_the_same_as_on_the_processor(pattern: Unstructured | NM | Block) -> None:
    scores = torch.randint(0, 9, (16, 16), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(pattern.mask(scores.cuda(), 0.5).cpu(), pattern.mask(scores, 0.5))
    together = global_masks({"a": scores.cuda(), "b": scores[:4].cuda()}, pattern, 0.5)
    apart = global_masks({"a": scores, "b": scores[:4]}, pattern, 0.5)
    assert all(torch.equal(together[name].cpu(), apart[name]) for name in apart)


def test_weights_are_zeroed_in_place() -> None:
    weight = torch.full((8, 8), -1.0, device="cuda")
    zero_where(weight, torch.eye(8, device="cuda").bool())
    assert not bool(torch.signbit(weight.diagonal()).any())
    assert int((weight == 0).sum()) == 8


def test_a_model_that_moves_to_the_device_after_modify_keeps_its_zeros() -> None:
    model = network()
    recipe = "modifiers: [!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.5, final_sparsity: 0.9, "
    manager = Manager(recipe + "start_epoch: 0, end_epoch: 1, update_frequency: 0.5}]")
    optimizer = manager.modify(model, sgd(model), 4)
    model.cuda()
    for step in range(4):
        inputs, labels = (part.cuda() for part in batch(step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert zeros(model[0].weight) == 259
