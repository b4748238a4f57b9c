"""Small models of every unusual kind that users bring, each with an example of its input."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

Example = Any
Build = Callable[[], tuple[nn.Module, Example]]
ARCHITECTURES: dict[str, Build] = {}

ROWS = 8


def architecture(build: Build) -> Build:
    ARCHITECTURES[build.__name__] = build
    return build


def built(name: str) -> tuple[Any, Example]:
    """The model, with the same weights always."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates some of what users still have
        return ARCHITECTURES[name]()


def rows(width: int = 32) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))


def mlp(first: nn.Module | None = None) -> nn.Sequential:
    """32 → 32 → 32 → 16, the first layer being the odd one."""
    return nn.Sequential(first or nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


@architecture
def plain() -> Any:
    return mlp(), rows()


# Weights that a layer computes


@architecture
def spectral_norm() -> Any:
    return mlp(parametrizations.spectral_norm(nn.Linear(32, 32))), rows()


@architecture
def spectral_norm_by_hook() -> Any:
    return mlp(nn.utils.spectral_norm(nn.Linear(32, 32))), rows()


@architecture
def weight_norm() -> Any:
    return mlp(parametrizations.weight_norm(nn.Linear(32, 32))), rows()


@architecture
def weight_norm_by_hook() -> Any:
    return mlp(nn.utils.weight_norm(nn.Linear(32, 32))), rows()


@architecture
def weight_norm_of_convolutions() -> Any:
    layers = [parametrizations.weight_norm(nn.Conv2d(16, 16, 3, padding=1)) for _ in range(2)]
    ends = [nn.Conv2d(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16)]
    return nn.Sequential(*layers, *ends), torch.randn(4, 16, 6, 6)


@architecture
def weight_norm_as_one() -> Any:
    return mlp(parametrizations.weight_norm(nn.Linear(32, 32), dim=None)), rows()


@architecture
def pruned_by_torch() -> Any:
    return mlp(prune.random_unstructured(nn.Linear(32, 32), "weight", 0.25)), rows()


@architecture
def orthogonal() -> Any:
    return mlp(parametrizations.orthogonal(nn.Linear(32, 32))), rows()


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@architecture
def own_parametrization() -> Any:
    layer = nn.Linear(32, 32)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return mlp(layer), rows()


@architecture
def only_computed_weights() -> Any:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(32, 32))), rows()


# Language models


@architecture
def conv1d_of_transformers() -> Any:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(64, 32), nn.GELU(), Conv1D(32, 64)), rows()


@architecture
def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=1, n_head=2, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": torch.arange(16).reshape(2, 8)}


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.out = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.middle(self.words(tokens)))


@architecture
def tied_embedding() -> Any:
    return _Tied(), torch.arange(16).reshape(2, 8)


# Parameters without ordinary values


@architecture
def lazy() -> Any:
    return mlp(nn.LazyLinear(32)), rows()


@architecture
def lazy_after_a_batch() -> Any:
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(16))
    model(rows())
    return model, rows()


@architecture
def meta() -> Any:
    with torch.device("meta"):
        return mlp(), torch.randn(ROWS, 32, device="meta")


@architecture
def partly_meta() -> Any:
    return _Unused(nn.Linear(32, 32, device="meta")), rows()


class _Unused(nn.Module):
    """A plain network beside a layer that takes no part in `forward`."""

    def __init__(self, unused: nn.Module) -> None:
        super().__init__()
        self.net, self.unused = mlp(), unused

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@architecture
def zero_size() -> Any:
    return _Unused(nn.Linear(0, 16)), rows()


@architecture
def zero_outputs() -> Any:
    return _Unused(nn.Linear(16, 0)), rows()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.out = nn.Linear(32, 32, dtype=torch.complex64), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.turn(x.to(torch.complex64)).abs())


@architecture
def complex_weights() -> Any:
    return _Complex(), rows()


@architecture
def float64() -> Any:
    return mlp().double(), rows().double()


@architecture
def bfloat16() -> Any:
    return mlp().bfloat16(), rows().bfloat16()


@architecture
def float8() -> Any:
    layer = nn.Linear(16, 16).requires_grad_(False).to(torch.float8_e4m3fn)
    return _Unused(layer), rows()


@architecture
def integers() -> Any:
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    return _Unused(layer), rows()


@architecture
def sparse_layout() -> Any:
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(torch.eye(16).to_sparse(), requires_grad=False)
    return _Unused(layer), rows()


class _Subclass(torch.Tensor):
    """What libraries that quantize or distribute weights put into layers."""


@architecture
def tensor_subclass() -> Any:
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(torch.randn(16, 16).as_subclass(_Subclass))
    return _Unused(layer), rows()


# Compiled and converted modules


@architecture
def scripted() -> Any:
    return torch.jit.script(mlp()), rows()


@architecture
def traced_by_jit() -> Any:
    return torch.jit.trace(mlp(), rows()), rows()


@architecture
def scripted_layer() -> Any:
    return mlp(torch.jit.script(nn.Linear(32, 32))), rows()


@architecture
def exported_program() -> Any:
    return torch.export.export(mlp(), (rows(),)), rows()


@architecture
def module_of_exported_program() -> Any:
    return torch.export.export(mlp(), (rows(),)).module(), rows()


@architecture
def quantized_by_torch() -> Any:
    model = mlp()
    return nn.Sequential(torch.ao.quantization.quantize_dynamic(model[:2], {nn.Linear}), *model[2:]), rows()


@architecture
def traced_by_fx() -> Any:
    return torch.fx.symbolic_trace(mlp()), rows()


@architecture
def compiled() -> Any:
    return torch.compile(mlp(), backend="eager"), rows()


# Parameters in several or no places


@architecture
def shared_weight() -> Any:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 16))
    model[2].weight = model[0].weight
    return model, rows()


@architecture
def layer_used_twice() -> Any:
    layer = nn.Linear(32, 32)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)), rows()


@architecture
def not_contiguous() -> Any:
    layer = nn.Linear(32, 32)
    layer.weight = nn.Parameter(torch.randn(32, 32).T)
    return mlp(layer), rows()


@architecture
def expanded() -> Any:
    layer = nn.Linear(32, 32)
    layer.weight = nn.Parameter(torch.randn(32, 1).expand(32, 32), requires_grad=False)
    return mlp(layer), rows()


@architecture
def frozen_layer() -> Any:
    model = mlp()
    model[0].requires_grad_(False)
    return model, rows()


@architecture
def weight_as_buffer() -> Any:
    layer = nn.Linear(32, 32)
    values = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", values)
    return mlp(layer), rows()


@architecture
def no_parameters() -> Any:
    return nn.Sequential(nn.ReLU(), nn.Flatten()), rows()


@architecture
def empty() -> Any:
    return nn.Sequential(), rows()


@architecture
def no_prunable_layer() -> Any:
    return nn.LSTM(32, 16), rows()


@architecture
def odd_names() -> Any:
    model = nn.Sequential()
    for name in ("größe [0]/ü", "re:x", "weight"):
        model.add_module(name, nn.Linear(32, 32))
    return model, rows()


@architecture
def name_with_a_dot() -> Any:
    model = nn.Sequential()
    model._modules["block.1"] = nn.Linear(32, 32)
    model.add_module("out", nn.Linear(32, 16))
    return model, rows()


# Modules with a will of their own


class _NoCopy(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise KeyError("this module holds a connection")


class _NoState(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("ask the server")


@architecture
def raises_when_copied() -> Any:
    return mlp(_NoCopy(32, 32)), rows()


@architecture
def raises_in_state_dict() -> Any:
    return mlp(_NoState(32, 32)), rows()


# Other layers


@architecture
def attention() -> Any:
    layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Linear(32, 16)), rows().reshape(2, 4, 32)


@architecture
def bilinear() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.out = nn.Bilinear(32, 16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.both(x, x[:, :16]))

    return Net(), rows()


@architecture
def convolutions() -> Any:
    return (
        nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.ConvTranspose2d(16, 16, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 16),
        ),
        torch.randn(4, 16, 6, 6, generator=torch.Generator().manual_seed(1)),
    )
