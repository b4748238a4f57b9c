"""Runs made up for the tests of the page: values only, no folder behind them."""

from __future__ import annotations

from dataclasses import replace

import torch

from gossamer.report.content import (
    Bins,
    Card,
    HeatMap,
    LayerSparsity,
    RunContent,
    Series,
    Speed,
    SpeedTable,
    TimedFile,
    WeightHistogram,
)
from gossamer.report.weights import mask_image, weight_bins


def run(name: str = "levels", layers: int = 4, **changed: object) -> RunContent:
    """A sparse run of a network with so many layers."""
    torch.manual_seed(0)
    names = [f"layer{i}.conv" for i in range(layers)]
    weights = [torch.randn(16, 8, 3, 3) for _ in names]
    pruned = [weight * (weight.abs() > 1) for weight in weights]
    epochs = tuple(n / 10 for n in range(1, 41))
    made = RunContent(
        name=name,
        method="AmbaLevel",
        state="40 iterations, 4 epochs",
        cards=(Card("top1", "96.34", "best 96.34"), Card("sparsity", "68.3 %")),
        figures=(("top1", "96.34"), ("sparsity", "68.3 %")),
        metric="top1",
        tests=(Series("top1", (1.0, 2.0, 4.0), (80.0, 90.0, 96.34)),),
        sparsity=Series("sparsity", epochs, tuple(0.017 * n for n in range(1, 41))),
        plan=Series("planned", (0.0, 2.0, 4.0), (0.0, 0.4, 0.7), stepped=True),
        loss=(Series("loss", epochs, tuple(3.0 / n for n in range(1, 41))),),
        rate=Series("learning rate", epochs, tuple(0.1 - 0.002 * n for n in range(40))),
        layers=tuple(
            LayerSparsity(n, tuple(w.shape), w.numel(), w.numel() - int(w.count_nonzero()), 0.7)
            for n, w in zip(names, pruned, strict=True)
        ),
        histograms=tuple(
            WeightHistogram(n, weight_bins(before), weight_bins(after))
            for n, before, after in zip(names, weights, pruned, strict=True)
        ),
        masks=tuple(mask_image(n, w) for n, w in zip(names[:3], pruned[:3], strict=True)),
        sensitivity=HeatMap((0.5, 0.9), tuple((n, (0.01, float("inf"))) for n in names), "Measured on 8 images."),
        settings=(("The config (config.yaml)", "net: {type: resnet18}\n"),),
    )
    return replace(made, **changed)  # pyright: ignore[reportArgumentType]


def speed() -> Speed:
    """Three files of a benchmark, the last two of runs on the page."""
    files = (
        TimedFile("dense.onnx", 44_700_000, 0.0, 0.0905, 0.0695, 0.1021),
        TimedFile("thin/model-thin.onnx", 11_200_000, 0.0, 0.0226, 0.0172, 0.0336, (3.78, 3.41, 4.04), 0),
        TimedFile("int8/model.onnx", 11_200_000, 0.024, 0.0258, 0.0184, 0.035, (3.37, None, None), 1),
    )
    return Speed((SpeedTable("onnxruntime 1.31.1: batch 1, 1 thread, 38 rounds", files),), ("thin <b> is faster",))


def empty_bins() -> Bins:
    return Bins(1.0, (0,) * 256, 0, 9)
