"""An engine as a `torch.nn.Module`, for code that expects one."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.runtime.engine import Engine


class EngineModule(nn.Module):
    """A module without parameters whose `forward` calls an engine.

    It can be a part of another module, be pickled and be copied. It is always in evaluation mode: `train()` has no
    effect, so that loops which switch modes work. An engine computes no gradients: outputs are detached, and an input
    that requires one is an error after `train()`.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.training = False
        self._in_training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = pytree.tree_leaves((args, kwargs))
        in_use = self._in_training and torch.is_grad_enabled()
        if in_use and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise GossamerError("an engine computes no gradients; train the model and compile it afterwards")
        outputs = self.engine(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            return outputs
        return pytree.tree_map_only(Tensor, torch.clone, outputs)  # the engine's are not usable by autograd

    def train(self, mode: bool = True) -> EngineModule:
        self._in_training = mode
        return self

    def extra_repr(self) -> str:
        return ", ".join(self.engine.graph.signature.names)
