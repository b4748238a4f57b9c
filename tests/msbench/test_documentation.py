"""Every configuration of the users' documentation builds, prepares, trains and exports as it is printed.

The page lacks the comma after some `'type': '…'` and names things that are the
user's own; both are filled in, and nothing else.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim.lr_scheduler import CosineAnnealingLR

from gossamer.msbench import build_sparse_scheduler
from gossamer.sparse import NM
from tests.msbench.configs import accuracy, digit_loss, digits, loop, trained_digit_net

PAGE = Path(__file__).parents[1] / "data" / "msbench" / "learn_config.rst"
WEIGHTS = {"conv1": 144, "conv2": 4608, "conv3": 9216, "fc": 1280}


@dataclass(frozen=True)
class Block:
    """A code block of the page, as Python."""

    section: str
    printed: str

    @property
    def code(self) -> str:
        """With a comma after each `'type': '…'` that another key follows."""
        return re.sub(r"('type': '\w+')( *#[^\n]*\n\s*')", r"\1,\2", self.printed)

    def config(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """What the block assigns to `sparsity_config`; the calls below it are left to the tests."""
        end = re.search(r"^}\n", self.code, re.MULTILINE)
        assert end is not None
        exec(self.code[: end.end()], namespace)
        return namespace["sparsity_config"]


def blocks() -> list[Block]:
    """The Python blocks that hold a config."""
    text = PAGE.read_text("utf-8")
    found: list[Block] = []
    for block in re.finditer(r"^\.\. code-block:: python\n\n((?:    .*\n|\s*\n)+)", text + "\n", re.MULTILINE):
        section = re.findall(r"^\*\*(\d\.?\d?)", text[: block.start()], re.MULTILINE)[-1]
        code = re.sub(r"^    ", "", block[1], flags=re.MULTILINE)
        if "sparsity_config = {" in code:
            found.append(Block(section, code))
    return found


def filled(section: str, folder: Path, iterations: int) -> dict[str, Any]:
    """The config of a section with the names of the user's own filled in."""
    block = next(block for block in blocks() if block.section == section)
    found = block.config({"max_iter": iterations})
    kwargs = found["scheduler"].get("kwargs", {})
    for key in ("output_dir", "save_dir"):
        if key in kwargs:
            assert kwargs[key].startswith("path_to_")
            kwargs[key] = str(folder / kwargs[key])
    return found


def test_the_page_prints_four_configs_and_only_commas_are_missing() -> None:
    missing = {block.section: len(block.code) - len(block.printed) for block in blocks()}
    assert missing == {"1.": 1, "4.1": 1, "4.2": 1, "4.3": 0}
    for block in blocks():
        compile(block.code, block.section, "exec")
        if missing[block.section]:
            with pytest.raises(SyntaxError):
                compile(block.printed, block.section, "exec")


def trained_by(section: str, iterations: int, folder: Path) -> tuple[Any, Any]:
    """The scheduler and the exported model after the training script of a section, which changes no config."""
    sparsity_config = filled(section, folder, iterations)
    given = deepcopy(sparsity_config)
    model = trained_digit_net()
    names = list(model.state_dict())
    scheduler = build_sparse_scheduler(sparsity_config)
    model = scheduler.prepare_sparse_model(model)
    assert isinstance(model, GraphModule) == scheduler.traces
    groups = scheduler.param_groups(model, 1e-4, st_decay=0.02)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    lr_scheduler = CosineAnnealingLR(optimizer, T_max=iterations // 7 if scheduler.length else iterations)
    if scheduler.length:
        scheduler.set_lr_scheduler(lr_scheduler)
    scheduler.init_optimizer(optimizer)
    loop(scheduler, model, optimizer, range(iterations), lr_scheduler, loss=digit_loss)
    expect_exported(scheduler, model, names)
    assert sparsity_config == given
    return scheduler, model


@pytest.mark.parametrize(("section", "iterations"), [("1.", 105), ("4.1", 210)])
def test_levels_end_at_ninety_percent_and_still_read_digits(section: str, iterations: int, tmp_path: Path) -> None:
    _, model = trained_by(section, iterations, tmp_path)
    assert zeros(model) == round(0.9 * sum(WEIGHTS.values()))
    assert accuracy(model) >= 0.85
    saved = sorted(file.name for file in (tmp_path / "path_to_sparse_ckpts").iterdir())
    assert saved == [f"global_sparse_rate_0.{digit}.pth.tar" for digit in range(3, 10)]


def test_ampere_keeps_two_of_four_and_still_reads_digits(tmp_path: Path) -> None:
    scheduler, model = trained_by("4.2", 80, tmp_path)
    assert "1 input channel does not divide by 16" in str(scheduler.layers["conv1"])
    assert scheduler.compute_sparse_rate(model) == 0.5
    for layer in (model.conv2, model.conv3):
        assert NM(2, 4).violations(layer.weight.detach()) == 0
        assert int((layer.weight == 0).sum()) == layer.weight.numel() // 2
    assert accuracy(model) >= 0.9


def test_learned_thresholds_leave_zeros_and_still_read_digits(tmp_path: Path) -> None:
    scheduler, model = trained_by("4.3", 120, tmp_path)
    assert scheduler.compute_sparse_rate(model) == pytest.approx(zeros(model) / sum(WEIGHTS.values()), abs=1e-12)
    assert zeros(model) > 0.1 * sum(WEIGHTS.values())
    assert accuracy(model) >= 0.9


def zeros(model: nn.Module) -> int:
    weights = {name: model.get_parameter(f"{name}.weight") for name in WEIGHTS}
    assert {name: weight.numel() for name, weight in weights.items()} == WEIGHTS
    return sum(int((weight == 0).sum()) for weight in weights.values())


def expect_exported(scheduler: Any, model: nn.Module, names: list[str]) -> None:
    """Export a model: it has the user's names then and computes what it did before, as sparse as measured."""
    images, rate = digits()[0][1280:], scheduler.compute_sparse_rate(model)
    model.eval()
    with torch.no_grad():
        before = model(images)
        assert scheduler.export_sparse_model(model) is model
        after = model(images)
    assert list(model.state_dict()) == names
    assert scheduler.compute_sparse_rate(model) == rate
    assert torch.allclose(before, after, rtol=0, atol=1e-6 * float(before.abs().max()))
