"""Random networks of layers, branches, poolings and activations compute on kernels what they compute in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer import runtime
from tests.runtime.models import pruned

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.GELU,
    nn.Hardswish,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.Tanh,
    nn.ELU,
]


class Branches(nn.Module):
    """Several modules on the same input; their results are added or concatenated."""

    def __init__(self, parts: list[nn.Module], added: bool) -> None:
        super().__init__()
        self.parts, self.added = nn.ModuleList(parts), added

    def forward(self, x: Tensor) -> Tensor:
        results = [part(x) for part in self.parts]
        return sum(results[1:], results[0]) if self.added else torch.cat(results, 1)


class _Networks:
    """Draws modules; each method returns one with the shape of its result."""

    def __init__(self, draw: Callable[[st.SearchStrategy], object]) -> None:
        self._draw = draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def choice(self, *options: object) -> object:
        return self._draw(st.sampled_from(options))

    def convolution(self, shape: tuple[int, int, int], filters: int, same: bool = False) -> tuple[nn.Module, tuple]:
        channels, height, width = shape
        kernel, dilation = self.choice(1, 3, 5), self.choice(1, 1, 2)
        stride = 1 if same else self.choice(1, 1, 2, 3)
        padding = dilation * (kernel // 2)
        divisors = [g for g in range(1, channels + 1) if channels % g == 0 and filters % g == 0]
        groups = self.choice(1, *divisors)
        conv = nn.Conv2d(channels, filters, kernel, stride, padding, dilation, groups, bias=self.choice(True, False))
        return conv, (filters, (height - 1) // stride + 1, (width - 1) // stride + 1)

    def block(self, shape: tuple[int, int, int], depth: int = 0) -> tuple[nn.Module, tuple]:
        kind = self.choice("conv", "conv", "norm", "activation", "pool", *(["branches"] if depth < 2 else []))
        channels, height, width = shape
        if kind == "conv":
            return self.convolution(shape, self.number(1, 20))
        if kind == "norm":
            return nn.BatchNorm2d(channels), shape
        if kind == "activation":
            return self.choice(*ACTIVATIONS)(), shape
        if kind == "pool":
            pool = self.choice(nn.MaxPool2d, nn.AvgPool2d)
            stride = self.choice(1, 2)
            return pool(3, stride, 1), (channels, (height - 1) // stride + 1, (width - 1) // stride + 1)
        added = self.choice(True, False)
        filters = self.number(1, 12)
        parts, total = [], 0
        for _ in range(self.number(2, 3)):
            count = channels if added else filters
            part: nn.Module = nn.Identity() if self.number(0, 3) == 0 else self.convolution(shape, count, same=True)[0]
            total += channels if isinstance(part, nn.Identity) else count
            if self.choice(True, False):
                part = nn.Sequential(part, self.choice(*ACTIVATIONS)())
            parts.append(part)
        return Branches(parts, added), (channels if added else total, height, width)

    def network(self) -> tuple[nn.Module, tuple[int, int, int]]:
        shape = start = (self.number(1, 8), self.number(1, 23), self.number(1, 37))
        parts: list[nn.Module] = []
        for _ in range(self.number(1, 5)):
            part, shape = self.block(shape)
            parts.append(part)
        if self.choice(True, False):
            parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(shape[0], self.number(1, 33))]
            if self.choice(True, False):
                parts += [self.choice(*ACTIVATIONS)(), nn.LazyLinear(self.number(1, 9))]
        model = nn.Sequential(*parts).eval()
        with torch.no_grad():
            model(torch.zeros(1, *start))
        return model, start


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_random_network_with_90_percent_zeros_equals_torch(data: st.DataObject) -> None:
    model, shape = _Networks(data.draw).network()
    pruned(model)
    engine = runtime.compile(model, torch.randn(2, *shape), threads=data.draw(st.sampled_from([1, 2])), tuned=False)
    for batch in {1, data.draw(st.integers(2, 17))}:
        x = torch.randn(batch, *shape)
        with torch.inference_mode():
            found, expected = engine(x), model(x)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=1e-6)
