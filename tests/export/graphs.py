"""Small ONNX models with emulated quantization, written by hand as other tools write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]


class Graph:
    """Operators one after the other; each returns the name of its output."""

    def __init__(self, opset: int = 18, ir_version: int = 8) -> None:
        self.opset, self.ir_version = opset, ir_version
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def constant(self, name: str, array: Any, as_node: bool = False) -> str:
        array = np.asarray(array)
        if as_node:
            tensor = numpy_helper.from_array(array, name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        else:
            self.constants[name] = array
        return name

    def add(self, operator: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        name = name or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def emulate(self, x: str, scale: Any, zero_point: Any, axis: int | None = None) -> str:
        """QuantizeLinear and DequantizeLinear behind a value."""
        parts = (
            self.constant(f"{x}_s{len(self.nodes)}", np.float32(scale)),
            self.constant(f"{x}_z{len(self.nodes)}", zero_point),
        )
        more = {} if axis is None else {"axis": axis}
        return self.add("DequantizeLinear", self.add("QuantizeLinear", x, *parts, **more), *parts, **more)

    def build(self, output: str, shape: tuple[Any, ...], *, constants_as_inputs: bool = False) -> ModelProto:
        """The model; its input is `x`. It has to stand ONNX's own check."""
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        if constants_as_inputs:
            inputs += [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in self.constants.items()
            ]
        tensors = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        model = helper.make_model(
            helper.make_graph(self.nodes, "test", inputs, [result], tensors),
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=self.ir_version,
        )
        model = onnx.shape_inference.infer_shapes(model)
        onnx.checker.check_model(model)
        return model


def symmetric(weight: Array, axis: int | None, largest: int = 63) -> Array:
    """The scale, for each channel or for all, that brings the largest magnitude to `largest`."""
    axes = None if axis is None else tuple(at for at in range(weight.ndim) if at != axis)
    return np.maximum(np.abs(weight).max(axis=axes) / np.float32(largest), np.float32(1e-8)).astype(np.float32)


def computed(model: ModelProto, x: Array, optimized: bool = False) -> Array:
    """What onnxruntime computes: each operator as it is written, or with the integer operators put in."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def initializers(model: ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def types(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]
