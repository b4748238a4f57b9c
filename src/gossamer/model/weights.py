"""Which parameter of a layer is the weight to prune, and why the weights of other layers cannot be pruned.

A layer may compute its weight from other tensors: spectral norm, weight norm, `torch.nn.utils.prune`, or any
parametrization. Where zeros of one stored tensor are zeros of the computed weight, that tensor is pruned; every other
weight is reported with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm, _WeightNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from gossamer.errors import GossamerError
from gossamer.sparse.sharding import is_sharded

WHOLE = -1
"""One norm over all elements of a weight."""
_ORIGINAL = re.compile(r"(?:(.*)\.)?parametrizations\.([^.]+)\.original\d*")
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_SCRIPTED = re.compile(r"\w*Linear|\w*Conv(Transpose)?[123]d|Conv1D")
"""Layers with a weight, by the class names that TorchScript keeps."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Stored:
    """The tensor that a layer computes one of its weights from."""

    weight: str
    """The weight's name within the layer, such as `weight`."""
    leaf: str
    """The tensor's name within the layer: `weight`, `weight_orig`, `parametrizations.weight.original`."""
    reason: str | None = None
    """Why its zeros are not zeros of the weight, or None."""
    norm: int | None = None
    """The dimension whose slices are divided by their norms, which must not be zero; WHOLE for one norm of all."""
    mask: str | None = None
    """The buffer of `torch.nn.utils.prune` that the tensor is multiplied by."""
    unpruned: tuple[str, ...] = ()
    """Tensors of the layer that belong to the same weight and are never pruned, such as magnitudes."""


def weights_of(layer: nn.Module) -> Iterator[Stored]:
    """What each prunable weight of a convolution, linear or attention layer is stored as; none for other modules."""
    if isinstance(layer, nn.MultiheadAttention):
        leaves = list(_ATTENTION)
    else:
        convolution = isinstance(layer, nn.modules.conv._ConvNd)  # pyright: ignore[reportPrivateUsage]
        known = isinstance(layer, nn.Linear | nn.Bilinear) or convolution or is_conv1d(layer)
        leaves = ["weight"] if known else []
    for leaf in leaves:
        if _is_present(layer, leaf):
            yield stored(layer, leaf)


def _is_present(layer: nn.Module, leaf: str) -> bool:
    """Whether a layer has such a tensor; asking for the attribute would compute it, and spectral norm counts that."""
    own: Any = layer
    held = (own._parameters.get(leaf), own._buffers.get(leaf), vars(layer).get(leaf))
    return parametrize.is_parametrized(layer, leaf) or any(tensor is not None for tensor in held)


def check_values(model: nn.Module, call: str) -> None:
    """Raise when a parameter or buffer has no values yet: lazy ones, and those on the meta device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise GossamerError(f"{call}: '{name}' cannot be used: {unprunable(tensor)}")


def stored(layer: nn.Module, leaf: str) -> Stored:
    """What a layer computes its `leaf` from; the leaf itself when it is a parameter."""
    if parametrize.is_parametrized(layer, leaf):
        return _parametrized(layer, leaf)
    match hooks_that_compute(layer).get(leaf):
        case WeightNorm() as norm:
            return Stored(leaf, f"{leaf}_v", norm=_norm_dim(layer, f"{leaf}_v", norm.dim), unpruned=(f"{leaf}_g",))
        case SpectralNorm():
            return Stored(leaf, f"{leaf}_orig", norm=WHOLE)
        case BasePruningMethod():
            return Stored(leaf, f"{leaf}_orig", mask=f"{leaf}_mask")
        case _:
            return Stored(leaf, leaf)


def hooks_that_compute(layer: nn.Module) -> dict[str, object]:
    """Attributes of a layer that a hook computes before each forward pass, each with the hook."""
    hooks = cast(dict[int, object], layer._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
    found: dict[str, object] = {}
    for hook in hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            found[hook.name] = hook
        elif isinstance(hook, BasePruningMethod):
            found[cast(Any, hook)._tensor_name] = hook
    return found


def _parametrized(layer: nn.Module, leaf: str) -> Stored:
    chain: list[nn.Module] = list(cast(Any, layer).parametrizations[leaf])
    path = f"parametrizations.{leaf}.original"
    if all(isinstance(step, _SpectralNorm) for step in chain):
        return Stored(leaf, path, norm=WHOLE)
    if len(chain) == 1 and isinstance(chain[0], _WeightNorm):
        return Stored(leaf, f"{path}1", norm=_norm_dim(layer, f"{path}1", chain[0].dim), unpruned=(f"{path}0",))
    several = hasattr(cast(Any, layer).parametrizations[leaf], "original0")
    kinds = " and ".join(dict.fromkeys(type(step).__name__.strip("_") for step in chain))
    return Stored(
        leaf,
        f"{path}0" if several else path,
        f"it is computed by the parametrization {kinds}, which need not keep zeros where they are; call "
        f"torch.nn.utils.parametrize.remove_parametrizations(layer, '{leaf}') first",
    )


def _norm_dim(layer: nn.Module, leaf: str, dim: int | None) -> int:
    return WHOLE if dim is None or dim == -1 else dim % _tensor(layer, leaf).dim()


def by_norm(tensor: Tensor, norm: int) -> Tensor:
    """The elements of a weight-shaped tensor by the norm that they belong to, `(norms, elements)`."""
    return tensor.reshape(1, -1) if norm == WHOLE else tensor.movedim(norm, 0).flatten(1)


def with_one_kept(scores: Tensor, norm: int) -> Tensor:
    """The scores, with the highest of each norm made infinite, so that no norm loses all of its weights.

    >>> with_one_kept(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), 0)
    tensor([[1., inf],
            [inf, 3.]])
    """
    rows = by_norm(scores, norm).clone()
    rows[torch.arange(len(rows), device=rows.device), rows.argmax(1)] = torch.inf
    return rows.reshape(scores.shape) if norm == WHOLE else rows.reshape(scores.movedim(norm, 0).shape).movedim(0, norm)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether it is the `Conv1D` of Transformers, a linear layer with a weight `(in, out)`, or a copy of that class."""
    if not any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__) or not _is_present(layer, "weight"):
        return False
    weight = _tensor(layer, stored(layer, "weight").leaf)
    return weight.dim() == 2 and getattr(layer, "nf", weight.shape[1]) == weight.shape[1]


def opaque(layer: nn.Module) -> str | None:
    """Why the weight of a layer is not a parameter: TorchScript and quantized modules; None for any other module."""
    if isinstance(layer, torch.jit.ScriptModule):
        weighty = _SCRIPTED.fullmatch(str(getattr(layer, "original_name", "")))
        reason = "it is compiled by TorchScript; prune the model before torch.jit.script or torch.jit.trace"
        return reason if weighty else None
    quantized = type(layer).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"))
    if quantized and callable(getattr(layer, "weight", None)):
        return "it is quantized to integers by torch.ao; prune the model before it is converted"
    return None


def unprunable(parameter: Tensor) -> str | None:
    """Why no values of a parameter can be set to zero, with a fix; None when they can."""
    if is_lazy(parameter):
        return "its shape is not known yet; run the model on one batch first"
    if parameter.is_meta:
        return "it is on the meta device and has no values; load the model's weights first"
    if parameter.layout != torch.strided:
        return f"it is stored as {parameter.layout}; call to_dense() on it first"
    if is_subclass(parameter):
        return f"it is a {type(parameter).__name__} and no plain tensor; prune the model before it is converted"
    if parameter.is_complex():
        return f"it is complex ({parameter.dtype}); prune its real and imaginary parts as two parameters"
    if parameter.dtype not in _FLOATS:
        return f"its values are {parameter.dtype}; convert it to bfloat16 or float32 first"
    if parameter.numel() == 0:
        return f"it has no elements: its shape is {tuple(parameter.shape)}"
    if shares_elements(parameter):
        return "several of its elements share memory; call contiguous() on it first"
    return None


def is_subclass(parameter: Tensor) -> bool:
    """Whether it is another kind of tensor than a parameter or buffer of torch, or one that is split over ranks."""
    kind = type(parameter)
    return (
        not is_sharded(parameter)
        and kind not in (Tensor, nn.Parameter)
        and not issubclass(kind, nn.Parameter | nn.Buffer)
    )


def shares_elements(tensor: Tensor) -> bool:
    """Whether it is expanded, so that elements share memory and cannot be set one by one."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def layer_path(name: str) -> str:
    """The path of the layer that a parameter belongs to, also where a parametrization holds the parameter.

    >>> layer_path("a.fc.weight"), layer_path("a.fc.parametrizations.weight.original1"), layer_path("weight")
    ('a.fc', 'a.fc', '')
    """
    found = _ORIGINAL.fullmatch(name)
    return (found[1] or "") if found else name.rpartition(".")[0]


def expect_model(model: object, call: str) -> None:
    """Raise unless this is a module that can be changed in Python."""
    if isinstance(model, torch.jit.ScriptModule):
        raise GossamerError(
            f"{call}: a ScriptModule ({type(model).__name__}) cannot be changed; give the module that "
            "torch.jit.script or torch.jit.trace was called with"
        )
    if not isinstance(model, nn.Module):
        hint = "; give the module that torch.export.export was called with" * (
            type(model).__name__ == "ExportedProgram"
        )
        raise GossamerError(f"{call}: expected a torch.nn.Module, found {type(model).__name__}{hint}")


def _tensor(layer: nn.Module, leaf: str) -> Tensor:
    *path, last = leaf.split(".")
    owner: Any = layer
    for part in path:
        owner = getattr(owner, part)
    return cast(Tensor, getattr(owner, last))


M = TypeVar("M", bound=nn.Module)


def duplicate(model: M) -> M:
    """A deep copy of a model; raises what the model's own code raises.

    Spectral norm, weight norm and `torch.nn.utils.prune` keep the weight that they computed last as an attribute of
    the layer, with its graph, which torch does not copy. The copy gets its values, until it computes its own.
    """
    computed = [vars(layer).get(leaf) for layer in model.modules() for leaf in hooks_that_compute(layer)]
    return deepcopy(model, {id(value): value.detach().clone() for value in computed if isinstance(value, Tensor)})
