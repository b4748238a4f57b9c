"""Which layers a config leaves dense: by keyword, by exact name; the same for analysis, training and export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gossamer.errors import GossamerError, nearest

_PREFIX = "module."


def words(listed: str | Sequence[str]) -> list[str]:
    """The entries of a list with commas, without the prefix that DistributedDataParallel puts before names.

    >>> words("layer1, module.fc,")
    ['layer1', 'fc']
    """
    entries = listed.split(",") if isinstance(listed, str) else listed
    return [entry.strip().removeprefix(_PREFIX) for entry in entries if entry.strip().removeprefix(_PREFIX)]


def patterns(keywords: Sequence[str], exact: Sequence[str]) -> list[str]:
    """What to write into `exclude` of a recipe. A keyword is looked for in the layer's name, not the weight's.

    >>> patterns(["conv"], ["fc"])
    ['re:.*conv.*\\\\.[^.]+$', 'fc']
    """
    return [f"re:.*{re.escape(keyword)}.*\\.[^.]+$" for keyword in keywords] + list(exact)


def layer_of(weight: str) -> str:
    """The layer's name: the weight's without its last part."""
    return weight.rpartition(".")[0]


def by_weight(given: float | Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """A sparsity for each weight, from one for all or one per layer (or weight); layers not named stay as they are."""
    if not isinstance(given, Mapping):
        given = dict.fromkeys(names, given)
    known = {layer_of(name): name for name in names} | {name: name for name in names}
    found: dict[str, float] = {}
    for word, sparsity in given.items():
        name = known.get(word.removeprefix(_PREFIX))
        if name is None:
            raise GossamerError(f"sparsity_rate: no layer '{word}' is pruned{nearest(word, known)}")
        if not 0 <= sparsity <= 1:
            raise GossamerError(f"sparsity_rate: '{word}': expected a share between 0 and 1, found {sparsity!r}")
        found[name] = float(sparsity)
    return found
