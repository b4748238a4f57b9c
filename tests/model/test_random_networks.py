"""Whatever a network is built of, permuting its channels leaves what it computes as it was."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (as everybody writes it)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.model.keeping import keeps, randomised

Step = tuple[str, int, int, int]
"""An operation, the two earlier tensors that it takes, and a number that it makes of what it will."""

_LAYERS = [
    "conv",
    "grouped",
    "depthwise",
    "multiplied",
    "transposed",
    "grouped_transposed",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "prelu",
    "squeeze_excite",
    "attention",
    "same_layer",
    "tied",
]
_PLAIN = [
    "relu",
    "add",
    "multiply",
    "cat",
    "chunk",
    "slice",
    "flip",
    "roll",
    "shuffle",
    "pixel_shuffle",
    "pixel_unshuffle",
    "lrn",
    "softmax",
    "largest",
    "mean",
    "write_slice",
    "write_zeros",
    "pad",
    "cat_input",
    "add_input",
    "gram",
    "cumsum",
    "glu",
    "stack",
    "norm",
    "index",
    "constant",
    "einsum",
    "interpolate",
    "mask",
    "add_bias",
    "where",
    "repeat",
    "dropout",
    "sort",
]


class RandomNetwork(nn.Module):
    """Runs its steps one after the other; each appends one tensor (batch, channels, 4, 4) to those before."""

    def __init__(self, steps: list[Step], returned: list[int]) -> None:
        super().__init__()
        self.steps, self.returned = steps, returned
        self.layers = nn.ModuleDict()
        self.extra = nn.ParameterDict()
        with torch.no_grad():
            self(torch.randn(2, 8, 4, 4), building=True)

    def forward(self, x: Tensor, building: bool = False) -> list[Tensor]:
        pool = [x]
        for number, (kind, first, second, how) in enumerate(self.steps):
            a, b = pool[-1 - first % len(pool)], pool[-1 - second % len(pool)]
            pool.append(getattr(self, f"_{kind}")(str(number), a, b, how, x, building))
        chosen = [pool[index % len(pool)] for index in self.returned]
        last = pool[-1]
        return [self._layer("head", building, lambda: nn.Linear(last[0].numel(), 8))(last.flatten(1)), *chosen]

    def _layer(self, key: str, building: bool, make: Any) -> nn.Module:
        if building and key not in self.layers:
            self.layers[key] = make()
        return self.layers[key]

    def _fitted(self, key: str, x: Tensor, channels: int, building: bool) -> Tensor:
        """The tensor with so many channels."""
        if x.shape[1] == channels:
            return x
        return self._layer(key, building, lambda: nn.Conv2d(x.shape[1], channels, 1))(x)

    def _conv(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        make = lambda: nn.Conv2d(a.shape[1], 16, 1 + 2 * (how % 2), padding=how % 2, bias=how % 3 > 0)  # noqa: E731
        return self._layer(key, building, make)(a)

    def _grouped(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        a = self._fitted(key + "f", a, 16, building)
        return self._layer(key, building, lambda: nn.Conv2d(16, 16 if how % 3 else 32, 1, groups=2))(a)

    def _depthwise(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        c = a.shape[1]
        return self._layer(key, building, lambda: nn.Conv2d(c, c, 3, padding=1, groups=c, bias=how % 2 > 0))(a)

    def _multiplied(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        a = self._fitted(key + "f", a, 8, building)
        return self._layer(key, building, lambda: nn.Conv2d(8, 16, 1, groups=8))(a)

    def _transposed(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._layer(key, building, lambda: nn.ConvTranspose2d(a.shape[1], 16, 3, padding=1))(a)

    def _grouped_transposed(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        a = self._fitted(key + "f", a, 16, building)
        groups = (2, 4, 16)[how % 3]
        return self._layer(key, building, lambda: nn.ConvTranspose2d(16, 16, 1, groups=groups))(a)

    def _batch_norm(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._layer(key, building, lambda: nn.BatchNorm2d(a.shape[1], affine=how % 3 > 0))(a)

    def _group_norm(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._layer(key, building, lambda: nn.GroupNorm(2 - how % 2, a.shape[1]))(a)

    def _instance_norm(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        make = lambda: nn.InstanceNorm2d(a.shape[1], affine=True, track_running_stats=how % 2 > 0)  # noqa: E731
        return self._layer(key, building, make)(a)

    def _layer_norm(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        if how % 2:
            return self._layer(key, building, lambda: nn.LayerNorm(list(a.shape[1:])))(a)
        return self._layer(key, building, lambda: nn.LayerNorm(a.shape[1]))(a.movedim(1, -1)).movedim(-1, 1)

    def _prelu(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._layer(key, building, lambda: nn.PReLU(a.shape[1] if how % 3 else 1))(a)

    def _squeeze_excite(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        c = a.shape[1]
        make = lambda: nn.Sequential(  # noqa: E731
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 8, 1), nn.ReLU(), nn.Conv2d(8, c, 1), nn.Sigmoid()
        )
        return a * self._layer(key, building, make)(a)

    def _attention(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        a = self._fitted(key + "f", a, 16, building)
        tokens = a.flatten(2).transpose(1, 2)
        if how % 3 == 0:
            layer = self._layer(key, building, lambda: nn.MultiheadAttention(16, 2, batch_first=True))
            return layer(tokens, tokens, tokens)[0].transpose(1, 2).reshape(a.shape)
        projected = self._layer(key, building, lambda: nn.Linear(16, 48))(tokens)
        q, k, v = projected.view(-1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        fused = how % 3 == 1
        mixed = F.scaled_dot_product_attention(q, k, v) if fused else (q @ k.transpose(-2, -1)).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).reshape(-1, 16, 16)
        return self._layer(key + "o", building, lambda: nn.Linear(16, 16))(mixed).transpose(1, 2).reshape(a.shape)

    def _same_layer(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        """One convolution on two tensors."""
        a, b = self._fitted(key + "a", a, 16, building), self._fitted(key + "b", b, 16, building)
        layer = self._layer(key, building, lambda: nn.Conv2d(16, 16, 1))
        return layer(F.relu(layer(a))) + b if how % 2 else torch.cat([layer(a), layer(b)], 1)

    def _tied(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        """A weight, and the same weight transposed."""
        a = self._fitted(key + "f", a, 16, building)
        layer = self._layer(key, building, lambda: nn.Conv2d(16, 16 if how % 2 else 8, 1))
        return F.conv2d(F.relu(layer(a)), layer.weight.transpose(0, 1))

    def _relu(self, key: str, a: Tensor, *_: Any) -> Tensor:
        return F.leaky_relu(a, 0.1)

    def _add(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return a + self._fitted(key, b, a.shape[1], building)

    def _multiply(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return a * torch.sigmoid(self._fitted(key, b, a.shape[1], building))

    def _cat(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._fitted(key, torch.cat([a, b] if how % 2 else [b, a, b], 1), 16, building)

    def _chunk(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        left, right = a.chunk(2, 1)
        return left * torch.sigmoid(right) if how % 2 else torch.cat([right, left], 1)

    def _slice(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return torch.cat([a[:, how % 2 :: 2], b[:, :4]], 1)

    def _flip(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a.flip(1) if how % 2 else a + a.flip(1)

    def _roll(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a + a.roll(how % 8, 1) if how % 2 else a.roll((how % 8, 1), (1, 2))

    def _shuffle(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        if how % 2:
            return F.channel_shuffle(a, 2)
        n, c, h, w = a.shape
        return a.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    def _pixel_shuffle(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return F.max_pool2d(F.pixel_shuffle(self._fitted(key, a, 32, building), 2), 2)

    def _pixel_unshuffle(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return F.interpolate(F.pixel_unshuffle(self._fitted(key, a, 8, building), 2), scale_factor=2)

    def _lrn(self, key: str, a: Tensor, *_: Any) -> Tensor:
        return F.local_response_norm(a, 3)

    def _softmax(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a.softmax(1 + how % 2)

    def _largest(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        values, places = a.max(1, keepdim=True)
        return a * values + (places if how % 2 else 0)

    def _mean(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a - a.mean((1, 2) if how % 2 else 1, keepdim=True)

    def _write_slice(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        a = a.clone()
        if how % 2:
            a[:, :4] += b[:, :4]
        else:
            a[:, 2:6] = torch.tanh(a[:, 4:8])
        return a

    def _write_zeros(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        zeros = torch.zeros_like(a)
        zeros[:, 1:] = a[:, :-1]
        return zeros + (a if how % 2 else 0)

    def _pad(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return F.pad(a, (0, 0, 0, 0, how % 5, 8 - how % 5)) if a.shape[1] < 32 else a

    def _cat_input(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._fitted(key, torch.cat([a, x], 1), 16, building)

    def _add_input(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._fitted(key, a, x.shape[1], building) + x

    def _gram(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        flat = a.flatten(2)
        gram = flat @ flat.transpose(1, 2)
        return (gram.softmax(-1) @ flat).view(a.shape)

    def _cumsum(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a.cumsum(1 + how % 2)

    def _glu(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return F.glu(self._fitted(key, a, 32, building), 1)

    def _stack(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        stacked = torch.stack([a, self._fitted(key, b, a.shape[1], building)], 1 + how % 2)
        return stacked.mean(1 + how % 2) if how % 3 else self._fitted(key + "o", stacked.flatten(1, 2), 16, building)

    def _norm(self, key: str, a: Tensor, *_: Any) -> Tensor:
        return F.normalize(a, dim=1)

    def _index(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a[:, torch.arange(a.shape[1] - 1, -1, -1)] if how % 2 else a[:, :, torch.tensor([1, 0, 3, 2])]

    def _constant(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a * torch.linspace(1, 2, a.shape[1], dtype=a.dtype).view(1, -1, 1, 1)

    def _einsum(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        if building:
            self.extra[key] = nn.Parameter(torch.randn(16, a.shape[1], 2))
        return torch.einsum("nchw,oci->noih", a, self.extra[key]).flatten(1, 2).unsqueeze(-1).expand(-1, -1, -1, 4)

    def _interpolate(self, key: str, a: Tensor, *_: Any) -> Tensor:
        return F.interpolate(F.avg_pool2d(a, 2), size=4, mode="bilinear")

    def _mask(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a.masked_fill(a > 1, 0.5) if how % 2 else a.masked_fill(torch.ones(4, 4).tril().bool(), 0.5)

    def _add_bias(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        if building:
            self.extra[key] = nn.Parameter(torch.randn((a.shape[1], 1, 1) if how % 2 else a.shape[1:]))
        return a + self.extra[key]

    def _where(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return torch.where(a > 0, a, self._fitted(key, b, a.shape[1], building))

    def _repeat(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        wide = a.repeat(1, 2, 1, 1) if how % 2 else a.repeat_interleave(2, 1)
        return self._fitted(key, wide, 16, building)

    def _dropout(self, key: str, a: Tensor, b: Tensor, how: int, x: Tensor, building: bool) -> Tensor:
        return self._layer(key, building, lambda: nn.Dropout2d(0.0) if how % 2 else nn.Dropout(0.0))(a)

    def _sort(self, key: str, a: Tensor, b: Tensor, how: int, *_: Any) -> Tensor:
        return a.sort(1 + how % 3).values


_step = st.tuples(
    st.one_of(st.sampled_from(_LAYERS), st.sampled_from(_PLAIN)),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 11),
)


@settings(max_examples=40)
@given(st.lists(_step, min_size=1, max_size=9), st.lists(st.integers(1, 9), max_size=1))
def test_a_random_network_computes_the_same_after_permutation(steps: list[Step], returned: list[int]) -> None:
    torch.manual_seed(0)
    model = randomised(RandomNetwork([("conv", 0, 0, 1), *steps, ("conv", 0, 0, 0)], returned))
    keeps(model, torch.randn(2, 8, 4, 4, dtype=torch.float64), sensitive=False, m=4 if len(steps) % 2 else 2)
