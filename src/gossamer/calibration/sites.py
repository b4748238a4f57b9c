"""Layers as matrices: which tensor a layer is called with, and how its weight and inputs are rows and columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.model import get_module, layer_path
from gossamer.model.weights import is_conv1d

_CHUNK = 2**24
"""Numbers of unfolded inputs that are in memory at once."""


class Site(ABC):
    """A weight of a layer, as one matrix `(rows, columns)` or several: the groups of a grouped convolution."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.layer = get_module(module, layer_path(name))
        self._leaf = name.rpartition(".")[2]

    @property
    def parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self.layer, self._leaf))

    @property
    def columns(self) -> list[int]:
        return [matrix.shape[1] for matrix in self.matrices()]

    @abstractmethod
    def matrices(self) -> list[Tensor]:
        """The weight in float32."""

    @abstractmethod
    def weight(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of `matrices`: a tensor of the parameter's shape."""

    @abstractmethod
    def samples(self, inputs: Tensor) -> list[list[Tensor]]:
        """By matrix: the inputs as `(samples, columns)`, in chunks."""

    def write(self, matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        """Overwrite the weight, rounded to `dtype` if it is stored in another one than it computes in."""
        weight = self.weight(matrices)
        with torch.no_grad():
            self.parameter.copy_(weight if dtype is None else weight.to(dtype))


class LinearSite(Site):
    """A linear layer, the `Conv1D` of Transformers, or the output projection of an attention layer."""

    def matrices(self) -> list[Tensor]:
        weight = self.parameter.detach().float()
        return [weight.t() if is_conv1d(self.layer) else weight]

    def weight(self, matrices: Sequence[Tensor]) -> Tensor:
        return matrices[0].t() if is_conv1d(self.layer) else matrices[0]

    def samples(self, inputs: Tensor) -> list[list[Tensor]]:
        return [[inputs.reshape(-1, inputs.shape[-1])]]


class ConvolutionSite(Site):
    """A convolution: columns are kernel positions by input channels, so that neighbours are channels."""

    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def matrices(self) -> list[Tensor]:
        weight = self.parameter.detach().float().movedim(1, -1).flatten(1)
        return list(weight.chunk(self.layer.groups))

    def weight(self, matrices: Sequence[Tensor]) -> Tensor:
        out, channels, *kernel = self.parameter.shape
        return torch.cat(list(matrices)).reshape(out, *kernel, channels).movedim(-1, 1)

    def samples(self, inputs: Tensor) -> list[list[Tensor]]:
        layer = self.layer
        dims = len(layer.kernel_size)
        images = inputs if inputs.dim() == dims + 2 else inputs[None]
        padding = layer._reversed_padding_repeated_twice  # pyright: ignore[reportPrivateUsage]
        if any(padding):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            images = functional.pad(images, padding, mode=mode)
        per_image = sum(part.shape[1] for part in self.matrices()) * max(images[0, 0].numel(), 1)
        chunks: list[list[Tensor]] = [[] for _ in range(layer.groups)]
        step, width = max(_CHUNK // max(per_image, 1), 1), images.shape[1] // layer.groups
        for first in range(0, len(images), step):
            for group, chunk in enumerate(chunks):
                chunk.append(self._unfolded(images[first : first + step, group * width : (group + 1) * width]))
        return chunks

    def _unfolded(self, images: Tensor) -> Tensor:
        """`(images, channels, *size)` as `(samples, positions × channels)`."""
        dims = len(self.layer.kernel_size)
        for dim, (size, step, gap) in enumerate(
            zip(self.layer.kernel_size, self.layer.stride, self.layer.dilation, strict=True)
        ):
            images = images.unfold(dim + 2, (size - 1) * gap + 1, step)[..., ::gap]
        order = [0, *range(2, dims + 2), *range(dims + 2, 2 * dims + 2), 1]
        windows = images.permute(order)
        return windows.reshape(-1, windows.shape[dims + 1 :].numel())


class ProjectionSite(Site):
    """The input projections of an attention layer, whose inputs may differ."""

    layer: nn.MultiheadAttention

    def matrices(self) -> list[Tensor]:
        weight = self.parameter.detach().float()
        return list(weight.chunk(3)) if self._leaf == "in_proj_weight" else [weight]

    def weight(self, matrices: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(matrices))

    def samples(self, inputs: Tensor) -> list[list[Tensor]]:
        raise NotImplementedError("its inputs are several tensors: see of_attention")

    def of_attention(self, query: Tensor, key: Tensor, value: Tensor) -> list[list[Tensor]]:
        named = {"q_proj_weight": [query], "k_proj_weight": [key], "v_proj_weight": [value]}
        return [[part.reshape(-1, part.shape[-1])] for part in named.get(self._leaf, [query, key, value])]


def site_of(module: nn.Module, name: str) -> Site:
    """The site of a weight that one-shot methods support."""
    layer = get_module(module, layer_path(name))
    if isinstance(layer, nn.MultiheadAttention):
        return ProjectionSite(module, name)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return ConvolutionSite(module, name)
    return LinearSite(module, name)


def attention_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a call of `nn.MultiheadAttention`."""
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    return given["query"], given["key"], given["value"]


def attended(layer: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the output projection of an attention layer is called with."""
    projection = layer.out_proj
    kept = [parameter.data for parameter in projection.parameters()]
    try:
        for parameter in projection.parameters():  # the weight, and a bias unless there is none
            plain = torch.eye(len(parameter)) if parameter.dim() > 1 else torch.zeros(len(parameter))
            parameter.data = plain.to(parameter.data)
        return layer.forward(*args, **kwargs)[0]
    finally:
        for parameter, value in zip(projection.parameters(), kept, strict=True):
            parameter.data = value
