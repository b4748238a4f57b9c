"""Decoding with a cache of keys and values: a sparse Llama in `gossamer.runtime` over the same model dense in torch.

Both continue a prompt token by token, each with its own cache; torch runs the model of Transformers without the
overhead of `generate`. Weights are random with zeros drawn uniformly in every linear layer, the last one too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import Row, Watch, ratio_quartiles, rounds_of
from benchmarks.runtime import with_zeros
from gossamer import runtime

ROUNDS, PROMPT, TOKENS = 15, 64, 16
AIMS = {0.0: 1 / 1.05, 0.8: 2.0, 0.9: 3.0}
"""Speed-ups to reach, by share of zeros."""


def decoding_speed(watch: Watch) -> Iterator[Row]:
    """Tokens after a prompt, one sequence, one thread."""
    torch.manual_seed(0)
    dense, before = small_llama().eval(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for share, aim in AIMS.items():
            sparse = with_zeros(dense, share)
            decoder = runtime.compile_decoder(sparse, threads=1)
            ids = torch.randint(8000, (1, PROMPT))
            contenders = {"ours": _ours(decoder, ids), "torch": _torch(sparse, ids)}
            seconds = rounds_of(contenders, watch, f"decoding, {share:.0%} zeros", ROUNDS, warm_up=2)
            found = {name: statistics.median(values) / TOKENS for name, values in seconds.items()}
            yield Row(
                f"Llama of 6 layers of 512, {share:.0%} zeros, single tokens",
                1e3 * found["ours"],
                1e3 * found["torch"],
                "ms",
                1 / aim,
                note=f"{1 / found['ours']:.0f} tokens/s, torch {1 / found['torch']:.0f}: "
                f"{found['torch'] / found['ours']:.2f}× the speed, aim {aim:.2g}×; "
                f"{decoder.weight_bytes / 1e6:.0f} MB of weights",
                spread=ratio_quartiles(seconds["ours"], seconds["torch"]),
            )
    finally:
        torch.set_num_threads(before)


def small_llama() -> nn.Module:
    transformers: Any = import_module("transformers")  # slow to import, and for this benchmark only
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1376,
    )
    return transformers.LlamaForCausalLM(config)


def _ours(decoder: runtime.Decoder, ids: Tensor) -> Any:
    logits, prompt = decoder(ids)
    first = logits[:, -1].argmax(1, keepdim=True)

    def run() -> Tensor:
        prompt.crop(PROMPT)
        new, cache = first, prompt
        for _ in range(TOKENS):
            logits, cache = decoder(new, cache)
            new = logits[:, -1].argmax(1, keepdim=True)
        return new

    return run


def _torch(model: Any, ids: Tensor) -> Any:
    with torch.inference_mode():
        output = model(ids, use_cache=True)
    prompt = output.past_key_values
    first = output.logits[:, -1].argmax(1, keepdim=True)

    def run() -> Tensor:
        with torch.inference_mode():
            prompt.crop(PROMPT - prompt.get_seq_length())  # what the round before added
            new, cache = first, prompt
            for _ in range(TOKENS):
                output = model(new, past_key_values=cache, use_cache=True)
                new, cache = output.logits[:, -1].argmax(1, keepdim=True), output.past_key_values
            return new

    return run
