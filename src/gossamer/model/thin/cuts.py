"""Cut positions out of a model's tensors, and adapt the sizes that its layers store.

`Cuts` says which positions of which tensor stay. Parameters, buffers, an optimizer's state and masks are cut alike, and
every parameter remains the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd  # pyright: ignore[reportPrivateUsage]

from gossamer.errors import GossamerError
from gossamer.model.parameters import named_modules, named_state, unwrap

Shapes = Mapping[str, Sequence[int]]
"""By clean name of a parameter or buffer."""


@dataclass(frozen=True)
class Cuts:
    """What stays of each tensor: positions, ascending, by clean name and dimension."""

    kept: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict[str, Mapping[int, Tensor]])

    def __bool__(self) -> bool:
        return bool(self.kept)

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor shaped like the named one, cut; in the same memory format."""
        cut = tensor
        for dim, positions in self.kept.get(name, {}).items():
            cut = cut.index_select(dim, positions.to(tensor.device))
        if cut.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            return cut.contiguous(memory_format=torch.channels_last)
        return cut

    def fits(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape can be cut as the named one."""
        return all(dim < len(shape) and int(rows[-1]) < shape[dim] for dim, rows in self.kept.get(name, {}).items())

    @torch.no_grad()
    def apply(self, model: nn.Module, values: Mapping[str, Tensor] | None = None) -> None:
        """Cut the model in place; `values` are tensors, cut already, to take in place of the model's own.

        Gradients are dropped. A parameter stays the same object, so that optimizers go on to hold it.
        """
        state = dict(named_state(model))
        shapes: dict[str, tuple[int, ...]] = {}
        for name in {*self.kept, *(values or {})}:
            tensor = state[name]
            cut = self.of(name, tensor.detach()) if name not in (values or {}) else (values or {})[name]
            tensor.grad = None
            tensor.data = cut.to(tensor.device, tensor.dtype).clone()
            shapes[name] = tuple(tensor.shape)
        resize(model, shapes)

    def cut_state(
        self, optimizer: torch.optim.Optimizer | None, name: str, parameter: Tensor, shape: torch.Size
    ) -> None:
        """Cut what an optimizer keeps for a parameter that had this shape."""
        if optimizer is None or parameter not in optimizer.state:
            return
        kept = cast(dict[str, Any], optimizer.state[parameter])
        for key, value in kept.items():
            kept[key] = self._like(name, value, shape)

    def _like(self, name: str, value: Any, shape: torch.Size) -> Any:
        if isinstance(value, Tensor):
            return self.of(name, value).clone() if value.shape == shape else value
        if isinstance(value, list):
            return [self._like(name, item, shape) for item in cast(list[Any], value)]
        if isinstance(value, dict):
            return {key: self._like(name, item, shape) for key, item in cast(dict[Any, Any], value).items()}
        return value


def shrunk(own: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The tensors of a state dict as `shrink_to` makes them, as views to compare with; nothing is changed.

    Raises when names of one tensor have different shapes.
    """
    first: dict[object, str] = {}
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() and not tensor.is_meta else name
        other = first.setdefault(key, name)
        if name in shapes and other in shapes and tuple(shapes[name]) != tuple(shapes[other]):
            both = f"{tuple(shapes[other])} and {tuple(shapes[name])}"
            raise GossamerError(f"'{other}' and '{name}' are one tensor in the model, and have the shapes {both} there")
    corners = {name: _corner(tensor, shapes[name]) for name, tensor in tensors.items() if name in shapes}
    return {**own, **corners}


def _corner(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The first entries of a tensor along each axis, when it has at least as many."""
    smaller = len(shape) == tensor.dim() and all(a <= b for a, b in zip(shape, tensor.shape, strict=True))
    return tensor.detach()[tuple(slice(size) for size in shape)] if smaller else tensor


@torch.no_grad()
def shrink_to(model: nn.Module, shapes: Shapes) -> list[str]:
    """Give the tensors of a model that was built whole the shapes of a thinned one, before its weights are loaded.

    Returns the names of those that shrank. A tensor that cannot shrink is left, and loading reports it.
    """
    found: list[str] = []
    for name, tensor in named_state(model):
        corner = _corner(tensor, shapes.get(name, tensor.shape))
        if corner.shape != tensor.shape:
            tensor.grad = None
            tensor.data = corner.clone()
            found.append(name)
    resize(model, {name: shapes[name] for name in found})
    return found


def spread_over_processes(model: nn.Module) -> str | None:
    """What has laid the parameters out for several processes, so that none can change its shape; None: nothing."""
    kinds = {type(module).__name__ for module in model.modules()} & {
        "DistributedDataParallel",
        "FullyShardedDataParallel",
    }
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        kinds.add("FSDP")
    return f"{min(kinds)} has laid the parameters out for several processes" if kinds else None


def resize(model: nn.Module, shapes: Shapes) -> None:
    """Set the sizes that layers store to the shapes of their tensors."""
    module = unwrap(model)
    names = {id(tensor): name for name, tensor in named_state(module)}
    for _, layer in named_modules(module):
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        found = {leaf: tuple(shapes[name]) for leaf, tensor in own if (name := names.get(id(tensor), "")) in shapes}
        if found:
            _resize(layer, found)


def _resize(layer: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    weight = shapes.get("weight")
    if isinstance(layer, _ConvNd):
        if weight is not None:
            _resize_convolution(layer, weight)
    elif isinstance(layer, _NormBase):
        layer.num_features = next(iter(shapes.values()))[0]
    elif weight is None:
        return
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = weight[1]
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = weight[0]
    elif type(layer).__name__ == "Conv1D":  # of Transformers: its forward asks for nf
        cast(Any, layer).nx, cast(Any, layer).nf = weight


def _resize_convolution(layer: _ConvNd, weight: tuple[int, ...]) -> None:
    if layer.groups > 1 and layer.groups == layer.in_channels:  # depthwise: one filter or more for each channel
        each = layer.out_channels // layer.groups
        transposed = isinstance(layer, _ConvTransposeNd)
        layer.groups = layer.in_channels = weight[0] if transposed else weight[0] // each
        layer.out_channels = layer.groups * each
        return
    first, second = weight[0], weight[1] * layer.groups
    transposed = isinstance(layer, _ConvTransposeNd)
    layer.in_channels, layer.out_channels = (first, second) if transposed else (second, first)
