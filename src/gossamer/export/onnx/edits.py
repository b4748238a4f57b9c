"""Small changes of an ONNX graph: constants put into it, operators taken out of it.

Nothing here knows quantization.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

_TAKEN = "gossamer.names"


def operators(model: ir.Model, *types: str) -> list[ir.Node]:
    """The operators of ONNX's own domain of these types, in order, those inside If and Loop too."""
    return [node for node in model.graph.all_nodes() if node.op_type in types and node.domain in ("", "ai.onnx")]


def set_constant(model: ir.Model, node: ir.Node, index: int, array: Array, name: str) -> None:
    """Make an input of an operator a constant; one that nothing else uses is changed where it is."""
    known = node.inputs[index] if index < len(node.inputs) else None
    if known is not None and known.is_initializer() and len(known.uses()) == 1 and not known.is_graph_output():
        known.const_value = ir.tensor(array, name=known.name)
        known.type, known.shape = ir.TensorType(known.const_value.dtype), ir.Shape(array.shape)
        return
    set_input(node, index, new_constant(model, array, name))


def set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    """Give an operator an input, behind its last one if need be."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def new_constant(model: ir.Model, array: Array, name: str) -> ir.Value:
    """A constant of the model under this name, or under the next one that is free."""
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape))
    free = free_name(model, name)
    tensor.name = free
    value = ir.Value(name=free, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def insert_before(model: ir.Model, node: ir.Node, new: ir.Node, name: str) -> ir.Value:
    """Put an operator with one output before another, in the same graph, and return the output."""
    assert node.graph is not None
    (output,) = new.outputs
    output.name = free_name(model, name)
    node.graph.insert_before(node, new)
    return output


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Take an operator out: what used its output uses `value`, and an output of the model keeps its name."""
    assert node.graph is not None
    output = node.outputs[0]
    name, was_output = output.name, output.is_graph_output()
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    if value.shape is None:
        value.type, value.shape = output.type, output.shape
    node.graph.remove(node, safe=True)
    if was_output:
        value.name = name


def sole_user(value: ir.Value) -> ir.Node | None:
    """The only operator that uses a value, if there is just one and the value is no output of the model."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def free_name(model: ir.Model, name: str) -> str:
    """The name, or the next that is free; all that are taken are looked up once and remembered."""
    if _TAKEN not in model.meta:
        values = [value for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs) if value]
        values += [*model.graph.inputs, *model.graph.outputs]
        model.meta[_TAKEN] = {value.name for value in values} | set(model.graph.initializers)
    taken = cast(set[str], model.meta[_TAKEN])
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
