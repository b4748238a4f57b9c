"""The repeated blocks of a model, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from gossamer.model import named_modules


def find_blocks(module: nn.Module) -> dict[str, list[str]]:
    """By name of a list of modules: the names of its items, if these are blocks of one class; outermost lists only.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> find_blocks(nn.Sequential(nn.Linear(2, 4), nn.ModuleList([block(), block()])))
    {'1': ['1.0', '1.1']}
    """
    found: dict[str, list[str]] = {}
    for path, layer in named_modules(module):
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if inside or not isinstance(layer, nn.ModuleList | nn.Sequential) or len(layer) < 2:
            continue
        kinds = {type(item) for item in layer}
        if len(kinds) == 1 and all(_is_block(item) for item in layer):
            start = f"{path}." if path else ""
            found[path] = [f"{start}{name}" for name, _ in layer.named_children()]
    return found


def by_block(module: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """The weights by the block that holds them; a weight outside of blocks is a group of its own."""
    blocks = [block for items in find_blocks(module).values() for block in items]
    groups: dict[str, list[str]] = {}
    for name in names:
        owner = next((block for block in blocks if name.startswith(f"{block}.")), name)
        groups.setdefault(owner, []).append(name)
    return groups


def _is_block(item: nn.Module) -> bool:
    return next(item.children(), None) is not None and any(parameter.dim() > 1 for parameter in item.parameters())
