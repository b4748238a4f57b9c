"""Quantized networks with zeros in blocks of four input channels: `gossamer.runtime` over onnxruntime's int8.

Both run the same file; onnxruntime multiplies by the zeros, so its time is that of the dense network. Weights are
random, and the zeros are drawn uniformly in every layer but the first and the last.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
import torch
import torchvision
from torch import nn

from benchmarks.measuring import Row, Watch, bursts_of, ratio_quartiles
from gossamer import runtime
from gossamer.export import to_onnx
from gossamer.quantization import SCHEMES, Emulation, Rules

ROUNDS = 15
_AIMS = {0.8: 1.5, 0.9: 2.5}
"""By share of zeros."""


def integer_speed(watch: Watch) -> Iterator[Row]:
    """One thread, single images."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    networks: dict[str, Callable[[], nn.Module]] = {
        "ResNet-18": torchvision.models.resnet18,
        "ResNet-50": torchvision.models.resnet50,
    }
    for name, build in networks.items():
        for share, aim in _AIMS.items():
            with TemporaryDirectory() as folder:
                file = _quantized(build, share, Path(folder) / "model.onnx")
                yield _row(watch, f"{name} in int8, 224², {share:.0%} zeros in blocks of four", file, aim)
    torch.set_num_threads(threads)


def _quantized(build: Callable[[], nn.Module], share: float, path: Path) -> Path:
    torch.manual_seed(0)
    model, example = build().eval(), torch.randn(2, 3, 224, 224)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for layer in layers[1:-1]:
        weight = layer.weight.data
        blocks = weight.reshape(weight.shape[0], weight.shape[1] // 4, 4, -1)
        zeros = torch.rand(blocks.shape[0], blocks.shape[1], 1, blocks.shape[3]) < share
        blocks.masked_fill_(zeros, 0.0)
    emulation = Emulation(model, Rules(SCHEMES["vnni"]).schemes(model), {})
    with torch.no_grad(), emulation.calibration():
        model(example)
    return to_onnx(model, path, example)


def _row(watch: Watch, name: str, file: Path, aim: float) -> Row:
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    theirs: Any = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    ours = runtime.InferenceSession(file, threads=1)
    feeds = {theirs.get_inputs()[0].name: torch.randn(1, 3, 224, 224).numpy()}
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.run(None, feeds),
        "onnxruntime": lambda: theirs.run(None, feeds),
    }
    bursts = bursts_of(contenders, watch, name, ROUNDS)
    seconds, first = bursts.settled, {key: statistics.median(values) for key, values in bursts.first.items()}
    found = {contender: statistics.median(values) for contender, values in seconds.items()}
    return Row(
        name,
        1e3 * found["ours"],
        1e3 * found["onnxruntime"],
        "ms",
        1 / aim,
        note=f"{found['onnxruntime'] / found['ours']:.2f}× the speed of onnxruntime's int8, aim {aim:.2g}×; "
        f"{first['onnxruntime'] / first['ours']:.2f}× in first calls",
        spread=ratio_quartiles(seconds["ours"], seconds["onnxruntime"]),
    )
