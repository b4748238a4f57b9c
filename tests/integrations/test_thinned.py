"""Going on, inside other libraries, from a checkpoint in which filters were removed, with a model built anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

RECIPE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0.0, end_epoch: 3.0}
  - !StructuredPruningModifier
    {params: ['re:.*0.weight'], init_sparsity: 0.1, final_sparsity: 0.5,
     start_epoch: 0, end_epoch: 1, update_frequency: 0.5}
  - !LayerThinningModifier {start_epoch: 1.0}
"""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))


def test_lightning_goes_on_from_a_checkpoint_of_a_thinned_model(tmp_path: Path) -> None:
    pl: Any = pytest.importorskip("lightning.pytorch")
    from gossamer.integrations.lightning import SparsityCallback

    class Module(pl.LightningModule):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(epochs: int, start: Path | None = None) -> Any:
        module = Module()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            callbacks=[SparsityCallback(RECIPE)],
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(module, DataLoader(data(), batch_size=8), ckpt_path=start)
        return module, trainer

    whole, _ = fit(3)
    assert whole.net[0].out_features < 32
    _, stopped = fit(2)
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = fit(3, tmp_path / "two.ckpt")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


class _Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Any, labels: Any = None) -> Any:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def test_transformers_goes_on_from_a_checkpoint_of_a_thinned_model(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from gossamer.integrations.transformers import SparsityCallback

    rows = [{"x": x, "labels": y} for x, y in data()]

    def train(resume: bool | str) -> nn.Module:
        model = _Answers()
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=3,
            per_device_train_batch_size=8,
            save_strategy="epoch",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks = [SparsityCallback(RECIPE, example_inputs=torch.zeros(1, 16))]
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train(
            resume_from_checkpoint=resume or None
        )
        return model

    whole: Any = train(False)
    assert whole.net[0].out_features < 32
    resumed = train(str(tmp_path / "out" / "checkpoint-16"))
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
