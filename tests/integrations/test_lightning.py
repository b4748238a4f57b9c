"""Recipes in Lightning's Trainer, on scikit-learn's digits."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gossamer.errors import GossamerError
from tests.integrations.digits import (
    BATCHES,
    RECIPE,
    WITH_RATES,
    accuracy,
    in_a_new_process,
    loader,
    network,
    pruning,
    same,
    weights,
)
from tests.loops import zeros


@pytest.fixture(scope="module")
def pl() -> Any:
    # Imported here and not above: it takes seconds, which only the process that runs these tests should spend.
    return pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")


def callback(*args: Any, **kwargs: Any) -> Any:
    from gossamer.integrations.lightning import SparsityCallback

    return SparsityCallback(*args, **kwargs)


def module(pl: Any, seed: int = 0, scheduled: bool = False, **overrides: Any) -> Any:
    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(seed)
            self.rates: list[float] = []

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, labels = batch
            return cross_entropy(self(inputs), labels)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self(batch[0])

        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            if not scheduled:
                return optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return type("Digits", (Digits,), overrides)()


def trainer(pl: Any, *callbacks: Any, epochs: int = 4, **kwargs: Any) -> Any:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return pl.Trainer(max_epochs=epochs, callbacks=list(callbacks), **(quiet | kwargs))


def test_digits_are_read_with_a_fifth_of_the_weights(pl: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    model = module(pl)
    logger = CSVLogger(str(tmp_path), name="", version="")
    fit = trainer(pl, callback(RECIPE), epochs=5, logger=logger, log_every_n_steps=BATCHES)
    fit.fit(model, loader())
    assert (zeros(model.net[0].weight), zeros(model.net[2].weight)) == (4915, 768)
    assert accuracy(model) > 0.9
    with (tmp_path / "metrics.csv").open() as file:
        logged = [float(row["sparsity"]) for row in csv.DictReader(file)]
    assert logged == sorted(logged)
    assert logged[2:] == [pytest.approx((4915 + 768) / (64 * 96 + 960))] * 3


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("recipe", [RECIPE, WITH_RATES], ids=["without rates", "with rates"])
def test_a_fit_from_a_checkpoint_ends_at_the_weights_of_one_that_never_stopped(
    pl: Any, tmp_path: Path, recipe: str
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(model: Any, **kwargs: Any) -> None:
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer(pl, callback(recipe), saver, enable_checkpointing=True).fit(model, loader(), **kwargs)

    whole = module(pl, scheduled=True)
    fit(whole)
    middle = tmp_path / "epoch=1.ckpt"
    saved = torch.load(middle, weights_only=True)["state_dict"]
    assert 0.5 < float((saved["net.0.weight"] == 0).double().mean()) < 0.8
    again = module(pl, seed=1, scheduled=True)
    fit(again, ckpt_path=middle)
    assert same(weights(whole), weights(again))
    assert zeros(again.net[0].weight) == 4915


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_module_that_has_lost_a_layer_goes_on_when_it_loads_what_there_is(pl: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    recipe = "modifiers:\n  - !LayerPruningModifier {layers: ['net.1'], start_epoch: 0.5}\n" + pruning(end=2)

    def fitted(seed: int, **kwargs: Any) -> dict[str, torch.Tensor]:
        model = module(pl, seed, strict_loading=False)
        model.net.insert(1, nn.Linear(96, 96))
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer(pl, callback(recipe), saver, epochs=2, enable_checkpointing=True).fit(model, loader(), **kwargs)
        return weights(model)

    whole = fitted(0)
    assert "net.1.weight" not in whole
    assert same(whole, fitted(1, ckpt_path=tmp_path / "epoch=0.ckpt"))


def test_a_fit_that_is_given_more_epochs_goes_on_with_the_recipe(pl: Any) -> None:
    model, sparsity = module(pl), callback(RECIPE)
    fit = trainer(pl, sparsity, epochs=1)
    fit.fit(model, loader())
    begun = zeros(model.net[0].weight)
    fit.fit_loop.max_epochs = 3
    fit.fit(model, loader())
    assert 0 < begun < 4915
    assert zeros(model.net[0].weight) == 4915


def test_accumulated_batches_are_one_step(pl: Any) -> None:
    epochs: list[float] = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            epochs.append(sparsity.manager.epoch)

    sparsity = callback(RECIPE)
    fit = trainer(pl, sparsity, Watch(), epochs=3, accumulate_grad_batches=4, limit_train_batches=10)
    model = module(pl)
    fit.fit(model, loader())
    assert epochs == [1, 2, 3]  # 10 batches are 3 steps
    assert fit.global_step == 9
    assert zeros(model.net[0].weight) == 4915


def test_the_rates_of_the_recipe_win_with_a_warning(pl: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = module(pl, scheduled=True)
    with caplog.at_level(logging.WARNING, "gossamer"):
        trainer(pl, callback(WITH_RATES), limit_train_batches=5).fit(model, loader())
    assert "StepLR has no effect" in caplog.text
    assert len(caplog.messages) == 1
    assert model.rates == pytest.approx([0.01 - 0.009 * step / 20 for step in range(20)])


def test_a_training_that_is_too_short_is_reported(pl: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        trainer(pl, callback(RECIPE), max_steps=BATCHES).fit(module(pl), loader())
    assert "ends after 1 epochs and the recipe after 3" in caplog.messages[0]
    assert f"{BATCHES} of {3 * BATCHES} steps (epoch 1 of 3), sparsity" in caplog.messages[1]
    assert len(caplog.messages) == 2


def test_a_step_that_the_scaler_skips_does_not_move_the_clock(pl: Any) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        return loss * torch.inf if index == 2 else loss

    class Watch(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append((trainer.global_step, sparsity.manager.step))

    seen: list[tuple[int, int]] = []
    sparsity = callback("modifiers:\n" + pruning(end=0.5))
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=128.0))
    model = module(pl, training_step=training_step)
    trainer(pl, sparsity, Watch(), epochs=1, plugins=[half]).fit(model, loader())
    assert seen == [(BATCHES, BATCHES - 1)]
    assert zeros(model.net[0].weight) == 4915


def test_an_average_of_the_weights_has_the_zeros(pl: Any) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    model = module(pl)
    trainer(pl, callback(RECIPE), averaging.EMAWeightAveraging(decay=0.9), epochs=3).fit(model, loader())
    assert zeros(model.net[0].weight) == 4915


def test_two_optimizers_are_refused(pl: Any) -> None:
    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

    model = module(pl, configure_optimizers=configure_optimizers, automatic_optimization=False)
    with pytest.raises(GossamerError, match="Digits has 2 optimizers, and a recipe drives one"):
        trainer(pl, callback(RECIPE)).fit(model, loader())


def test_manual_optimization_needs_the_steps_and_then_works(pl: Any) -> None:
    def training_step(self: Any, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()

    def model() -> Any:
        return module(pl, training_step=training_step, automatic_optimization=False)

    with pytest.raises(GossamerError, match="steps_per_epoch"):
        trainer(pl, callback(RECIPE)).fit(model(), loader())
    told = model()
    trainer(pl, callback(RECIPE, steps_per_epoch=BATCHES), epochs=3).fit(told, loader())
    assert zeros(told.net[0].weight) == 4915


def test_changing_accumulation_is_refused(pl: Any) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with pytest.raises(GossamerError, match="GradientAccumulationScheduler changes"):
        trainer(pl, callback(RECIPE), GradientAccumulationScheduler({0: 1, 2: 4})).fit(module(pl), loader())


def test_an_error_in_training_leaves_model_and_optimizer_free(pl: Any) -> None:
    def training_step(self: Any, batch: Any, index: int) -> torch.Tensor:
        if index == 3:
            raise RuntimeError("a bad batch")
        return cross_entropy(self(batch[0]), batch[1])

    sparsity = callback(RECIPE)
    fit = trainer(pl, sparsity)
    with pytest.raises(RuntimeError, match="a bad batch"):
        fit.fit(module(pl, training_step=training_step), loader())
    assert not fit.optimizers[0]._optimizer_step_post_hooks
    assert sparsity.state_dict()["state"]["step"] == 3


def _in_two_processes(folder: Path) -> None:
    import lightning.pytorch as pl

    model = module(pl)
    fit = trainer(pl, callback(RECIPE), devices=2, strategy="ddp_fork", use_distributed_sampler=True, epochs=3)
    fit.fit(model, loader())
    torch.save(model.net[0].weight.detach(), folder / "weight.pt")


@pytest.mark.slow
def test_two_processes_train_one_sparse_model(pl: Any, tmp_path: Path) -> None:
    in_a_new_process(__name__, f"tests._in_two_processes(Path({str(tmp_path)!r}))")
    assert zeros(torch.load(tmp_path / "weight.pt", weights_only=True)) == 4915
