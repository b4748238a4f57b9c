"""Which activations are held as 8-bit integers, and the operators that compute with them.

A value that is rounded to integers is held as integers if a layer with an integer weight, a maximum or another rounded
sum reads it. Readers that need floats get a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from gossamer.runtime.graph import Convolution, Elementwise, Graph, Linear, Node, Ref, Steps
from gossamer.runtime.integer_layers import IntegerLayer, MapIntegers, fill_of, quads, unsigned
from gossamer.runtime.layout import Activation, Margins
from gossamer.runtime.operators import MaximumPool, Operator, Tap
from gossamer.runtime.weights import SparseWeight


@dataclass(frozen=True)
class Integers:
    """An activation of integers: its name, and what they stand for."""

    name: str
    steps: Steps

    @property
    def fill(self) -> int:
        return fill_of(self.steps)


Window = tuple[list[Operator], str, list[Tap], Margins]


class IntegerPlan:
    """The activations of a graph that are held as integers, while its operators are built in order."""

    def __init__(
        self,
        graph: Graph,
        activations: dict[str, Activation],
        activation: Callable[[str], Activation | None],
        weight: Callable[[str], SparseWeight],
        bias: Callable[[str, int], Tensor],
        window: Callable[[Convolution, Integers], Window | None],
    ) -> None:
        self._graph, self._activations = graph, activations
        self._activation, self._weight, self._bias, self._window = activation, weight, bias, window
        self._held: dict[str, Integers] = {}
        self._layers: dict[str, IntegerLayer] = {}
        """By value: the layer that computes it, if a sum may become part of the layer."""
        self._copies: set[str] = set()
        self._users = graph.users()

    def held(self, name: str) -> Integers | None:
        return self._held.get(name)

    def hold(self, name: str, steps: Steps) -> Integers:
        """A new activation of integers for a value."""
        value = cast(Activation, self._activation(name))
        found = self._held[name] = Integers(f"{name}/8", steps)
        self._activations[found.name] = replace(value, channels=quads(cast(int, value.channels)))
        return found

    def floats(self, names: Iterable[str]) -> list[Operator]:
        """What makes floats of those values that are held as integers only."""
        found: list[Operator] = []
        for name in dict.fromkeys(names):
            held = self._held.get(name)
            if held is not None and name not in self._copies:
                value = self._activations[name] = cast(Activation, self._activation(name))
                found.append(MapIntegers([held.name], name, [held.steps], cast(int, value.channels)))
                self._copies.add(name)
                self._layers.pop(name, None)
        return found

    def operators(self, node: Node) -> list[Operator] | None:
        """The operators of a node that computes with integers; None for others."""
        value = self._activation(node.output)
        if value is None or value.kind not in ("image", "tokens"):
            return None
        if isinstance(node, Convolution | Linear):
            return self._layer(node)
        return self._sum(node) if isinstance(node, Elementwise) else None

    def _is_integer_layer(self, node: Node) -> bool:
        if not isinstance(node, Convolution | Linear):
            return False
        value = self._activation(node.output)
        groups = node.groups if isinstance(node, Convolution) else 1
        return (
            value is not None
            and value.kind in ("image", "tokens")
            and IntegerLayer.fits(self._weight(node.weight), groups, node.steps is not None)
        )

    def _is_wanted(self, name: str) -> bool:
        """Whether a reader of a value computes with integers."""
        return any(
            self._is_integer_layer(user)
            or user.op == "aten.max_pool2d.default"
            or (isinstance(user, Elementwise) and user.steps is not None)
            for user in self._graph.consumers(name)
        )

    def _sum(self, node: Elementwise) -> list[Operator] | None:
        """The activation of one value or of a sum, rounded to integers."""
        steps = None if node.steps is None else unsigned(node.steps)
        names = [arg.name for arg in node.args if isinstance(arg, Ref)]
        if steps is None or len(names) != sum(arg is not None for arg in node.args):
            return None
        value = cast(Activation, self._activation(node.output))
        held = [self._held.get(name) for name in names]
        if any(self._activation(name) != value for name in names):
            return None
        if not any(held) and not self._is_wanted(node.output):
            return None
        if len(names) == 1 and node.activation is None and held[0] is not None and held[0].steps == steps:
            self._held[node.output] = held[0]  # rounding a second time changes nothing
            return []
        if len(names) == 2 and self._merge(node, names, steps):
            return []
        for name in names:
            self._activations.setdefault(name, value)
        sources = [name if own is None else own.name for name, own in zip(names, held, strict=True)]
        integers = [None if own is None else own.steps for own in held]
        result = self.hold(node.output, steps)
        return [MapIntegers(sources, result.name, integers, cast(int, value.channels), node.activation, steps)]

    def _merge(self, node: Elementwise, names: list[str], steps: Steps) -> bool:
        """Make a sum part of the later of the two layers that it adds."""
        order = list(self._held)
        own, other = sorted(names, key=lambda name: order.index(name) if name in order else -1, reverse=True)
        layer, added = self._layers.get(own), self._held.get(other)
        mergeable = layer is not None and layer.activation is None and len(layer.inputs) == 1
        if not mergeable or own == other or added is None or self._users[own] != 1:
            return False
        assert layer is not None
        del self._held[own], self._layers[own]
        layer.inputs.append(added.name)
        layer.rounding, layer.added, layer.activation, layer.steps = layer.steps, added.steps, node.activation, steps
        layer.output = self.hold(node.output, steps).name
        return True

    def _layer(self, node: Convolution | Linear) -> list[Operator] | None:
        source = cast(Ref, node.args[0]).name
        held, added = self._held.get(source), node.args[1]
        steps = None if node.steps is None else unsigned(node.steps)
        if held is None or not self._is_integer_layer(node) or (steps is None) != (node.steps is None):
            return None
        if isinstance(node, Convolution):
            window, groups = self._window(node, held), node.groups
        else:
            window, groups = (list[Operator](), held.name, [Tap(0, 0, 0)], Margins()), 1
        weight = self._weight(node.weight)
        incoming, outgoing = (cast(Activation, self._activation(name)) for name in (source, node.output))
        if window is None or (weight.shape[0], weight.shape[1] * groups) != (outgoing.channels, incoming.channels):
            return None
        if isinstance(node, Linear) and replace(incoming, channels=outgoing.channels) != outgoing:
            return None
        residual: Any = None
        if isinstance(added, Ref):
            if self._activation(added.name) != outgoing:
                return None
            residual = self._held.get(added.name) or added
            self._activations.setdefault(added.name, outgoing)
        before, name, positions, margin = window
        result = node.output if steps is None else self.hold(node.output, steps).name
        layer = IntegerLayer(
            [name, *([] if residual is None else [residual.name])],
            result,
            weight,
            self._bias(node.bias, weight.shape[0]),
            positions,
            held.steps,
            margin,
            groups=groups,
            phase_quads=quads(cast(int, incoming.channels)),
            activation=node.activation,
            added=residual.steps if isinstance(residual, Integers) else None,
            steps=steps,
        )
        if steps is not None:
            self._layers[node.output] = layer
        return [*before, layer]

    def maximum(self, source: str, output: str, window: Window) -> list[Operator]:
        """The maximum over a window of integers."""
        before, name, positions, margin = window
        held = self._held[source]
        channels = quads(cast(int, cast(Activation, self._activation(source)).channels))
        result = self.hold(output, held.steps)
        return [*before, MaximumPool([name], result.name, positions, margin, channels, packed=True, fill=held.fill)]
