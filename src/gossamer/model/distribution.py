"""Models whose parameters are split over ranks, by `fully_shard` (FSDP2) or by tensor parallelism."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from gossamer.errors import GossamerError, SparsityError
from gossamer.model.parameters import named_parameters
from gossamer.sparse.sharding import Ranks, is_sharded, refuse_partial


def fully_sharded(module: nn.Module) -> list[Any]:
    """The parts of a model that `fully_shard` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def is_distributed(module: nn.Module) -> bool:
    """Whether parameters are split over ranks, or may be."""
    return bool(fully_sharded(module)) or any(is_sharded(parameter) for parameter in module.parameters())


def reshard(module: nn.Module) -> None:
    """Let every rank hold its own part of the parameters only, as after a backward pass.

    After an evaluation `fully_shard` leaves the root's parameters whole until the next training step.
    """
    for part in fully_sharded(module):
        part.reshard()


def gathered_weights(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of a split model, whole and on the CPU of rank 0; empty on the others, which call this too."""
    from torch import distributed

    reshard(module)
    first, found = distributed.get_rank() == 0, dict[str, Tensor]()
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if first:
            found[name] = whole.detach().cpu()
    return found


def refuse_unsupported(module: nn.Module, call: str) -> None:
    """Raise, in one sentence, for a model that is distributed in a way that masks cannot follow."""
    for part in module.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__):
            raise GossamerError(
                f"{call}: FullyShardedDataParallel (FSDP1) is not supported, because it flattens the weights; call "
                "torch.distributed.fsdp.fully_shard (FSDP2) on the model instead"
            )
    if not is_distributed(module):
        return
    reshard(module)
    for name, parameter in named_parameters(module):
        if is_sharded(parameter) and (reason := refuse_partial(parameter)) is not None:
            raise GossamerError(f"{call}: '{name}' cannot be masked: {reason}; redistribute it as shards first")
    try:
        Ranks.of(parameter for _, parameter in named_parameters(module))
    except SparsityError as error:
        raise GossamerError(f"{call}: {error}") from None


def refuse_meta(module: nn.Module, call: str) -> None:
    """Raise for sharded parameters without values, which `fully_shard` may leave on the meta device."""
    for name, parameter in named_parameters(module):
        if parameter.is_meta and is_sharded(parameter):
            raise GossamerError(
                f"{call}: '{name}' is on the meta device and has no values; first materialize the model, with "
                "model.to_empty(device=...), and load or initialize its weights"
            )


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@contextmanager
def without_communication(module: nn.Module) -> Generator[None]:
    """Take out the hooks with which `fully_shard` and `parallelize_module` exchange weights and activations."""
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for part in module.modules():
        for kind in _HOOKS:
            own = cast(dict[int, Any], getattr(part, kind))
            if any(_communicates(hook) for hook in own.values()):
                taken.append((own, dict(own)))
                for key in [key for key, hook in own.items() if _communicates(hook)]:
                    del own[key]
    try:
        yield
    finally:
        for own, before in taken:
            added = {key: hook for key, hook in own.items() if key not in before}
            own.clear()
            own.update(before | added)


def _communicates(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.")


def sharded_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are split over ranks, by clean name."""
    for name, parameter in named_parameters(module):
        if is_sharded(parameter):
            yield name, cast(Tensor, parameter)
