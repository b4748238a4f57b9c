"""Apply SmoothQuant to a model: find the largest activations of norms, and scale norms and the layers behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.calibration.lockstep import removed
from gossamer.calibration.sites import LinearSite, site_of
from gossamer.errors import ModifierError
from gossamer.model import get_module
from gossamer.model.example_inputs import Arguments
from gossamer.modifiers.oneshot import SmoothQuantModifier
from gossamer.modifiers.oneshot.smoothing import Smoothed
from gossamer.sparse.reconstruction import smoothing_scales


def smooth(
    module: nn.Module,
    modifier: SmoothQuantModifier,
    batches: Sequence[Arguments],
    run: Callable[[nn.Module, Arguments], None],
    changing: Callable[[str, Tensor], None],
) -> None:
    """Scale the norms that the modifier names; raises `ModifierError` where this would change what a model computes."""
    pairs = modifier.resolve(module)
    for pair in pairs:
        for name in pair.layers:
            if not isinstance(get_module(module, name), nn.Linear):
                raise ModifierError(f"'{name}' is not a linear layer", "mappings")
        _check_linear(get_module(module, pair.norm), pair.norm)
    largest: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for pair in pairs:
            _watch(module, pair, largest, hooks)
        for batch in batches:
            run(module, batch)
    for pair in pairs:
        if pair.norm not in largest:
            raise ModifierError(f"no batch of the data reaches '{pair.norm}'", "mappings")
        sites = [site_of(module, f"{name}.weight") for name in pair.layers]
        matrices = [site.matrices()[0] for site in sites]
        scales = smoothing_scales(largest[pair.norm], matrices, modifier.smoothing_strength)
        norm = cast(Any, get_module(module, pair.norm))
        for leaf in ("weight", "bias"):
            if getattr(norm, leaf, None) is not None:
                changing(f"{pair.norm}.{leaf}", getattr(norm, leaf))
                with torch.no_grad():
                    getattr(norm, leaf).div_(scales.to(getattr(norm, leaf).dtype))
        for site, matrix in zip(sites, matrices, strict=True):
            assert isinstance(site, LinearSite)
            changing(site.name, site.parameter)
            site.write([matrix * scales])


def _watch(module: nn.Module, pair: Smoothed, largest: dict[str, Tensor], hooks: ExitStack) -> None:
    """Record the norm's largest outputs, and check that each layer reads exactly these."""
    output: list[Tensor] = []

    def of_norm(_: nn.Module, __: Any, result: Tensor) -> None:
        output[:] = [result]
        most = result.detach().float().abs().flatten(0, -2).amax(0)
        largest[pair.norm] = torch.maximum(largest[pair.norm], most) if pair.norm in largest else most

    hooks.enter_context(removed(get_module(module, pair.norm).register_forward_hook(of_norm)))
    for name in pair.layers:

        def of_layer(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if not output or args[0] is not output[0]:
                raise ModifierError(f"'{name}' does not read the output of '{pair.norm}'", "mappings")

        hooks.enter_context(removed(get_module(module, name).register_forward_pre_hook(of_layer)))


def _check_linear(norm: nn.Module, name: str) -> None:
    """Raise unless half of the weight is half of the output, as not in norms that multiply by 1 + weight."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        raise ModifierError(f"'{name}' is not a norm with a weight for each channel", "mappings")
    bias = getattr(norm, "bias", None)
    probe = torch.linspace(-1, 1, len(weight), dtype=weight.dtype, device=weight.device)[None] + 0.1
    with torch.no_grad():
        before = norm(probe)
        kept = [tensor.clone() for tensor in (weight, bias) if isinstance(tensor, Tensor)]
        try:
            for tensor in (weight, bias):
                if isinstance(tensor, Tensor):
                    tensor.mul_(0.5)
            after = norm(probe)
        finally:
            for tensor, old in zip((weight, bias), kept, strict=False):
                if isinstance(tensor, Tensor):
                    tensor.copy_(old)
    if not torch.allclose(after * 2, before, rtol=1e-2, atol=1e-4):
        raise ModifierError(f"the output of '{name}' is not its weight times the normalized input", "mappings")
