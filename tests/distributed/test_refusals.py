"""What is not supported for distributed models is refused at `modify`, in one sentence, and nothing changes."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from gossamer import GossamerError, Manager
from tests.distributed.sharded import mesh_of, shard, whole
from tests.loops import network, sgd
from tests.ranks import in_ranks

GMP = (
    "modifiers: [!GMPruningModifier {params: __ALL_PRUNABLE__, init_sparsity: 0.1, final_sparsity: 0.5, "
    "start_epoch: 0, end_epoch: 3, update_frequency: 1%s}]"
)
REFUSED = {
    GMP % ", mask_type: '2:4', permute: true": "cannot be reordered",
    GMP.replace("GMP", "MFACP") % ", fisher_block_size: null": "fisher_block_size",
    "modifiers: [!LayerPruningModifier {layers: ['3'], start_epoch: 0, end_epoch: 1}]": "cannot be taken out",
    "modifiers: [!LayerThinningModifier {params: ['0.weight'], start_epoch: 1}]": "thin the model after the run",
}


def worker(rank: int, folder: str) -> None:
    for recipe, message in REFUSED.items():
        model = shard(network())
        before = {name: whole(weight).clone() for name, weight in model.named_parameters()}
        with pytest.raises(GossamerError, match=message):
            Manager(recipe).modify(model, sgd(model), 4)
        assert all(torch.equal(whole(weight), before[name]) for name, weight in model.named_parameters())
    flat = FullyShardedDataParallel(network(), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(GossamerError, match=r"FSDP1\) is not supported.*fully_shard"):
        Manager(GMP % "").modify(flat, sgd(flat), 4)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8))
    fully_shard(empty, mesh=mesh_of())
    with pytest.raises(GossamerError, match=r"'0.weight' is on the meta device .*to_empty"):
        Manager(GMP % "").modify(empty, sgd(empty), 4)


def test_what_is_not_supported_is_refused_when_the_recipe_is_attached() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, folder)


def test_a_model_on_the_meta_device_is_refused_without_ranks() -> None:
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(GossamerError, match="it is on the meta device and has no values"):
        Manager(GMP % "").modify(empty, sgd(empty), 4)
