"""Decoding with a cache of keys and values gives what the model gives, token by token."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import runtime
from gossamer.errors import GossamerError
from gossamer.runtime.decoding_operators import STATE, CachedHeads
from gossamer.runtime.operators import SparseLayer
from tests.runtime.models import kernels, pruned
from tests.runtime.test_file import rewritten

WORDS = 211


@cache
def language_model(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        config: Any = transformers.GPT2Config(vocab_size=WORDS, n_embd=96, n_layer=2, n_head=4, n_positions=200)
        model: Any = transformers.GPT2LMHeadModel(config)
    elif name == "qwen3":  # a norm of every head, in front of rotary embeddings
        config = transformers.Qwen3Config(
            **sizes, hidden_size=96, num_key_value_heads=2, head_dim=20, intermediate_size=160
        )
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**sizes, hidden_size=96, num_key_value_heads=2, intermediate_size=160)
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = 3 * parameter.data if parameter.dim() > 1 else parameter.data
    model = pruned(model, 0.8)
    model.generation_config.eos_token_id = None
    return model


@cache
def decoder(name: str) -> runtime.Decoder:
    return runtime.compile_decoder(language_model(name), threads=1, tuned=False)


def ids_of(batch: int, tokens: int) -> Tensor:
    return torch.randint(WORDS, (batch, tokens))


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 7), (2, 16), (2, 67), (1, 130)])
def test_prompts_and_single_tokens_equal_the_model(name: str, batch: int, tokens: int) -> None:
    ids = ids_of(batch, tokens + 3)
    expected = logits_of(language_model(name), ids)
    found, kept = decoder(name)(ids[:, :tokens])
    assert_close(found, expected[:, :tokens])
    for k in range(tokens, tokens + 3):
        found, kept = decoder(name)(ids[:, k : k + 1], kept)
        assert_close(found, expected[:, k : k + 1])
    assert len(kept) == tokens + 3


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (2, 33)])
def test_generated_tokens_equal_those_of_the_model(name: str, batch: int, tokens: int) -> None:
    ids = ids_of(batch, tokens)
    mask = torch.ones_like(ids)
    model = language_model(name)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert torch.equal(decoder(name).generate(ids, max_new_tokens=20), expected)


@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 3), parts=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_tokens_in_parts_of_any_length_equal_all_at_once(batch: int, parts: list[int]) -> None:
    ids, kept, found = ids_of(batch, sum(parts)), None, []
    for part in ids.split(parts, dim=1):
        logits, kept = decoder("llama")(part, kept)
        found.append(logits)
    assert_close(torch.cat(found, 1), logits_of(language_model("llama"), ids))


def test_single_tokens_run_on_matrix_vector_kernels_in_one_native_segment() -> None:
    own = decoder("llama")
    lines = kernels(own.engine).splitlines()
    native = [k for k, line in enumerate(lines) if "SparseLayer" in line or "CachedHeads" in line]
    inside = [line for line in lines[native[0] : native[-2]] if "torch:" in line]
    assert inside == []
    assert sum("CachedHeads" in line for line in lines) == 2
    own(ids_of(1, 1))
    layers = [op for op in own.engine.plan.operators if isinstance(op, SparseLayer)]
    assert all(layer.takes_vectors and layer._vectors for layer in layers)


def test_a_cache_can_be_copied_cropped_and_read() -> None:
    own, ids = decoder("llama"), ids_of(2, 90)
    first, kept = own(ids[:, :60])
    other = kept.copy()
    ended, _ = own(ids[:, 60:90], kept)  # grows the memory
    assert [len(kept), len(other)] == [90, 60]
    kept.crop(60)
    for same in (kept, other):
        again, _ = own(ids[:, 60:90], same)
        assert torch.equal(again, ended)
    (keys, values), *_ = kept.tensors()
    assert keys.shape == values.shape == (2, 90, 48)
    reference = language_model("llama")(ids, use_cache=True).past_key_values.layers[0]
    torch.testing.assert_close(keys, reference.keys.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values, reference.values.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
    with pytest.raises(GossamerError, match="length: expected 0 to 90"):
        kept.crop(91)
    del first


def test_sequences_end_with_their_end_token() -> None:
    ids = ids_of(2, 5)
    plain = decoder("llama").generate(ids, 12)
    end = int(plain[0, 7])
    found = decoder("llama").generate(ids, 12, eos_token_id=end)
    model = language_model("llama")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    assert torch.equal(found, model.generate(ids, attention_mask=torch.ones_like(ids), **options))


def test_results_have_the_same_bits_for_any_number_of_threads_and_calls_at_once() -> None:
    own, ids = decoder("llama"), ids_of(2, 40)
    threaded = runtime.Decoder(runtime.Engine(own.engine.plan, threads=3))
    expected = own(ids)[0]
    assert torch.equal(threaded(ids)[0], expected)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: own.generate(ids, 8), range(8)):
            assert torch.equal(found, own.generate(ids, 8))


def test_a_saved_decoder_generates_the_same_without_transformers(tmp_path: Path) -> None:
    own, ids, path = decoder("gpt2"), ids_of(1, 9), tmp_path / "decoder.gossamer"
    own.save(path)
    expected = own.generate(ids, 10)
    assert torch.equal(pickle.loads(pickle.dumps(own)).generate(ids, 10), expected)
    program = f"""
import json, sys, torch
sys.modules["transformers"] = None
from gossamer import runtime
print(json.dumps(runtime.load_decoder({str(path)!r}, threads=1).generate(torch.tensor({ids.tolist()}), 10).tolist()))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == expected.tolist()
    with pytest.raises(GossamerError, match=r"holds a decoder; load it with gossamer\.runtime\.load_decoder"):
        runtime.load(path)
    runtime.compile(pruned(torch.nn.Linear(8, 8)), torch.randn(2, 8), tuned=False).save(tmp_path / "engine")
    with pytest.raises(GossamerError, match="not a decoder"):
        runtime.load_decoder(tmp_path / "engine")


@pytest.mark.parametrize("change", ["layer", "state", "heads"])
def test_a_file_cannot_make_kernels_write_elsewhere(change: str, tmp_path: Path) -> None:
    def changed(graph: Any, _: Any) -> None:
        nodes = [node for node in graph["nodes"] if node["op"] == "cached_attention"]
        if change == "layer":
            nodes[1]["layer"] = 7
        elif change == "heads":
            nodes[1]["heads"] = 8
        else:
            graph["nodes"].insert(0, {**nodes[0], "op": "aten.zeros.default", "output": STATE, "args": [[1, 16]]})
            for name in ("heads", "shared", "scale", "layer"):
                graph["nodes"][0].pop(name)

    decoder("llama").save(tmp_path / "decoder")
    path = rewritten(tmp_path / "decoder", tmp_path / "changed", changed)
    if change == "heads":  # another result, of memory of its own
        plan = runtime.load_decoder(path).engine.plan
        assert [op.heads * op.shared for op in plan.operators if isinstance(op, CachedHeads)] == [4, 8]
    else:
        with pytest.raises(GossamerError, match="not a decoder"):
            runtime.load_decoder(path)


def mistral() -> Any:
    config = transformers.MistralConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        sliding_window=8,
    )
    return transformers.MistralForCausalLM(config)


def test_models_that_keys_and_values_are_not_enough_for_are_refused() -> None:
    with pytest.raises(GossamerError, match="attention with sliding_window is not supported"):
        runtime.compile_decoder(mistral(), tuned=False)
    with pytest.raises(GossamerError, match="expected a causal language model of Transformers"):
        runtime.compile_decoder(torch.nn.Linear(2, 2))
    with pytest.raises(GossamerError, match=r"its parameters are torch\.bfloat16; convert it with model\.float\(\)"):
        runtime.compile_decoder(mistral().to(torch.bfloat16))


def test_wrong_arguments_are_one_error() -> None:
    own = decoder("gpt2")
    _, kept = own(ids_of(2, 3))
    for ids, message in (
        (torch.zeros(1, 0, dtype=torch.long), "ids: expected torch.int64"),
        (torch.zeros(1, 3), r"found torch.float32 \(1, 3\)"),
        ([1, 2], "found list"),
        (torch.full((1, 1), WORDS), "outside of the model's embeddings"),
        (torch.zeros(1, 201, dtype=torch.long), "position 200"),
    ):
        with pytest.raises(GossamerError, match=message):
            own(ids)
    with pytest.raises(GossamerError, match="cache: it is of 2 sequences"):
        own(ids_of(1, 1), kept)
    with pytest.raises(GossamerError, match="needs a cache of keys and values; call the decoder"):
        own.engine(ids_of(1, 1), torch.arange(1), torch.arange(1))
    with pytest.raises(GossamerError, match="max_new_tokens: expected a number of at least 1"):
        own.generate(ids_of(1, 1), 0)
    assert len(kept) == 3
