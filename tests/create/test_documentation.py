"""What the users' documentation shows runs as it is written, in a training loop on digits, with one import changed.

Its dots stand for the user's own code; the tests fill them in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.create.digits import STEPS_PER_EPOCH, accuracy, adam, batches, network, train, trained, zeros

PAGE = Path(__file__).parents[1] / "data/create/users-documentation.md"
FIRST, END, SCALER, QUANTIZATION, TEACHER, TRANSFER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(snippet: str, names: dict[str, Any]) -> None:
    """The snippet without the lines `NAME = ...`, which stand for what is there already."""
    text = re.sub(r"^\w+ = \.\.\..*\n", "", snippet, flags=re.MULTILINE)
    exec(text.replace("import sparsify", "import gossamer as sparsify"), names)


def script() -> dict[str, Any]:
    """The variables of a training script that has imported sparsify."""
    model = trained()
    names: dict[str, Any] = {"MODEL": model, "OPTIMIZER": adam(model), "STEPS_PER_EPOCH": STEPS_PER_EPOCH}
    exec("import gossamer as sparsify", names)
    return names


@torch.no_grad()
def rounded(model: nn.Module) -> bool:
    """Whether the model computes in 8 bits: near what its weights give in floating point, but not that."""
    plain = network()
    plain.load_state_dict(model.state_dict())
    pixels = batches(0)[0][0]
    found, whole = model.eval()(pixels), plain.eval()(pixels)
    model.train()
    return not torch.equal(found, whole) and bool((found - whole).norm() < 0.1 * whole.norm())


def test_the_first_snippet_prunes_and_quantizes_and_says_how_long_to_train() -> None:
    names = script()
    run(FIRST, names)
    manager, model = names["sparsification_manager"], names["MODEL"]
    assert names["END_EPOCH"] == manager.max_epochs == 20
    assert isinstance(names["OPTIMIZER"], torch.optim.Optimizer)
    train(model, names["OPTIMIZER"], names["END_EPOCH"])
    assert zeros(model) == (round(13_824 * 0.8), 13_824)
    assert accuracy(model) > 0.95
    assert rounded(model)
    assert [modifier.start_epoch for modifier in manager.quantization_modifiers] == [15]


def test_the_end_epoch_follows_the_manager() -> None:
    names = script()
    run(FIRST, names)
    names["END_EPOCH"] = 90
    run(END, names)
    assert names["END_EPOCH"] == 20


def test_the_epoch_of_quantization_is_found_as_shown() -> None:
    names = script()
    run(FIRST, names)
    run(QUANTIZATION, names)
    assert names["quantization_start_epoch"] == 15
    without = script()
    exec(
        "sparsification_manager, OPTIMIZER = sparsify.create.initialize("
        "MODEL, OPTIMIZER, STEPS_PER_EPOCH, quantization=False)",
        without,
    )
    run(QUANTIZATION, without)
    assert "quantization_start_epoch" not in without


def test_the_scaler_is_returned_in_place_of_the_optimizer_and_trains_in_mixed_precision() -> None:
    names = script()
    given = names["SCALER"] = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run(SCALER, names)
    run(QUANTIZATION, names)
    manager, model, optimizer, scaler = (
        names[name] for name in ("sparsification_manager", "MODEL", "OPTIMIZER", "SCALER")
    )
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler is not given
    for epoch in range(manager.max_epochs):
        mixed = epoch < names["quantization_start_epoch"]
        for pixels, labels in batches(epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
                loss = cross_entropy(model(pixels), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert manager.step == 20 * STEPS_PER_EPOCH
    assert zeros(model) == (round(13_824 * 0.8), 13_824)
    assert accuracy(model) > 0.95
    assert rounded(model)


def test_distillation_from_a_teacher_of_ones_own_needs_nothing_else_in_the_loop() -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    names = script()
    names["DISTILLATION_TEACHER"] = trained()
    names["DISTILLATION_TEACHER"].register_forward_hook(count)
    run(TEACHER, names)
    manager, model = names["sparsification_manager"], names["MODEL"]
    train(model, names["OPTIMIZER"], manager.max_epochs)
    assert calls == 20 * STEPS_PER_EPOCH
    assert zeros(model) == (round(13_824 * 0.8), 13_824)
    assert accuracy(model) > 0.95
    assert rounded(model)


def test_transfer_holds_the_zeros_that_the_model_has() -> None:
    names = script()
    model = names["MODEL"]
    with torch.no_grad():
        for name in ("3.weight", "6.weight"):
            weight = model.get_parameter(name)
            weight.masked_fill_(weight.abs() < weight.abs().flatten().kthvalue(weight.numel() // 2).values, 0)
    before = {name: model.get_parameter(name) == 0 for name in ("3.weight", "6.weight")}
    run(TRANSFER, names)
    train(model, names["OPTIMIZER"], names["sparsification_manager"].max_epochs)
    assert all(bool((model.get_parameter(name)[held] == 0).all()) for name, held in before.items())
    assert all(int(held.sum()) > 2000 for held in before.values())
    assert accuracy(model) > 0.95
    assert rounded(model)
