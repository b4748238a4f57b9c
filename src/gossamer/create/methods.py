"""The ways of pruning that a recipe may be made with, by the names that users give them.

A table of what each method can do and what it needs. What follows for one
recipe is worked out in `choices.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gossamer.errors import GossamerError, nearest


@dataclass(frozen=True)
class Method:
    """One way of pruning."""

    name: str
    modifier: str
    words: str
    """What it does, as the end of `The recipe …`."""
    sharing: Literal["either", "global", "layers", "own"] = "either"
    """How layers share the zeros: by one threshold or each its share, one of the two, or as the method finds."""
    single_weights: bool = False
    """Whether it is defined for single weights only."""
    by_gradient: bool = False
    """Whether it ranks by gradients, which a frozen layer does not have."""
    needs_sampler: bool = False

    @property
    def takes_shares(self) -> bool:
        """Whether it can be told how layers share the zeros."""
        return self.sharing in ("either", "layers") and self.name != "levels"


MAGNITUDE = Method("magnitude", "GMPruningModifier", "removes the smallest weights, a few more at every update")
CONSTANT = Method("constant", "ConstantPruningModifier", "holds the zeros that the model has", sharing="own")

METHODS: tuple[Method, ...] = (
    MAGNITUDE,
    Method(
        "movement",
        "MovementPruningModifier",
        "removes what training moves towards zero, step by step",
        by_gradient=True,
    ),
    Method("acdc", "ACDCPruningModifier", "takes turns between dense and sparse phases"),
    Method(
        "obs",
        "OBSPruningModifier",
        "removes what costs least by curvature and corrects the rest",
        by_gradient=True,
        needs_sampler=True,
    ),
    Method("mfac", "MFACPruningModifier", "removes what costs least by recent gradients", by_gradient=True),
    Method(
        "rigl",
        "RigLPruningModifier",
        "is sparse from the start and moves weights to where gradients ask",
        sharing="layers",
        single_weights=True,
        by_gradient=True,
    ),
    Method("topkast", "TopKASTPruningModifier", "runs on the largest weights and trains more", single_weights=True),
    Method(
        "str",
        "STRPruningModifier",
        "learns a threshold for each layer",
        sharing="global",
        single_weights=True,
        by_gradient=True,
    ),
    Method(
        "probmask",
        "ProbMaskPruningModifier",
        "learns for each weight the chance to be kept",
        sharing="global",
        single_weights=True,
        by_gradient=True,
    ),
    Method("admm", "ADMMPruningModifier", "draws the weights to the pattern, then cuts them"),
    Method("levels", "LevelPruningModifier", "goes through a table of sparsities"),
    Method("structured", "StructuredPruningModifier", "removes whole filters, a few more at every update"),
    CONSTANT,
)

_BY_NAME: Mapping[str, Method] = {
    **{method.name: method for method in METHODS},
    "gmp": MAGNITUDE,
    "transfer": CONSTANT,
    "sparse-transfer": CONSTANT,
}
NAMES = tuple(_BY_NAME)


def method_of(pruning: object) -> Method | None:
    """The method that a user's `pruning` means; None when it means none.

    >>> method_of(True).modifier, method_of("AC/DC").modifier, method_of("transfer").name
    ('GMPruningModifier', 'ACDCPruningModifier', 'constant')
    """
    if pruning is None or pruning is False:
        return None
    if pruning is True:
        return MAGNITUDE
    if not isinstance(pruning, str):
        raise GossamerError(f"pruning: expected true, false or the name of a method, found {pruning!r}")
    plain = {name.replace("-", ""): method for name, method in _BY_NAME.items()}
    found = plain.get("".join(letter for letter in pruning.lower() if letter.isalnum()))
    if found is None:
        close = nearest(pruning.lower(), NAMES)
        raise GossamerError(f"pruning: unknown method '{pruning}'{close}; known: {', '.join(NAMES)}")
    return found
