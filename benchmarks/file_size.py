"""What small files of weights take, over the plain safetensors file of the same model, as both lie on the disk.

The weights are as they are initialised: how large a file is depends on which of them are zero, not on their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torchvision
from torch import nn

from benchmarks.measuring import Row, Watch
from gossamer import Manager
from gossamer.export import save

NINE_IN_TEN = "init_sparsity: 0.9, final_sparsity: 0.9, start_epoch: 0, end_epoch: 1, update_frequency: 1"
RECIPES = {
    "90 % zeros, float32": f"modifiers: [!GMPruningModifier {{params: __ALL_PRUNABLE__, {NINE_IN_TEN}}}]",
    "90 % zeros, int8": f"modifiers: [!GMPruningModifier {{params: __ALL_PRUNABLE__, {NINE_IN_TEN}}}, "
    "!QuantizationModifier {start_epoch: 0}]",
    "2:4, float16": "builtin:nm-2of4",
}
AIMS = {
    ("90 % zeros, float32", "bitmask"): 0.14,
    ("90 % zeros, int8", "bitmask"): 0.06,
    ("2:4, float16", "sparse24"): 0.57,
}


def file_size(watch: Watch) -> Iterator[Row]:
    networks = [(name, zeros) for name in ("resnet18", "resnet50") for zeros in RECIPES]
    for number in watch("networks", len(networks)):
        yield from _files(*networks[number])


def _files(name: str, zeros: str) -> Iterator[Row]:
    model: nn.Module = torchvision.models.get_model(name)
    Manager(RECIPES[zeros]).apply(model)
    model = model.half() if zeros.endswith("16") else model
    with TemporaryDirectory() as folder:
        plain = save(model, Path(folder) / "plain.safetensors", "safetensors").bytes
        for format in ("bitmask", "sparse24"):
            size = save(model, Path(folder) / f"{format}.safetensors", format).bytes
            aim = AIMS.get((zeros, format))
            yield Row(f"{name}, {zeros}: {format} / plain", size / 1e6, plain / 1e6, "MB", aim)
