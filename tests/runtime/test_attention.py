"""Attention runs on kernels, whichever way the model or an exporter writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from gossamer import runtime
from tests.runtime.models import kernels, pruned


class Encoder(nn.Module):
    """A model of Transformers, as a function of token ids and an optional mask."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, **self.options)[0]


def encoder(name: str, attention: str = "sdpa") -> nn.Module:
    import transformers

    if name == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=100,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=96,
        )
    elif name == "gpt2":
        config = transformers.GPT2Config(vocab_size=100, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    elif name == "distilbert":
        config = transformers.DistilBertConfig(vocab_size=100, dim=48, n_layers=2, n_heads=4, hidden_dim=96)
    else:
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
        )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation=attention)
    options = {"use_cache": False} if name in ("llama", "gpt2") else {}
    model = pruned(Encoder(model, options))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif name == "gpt2":
            parameter.data[torch.rand_like(parameter) < 0.9] = 0
    return model


def tokens(batch: int, length: int, masked: bool) -> tuple[Tensor, ...]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 + 1 :] = 0
    return (torch.randint(100, (batch, length)), mask) if masked else (torch.randint(100, (batch, length)),)


def check(model: nn.Module, engine: runtime.Engine, *inputs: Tensor) -> None:
    with torch.inference_mode():
        expected = model(*inputs)
    found = engine(*inputs)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert torch.equal(runtime.Engine(engine._plan, threads=2)(*inputs), found)


@pytest.mark.parametrize(
    ("name", "attention", "masked"),
    [
        ("llama", "sdpa", False),
        ("llama", "sdpa", True),
        ("gpt2", "sdpa", False),
        ("gpt2", "sdpa", True),
        ("bert", "sdpa", True),
        ("bert", "eager", True),
    ],
)
def test_transformers_models_run_attention_on_kernels(name: str, attention: str, masked: bool, tmp_path: Path) -> None:
    model = encoder(name, attention)
    engine = runtime.compile(model, tokens(2, 24, masked), threads=1, tuned=False)
    for batch, length in ((1, 24), (2, 37), (5, 5)):
        check(model, engine, *tokens(batch, length, masked))
    nodes: list[Any] = [node for node in engine._plan.graph.nodes if node.op == "attention"]
    assert kernels(engine).count("AttentionHeads") == 2
    assert [node.causal for node in nodes] == [name != "bert"] * 2
    assert [node.shared for node in nodes] == [2 if name == "llama" else 1] * 2
    assert kernels(engine).count("LayerNorm ") == 5
    engine.save(tmp_path / "model.gossamer")
    inputs = tokens(3, 19, masked)
    assert torch.equal(runtime.load(tmp_path / "model.gossamer", threads=1)(*inputs), engine(*inputs))
    if name == "llama":
        assert kernels(engine).count("MapPlanes") == 2  # the product of the gated layers


class SelfAttention(nn.Module):
    """Attention from one packed projection, with options of torch's function."""

    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        self.heads, self.options = heads, options
        self.projection, self.last = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.projection(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(*parts, attn_mask=mask, **self.options)
        return self.last(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["full", "causal", "scale"])
def test_a_packed_projection_equals_torch(options: dict[str, Any]) -> None:
    model = pruned(SelfAttention(3, **options), 0.5)
    engine = runtime.compile(model, torch.randn(2, 8, 24), threads=1, tuned=False)
    assert "torch:" not in kernels(engine)
    for batch, length in ((1, 1), (4, 16), (1, 17), (3, 49), (2, 70)):
        check(model, engine, torch.randn(batch, length, 24))


def test_causal_attention_does_not_read_later_keys() -> None:
    """NaN in later tokens would reach the result of earlier ones through any product with them, even with weight 0."""
    model = pruned(SelfAttention(3, is_causal=True), 0.5)
    engine = runtime.compile(model, torch.randn(2, 8, 24), threads=1, tuned=False)
    x = torch.randn(1, 200, 24)
    expected = engine(x)
    x[:, 100:] = float("nan")
    assert torch.equal(engine(x)[:, :48], expected[:, :48])


@pytest.mark.parametrize("shape", [(9, 9), (1, 1, 1, 9), (1, 3, 9, 9), (2, 1, 9, 9)])
def test_masks_of_any_shape_equal_torch(shape: tuple[int, ...]) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAttention(3)
            self.register_buffer("mask", torch.randn(shape))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.mask)

    class Padded(nn.Module):
        """The first tokens of every input, whose number is fixed."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Masked()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.reshape(-1, 9, 24))

    model = pruned(Padded(), 0.5)
    batch = shape[0] if len(shape) == 4 and shape[0] > 1 else 3
    example = torch.randn(batch, 216)
    check(model, runtime.compile(model, example, threads=1, tuned=False), example)


def test_attention_over_other_tokens_equals_torch() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            parts = (self.query(x), self.key(y), self.value(y))
            q, k, v = (part.unflatten(2, (4, 6)).transpose(1, 2) for part in parts)
            return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model = pruned(Cross(), 0.5)
    engine = runtime.compile(model, (torch.randn(2, 8, 24), torch.randn(2, 13, 24)), threads=1, tuned=False)
    assert "AttentionHeads" in kernels(engine)
    check(model, engine, torch.randn(3, 19, 24), torch.randn(3, 35, 24))


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "tokens first"])
def test_torch_encoders_run_without_torch_operators(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=first, activation="gelu")
    model = pruned(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    engine = runtime.compile(model, torch.randn(6, 24, 48), threads=1, tuned=False)
    check(model, engine, torch.randn(3, 37, 48))
    if first:
        assert "torch:" not in kernels(engine)


def test_a_vision_transformer_runs_attention_on_kernels() -> None:
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 48, 96)
    nn.init.normal_(model.heads.head.weight)
    engine = runtime.compile(pruned(model), torch.randn(2, 3, 32, 32), threads=1, tuned=False)
    for batch in (1, 5):
        check(model, engine, torch.randn(batch, 3, 32, 32))
    assert kernels(engine).count("AttentionHeads") == 2
    assert kernels(engine).count("SparseLayer") == 2 * 6 + 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "legacy"])
@pytest.mark.parametrize(("name", "attention"), [("bert", "eager"), ("distilbert", "sdpa"), ("vit", "")])
def test_files_of_both_exporters_run_attention_on_kernels(
    name: str, attention: str, dynamo: bool, tmp_path: Path
) -> None:
    if name == "vit":
        model: nn.Module = torchvision.models.VisionTransformer(32, 8, 2, 4, 48, 96)
        nn.init.normal_(model.heads.head.weight)
        inputs: tuple[Tensor, ...] = (torch.randn(2, 3, 32, 32),)
        model = pruned(model)
    else:
        model, inputs = encoder(name, attention), tokens(2, 24, masked=True)
    sizes = (0,) if name == "vit" else (0, 1)
    path = tmp_path / "model.onnx"
    if dynamo:
        dynamic = tuple(dict.fromkeys(sizes, torch.export.Dim.AUTO) for _ in inputs)
        options: dict[str, Any] = {"dynamic_shapes": dynamic, "external_data": False}
    else:
        names = ["x", "mask"][: len(inputs)]
        axes = {put: {axis: f"size{axis}" for axis in sizes} for put in names}
        options = {"input_names": names, "dynamic_axes": axes, "opset_version": 16 if name == "bert" else 17}
    torch.onnx.export(model, inputs, path, dynamo=dynamo, verbose=False, **options)
    ours = runtime.InferenceSession(path, threads=1, tuned=False)
    theirs = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch, length in ((1, 24), (3, 37)):
        given = (torch.randn(batch, 3, 32, 32),) if name == "vit" else tokens(batch, length, masked=True)
        feeds = {put.name: value.numpy() for put, value in zip(theirs.get_inputs(), given, strict=True)}
        found, expected = ours.run(None, feeds)[0], theirs.run(None, feeds)[0]
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    summary = kernels(ours.engine)
    assert summary.count("AttentionHeads") == 2
    assert summary.count("LayerNorm ") == 5
    assert not any(name in summary for name in ("Erf", "Softmax", "MatMul"))
