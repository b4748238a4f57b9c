"""Rows of an integer table are looked up first and made floats afterwards, not the whole table at each run.

Nothing here knows files or other operators.
"""

from __future__ import annotations

import onnx_ir as ir

from gossamer.export.onnx.edits import free_name, operators
from gossamer.export.onnx.integer_weights import integer_weight


def look_up_integers(model: ir.Model) -> None:
    """Swap DequantizeLinear and Gather where one scale holds for the whole table."""
    for node in operators(model, "Gather"):
        table, output = integer_weight(node.inputs[0]), node.outputs[0]
        if table is None or table.axis is not None or output.is_graph_output():
            continue
        assert node.graph is not None
        integers, *parameters = table.node.inputs
        users = list(output.uses())
        node.replace_input_with(0, integers)
        after = ir.Node("", "DequantizeLinear", [output, *parameters])
        after.outputs[0].name = free_name(model, f"{output.name}_dequantized")
        after.outputs[0].type, after.outputs[0].shape = output.type, output.shape
        output.type = ir.TensorType(ir.DataType.from_numpy(table.integers.dtype))
        node.graph.insert_after(node, after)
        for user, index in users:
            user.replace_input_with(index, after.outputs[0])
