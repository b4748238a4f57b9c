"""Programs in torch itself: a .pt2 file of torch.export, or a model in memory, called as they are.

torch.export.load unpickles what a file says is pickled, and so can run code that the file holds: a .pt2 is loaded only
when the caller trusts it. Nothing here times anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from gossamer.benchmark.candidates import Candidate, InMemory, Program, Run, Settings
from gossamer.benchmark.contents import contents_of_tensors
from gossamer.benchmark.inputs import Array, Slot
from gossamer.errors import GossamerError
from gossamer.export.example_inputs import ExampleInputs
from gossamer.export.onnx.writing import reason_of
from gossamer.io import dtype_name


def in_torch(candidate: Candidate, settings: Settings) -> Program:
    """A program of torch; threads are torch's own, for all programs, and set by `torch_threads`."""
    return _in_memory(candidate) if isinstance(candidate, InMemory) else _exported(candidate, settings)


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """torch with so many threads, and afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _exported(path: Path, settings: Settings) -> Program:
    if not path.is_file():
        raise GossamerError(f"{path}: there is no such file; gossamer export writes one")
    if not settings.trust:
        raise GossamerError(
            f"{path}: loading a .pt2 can run code that is in the file; give --trust if you know where it comes from"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path)
    except Exception as error:
        raise GossamerError(f"{path}: not a program of torch.export, or damaged; export it again") from error
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    leaves = [values.get(name) if isinstance(name, str) else name for name in names]
    slots = [_slot(str(name), leaf, path) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    module = program.module()
    spec = program.call_spec.in_spec

    def bind(arrays: Sequence[Array]) -> Run:
        args, kwargs = tree.tree_unflatten(_filled(leaves, arrays), cast(Any, spec))
        return _call(module, args, kwargs, str(path))

    tensors = [tensor for tensor in program.state_dict.values() if isinstance(tensor, Tensor)]
    return Program(tuple(slots), bind, _arrays, partial(contents_of_tensors, path.stat().st_size, tensors))


def _in_memory(given: InMemory) -> Program:
    inputs = ExampleInputs.of(given.example_inputs).on_cpu()
    leaves, spec = tree.tree_flatten((inputs.positional, inputs.named))
    slots = [
        Slot(f"input_{number}", ("batch", *leaf.shape[1:]) if leaf.dim() else (), _type_name(leaf, given.name))
        for number, leaf in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor))
    ]

    def bind(arrays: Sequence[Array]) -> Run:
        args, kwargs = tree.tree_unflatten(_filled(leaves, arrays), spec)
        return _call(given.model, args, kwargs, given.name)

    state = [*given.model.parameters(), *given.model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in state)
    return Program(tuple(slots), bind, _arrays, partial(contents_of_tensors, size, list(given.model.parameters())))


def _call(module: torch.nn.Module, args: Any, kwargs: Any, where: str) -> Run:
    def run() -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    try:
        run()
    except Exception as error:
        raise GossamerError(f"{where}: torch cannot run it on noise: {reason_of(error)}") from error
    return run


def _filled(leaves: Sequence[Any], arrays: Sequence[Array]) -> list[Any]:
    """The leaves with arrays in the place of tensors."""
    rest = iter(arrays)
    return [torch.from_numpy(next(rest)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _slot(name: str, leaf: Tensor, path: Path) -> Slot:
    sizes = cast(tuple[Any, ...], leaf.shape)  # int, or torch.SymInt where the size is open
    shape = tuple(size if isinstance(size, int) else str(size) for size in sizes)
    return Slot(name, shape, _type_name(leaf, str(path)))


def _type_name(tensor: Tensor, where: str) -> str:
    name = dtype_name(tensor.dtype)
    if name not in {"float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64"}:
        raise GossamerError(f"{where}: an input is {name}, of which no noise can be made; export it in float32")
    return name


def _arrays(found: Any) -> list[Array]:
    tensors = [leaf for leaf in tree.tree_leaves(found) if isinstance(leaf, Tensor)]
    return [(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy() for tensor in tensors]
