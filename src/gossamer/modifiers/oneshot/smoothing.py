"""SmoothQuant: scale the outputs of norms down and the weights that read them up, so that both round well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from gossamer.errors import ModifierError, Problem, nearest
from gossamer.model import named_modules
from gossamer.model.name_patterns import PREFIX, matching
from gossamer.modifiers.oneshot.base import OneShotModifier
from gossamer.quantities import Count, Share

_KNOWN: list[tuple[list[str], str]] = [
    (["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"], "re:.*(input_layernorm|self_attn_layer_norm)$"),
    (["re:.*gate_proj$", "re:.*up_proj$"], "re:.*post_attention_layernorm$"),
    (["re:.*fc1$"], "re:.*final_layer_norm$"),
    (["re:.*query_key_value$"], "re:.*input_layernorm$"),
    (["re:.*dense_h_to_4h$"], "re:.*post_attention_layernorm$"),
    (["re:.*(query|key|value)$"], "re:.*layernorm_before$"),
    (["re:.*intermediate.dense$"], "re:.*layernorm_after$"),
]
"""The norms of common transformers, and the layers that read them."""

Pair = tuple[list[str], str | list[str]]
"""Layers, and the norm that they read, or several."""


@dataclass(frozen=True)
class Smoothed:
    """A norm whose outputs are divided, and the layers that read it."""

    norm: str
    layers: tuple[str, ...]


class SmoothQuantModifier(OneShotModifier):
    """Move the range of activations into weights, without changing what the model computes (Xiao et al. 2022)."""

    smoothing_strength: Share = 0.5
    """How much of the range moves: 0 leaves activations, 1 weights with a range of one."""
    mappings: list[Pair] | None = None
    """Pairs of layers and the norm that they read, by name or pattern; those of common transformers by default."""
    ignore: list[str] | None = None
    """Norms to leave as they are."""
    num_calibration_steps: Count | None = None
    calibration_function: Any = None
    algorithm: Literal["smoothquant"] = "smoothquant"

    def warnings(self) -> list[Problem]:
        fields = ("num_calibration_steps", "calibration_function")
        idle = [Problem("has no effect in Gossamer", (field,)) for field in fields if getattr(self, field) is not None]
        return [*super().warnings(), *idle]

    def resolve(self, module: nn.Module) -> list[Smoothed]:
        """The norms to smooth with the layers that read each; raises `ModifierError`."""
        names = [path for path, _ in named_modules(module) if path]
        ignored = {name for item in self.ignore or () for name in _find(item, names, "ignore")}
        pairs: list[Smoothed] = []
        for layers, norms in self.mappings if self.mappings is not None else _KNOWN:
            norm_names = [
                name
                for item in ([norms] if isinstance(norms, str) else norms)
                for name in _find(item, names, "mappings")
            ]
            candidates = [_find(item, names, "mappings") for item in layers]
            if self.mappings is not None and (not norm_names or not all(candidates)):
                missing = norms if not norm_names else layers[candidates.index([])]
                raise ModifierError(f"nothing matches '{missing}'{nearest(str(missing), names)}", "mappings")
            for norm in norm_names:
                readers = tuple(name for found in candidates for name in _closest(norm, found, norm_names))
                if readers and norm not in ignored:
                    pairs.append(Smoothed(norm, readers))
        if not pairs:
            raise ModifierError("no norm and layers that read it were found; give mappings", "mappings")
        return pairs


def _find(item: str, names: list[str], field: str) -> list[str]:
    if item.startswith(PREFIX):
        return matching(item, names, field=field)
    return [name for name in names if name == item]


def _closest(norm: str, layers: list[str], norms: list[str]) -> list[str]:
    """The layers that share more of their path with this norm than with any other."""
    best = max((_shared(norm, layer) for layer in layers), default=0)
    near = [layer for layer in layers if _shared(norm, layer) == best]
    return [layer for layer in near if best == max(_shared(other, layer) for other in norms)]


def _shared(first: str, second: str) -> int:
    count = 0
    for one, other in zip(first.split("."), second.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count
