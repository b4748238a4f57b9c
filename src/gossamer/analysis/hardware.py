"""Which layers can use which sparsity pattern on which hardware, and why the others cannot.

`RUNTIMES` is a table with one row per runtime and the source of its facts; a new runtime is a new row. `eligibility`
checks whether weights satisfy an N:M pattern now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.analysis.layers import kind_of, outputs_first
from gossamer.errors import GossamerError
from gossamer.model import owner_of, prunable, unwrap, weight_of
from gossamer.model.tracing.filter_groups import filter_groups
from gossamer.sparse import NM, Block, NM2d

OUTPUTS, INPUTS = 8, 16
"""Sparse tensor cores need output and input channels divisible by these."""


@dataclass(frozen=True)
class Eligibility:
    """A weight checked against a pattern."""

    name: str
    shape: tuple[int, ...]
    groups: int
    """Number of groups of the pattern in the weight; 0 if it does not fit."""
    violations: int
    """Number of groups with too many non-zero weights."""
    first: tuple[int, ...] | None
    """Output channel, input channel and kernel position of the first such group."""
    reason: str | None
    """Why hardware cannot accelerate this weight."""

    @property
    def holds(self) -> bool:
        return self.groups > 0 and self.violations == 0


def ineligible(shape: Sequence[int]) -> str | None:
    """Why hardware cannot accelerate a 2:4 weight `(out, in, …)`, or None."""
    if len(shape) < 2:
        return "it has fewer than two dimensions"
    return _not_divisible(shape, OUTPUTS, INPUTS)


def _not_divisible(shape: Sequence[int], outputs: int, inputs: int) -> str | None:
    sides = ((shape[0], outputs, "output"), (shape[1], inputs, "input"))
    problems = [(size, side, step) for size, step, side in sides if size % step]
    return (
        " and ".join(
            f"{size} {side} channel{' does' if size == 1 else 's do'} not divide by {step}"
            for size, side, step in problems
        )
        or None
    )


def eligibility(model: nn.Module, pattern: NM) -> list[Eligibility]:
    """Check every convolution, linear and attention weight, in the model's order."""
    return [_check(pattern, name, outputs_first(model, name, weight_of(model, name))) for name in prunable(model)]


def _check(pattern: NM, name: str, weight: Tensor) -> Eligibility:
    shape = tuple(weight.shape)
    unfit = pattern.fits(shape)
    if unfit is not None:
        return Eligibility(name, shape, 0, 0, None, ineligible(shape) or unfit)
    groups = weight.numel() // pattern.m * (2 if isinstance(pattern, NM2d) else 1)
    violations = pattern.violations(weight)
    first = _first_violation(weight, pattern) if violations else None
    return Eligibility(name, shape, groups, violations, first, ineligible(shape))


def _first_violation(weight: Tensor, pattern: NM) -> tuple[int, ...] | None:
    """The first group along input channels that violates the pattern; None if only groups along outputs do."""
    out, channels, *kernel = weight.shape
    groups = (weight != 0).reshape(out, channels // pattern.m, pattern.m, *kernel)
    violations = torch.nonzero(groups.sum(dim=2) > pattern.n)
    if not len(violations):
        return None
    row, group, *position = (int(index) for index in violations[0])
    return row, group * pattern.m, *position


ROWS, COLUMNS = 16, 16
"""torch's semi-structured tensors with cuSPARSELt need half-precision weights with sides divisible by these."""


@dataclass(frozen=True)
class LayerTraits:
    """The properties of a layer that a rule checks."""

    weight: str
    kind: str
    """As in `model_table`: `conv 3×3`, `linear`, …"""
    shape: tuple[int, ...]
    """(out, in, …)"""
    linear: bool
    """Whether an `nn.Linear` applies it; attention uses the weights of its projections directly."""
    channels: str | None
    """Why its output channels cannot be removed from the graph, or None."""


@dataclass(frozen=True)
class Runtime:
    """How a runtime uses zeros."""

    key: str
    name: str
    pattern: str
    """`2:4`, `block4`, `channels` or `unstructured`."""
    needs: str
    """Hardware and number format."""
    fact: str
    """What becomes faster, and the limits."""
    source: str
    """Where that is documented or measured."""
    rule: Callable[[LayerTraits], str | None]
    """Why a layer cannot use it, or None."""


@dataclass(frozen=True)
class Support:
    """A runtime and the layers of a model that it can accelerate."""

    runtime: Runtime
    able: tuple[str, ...]
    """Weights that can use it once they satisfy the pattern."""
    unable: Mapping[str, str]
    """The others, each with the reason."""

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        facts = {name: getattr(self.runtime, name) for name in ("key", "name", "pattern", "needs", "fact", "source")}
        return {**facts, "able": list(self.able), "unable": dict(self.unable)}


def hardware_support(model: nn.Module, example_inputs: Any = None) -> list[Support]:
    """Every runtime in `RUNTIMES` with the layers of the model that it can accelerate.

    `example_inputs` are arguments of `forward`; only their shapes matter.

    >>> support = {s.runtime.key: s for s in hardware_support(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))}
    >>> support["tensorrt"].able, support["tensorrt"].unable
    (('1.weight',), {'0.weight': '8 input channels do not divide by 16'})
    >>> support["thin"].able
    ('0.weight',)
    """
    layers = layers_of(model, example_inputs)
    supports: list[Support] = []
    for runtime in RUNTIMES:
        reasons = {layer.weight: runtime.rule(layer) for layer in layers}
        unable = {name: reason for name, reason in reasons.items() if reason is not None}
        supports.append(Support(runtime, tuple(name for name in reasons if name not in unable), unable))
    return supports


def layers_of(model: nn.Module, example_inputs: Any = None) -> list[LayerTraits]:
    """The prunable weights of a model with the properties that rules check."""
    module = unwrap(model)
    fixed = _fixed_channels(module, example_inputs)
    return [
        LayerTraits(
            weight=name,
            kind=kind_of(module, name),
            shape=tuple(outputs_first(module, name, weight_of(module, name)).shape),
            linear=_is_linear(owner_of(module, name)),
            channels=fixed.get(name),
        )
        for name in prunable(module)
    ]


def _is_linear(owner: nn.Module) -> bool:
    # The output projection of nn.MultiheadAttention is a linear layer whose forward is never called.
    return isinstance(owner, nn.Linear) and type(owner).__name__ != "NonDynamicallyQuantizableLinear"


def _fixed_channels(module: nn.Module, example_inputs: Any) -> dict[str, str]:
    """The weights whose output channels cannot be removed, with the reason."""
    names = prunable(module)
    try:
        groups = filter_groups(module, example_inputs)
    except GossamerError as error:
        return dict.fromkeys(names, str(error))
    reasons: dict[str, str | None] = {name: group.held for group in groups for name in group.producers}
    unseen = "its output channels could not be traced through the model"
    return {name: reason for name in names if (reason := reasons.get(name, unseen)) is not None}


def _semi_structured(layer: LayerTraits) -> str | None:
    if not layer.linear:
        return "torch supports semi-structured tensors in linear layers only"
    return _not_divisible(layer.shape, ROWS, COLUMNS)


RUNTIMES: tuple[Runtime, ...] = (
    Runtime(
        "thin",
        "any runtime, thinned",
        "channels",
        "any hardware, any number format",
        "removes channels that are all zero: a smaller dense network, faster on any hardware",
        "measured: `gossamer export --format thin`, `gossamer benchmark`",
        lambda layer: layer.channels,
    ),
    Runtime(
        "tensorrt",
        "TensorRT",
        "2:4",
        "NVIDIA GPU since Ampere; float16, int8",
        "convolutions and matrix products on sparse tensor cores, if TensorRT measures them as faster",
        "https://developer.nvidia.com/blog/accelerating-inference-with-sparsity-using-ampere-and-tensorrt",
        lambda layer: ineligible(layer.shape),
    ),
    Runtime(
        "torch",
        "torch, semi-structured",
        "2:4",
        "NVIDIA GPU since Ampere; float16, bfloat16, int8",
        "linear layers only, with cuSPARSELt; int8 needs sides divisible by 32",
        "the shape rules of torch.sparse.semi_structured",
        _semi_structured,
    ),
    Runtime(
        "deepsparse",
        "DeepSparse",
        "block4",
        "x86 CPU with VNNI; int8",
        "skips blocks of four neighbouring inputs; discontinued in June 2025",
        "https://github.com/neuralmagic/deepsparse/issues/1676",
        lambda layer: Block(1, 4).fits(layer.shape),
    ),
    Runtime(
        "openvino",
        "OpenVINO",
        "unstructured",
        "Intel Xeon, tested on the 4th generation; int8",
        "packs the weights of matrix products if CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE is set: less memory traffic, "
        "the same arithmetic",
        "https://docs.openvino.ai/2025/notebooks/sparsity-optimization-with-output.html",
        lambda layer: None if len(layer.shape) == 2 else "only matrix products use packed weights",
    ),
    Runtime(
        "xnnpack",
        "LiteRT, XNNPACK",
        "unstructured",
        "ARM CPU; float32",
        "1×1 convolutions of mobile networks with at least two thirds zeros, between a 3×3 stem and global pooling",
        "documentation of TensorFlow Lite's XNNPACK delegate, section on sparse inference",
        lambda layer: None if layer.kind == "conv 1×1" else "only 1×1 convolutions in one group have sparse kernels",
    ),
    Runtime(
        "onnxruntime",
        "onnxruntime, torch",
        "unstructured",
        "any hardware, any number format",
        "unstructured zeros make files smaller, not inference faster",
        "measured: `gossamer benchmark`",
        lambda _: "its kernels do not skip zeros",
    ),
)
"""The most widely applicable first."""
