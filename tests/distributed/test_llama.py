"""A Llama of Transformers under `fully_shard`: pruning, 2:4 and distillation in a loop, and in the libraries."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from gossamer import Manager
from gossamer.sparse import NM
from tests.distributed.sharded import mesh_of, same_bits, whole
from tests.ranks import in_ranks

RECIPE = """
modifiers:
  - !GMPruningModifier {params: ['re:.*mlp.*weight'], init_sparsity: 0.1, final_sparsity: 0.8, start_epoch: 0,
                        end_epoch: 2, update_frequency: 0.5}
  - !GMPruningModifier {params: ['re:.*self_attn.*weight'], init_sparsity: 0.1, final_sparsity: 0.5, start_epoch: 0,
                        end_epoch: 2, update_frequency: 0.5, mask_type: '2:4'}
  - !DistillationModifier {start_epoch: 0, hardness: 0.5, temperature: 2.0}
"""
EPOCHS, BATCHES, SIZE = 3, 4, 4


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, attn_implementation="eager", **shape
    )
    return LlamaForCausalLM(config)


def split(model: Any, mesh: Any = None) -> Any:
    mesh = mesh_of() if mesh is None else mesh
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def data() -> list[dict[str, Tensor]]:
    drawn = torch.randint(0, 64, (EPOCHS + 1, BATCHES * SIZE, 8), generator=torch.Generator().manual_seed(0))[0]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def loader() -> Any:
    return torch.utils.data.DataLoader(data(), batch_size=SIZE)  # pyright: ignore[reportArgumentType]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check(model: nn.Module, reference: nn.Module | None = None) -> None:
    """The zeros of the recipe, and the bits of a run in one process."""
    seen = 0
    for name, weight in model.named_parameters():
        values = whole(weight)
        zeros = int((values == 0).sum())
        if "mlp" in name:
            assert zeros == round(0.8 * values.numel()), name
        elif "self_attn" in name:
            assert zeros == values.numel() // 2, name
            assert NM(2, 4).violations(weight.detach()) == NM(2, 4).violations(values) == 0, name
        seen += "mlp" in name or "self_attn" in name
        if reference is not None:
            assert same_bits(values, dict(reference.named_parameters())[name]), name
    assert seen == 14


def plain(model: Any) -> Any:
    manager = Manager(RECIPE)
    optimizer = manager.modify(model, sgd(model), BATCHES)
    for _ in range(EPOCHS):
        for batch in loader():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    manager.finalize()
    return model


def trainer(folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    from gossamer.integrations.transformers import SparsityCallback

    model = split(llama())
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=SIZE,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    run = Trainer(model, arguments, train_dataset=data())  # pyright: ignore[reportArgumentType]
    SparsityCallback(RECIPE).join(run)
    run.train()
    return model


def accelerate() -> Any:
    from accelerate import Accelerator

    from gossamer.integrations.accelerate import Sparsity

    accelerator = Accelerator(cpu=True)
    model = split(llama())
    prepared, optimizer, batches = accelerator.prepare(model, sgd(model), loader())
    sparsity = Sparsity(RECIPE)
    sparsity.attach(accelerator, prepared, optimizer, batches)
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(loss_of(prepared, batch))
            optimizer.step()
    sparsity.finalize()
    return model


def lightning(rank: int, folder: str) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from gossamer.integrations.lightning import SparsityCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def configure_model(self) -> None:
            split(self.net, self.device_mesh["data_parallel"])  # pyright: ignore[reportOptionalSubscript]

        def forward(self, input_ids: Tensor) -> Any:
            return self.net(input_ids=input_ids)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return loss_of(self, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "MASTER_PORT": 29500}.items():
            patch.setenv(name, str(value))
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        run = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            callbacks=[SparsityCallback(RECIPE)],
            default_root_dir=folder,
        )
        module = Module()
        run.fit(module, loader())
    return module.net


def worker(rank: int, folder: str, kind: str) -> None:
    warnings.simplefilter("ignore")  # libraries warn of few data workers, and of ranks that they did not start
    logging.disable(logging.WARNING)
    match kind:
        case "loop":
            check(plain(split(llama())), plain(llama()))
        case "trainer":
            check(trainer(folder))
        case "accelerate":
            check(accelerate(), plain(llama()))
        case _:
            check(lightning(rank, folder), plain(llama()))


LIBRARIES = {"trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning"}


@pytest.mark.parametrize("kind", ["loop", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LIBRARIES)])
def test_a_llama_on_two_ranks_gets_the_zeros_of_the_recipe(kind: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip(LIBRARIES.get(kind, "transformers"))
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(worker, Path(folder), kind)
