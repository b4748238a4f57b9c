"""Which layers of a model can use which pattern on which hardware, and why the others cannot.

What is known of hardware is one table, `RUNTIMES`, a row for each runtime with where that was read; a new runtime is
a new row. Whether a layer holds to a pattern now, and what a recipe does, are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gossamer.analysis.eligibility import ineligible
from gossamer.analysis.model_table import kind_of, rows_of
from gossamer.errors import GossamerError
from gossamer.model import owner_of, prunable, unwrap
from gossamer.model.tracing.filter_groups import filter_groups
from gossamer.sparse import Block

ROWS, COLUMNS = 16, 16
"""Torch's semi-structured tensors by cuSPARSELt take half-precision weights whose sides divide by these."""


@dataclass(frozen=True)
class Layer:
    """What a rule may look at."""

    weight: str
    kind: str
    """As in `model_table`: `conv 3×3`, `linear`, …"""
    shape: tuple[int, ...]
    """(out, in, …)"""
    linear: bool
    """Whether a linear layer of its own applies it; attention reads the weights of its projections itself."""
    channels: str | None
    """Why none of its output channels can be removed from the graph, or None."""


@dataclass(frozen=True)
class Runtime:
    """What one runtime makes of zeros."""

    key: str
    name: str
    pattern: str
    """`2:4`, `block4`, `channels` or `unstructured`."""
    needs: str
    """Hardware, and numbers."""
    fact: str
    """One sentence: what it gains, and its limits."""
    source: str
    """Where that can be read, or seen."""
    rule: Callable[[Layer], str | None]
    """Why a layer cannot use it, or None."""


@dataclass(frozen=True)
class Support:
    """One runtime on one model."""

    runtime: Runtime
    able: tuple[str, ...]
    """Weights that can use it, once they hold to the pattern."""
    unable: Mapping[str, str]
    """The others, each with the reason."""

    def to_json(self) -> dict[str, Any]:
        """Text only."""
        told = {name: getattr(self.runtime, name) for name in ("key", "name", "pattern", "needs", "fact", "source")}
        return {**told, "able": list(self.able), "unable": dict(self.unable)}


def hardware_support(model: nn.Module, example_inputs: Any = None) -> list[Support]:
    """Every runtime of `RUNTIMES` with the layers of this model that it could speed up, by their shapes and places.

    `example_inputs`: what `forward` takes, as for `filter_groups`; only shapes matter.

    >>> found = {s.runtime.key: s for s in hardware_support(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))}
    >>> found["tensorrt"].able, found["tensorrt"].unable
    (('1.weight',), {'0.weight': '8 input channels do not divide by 16'})
    >>> found["thin"].able
    ('0.weight',)
    """
    layers = layers_of(model, example_inputs)
    found: list[Support] = []
    for runtime in RUNTIMES:
        reasons = {layer.weight: runtime.rule(layer) for layer in layers}
        unable = {name: reason for name, reason in reasons.items() if reason is not None}
        found.append(Support(runtime, tuple(name for name in reasons if name not in unable), unable))
    return found


def layers_of(model: nn.Module, example_inputs: Any = None) -> list[Layer]:
    """The prunable weights of a model as the rules see them."""
    module = unwrap(model)
    held = _held_channels(module, example_inputs)
    return [
        Layer(
            weight=name,
            kind=kind_of(module, name),
            shape=tuple(rows_of(module, name).shape),
            linear=_is_linear(owner_of(module, name)),
            channels=held.get(name),
        )
        for name in prunable(module)
    ]


def _is_linear(owner: nn.Module) -> bool:
    # What attention projects its result with is a linear layer by name only: its forward is never called.
    return isinstance(owner, nn.Linear) and type(owner).__name__ != "NonDynamicallyQuantizableLinear"


def _held_channels(module: nn.Module, example_inputs: Any) -> dict[str, str]:
    """The weights that can lose no output channel, with the reason."""
    names = prunable(module)
    try:
        groups = filter_groups(module, example_inputs)
    except GossamerError as error:
        return dict.fromkeys(names, str(error))
    reasons: dict[str, str | None] = {name: group.held for group in groups for name in group.producers}
    unseen = "its output channels could not be followed through the model"
    return {name: reason for name in names if (reason := reasons.get(name, unseen)) is not None}


# Rules: a layer in, the reason why not or None out


def _two_of_four(layer: Layer) -> str | None:
    return ineligible(layer.shape)


def _semi_structured(layer: Layer) -> str | None:
    if not layer.linear:
        return "torch multiplies semi-structured tensors in linear layers only"
    for size, step, side in ((layer.shape[0], ROWS, "output"), (layer.shape[1], COLUMNS, "input")):
        if size % step:
            return f"{size} {side} channel{'s' * (size != 1)} do{'es' * (size == 1)} not divide by {step}"
    return None


def _block4(layer: Layer) -> str | None:
    return Block(1, 4).fits(layer.shape)


def _matrix_product(layer: Layer) -> str | None:
    return None if len(layer.shape) == 2 else "only matrix products read packed weights"


def _pointwise(layer: Layer) -> str | None:
    return None if layer.kind == "conv 1×1" else "only 1×1 convolutions in one group have sparse kernels"


def _removable(layer: Layer) -> str | None:
    return layer.channels


def _never(_: Layer) -> str | None:
    return "its kernels multiply by zeros as by any other number"


RUNTIMES: tuple[Runtime, ...] = (
    Runtime(
        "thin",
        "any runtime, thinned",
        "channels",
        "any hardware, any numbers",
        "channels that are zero as a whole are taken out: a smaller dense network, faster everywhere",
        "measured: `gossamer export --format thin`, `gossamer benchmark`",
        _removable,
    ),
    Runtime(
        "tensorrt",
        "TensorRT",
        "2:4",
        "NVIDIA GPU since Ampere; float16, int8",
        "convolutions and matrix products on sparse tensor cores, where TensorRT finds that faster",
        "https://developer.nvidia.com/blog/accelerating-inference-with-sparsity-using-ampere-and-tensorrt",
        _two_of_four,
    ),
    Runtime(
        "torch",
        "torch, semi-structured",
        "2:4",
        "NVIDIA GPU since Ampere; float16, bfloat16, int8",
        "linear layers only, by cuSPARSELt; int8 wants sides that divide by 32",
        "the shape rules of torch.sparse.semi_structured",
        _semi_structured,
    ),
    Runtime(
        "deepsparse",
        "DeepSparse",
        "block4",
        "x86 CPU with VNNI; int8",
        "skips blocks of four neighbours along the inputs; discontinued in June 2025",
        "https://github.com/neuralmagic/deepsparse/issues/1676",
        _block4,
    ),
    Runtime(
        "openvino",
        "OpenVINO",
        "unstructured",
        "Intel Xeon, shown on the 4th generation; int8",
        "packs the weights of matrix products when asked to (CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE): less to read, "
        "as much to compute",
        "https://docs.openvino.ai/2025/notebooks/sparsity-optimization-with-output.html",
        _matrix_product,
    ),
    Runtime(
        "xnnpack",
        "LiteRT, XNNPACK",
        "unstructured",
        "ARM CPU; float32",
        "1×1 convolutions of mobile networks, two thirds of whose weights are zero, between a 3×3 stem and the mean",
        "the section on sparse inference in the notes of TensorFlow Lite's XNNPACK delegate",
        _pointwise,
    ),
    Runtime(
        "onnxruntime",
        "onnxruntime, torch",
        "unstructured",
        "any hardware, any numbers",
        "single zeros make files smaller and nothing faster",
        "measured: `gossamer benchmark`",
        _never,
    ),
)
"""What is known, runtimes that help most widely first."""
