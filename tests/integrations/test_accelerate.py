"""Recipes in a loop of one's own that Accelerate prepares, on scikit-learn's digits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
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


@pytest.fixture
def library() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    _forget()
    yield accelerate
    _forget()


def _forget() -> None:
    """Accelerate keeps one state for a whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Loop:
    """What a user of Accelerate writes."""

    def __init__(
        self,
        library: Any,
        recipe: str = RECIPE,
        accumulate: int = 1,
        seed: int = 0,
        scaler: Any = None,
        hidden: bool = False,
        **kwargs: Any,
    ) -> None:
        from gossamer.integrations.accelerate import Sparsity

        self.accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.accelerator.scaler = scaler
        self.plain = network(seed)
        if hidden:
            self.plain.insert(1, nn.Linear(96, 96))
        optimizer = torch.optim.Adam(self.plain.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.plain, optimizer, loader(), scheduler
        )
        self.sparsity = Sparsity(recipe, **kwargs)
        self.sparsity.attach(
            self.accelerator, self.model, self.optimizer, self.loader, lr_scheduler=self.scheduler, epochs=4
        )
        self.rates: list[float] = []

    def train(self, epochs: int, overflow_at: int | None = None) -> None:
        for _ in range(epochs):
            for number, (inputs, labels) in enumerate(self.loader):
                with self.accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(inputs), labels)
                    self.accelerator.backward(loss * torch.inf if number == overflow_at else loss)
                    self.optimizer.step()
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                    self.scheduler.step()
                    self.optimizer.zero_grad()


def test_digits_are_read_with_a_fifth_of_the_weights(library: Any) -> None:
    loop = Loop(library, accumulate=2)
    loop.train(epochs=4)
    assert loop.sparsity.manager.step == 4 * math.ceil(BATCHES / 2)
    assert loop.sparsity.figures() == {"sparsity": pytest.approx((4915 + 768) / (64 * 96 + 960))}
    loop.sparsity.finalize()
    assert (zeros(loop.plain[0].weight), zeros(loop.plain[2].weight)) == (4915, 768)
    assert accuracy(loop.plain) > 0.9


@pytest.mark.parametrize("recipe", [RECIPE, WITH_RATES], ids=["without rates", "with rates"])
def test_a_loaded_state_goes_on_to_the_same_weights(library: Any, tmp_path: Path, recipe: str) -> None:
    whole = Loop(library, recipe, accumulate=2)
    whole.train(epochs=2)
    whole.accelerator.save_state(str(tmp_path / "state"))
    whole.train(epochs=2)
    whole.sparsity.finalize()
    again = Loop(library, recipe, accumulate=2, seed=1)
    again.accelerator.load_state(str(tmp_path / "state"))
    assert again.sparsity.manager.step == 2 * math.ceil(BATCHES / 2)
    again.train(epochs=2)
    again.sparsity.finalize()
    assert same(weights(whole.plain), weights(again.plain))
    assert zeros(again.plain[0].weight) == 4915


def test_a_state_goes_back_in_the_same_loop(library: Any, tmp_path: Path) -> None:
    loop = Loop(library)
    loop.train(epochs=1)
    loop.accelerator.save_state(str(tmp_path))
    there = weights(loop.plain)
    loop.train(epochs=2)
    loop.accelerator.load_state(str(tmp_path))
    assert same(weights(loop.plain), there)
    assert loop.sparsity.manager.epoch == 1


def test_a_state_of_a_model_that_has_lost_a_layer_goes_on(library: Any, tmp_path: Path) -> None:
    recipe = "modifiers:\n  - !LayerPruningModifier {layers: ['1'], start_epoch: 1.0}\n" + pruning(end=2)
    whole = Loop(library, recipe, hidden=True)
    whole.train(epochs=1)
    whole.accelerator.save_state(str(tmp_path))
    assert "1.weight" not in whole.plain.state_dict()
    whole.train(epochs=1)
    again = Loop(library, recipe, hidden=True, seed=1)
    again.accelerator.load_state(str(tmp_path))
    again.train(epochs=1)
    assert same(weights(whole.plain), weights(again.plain))


def test_a_state_that_is_saved_after_the_end_has_the_last_masks(library: Any, tmp_path: Path) -> None:
    loop = Loop(library)
    loop.train(epochs=3)
    loop.sparsity.finalize()
    loop.accelerator.save_state(str(tmp_path))
    again = Loop(library, seed=1)
    again.accelerator.load_state(str(tmp_path))
    assert zeros(again.plain[0].weight) == 4915
    assert again.sparsity.manager.epoch == 3


def test_a_folder_without_the_recipes_state_is_refused_and_changes_nothing(library: Any, tmp_path: Path) -> None:
    loop = Loop(library)
    loop.accelerator.save_state(str(tmp_path))
    before = weights(loop.plain)
    (tmp_path / "gossamer.pt").write_bytes((tmp_path / "gossamer.pt").read_bytes()[:200])
    with pytest.raises(GossamerError, match=r"gossamer\.pt: not a recipe state, or damaged"):
        loop.accelerator.load_state(str(tmp_path))
    (tmp_path / "gossamer.pt").unlink()
    with pytest.raises(GossamerError, match="the checkpoint has no recipe state"):
        loop.accelerator.load_state(str(tmp_path))
    assert same(weights(loop.plain), before)


def test_the_rates_of_the_recipe_win_with_a_warning(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        loop = Loop(library, WITH_RATES)
        loop.train(epochs=2)
    assert "LambdaLR has no effect" in caplog.text
    assert "parameter group" not in caplog.text
    steps = 4 * BATCHES
    assert loop.rates == pytest.approx([0.01 - 0.009 * (step + 1) / steps for step in range(2 * BATCHES)])


def test_a_step_that_the_scaler_skips_does_not_move_the_clock(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(library, scaler=torch.amp.GradScaler("cpu", init_scale=128.0))
    loop.train(epochs=1, overflow_at=2)
    assert loop.optimizer.scaler.get_scale() == 64
    assert loop.sparsity.manager.step == BATCHES - 1
    with caplog.at_level(logging.WARNING, "gossamer"):
        loop.sparsity.finalize()
    assert f"{BATCHES - 1} of {3 * BATCHES} steps" in caplog.text


def test_a_loop_without_a_length_has_to_say_its_steps(library: Any) -> None:
    from gossamer.integrations.accelerate import Sparsity

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.zeros(4, 64)

    accelerator = library.Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, stream = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(Stream()))
    with pytest.raises(GossamerError, match="the training dataloader has no length"):
        Sparsity(RECIPE).attach(accelerator, model, optimizer, stream)
    with pytest.raises(GossamerError, match="pass the training dataloader"):
        Sparsity(RECIPE).attach(accelerator, model, optimizer)
    assert Sparsity(RECIPE, steps_per_epoch=4).attach(accelerator, model, optimizer, stream).epoch == 0


def _in_two_processes(folder: str) -> None:
    import accelerate

    from gossamer.integrations.accelerate import Sparsity

    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    plain = network(seed=accelerator.process_index)  # DDP takes those of the first process
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(plain, optimizer, loader())
    sparsity = Sparsity(RECIPE)
    sparsity.attach(accelerator, model, optimizer, batches)
    for _ in range(3):
        for inputs, labels in batches:
            accelerator.backward(cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    steps = sparsity.manager.step
    accelerator.save_state(f"{folder}/state")
    sparsity.finalize()
    torch.save({"steps": steps, **weights(plain)}, f"{folder}/rank{accelerator.process_index}.pt")


@pytest.mark.slow
def test_two_processes_end_with_the_same_sparse_model(library: Any, tmp_path: Path) -> None:
    launch = f"debug_launcher(tests._in_two_processes, args=({str(tmp_path)!r},), num_processes=2)"
    in_a_new_process(__name__, f"from accelerate import debug_launcher\n{launch}")
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert first.pop("steps") == second.pop("steps") == 3 * math.ceil(BATCHES / 2)
    assert same(first, second)
    assert zeros(first["0.weight"]) == 4915
    assert (tmp_path / "state" / "gossamer.pt").exists()
