"""What each operation of torch does to the channels of its tensors.

A rule is found by the operation's name in ATen; element-wise operations are
known by their tag. An operation without a rule holds every channel of its
arguments in place: an unknown operation costs freedom, never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.model.tracing.channels import Layout
from gossamer.model.tracing.layer_rules import LAYERS, attention, pool
from gossamer.model.tracing.tensors import Call, Rule, Tensors, tensors_in
from gossamer.model.tracing.value_rules import STRUCTURE, VALUES, in_place, pointwise, same

_RULES: dict[str, Rule] = VALUES | STRUCTURE | LAYERS
_SAME = ["clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "pin_memory"]
_ELEMENTWISE = [
    "copy",
    "copy_",
    "hardswish_",
    "hardswish",
    "_prelu_kernel",
    "masked_fill",
    "masked_fill_",
    "native_dropout",
    "log_sigmoid_forward",
    "bernoulli",
    "dropout",
    "feature_dropout",
    "fill_",
    "zero_",
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
]
_CONSTANT = [
    "empty",
    "empty_like",
    "new_empty",
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "full",
    "full_like",
    "new_full",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "scalar_tensor",
    "empty_strided",
    "new_empty_strided",
]
_EVEN = [
    "view",
    "_unsafe_view",
    "expand",
    "slice",
    "select",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "t",
    "clone",
    "detach",
    "alias",
    "_to_copy",
    "repeat",
    "fill_",
    "zero_",
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "bernoulli",
]
_POOLS = [
    "avg_pool",
    "max_pool",
    "_adaptive_avg_pool",
    "adaptive_max_pool",
    "adaptive_avg_pool",
    "upsample",
    "_upsample",
    "reflection_pad",
    "replication_pad",
    "fractional_max_pool",
    "mkldnn_max_pool",
]


def observe(tensors: Tensors, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Apply the rule of an operation that has just been performed."""
    call = _bound(tensors, operation, args, kwargs, result)
    inputs, outputs, writes = call.inputs, tensors_in(result), bool(operation._schema.is_mutable)
    if not outputs and not writes:
        return
    tensors.reveal(inputs)
    if call.name in _CONSTANT and call.get("generator") is None:
        for tensor in outputs:
            tensors.make_neutral(tensor)
    elif not any(tensors.is_tracked(tensor) for tensor in inputs):
        even = torch.Tag.pointwise in operation.tags or call.name in _EVEN
        _untracked(tensors, inputs, outputs, writes, even)
    else:
        _tracked(call, inputs, outputs, writes, _rule(operation, call.name, writes))


def _bound(tensors: Tensors, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
    schema = operation._schema
    space, name = str(schema.name).split("::")
    arguments: dict[str, Any] = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return Call(name if space == "aten" else f"{space}.{name}", arguments, result, tensors)


def _rule(operation: Any, name: str, writes: bool) -> Rule | None:
    if torch.Tag.out in operation.tags or name.endswith("_backward"):
        return pointwise if torch.Tag.pointwise in operation.tags and not writes else None
    if name in _SAME:
        return same
    if torch.Tag.pointwise in operation.tags or name in _ELEMENTWISE:
        return in_place if writes else pointwise
    if any(name.startswith(prefix) for prefix in _POOLS):
        return pool
    if name.startswith("_scaled_dot_product"):
        return attention
    rule = _RULES.get(name)
    return rule if not writes or rule is LAYERS["native_batch_norm"] else None


def _tracked(call: Call, inputs: list[Tensor], outputs: list[Tensor], writes: bool, rule: Rule | None) -> None:
    """Apply the rule; without one, or when it does not cover the case, all channels are held in place."""
    tensors = call.tensors
    try:
        found = None if rule is None else rule(call)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        found = None  # an unusual form of the operation; what the rule has stated so far only holds more in place
    if found is None:
        tensors.hold(inputs, f"its channels go through {call.title}, whose effect on channels is not known")
        for tensor in inputs if writes else ():
            tensors.spoil(tensor)
        tensors.inherit(outputs, (), f"the result of {call.title}, whose effect on channels is not known")
        return
    layouts: Sequence[Layout] = found if isinstance(found, list) else [found] * len(outputs)
    lost = _lost(call, inputs)
    for tensor, layout in zip(outputs, layouts, strict=False):
        tensors.inherit([tensor], inputs if layout else (), lost)
        if layout and not tensors.is_known(tensor):
            tensors.set(tensor, layout)


def _lost(call: Call, inputs: list[Tensor]) -> str:
    """What to call a result without channels: of a chain of operations, the first that met something without."""
    tensors = call.tensors
    origin = next((tensors.origin(t) for t in inputs if t.dim() and not tensors.is_tracked(t)), None)
    if origin is None:
        return f"the result of {call.title}"
    if origin.startswith(("what", "something")):
        return origin
    met = any(tensors.is_tracked(t) and not tensors.is_leaf(t) for t in inputs)
    return f"something that {call.title} combines with {origin}" if met else f"what {call.title} makes of {origin}"


def _untracked(tensors: Tensors, inputs: Sequence[Tensor], outputs: Sequence[Tensor], writes: bool, even: bool) -> None:
    """Nothing moves here; but constants stay constants only while they are filled evenly and as a whole."""
    neutral = even and all(tensors.is_neutral(tensor) for tensor in inputs)
    if writes:
        for tensor in inputs:
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if not (neutral and whole):
                tensors.spoil(tensor)
    elif neutral and inputs:
        for tensor in outputs:
            tensors.make_neutral(tensor)
    tensors.inherit(outputs, inputs, "a tensor that is neither parameter nor buffer")
