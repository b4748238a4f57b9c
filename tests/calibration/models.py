"""Small models of each kind that one-shot methods support, with data for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ONE_STAGE = "sparsity_stage:\n  run_type: oneshot\n  sparsity_modifiers:\n    {}\n"


def recipe(*modifiers: str) -> str:
    """One stage with these modifiers."""
    return ONE_STAGE.format("\n    ".join(modifiers))


def llama(**settings: Any) -> nn.Module:
    """Two blocks of a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **settings}))
    return model.eval()


def tokens(count: int = 12, length: int = 20, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(64, (count, length), generator=generator).split(1))


def network() -> nn.Sequential:
    """Convolutions with batch norm, one of them grouped, and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 24, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )


def images(count: int = 40, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list((torch.randn(count, 3, 12, 12, generator=generator) * 2 + 1).split(8))


def encoder() -> nn.Module:
    """Two encoder layers of torch, whose attention computes its projections itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def sequences(count: int = 30, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 6, 16, generator=generator).split(10))


def zero_shares(model: nn.Module, name: str = "") -> dict[str, float]:
    """The share of zeros of each parameter that has any, and whose name contains `name`."""
    shares = {key: float((value == 0).double().mean()) for key, value in model.named_parameters() if name in key}
    return {key: share for key, share in shares.items() if share}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
