"""Engines are called as their models are: by position or by name, with the outputs' structure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from gossamer import runtime
from gossamer.errors import GossamerError
from tests.runtime.models import kernels, pruned


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    torch.manual_seed(0)
    return pruned(transformers.BertModel(config, add_pooling_layer=False))


def batch(size: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(size, length, dtype=torch.long)
    mask[-1, length // 2 + 1 :] = 0
    return {"attention_mask": mask, "input_ids": torch.randint(100, (size, length))}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return bert()


@pytest.fixture(scope="module")
def engine(model: nn.Module) -> runtime.Engine:
    return runtime.compile(model, batch(2, 7), threads=1, tuned=False)


def test_an_engine_takes_a_batch_of_transformers_and_returns_the_models_class(
    model: nn.Module, engine: runtime.Engine, tmp_path: Path
) -> None:
    assert kernels(engine).count("AttentionHeads") == 2
    engine.save(tmp_path / "bert.gossamer")
    loaded = runtime.load(tmp_path / "bert.gossamer", threads=1)
    for size, length in ((1, 5), (3, 12)):
        given = batch(size, length)
        with torch.inference_mode():
            expected = model(**given)
        for found in (engine(**given), loaded(**given), engine(given["input_ids"], given["attention_mask"])):
            assert type(found) is type(expected)
            assert list(found) == list(expected)
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
            assert found.hidden_states is None


def test_arguments_that_were_given_by_position_may_be_given_by_name() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, offset: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale - offset

    x, offset = torch.randn(3, 4), torch.randn(3, 4)
    engine = runtime.compile(Scaled(), (x, offset), tuned=False)
    for found in (engine(x, offset), engine(offset=offset, x=x), engine(x, offset=offset)):
        assert torch.equal(found, x - offset)


class Options(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, parts: dict[str, Tensor] | None = None) -> dict[str, Any]:
        assert parts is not None
        return {"sum": x * scale + parts["u"] - parts["v"], "both": [x, parts["v"]]}


def test_nested_and_constant_arguments_keep_their_names(tmp_path: Path) -> None:
    x, u, v = (torch.randn(2, 3) for _ in range(3))
    compiled = runtime.compile(Options(), {"x": x, "parts": {"u": u, "v": v}, "scale": 3.0}, tuned=False)
    compiled.save(tmp_path / "options")
    for engine in (compiled, runtime.load(tmp_path / "options")):
        for found in (engine(x, parts={"v": v, "u": u}), engine(x, 3.0, {"u": u, "v": v})):
            torch.testing.assert_close(found["sum"], 3 * x + u - v)
            assert torch.equal(found["both"][1], v)
        with pytest.raises(GossamerError, match=r"'scale': the engine is compiled for 3\.0, found 2\.0"):
            engine(x, 2.0, {"u": u, "v": v})
        with pytest.raises(GossamerError, match="'parts': expected a mapping with the keys u, v"):
            engine(x, parts={"u": u})


IDS, MASK = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
WRONG: dict[str, tuple[Callable[[runtime.Engine], object], str]] = {
    "missing": (lambda engine: engine(IDS), "'attention_mask' is missing; the engine takes attention_mask, input_ids"),
    "unexpected": (
        lambda engine: engine(input_ids=IDS, attention_mask=MASK, token_type_ids=IDS),
        "unexpected argument 'token_type_ids'.*takes attention_mask, input_ids",
    ),
    "misspelled": (lambda engine: engine(IDS, attention_masks=MASK), "nearest: 'attention_mask'"),
    "twice": (lambda engine: engine(IDS, MASK, input_ids=IDS), "'input_ids' was given twice"),
    "too many": (lambda engine: engine(IDS, MASK, IDS), "3 arguments were given; the engine takes"),
    "no tensor": (lambda engine: engine([1, 2], MASK), r"input 'input_ids': expected torch\.int64 \(any, any\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_one_error_with_the_expected_names(name: str, engine: runtime.Engine) -> None:
    call, message = WRONG[name]
    with pytest.raises(GossamerError, match=message):
        call(engine)


def test_without_transformers_a_saved_engine_returns_a_mapping_with_attributes(
    engine: runtime.Engine, tmp_path: Path
) -> None:
    path, given = tmp_path / "bert.gossamer", batch(2, 6)
    engine.save(path)
    torch.save((given, engine(**given).last_hidden_state), tmp_path / "expected")
    program = f"""
import sys, torch
sys.modules["transformers"] = None  # as if it were not installed
from gossamer import runtime
given, expected = torch.load({str(tmp_path / "expected")!r})
found = runtime.load({str(path)!r}, threads=1)(**given)
assert torch.equal(found.last_hidden_state, expected) and torch.equal(found[0], expected)
assert torch.equal(found["last_hidden_state"], expected) and len(found.to_tuple()) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_structure_of_outputs_that_files_do_not_hold_is_one_error(tmp_path: Path) -> None:
    class Pair:
        def __init__(self, first: Tensor) -> None:
            self.first = first

    class Pairing(nn.Module):
        def forward(self, x: Tensor) -> Pair:
            return Pair(x + 1)

    torch.utils._pytree.register_pytree_node(Pair, lambda pair: ([pair.first], None), lambda parts, _: Pair(*parts))
    engine = runtime.compile(Pairing(), torch.zeros(2, 3), tuned=False)
    assert torch.equal(engine(torch.zeros(1, 3)).first, torch.ones(1, 3))
    with pytest.raises(GossamerError, match="structure of the outputs is not supported in engine files"):
        engine.save(tmp_path / "pair")
