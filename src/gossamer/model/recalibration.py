"""Estimate batch norm's running statistics again, for a model whose weights changed without training.

Training keeps the statistics up to date with the weights; masks that are applied afterwards, averages of weights and
one-shot pruning do not.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils import _pytree as pytree

from gossamer.errors import GossamerError, short_error
from gossamer.model.example_inputs import batch_arguments
from gossamer.model.parameters import named_modules, unwrap

_NO_BATCH = "expected at least one batch, found none; give some training data"
BATCHES = 100
"""How many batches are read where the library recalibrates by itself, from data that may hold any number."""


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> list[str]:
    """Estimate the running statistics of batch norm again, as plain averages over the given batches.

    For a model whose weights changed without training: masks applied to an averaged copy, one-shot pruning, a final
    mask. `batches` yields tensors, pairs (inputs, labels), tuples of three or more arguments, or dicts of keyword
    arguments; a few dozen training batches are enough. Batches of one sample, such as a loader's last, are left out
    when there are larger ones.

    Only batch norm is in training mode meanwhile, so that dropout and the like are off, and no gradient is computed.
    Afterwards every module has its mode and every layer its momentum back; weights are not touched.
    `num_batches_tracked` is the number of batches that the new statistics come from.

    Returns the names of the layers that were estimated again; an empty list when there are none. Left as they are:
    layers without running statistics, layers in evaluation mode while the model trains (frozen), those that emulated
    quantization has frozen, and those that the forward pass does not reach. In several processes, each estimates from
    its own batches. If the model fails on a batch, all statistics are left as they were.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)).eval()
    >>> nn.init.constant_(model[0].weight, 2.0)
    Parameter containing:
    tensor([[2.]], requires_grad=True)
    >>> recalibrate(model, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    ['1']
    >>> float(model[1].running_mean), float(model[1].running_var), model[1].training
    (6.0, 8.0, False)
    """
    _check_kind(batches, "recalibrate")
    module = unwrap(model)
    norms = _tracking(module)
    layers = list(dict.fromkeys(norms.values()))
    if not layers:
        return []
    with _averaging(module, layers) as estimated:
        _run(module, layers, batches, "recalibrate")
        estimated.update(layer for layer in layers if layer.num_batches_tracked)
    return [name for name, layer in norms.items() if layer in estimated]


def checked_batches(model: nn.Module, batches: Iterable[Any], argument: str) -> list[Any]:
    """The first `BATCHES` batches, on which the model can be recalibrated; raises `GossamerError` otherwise.

    The model runs on them where it has batch norm, and keeps its statistics.
    """
    _check_kind(batches, argument)
    found, module = list(islice(batches, BATCHES)), unwrap(model)
    if not found:
        raise GossamerError(f"{argument}: {_NO_BATCH}")
    if layers := list(dict.fromkeys(_tracking(module).values())):
        with _averaging(module, layers):
            _run(module, layers, found, argument)
    return found


def _check_kind(batches: object, argument: str) -> None:
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        kind = type(cast(object, batches)).__name__
        raise GossamerError(f"{argument}: expected batches, found one {kind}; give a list of them")


def running_means(module: nn.Module) -> Tensor | None:
    """A copy of all running means in one tensor, to compare with later ones; None without any."""
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    means = [layer.running_mean.detach().float() for layer in norms if layer.running_mean is not None]
    return torch.cat([mean.to(means[0].device) for mean in means]) if means else None


def has_running_statistics(model: nn.Module) -> bool:
    """Whether `recalibrate` would estimate anything."""
    return bool(_tracking(unwrap(model)))


def _tracking(module: nn.Module) -> dict[str, _BatchNorm]:
    return {name: layer for name, layer in named_modules(module) if _is_tracking(layer, module)}


def _is_tracking(layer: nn.Module, module: nn.Module) -> TypeGuard[_BatchNorm]:
    frozen = module.training and not layer.training
    return isinstance(layer, _BatchNorm) and layer.running_mean is not None and not frozen


@contextmanager
def _averaging(module: nn.Module, layers: Sequence[_BatchNorm]) -> Generator[set[_BatchNorm]]:
    """Batch norm trains, everything else evaluates; layers that are not in the set get their statistics back."""
    modes = [(child, child.training) for child in module.modules()]
    momenta = [layer.momentum for layer in layers]
    before = [[tensor.clone() for tensor in _statistics(layer)] for layer in layers]
    estimated: set[_BatchNorm] = set()
    try:
        with torch.no_grad(), _uncompiled():
            module.eval()
            for layer in layers:
                layer.training = True
                layer.momentum = None  # the plain average over batches
                layer.reset_running_stats()
            yield estimated
    finally:
        for child, training in modes:
            child.training = training
        for layer, momentum, tensors in zip(layers, momenta, before, strict=True):
            layer.momentum = momentum
            if layer not in estimated:
                for tensor, old in zip(_statistics(layer), tensors, strict=True):
                    tensor.copy_(old)


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiled parts run uncompiled; otherwise each change of mode would compile them again."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _statistics(layer: _BatchNorm) -> list[Tensor]:
    found = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    return [tensor for tensor in found if tensor is not None]


def _run(module: nn.Module, layers: Sequence[_BatchNorm], batches: Iterable[Any], argument: str) -> None:
    """Run the model on all batches; those of one sample count only where there is no larger one."""
    number, largest, failure = 0, 0, None
    for number, batch in enumerate(batches, start=1):
        args, kwargs = batch_arguments(batch, module)
        samples = _samples((args, kwargs))
        if samples == 1 < largest:
            continue
        if largest == 1 < samples:
            failure = None
            for layer in layers:
                layer.reset_running_stats()
        largest = max(largest, samples)
        try:
            module(*args, **kwargs)
        except Exception as error:  # any model, any reason
            problem = GossamerError(
                f"{argument}: the model does not run on batch {number} ({short_error(error)}); "
                "give tensors, pairs of inputs and labels, or dicts of the arguments of forward"
            )
            if samples != 1:
                raise problem from error
            failure = failure or problem  # batch norm may need two samples
    if failure is not None:
        raise failure
    if not number:
        raise GossamerError(f"{argument}: {_NO_BATCH}")


def _samples(batch: object) -> int:
    """The length of the first tensor, at least 1; 0 without a tensor."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(len(tensors[0]), 1) if tensors else 0
