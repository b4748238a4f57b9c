"""Sparse networks in `gossamer.runtime`, over the same networks dense in the best of torch, onnxruntime and OpenVINO.

Weights are random with zeros drawn uniformly in every layer but the first and the last; what the networks compute is of
no use, how fast they do is the same. Contenders take turns of four calls, of which the last three count; the ratio of
the first ones, after other networks have used the caches, is shown too. torch runs images in channels-last format.
Beside each ratio: the ratio to onnxruntime with the same dense network in 8-bit integers, and the share of time outside
of sparse layers. Networks without zeros are compared with torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import torch
import torchvision
from torch import Tensor, nn

from benchmarks.measuring import Row, Watch, bursts_of, ratio_quartiles
from gossamer import runtime
from gossamer.runtime.arena import bind
from gossamer.runtime.operators import SparseLayer
from gossamer.runtime.plan import NativeStep

ROUNDS = 9
THREADS = 1.7
"""The aim: how many times as fast two threads are."""
PEERS = ("torch", "onnxruntime", "openvino")
"""Dense, in 32-bit floats."""
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Network:
    """How to make a network and its inputs, and the speed-ups to reach, by share of zeros."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    aims: dict[float, float]
    single: bool = False
    """Whether the aims are for single inputs only."""


def runtime_speed(watch: Watch) -> Iterator[Row]:
    """One thread, single inputs, 90 % zeros."""
    _report_missing()
    for network in networks():
        yield from _compare(watch, network, shares=[0.9], batches=[1], threads=[1])


def runtime_speed_of_all(watch: Watch) -> Iterator[Row]:
    """Every network with 0, 80, 90 and 95 % zeros and batches of 1 and 16 on one thread; with 90 % also on two."""
    _report_missing()
    for network in networks():
        yield from _compare(watch, network, shares=[0.0, 0.8, 0.9, 0.95], batches=[1, 16], threads=[1, 2])


def networks() -> list[Network]:
    def images(batch: int) -> Inputs:
        return (torch.randn(batch, 3, 224, 224),)

    def tokens(batch: int) -> Inputs:
        return (torch.randint(30000, (batch, 128)), torch.ones(batch, 128, dtype=torch.long))

    convolutional = {0.8: 1.8, 0.9: 3.0, 0.95: 5.0}
    return [
        Network("ResNet-18, 224²", torchvision.models.resnet18, images, convolutional),
        Network("ResNet-50, 224²", torchvision.models.resnet50, images, convolutional),
        Network("MiniLM encoder, 128 tokens", lambda: Encoder(384, 6), tokens, {0.8: 1.8, 0.9: 2.5, 0.95: 3.5}),
        Network("BERT-base encoder, 128 tokens", lambda: Encoder(768, 12), tokens, {0.8: 2.0, 0.9: 3.5, 0.95: 5.0}),
        Network(
            "MLP 3 × 2048",
            _perceptron,
            lambda batch: (torch.randn(batch, 2048),),
            {0.8: 2.0, 0.9: 3.0, 0.95: 5.0},
            single=True,
        ),
    ]


class Encoder(nn.Module):
    """A BERT encoder of this width and depth, with heads as MiniLM and BERT-base have them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        transformers: Any = import_module("transformers")  # slow to import, and for these networks only
        config = transformers.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=4 * width
        )
        self.bert: Any = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.bert(input_ids=ids, attention_mask=mask)[0]


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()
    )


def with_zeros(model: nn.Module, share: float) -> nn.Module:
    """A copy with this share of zeros in every convolution and linear layer but the first and last of a CNN."""
    model = deepcopy(model)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    chosen = layers[1:-1] if isinstance(layers[0], nn.Conv2d) else layers
    for layer in chosen:
        weight = layer.weight.data
        weight.masked_fill_(torch.rand_like(weight) < share, 0.0)
    return model


def _compare(
    watch: Watch, network: Network, shares: list[float], batches: list[int], threads: list[int]
) -> Iterator[Row]:
    torch.manual_seed(0)
    dense = network.build().eval()
    before = torch.get_num_threads()
    with TemporaryDirectory() as folder:
        file = exported(dense, network.inputs(2), Path(folder))
        integers = _quantized(file, network)
        for share in shares:
            engine = runtime.compile(with_zeros(dense, share), network.inputs(1), threads=1)
            single = copy(engine)
            for count in threads if share == 0.9 else threads[:1]:
                torch.set_num_threads(count)
                floats, quantized = onnxruntime_session(file, count), onnxruntime_session(integers, count)
                for batch in batches:
                    engine.threads, inputs = count, network.inputs(batch)
                    contenders = _contenders(dense, engine, floats, inputs)
                    contenders["onnxruntime int8"] = onnxruntime_call(quantized, inputs)
                    contenders |= _openvino(file, count, inputs)
                    contenders["sparse layers"] = _sparse_layers(engine, inputs)
                    if count > 1:
                        contenders["ours, one thread"] = partial(single, *inputs)
                    yield _row(watch, network, share, batch, count, contenders)
    torch.set_num_threads(before)


def _contenders(
    dense: nn.Module, engine: runtime.Engine, session: Any, inputs: Inputs
) -> dict[str, Callable[[], object]]:
    images = inputs[0].dim() == 4
    model = deepcopy(dense).to(memory_format=torch.channels_last) if images else dense
    arranged = tuple(value.contiguous(memory_format=torch.channels_last) for value in inputs) if images else inputs

    def torch_dense() -> object:
        with torch.inference_mode():
            return model(*arranged)

    return {
        "ours": lambda: engine(*inputs),
        "torch": torch_dense,
        "onnxruntime": onnxruntime_call(session, inputs),
    }


def _row(
    watch: Watch,
    network: Network,
    share: float,
    batch: int,
    threads: int,
    contenders: dict[str, Callable[[], object]],
) -> Row:
    rounds, calls = (ROUNDS, 4) if batch == 1 else (3, 2)
    bursts = bursts_of(contenders, watch, f"{network.name}, {share:.0%} zeros", rounds, calls)
    seconds, first = bursts.settled, {name: statistics.median(values) for name, values in bursts.first.items()}
    found = {name: statistics.median(values) for name, values in seconds.items()}
    peers = PEERS if share else ("torch",)
    best, best_first = (
        min((name for name in peers if name in times), key=times.__getitem__) for times in (found, first)
    )
    integers, outside = found["onnxruntime int8"] / found["ours"], 1 - found["sparse layers"] / found["ours"]
    aim = network.aims.get(share, 1 / 1.05) if batch == 1 or not network.single else None
    notes = [
        f"{found[best] / found['ours']:.2f}× the speed of {best}" + ("" if aim is None else f", aim {aim:.2g}×"),
        f"{first[best_first] / first['ours']:.2f}× in first calls",
        f"{integers:.2f}× that of onnxruntime in int8",
        f"{max(0.0, outside):.0%} of the time outside of sparse layers",
    ]
    if "ours, one thread" in found:
        notes.append(f"{found['ours, one thread'] / found['ours']:.2f}× that of one thread, aim {THREADS}×")
    return Row(
        f"{network.name}, {share:.0%} zeros, batch {batch}, {threads} thread{'s' if threads > 1 else ''}",
        1e3 * found["ours"],
        1e3 * found[best],
        "ms",
        None if aim is None else 1 / aim,
        note="; ".join(notes),
        spread=ratio_quartiles(seconds["ours"], seconds[best]),
    )


def exported(model: nn.Module, example: Inputs, folder: Path) -> Path:
    """An ONNX file of the model, for any batch size if the example's is at least 2."""
    path = folder / "dense.onnx"
    dynamic = tuple({0: torch.export.Dim.AUTO} for _ in example)
    torch.onnx.export(model, example, path, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    return path


def onnxruntime_session(path: Path, threads: int) -> Any:
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnxruntime_call(session: Any, inputs: Inputs) -> Callable[[], object]:
    feeds = {put.name: value.numpy() for put, value in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: session.run(None, feeds)


def _quantized(path: Path, network: Network) -> Path:
    """The dense network in 8-bit integers: onnxruntime's static quantization, calibrated on random inputs."""
    quantization: Any = import_module("onnxruntime.quantization")
    target, names = path.with_name("integers.onnx"), [put.name for put in onnxruntime_session(path, 1).get_inputs()]
    images = network.inputs(1)[0].dim() == 4

    class Random(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._left = 4

        def get_next(self) -> dict[str, Any] | None:
            self._left -= 1
            values = (value.numpy() for value in network.inputs(2))
            return dict(zip(names, values, strict=True)) if self._left >= 0 else None

    quantization.quantize_static(
        str(path),
        str(target),
        Random(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=None if images else ["MatMul", "Gemm"],
    )
    return target


def _report_missing() -> None:
    if find_spec("openvino") is None:
        print("Without OpenVINO, which is not installed: pip install -c constraints.txt -e '.[bench]'")


def _openvino(path: Path, threads: int, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """OpenVINO in 32-bit floats, where it is installed."""
    if find_spec("openvino") is None:
        return {}
    openvino: Any = import_module("openvino")
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    model = openvino.Core().compile_model(str(path), "CPU", settings)
    request, feeds = model.create_infer_request(), {k: value.numpy() for k, value in enumerate(inputs)}
    return {"openvino": lambda: request.infer(feeds, share_inputs=True)}


def _sparse_layers(engine: runtime.Engine, inputs: Inputs) -> Callable[[], object]:
    """The sparse layers of an engine alone, on memory of their own."""
    inner: Any = engine
    sizes = {
        size: actual
        for name, value in zip(engine.graph.inputs, inputs, strict=True)
        for size, actual in zip(engine.graph.shapes[name], value.shape, strict=True)
        if isinstance(size, str)
    }
    plan: Any = inner._plan
    binding: Any = bind(plan, sizes, engine.threads)
    native = [k for k, step in enumerate(plan.steps) if isinstance(step, NativeStep)]
    for step in native:
        chosen = [isinstance(operator, SparseLayer) for operator in plan.steps[step].operators]
        program = binding.programs[step][1]
        program._operators = np.ascontiguousarray(program._operators[chosen])
    memory = np.zeros(binding.arena_bytes + 4096, np.uint8)
    arena = memory[-memory.ctypes.data % 4096 :]

    def run() -> None:
        binding.clear(arena)
        for step in native:
            binding.run(step, arena.ctypes.data, engine.threads)

    return run
