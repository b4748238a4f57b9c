"""A quantized network in onnxruntime, over the same network in floats: one thread, batches taking turns.

ResNet-20 for images of 3×32×32 (He et al. 2016, section 4.2), with weights as they are initialised and ranges of
noise: what it computes is of no use, how fast it does is the same. The figure depends on the processor's integer
instructions. Zeros play no part in it: onnxruntime does not use them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.measuring import Row, Watch, medians
from gossamer.export import integer_operators, to_onnx
from gossamer.quantization import SCHEMES, Emulation, Rules

BATCH = 100
GROUPS, ROUNDS = 5, 6
AIM, LIMIT = 0.7, 1.0
SIZE_AIM = 0.3


def quantized_speed(watch: Watch) -> Iterator[Row]:
    with TemporaryDirectory() as folder:
        floats, integers = _exported(Path(folder))
        images = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        contenders = {"ours": _runner(integers, images), "peer": _runner(floats, images)}
        found = [medians(contenders, watch, f"batches, part {part}", ROUNDS) for part in range(1, GROUPS + 1)]
        operators = integer_operators(integers)
        sizes = integers.stat().st_size, floats.stat().st_size
    ratios = [one["ours"] / one["peer"] for one in found]
    convolutions = sum(number for name, number in operators.items() if "Conv" in name)
    note = (
        f"{min(ratios):.3f} to {max(ratios):.3f} in {GROUPS} parts; "
        f"{operators.get('QLinearConv', 0)} of {convolutions} convolutions in integers"
    )
    ours, peer = (statistics.median(one[name] for one in found) * 1e3 for name in ("ours", "peer"))
    yield Row("ResNet-20 in int8 / float32, onnxruntime, 1 thread", ours, peer, "ms", AIM, LIMIT, note)
    yield Row("ResNet-20, file in int8 / float32", *sizes, "bytes", SIZE_AIM)


def _exported(folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    model, noise = resnet20(), torch.randn(BATCH, 3, 32, 32)
    with torch.no_grad():
        model.train()(noise)
        model.eval()
        floats = to_onnx(deepcopy(model), folder / "float.onnx", noise)
        emulation = Emulation(model, Rules(SCHEMES["default"]).schemes(model), {})
        with emulation.calibration():
            model(noise)
        return floats, to_onnx(model, folder / "integers.onnx", noise)


def _runner(path: Path, images: Tensor) -> Callable[[], object]:
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {session.get_inputs()[0].name: images.numpy()}
    return lambda: session.run(None, feeds)


class Block(nn.Module):
    """Two convolutions of 3×3 around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet20() -> nn.Sequential:
    widths = [16] * 3 + [32] * 3 + [64] * 3
    before = [16, *widths]
    blocks = [Block(before[at], width, 1 if before[at] == width else 2) for at, width in enumerate(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
