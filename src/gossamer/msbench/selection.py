"""Which layers a config leaves dense: by keyword, by exact name; the same for analysis, training and export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gossamer.errors import GossamerError, nearest
from gossamer.model import layer_path

_PREFIX = "module."


def words(listed: str) -> list[str]:
    """The entries of a list with commas.

    >>> words("layer1, module.fc,")
    ['layer1', 'module.fc']
    """
    return [entry.strip() for entry in listed.split(",") if entry.strip()]


def patterns(keywords: Sequence[str], exact: Sequence[str]) -> list[str]:
    """What to write into `exclude` of a recipe. A keyword is looked for in the layer's name, not the weight's.

    A keyword may begin with the prefix that DistributedDataParallel puts before names, as exact names may.

    >>> patterns(["conv", "module.a"], ["fc"])
    ['re:.*conv.*\\\\.[^.]+$', 're:(.*module\\\\.a|a).*\\\\.[^.]+$', 'fc']
    """
    return [f"re:{_looked_for(keyword)}.*\\.[^.]+$" for keyword in keywords] + list(exact)


def _looked_for(keyword: str) -> str:
    anywhere, bare = f".*{re.escape(keyword)}", keyword.removeprefix(_PREFIX)
    return anywhere if bare == keyword else f"({anywhere}|{re.escape(bare)})"


def layer_of(weight: str) -> str:
    """The layer's name: the weight's without its last part."""
    return layer_path(weight)


def by_weight(given: float | Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """A sparsity for each weight, from one for all or one per layer (or weight); layers not named stay as they are."""
    if not isinstance(given, Mapping):
        given = dict.fromkeys(names, given)
    known: dict[str, list[str]] = {name: [name] for name in names}
    for name in names:
        known.setdefault(layer_of(name), []).append(name)
    found: dict[str, float] = {}
    for word, sparsity in given.items():
        meant = known.get(word, known.get(word.removeprefix(_PREFIX)))
        if meant is None:
            raise GossamerError(f"sparsity_rate: no layer '{word}' is pruned{nearest(word, known)}")
        if not 0 <= sparsity <= 1:
            raise GossamerError(f"sparsity_rate: '{word}': expected a share between 0 and 1, found {sparsity!r}")
        found.update(dict.fromkeys(meant, float(sparsity)))
    return found
