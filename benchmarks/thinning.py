"""A network without its pruned filters in onnxruntime, over the same network with them: one thread, taking turns.

ResNet-18 for 1000 classes and one image of 3×224×224, half of the filters of every group that can lose them set to
zero; weights as they are initialised, for what it computes is of no use, and how fast it does is the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from benchmarks.measuring import Row, Watch, medians
from gossamer.export import thin, to_onnx
from gossamer.model import get_parameter, is_transposed
from gossamer.model.tracing.filter_groups import filter_groups

GROUPS, ROUNDS = 3, 8
AIM = 1 / 1.6


def thinning(watch: Watch) -> Iterator[Row]:
    """With batch norm's shifts at zero, as they are initialised, and with shifts that leave constants behind."""
    for shifts in (0.0, 0.3):
        torch.manual_seed(0)
        model, image = resnet18().eval(), torch.randn(1, 3, 224, 224)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.bias, 0.0, shifts)
        prune_half(model, image)
        smaller, found = thin(model, image)
        what = f"ResNet-18 without half of its filters{', carrying constants' if shifts else ''} / with them"
        yield _timed(watch, model, smaller, image, what)
        yield Row(f"{what}, parameters", found.parameters[1], found.parameters[0], "")


def _timed(watch: Watch, model: nn.Module, smaller: nn.Module, image: Tensor, what: str) -> Row:
    with TemporaryDirectory() as folder:
        files = {"ours": Path(folder) / "thin.onnx", "peer": Path(folder) / "dense.onnx"}
        to_onnx(smaller, files["ours"], image)
        to_onnx(model, files["peer"], image)
        contenders = {name: _runner(path, image) for name, path in files.items()}
        difference = float((contenders["ours"]() - contenders["peer"]()).abs().max())
        times = [medians(contenders, watch, f"images, part {part}", ROUNDS) for part in range(1, GROUPS + 1)]
    speeds = [one["peer"] / one["ours"] for one in times]
    note = (
        f"{statistics.median(speeds):.2f} times as fast, {min(speeds):.2f} to {max(speeds):.2f} in {GROUPS} parts; "
        f"outputs differ by {difference:.1e}"
    )
    ours, peer = (statistics.median(one[name] for one in times) * 1e3 for name in ("ours", "peer"))
    return Row(f"{what}, onnxruntime, 1 thread", ours, peer, "ms", AIM, note=note)


def prune_half(model: nn.Module, inputs: Tensor) -> None:
    """Set every other filter of each group that can lose them to zero."""
    for group in filter_groups(model, inputs):
        for name in group.producers if group.held is None else ():
            weight = get_parameter(model, name).detach()
            (weight.transpose(0, 1) if is_transposed(model, name) else weight)[::2] = 0


def _runner(path: Path, images: Tensor) -> Callable[[], Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: images.numpy()}
    return lambda: torch.from_numpy(session.run(None, given)[0])
