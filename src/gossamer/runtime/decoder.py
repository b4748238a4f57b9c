"""Decoding with a cache of keys and values, for causal language models of Transformers.

While the model is traced, its attention is one operator that stands for attention over the cache. Everything else is
compiled as in other engines. The cache is memory that attention kernels append to; it is not part of the graph, so one
engine takes prompts and single tokens of any number.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.runtime.decoding_operators import STATE, CachedHeads, scratch_bytes
from gossamer.runtime.engine import Engine, Tuned, compile
from gossamer.runtime.file import load_plan, save_plan
from gossamer.runtime.kernels.cached_attention import BLOCK
from gossamer.runtime.layout import LANES
from gossamer.runtime.plan import Plan

_KEYS = BLOCK * LANES
"""Keys that a kernel reads at once."""
_IMPLEMENTATION = "gossamer_cached"
_TOLERANCE = 1e-3


@torch.library.custom_op("gossamer::cached_attention", mutates_args=())
def _cached_attention(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    """Stands for attention over the cache while a model is traced; computes nothing."""
    return torch.zeros_like(query)


@_cached_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    return torch.empty_like(query)


class Cache:
    """The keys and values of the tokens that a decoder has seen, for each of its layers."""

    def __init__(self, widths: list[int], batch: int) -> None:
        self._widths, self._batch, self._length, self._capacity = widths, batch, 0, 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._scratch = torch.empty(0)
        self.reserve(1)

    def __len__(self) -> int:
        """The number of tokens."""
        return self._length

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self._batch

    @property
    def widths(self) -> list[int]:
        """The channels of keys in each layer."""
        return self._widths

    @property
    def nbytes(self) -> int:
        """Memory of keys and values."""
        return sum(held.nbytes for held in (*self._keys, *self._values))

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Views of each layer's keys and values, `(batch, tokens, heads · size)`."""
        pairs = zip(self._keys, self._values, strict=True)
        return [(keys[:, :, : len(self)].mT, values[:, : len(self)]) for keys, values in pairs]

    def copy(self) -> Cache:
        """A cache with the same tokens, to continue them in another way."""
        other = Cache(self._widths, self.batch)
        other.reserve(len(self))
        other._length = self._length
        other._take(self.tensors())
        return other

    def crop(self, length: int) -> None:
        """Forget all but the first tokens."""
        if not 0 <= length <= len(self):
            raise GossamerError(f"length: expected 0 to {len(self)}, the tokens of the cache, found {length}")
        self._length = length

    def reserve(self, tokens: int) -> None:
        """Make room for this number of tokens in all, so that memory need not grow while decoding."""
        if tokens + LANES <= self._capacity:
            return
        # An odd number of cache lines per channel, so that channels do not compete for the same cache sets.
        old, self._capacity = self.tensors(), -(-max(tokens, 2 * self._capacity) // _KEYS) * _KEYS + LANES
        self._keys = [torch.zeros(self.batch, width, self._capacity) for width in self._widths]
        self._values = []
        for width in self._widths:
            size = self.batch * self._capacity * width
            self._values.append(torch.zeros(size + LANES)[:size].view(self.batch, self._capacity, width))
        self._take(old)

    def _take(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        for taken, own in zip(layers, self.tensors(), strict=False):  # a new cache has no layers yet
            for source, target in zip(taken, own, strict=True):
                target.copy_(source)

    def state(self, threads: int) -> Tensor:
        """What kernels read: the number of tokens, and addresses."""
        size = scratch_bytes(self._capacity)
        if self._scratch.nbytes < threads * size:
            self._scratch = torch.empty(threads * size // 4)
        pointers = [held.data_ptr() for pair in zip(self._keys, self._values, strict=True) for held in pair]
        numbers = [self._length, self._capacity, self._scratch.data_ptr(), size, *pointers]
        return torch.tensor(numbers, dtype=torch.int64).view(torch.float32)[None]

    def append(self, tokens: int) -> None:
        """Count tokens whose keys and values kernels have written."""
        self._length += tokens


def compile_decoder(model: nn.Module, *, threads: int | None = None, tuned: Tuned = True) -> Decoder:
    """Compile a causal language model of Transformers for decoding with a cache of keys and values.

    `threads` and `tuned` are as in `compile`. Raises `GossamerError` for a model that keeps more from token to token
    than keys and values, or whose attention has a window.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(cast(object, model), nn.Module) or config is None or getattr(config, "is_encoder_decoder", False):
        found = type(model).__name__
        raise GossamerError(f"model: expected a causal language model of Transformers with a config, found {found}")
    if (other := {parameter.dtype for parameter in model.parameters()} - {torch.float32}) and other:
        raise GossamerError(f"model: its parameters are {other.pop()}; convert it with model.float()")
    step = _Step(model)
    ids, positions = torch.zeros(1, _KEYS, dtype=torch.long), torch.arange(_KEYS)
    rows = (torch.zeros(1, dtype=torch.long),) if step.selects else ()
    with _traceable(config):
        engine = compile(step, (ids, positions, *rows), threads=threads, tuned=tuned)
    decoder = Decoder(engine)
    _check(decoder, model, int(config.vocab_size))
    return decoder


def load_decoder(path: str | os.PathLike[str], *, threads: int | None = None) -> Decoder:
    """A decoder that `Decoder.save` wrote. The file is data: it is checked, and nothing in it is executed."""
    engine = Engine(load_plan(path), torch.get_num_threads() if threads is None else threads)
    try:
        return Decoder(engine)
    except GossamerError as error:
        raise GossamerError(f"{path}: not a decoder: {error}; load an engine with gossamer.runtime.load") from error


class Decoder:
    """A compiled causal language model. Calls with different caches are independent of each other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._widths = cache_widths(engine.plan)
        self._selects = len(engine.graph.inputs) == 3

    def __call__(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits `(batch, tokens, vocabulary)` of token ids `(batch, tokens)`, and the cache with these tokens.

        The tokens follow those of the cache, which is changed and returned; without one they are the first.
        """
        return self._step(ids, cache, last=False)

    def generate(self, ids: Tensor, max_new_tokens: int, *, eos_token_id: int | None = None) -> Tensor:
        """The ids followed by the most likely tokens, `(batch, tokens + new tokens)`.

        Stops when every sequence has ended with `eos_token_id`; ended sequences are filled with it.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise GossamerError(f"max_new_tokens: expected a number of at least 1, found {max_new_tokens!r}")
        result, new, cache = [ids], ids, None
        ended = torch.zeros(len(ids), 1, dtype=torch.bool)
        for number in range(max_new_tokens):
            if cache is not None and number == 1:
                cache.reserve(ids.shape[1] + max_new_tokens)
            logits, cache = self._step(new, cache, last=True)
            new = logits[:, -1].argmax(1, keepdim=True)
            if eos_token_id is not None:
                new = new.masked_fill(ended, eos_token_id)
                ended = ended | (new == eos_token_id)
            result.append(new)
            if eos_token_id is not None and bool(ended.all()):
                break
        return torch.cat(result, 1)

    def _step(self, ids: Tensor, cache: Cache | None, last: bool) -> tuple[Tensor, Cache]:
        if not isinstance(cast(object, ids), Tensor) or ids.dim() != 2 or ids.dtype != torch.long or not ids.numel():
            found = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(cast(object, ids), Tensor) else type(ids).__name__
            raise GossamerError(f"ids: expected torch.int64 (batch, tokens) with at least one token, found {found}")
        batch, tokens = ids.shape
        cache = Cache(self._widths, batch) if cache is None else cache
        if cache.batch != batch or cache.widths != self._widths:
            raise GossamerError(
                f"cache: it is of {cache.batch} sequences or of another model, ids of {batch} sequences"
            )
        past = len(cache)
        cache.reserve(past + tokens)
        inputs = [ids, torch.arange(past, past + tokens)]
        if self._selects:
            inputs.append(torch.arange(tokens - 1 if last else 0, tokens))
        try:
            (logits,) = self.engine.flat(inputs, {STATE: cache.state(self.engine.threads)})
        except GossamerError as error:
            if not isinstance(error.__cause__, IndexError):
                raise
            message = f"ids: a token, or position {past + tokens - 1}, is outside of the model's embeddings"
            raise GossamerError(message) from error
        cache.append(tokens)
        return logits, cache

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights; those used for prompts and for single tokens are in two orders."""
        return self.engine.weight_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the decoder to one file, without the model's class."""
        save_plan(self.engine.plan, path)

    def summary(self) -> str:
        """As `Engine.summary`."""
        return self.engine.summary()


def cache_widths(plan: Plan) -> list[int]:
    """The channels of keys in each layer. Raises `GossamerError` for a plan without attention over a cache."""
    layers = sum(node.op == "cached_attention" for node in plan.graph.nodes)
    found = {op.layer: op.inputs[1] for op in plan.operators if isinstance(op, CachedHeads)}
    if not layers or len(found) != layers or len(plan.graph.inputs) not in (2, 3) or len(plan.graph.outputs) != 1:
        raise GossamerError("it has no attention over a cache that kernels compute")
    return [cast(int, plan.activations[name].channels) for _, name in sorted(found.items())]


class _Step(nn.Module):
    """A model as a function of token ids, their positions, and the positions in `ids` whose logits are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        options = {} if rows is None else {"logits_to_keep": rows}
        return self.model(input_ids=ids, position_ids=positions[None], use_cache=False, **options).logits


@contextmanager
def _traceable(config: Any) -> Generator[None]:
    """The model's attention is one operator inside of this block."""
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise GossamerError("compile_decoder needs a newer transformers; install transformers>=4.48") from error
    AttentionInterface.register(_IMPLEMENTATION, _attend)
    before = config._attn_implementation
    config._attn_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before


_WINDOWS = ("sliding_window", "softcap", "s_aux", "position_bias")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it."""
    for name in _WINDOWS:
        if options.get(name) is not None:
            raise GossamerError(f"attention with {name} is not supported in decoders; compile the model as an engine")
    layer, causal = getattr(module, "layer_idx", None), getattr(module, "is_causal", True)
    if layer is None or not causal or attention_mask is not None:
        raise GossamerError("only causal attention without a mask is supported in decoders; compile it as an engine")
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return _cached_attention(query, key, value, int(layer), scale).transpose(1, 2).contiguous(), None


def _check(decoder: Decoder, model: nn.Module, vocabulary: int) -> None:
    """Compare with the model, token by token: it may keep more than keys and values, which tracing does not show."""
    ids = torch.arange(12).reshape(2, 6) % vocabulary
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            expected: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        for module in training:
            module.training = True
    cache, found = None, list[Tensor]()
    for first, stop in ((0, 3), (3, 4), (4, 6)):
        logits, cache = decoder(ids[:, first:stop], cache)
        found.append(logits)
    difference = float((torch.cat(found, 1) - expected).abs().max())
    if not difference <= _TOLERANCE * float(expected.abs().max()):
        message = "the model computes something else with a cache than without: it keeps more than keys and values"
        raise GossamerError(f"model: {message}; compile it as an engine")
