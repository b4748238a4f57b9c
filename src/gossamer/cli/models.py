"""The model that one word on the command line names, made without arguments and without pretrained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.runner.words import builder, import_module, reason

if TYPE_CHECKING:
    from torch import nn

__all__ = ["import_module", "load_model"]


def load_model(word: str) -> nn.Module:
    """Make the model that `word` names, without pretrained weights."""
    from torch import nn

    make = builder(word)
    try:
        made = make()
    except Exception as error:
        raise GossamerError(f"{word}: calling it without arguments failed: {reason(error)}") from error
    if not isinstance(made, nn.Module):
        raise GossamerError(f"{word}: expected a torch.nn.Module, found {type(made).__name__}")
    return made
