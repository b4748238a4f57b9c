"""The base classes of one-shot modifiers, and the weights that their `targets` and `ignore` name."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from torch import Tensor, nn

from gossamer.errors import ModifierError, Problem, nearest
from gossamer.model import ALL, ALL_PRUNABLE, embedding_tables, first_names, layer_path, left_dense, named_modules
from gossamer.model.name_patterns import PREFIX, matching
from gossamer.model.parameters import TIED, problem_of_name
from gossamer.model.weights import is_conv1d, weights_of
from gossamer.modifiers.base import Modifier, Run
from gossamer.sparse.reconstruction import Moments

logger = logging.getLogger("gossamer")

Statistics = Literal["nothing", "norms", "products"]
"""What a method needs to know of a layer's inputs: nothing, their norms, or the products of each two."""


def _name(value: str) -> str:
    if (problem := problem_of_name(value, (ALL, ALL_PRUNABLE))) is not None:
        raise ValueError(problem)
    return value


Targets = Annotated[str | list[Annotated[str, AfterValidator(_name)]], Field(union_mode="left_to_right")]
"""Modules, weights, classes of modules, `re:` patterns of their names, `__ALL__` or `__ALL_PRUNABLE__`."""


@dataclass
class LayerProblem:
    """A layer as a matrix, with what is known of its inputs; a group of a grouped convolution is one of its own."""

    name: str
    weight: Tensor
    """`(rows, columns)`: output channels by kernel positions and input channels, the latter last."""
    moments: Moments | None
    share: float
    """The sparsity that the recipe plans for this layer."""

    @property
    def gram(self) -> Tensor:
        assert self.moments is not None
        return self.moments.gram

    @property
    def norms(self) -> Tensor:
        assert self.moments is not None
        return self.moments.norms


Compressor = Callable[[LayerProblem], Tensor]


class OneShotModifier(Modifier):
    """The base class of modifiers that `gossamer.oneshot` runs; in a training loop they raise."""

    sequential_update: bool = True
    """Accepted: layers are always calibrated after those before them have changed."""

    def bind(self, run: Run) -> list[str]:
        raise ModifierError(
            Problem(
                "acts in one shot, without training",
                fix="call gossamer.oneshot(model, recipe=…, data=…), or move it to a stage with 'run_type: oneshot'",
            )
        )


class LayerModifier(OneShotModifier):
    """The base class of methods that change one layer after the other."""

    targets: Targets = ALL_PRUNABLE
    ignore: Targets = Field(default_factory=list)

    statistics: ClassVar[Statistics] = "products"

    def plan(self, module: nn.Module) -> dict[str, float]:
        """By weight to change: its sparsity, 0 if the method does not prune; raises `ModifierError`."""
        return {name: 0.0 for names in self.groups(module).values() for name in names}

    def groups(self, module: nn.Module) -> dict[str, list[str]]:
        """The weights to change, by the target that they belong to."""
        return target_weights(module, self.targets, self.ignore)

    @abstractmethod
    def compressor(self, module: nn.Module) -> Compressor:
        """The function that computes the new weight of a layer of this model."""


def target_weights(
    module: nn.Module, targets: str | Sequence[str], ignore: str | Sequence[str] = ()
) -> dict[str, list[str]]:
    """By matched module or weight, in the model's order: the weights inside, each once.

    Embeddings, also those that a linear layer shares, need their exact name. Layers that compute their weights from
    other tensors are left out, with a warning if nothing else is left.
    """
    index = _Index(module)
    tables = set(embedding_tables(module))
    ignored = {name for item in _items(ignore) for names in index.find(item, "ignore").values() for name in names}
    groups: dict[str, list[str]] = {}
    seen: set[str] = set()
    spared: dict[str, str] = {}
    for item in _items(targets):
        matches = index.find(item, "targets")
        if not matches:
            raise ModifierError(f"nothing matches '{item}'{nearest(item, index.known)}", "targets")
        for target, names in matches.items():
            for name in names:
                if name in index.unusable:
                    spared[name] = index.unusable[name]
                elif name in tables and item != name:
                    spared[name] = TIED
                elif name not in seen and name not in ignored:
                    groups.setdefault(target, []).append(name)
                    seen.add(name)
    if not groups:
        reason = next(iter(spared.values()), "'ignore' names them all" if ignored else "they hold no weights")
        raise ModifierError(f"no weight is left to change: {reason}", "targets")
    for name, reason in spared.items():
        logger.info("'%s' is left as it is: %s", name, reason)
    order = {name: position for position, name in enumerate(index.weights)}
    return dict(sorted(groups.items(), key=lambda group: min(order[name] for name in group[1])))


def _items(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


class _Index:
    """Modules and weights of a model by all that a target may call them."""

    def __init__(self, module: nn.Module) -> None:
        first = first_names(module)
        self.layers = dict(named_modules(module))
        self.aliases: dict[str, str] = {}
        """By name of a weight, each of its names: its first name."""
        self.unusable = dict(left_dense(module))
        """By first name: why a weight cannot be changed."""
        for path, layer in self.layers.items():
            for weight in weights_of(layer):
                alias = f"{path}.{weight.leaf}" if path else weight.leaf
                if alias in first:
                    self.aliases[alias] = first[alias]
                    if reason := _unusable(layer, weight.weight, weight.leaf):
                        self.unusable.setdefault(first[alias], reason)
        self.weights = list(dict.fromkeys(self.aliases.values()))
        self.classes: dict[str, list[str]] = {}
        for path, layer in self.layers.items():
            for kind in type(layer).__mro__[:-2]:  # without Module and object
                self.classes.setdefault(kind.__name__, []).append(path)

    @property
    def known(self) -> list[str]:
        return [*self.layers, *self.aliases, *self.classes]

    def find(self, item: str, field: str) -> dict[str, list[str]]:
        """By matched module or weight: the weights inside; empty if nothing matches."""
        if item in (ALL, ALL_PRUNABLE):
            return {name: [name] for name in self.weights}
        if item.startswith(PREFIX):
            names = [name for name in dict.fromkeys([*self.layers, *self.aliases]) if name]
            matched = matching(item, names, field=field)
        elif item in self.aliases or item in self.layers:
            matched = [item]
        else:
            matched = self.classes.get(item, [])
        inside = {name: self._inside(name) for name in matched}
        return {name: names for name, names in inside.items() if names}

    def _inside(self, target: str) -> list[str]:
        if target in self.aliases:
            return [self.aliases[target]]
        start = f"{target}." if target else ""
        return [name for alias, name in self.aliases.items() if layer_path(alias) == target or alias.startswith(start)]


def _unusable(layer: nn.Module, weight: str, leaf: str) -> str | None:
    if weight != leaf:
        return "its layer computes it from another tensor; make it a plain parameter first"
    if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.MultiheadAttention) or is_conv1d(layer):
        return None
    return f"one-shot methods do not support {type(layer).__name__}"


def by_pattern(
    given: Mapping[str, Any], names: Sequence[str], module: nn.Module, field: str
) -> dict[str, tuple[str, Any]]:
    """By weight: the first key of a mapping that names it, as a target does, with its value."""
    index = _Index(module)
    found: dict[str, tuple[str, Any]] = {}
    for key, value in given.items():
        matches = index.find(key, field)
        if not matches:
            raise ModifierError(f"nothing matches '{key}'{nearest(key, index.known)}", field, key)
        for inside in matches.values():
            for name in inside:
                if name in names:
                    found.setdefault(name, (key, value))
    return found
