"""What each operation of torch does to the channels of its tensors.

One small method per kind of operation, found by the operation's name in
ATen; element-wise ones are known by their tag. An operation that is not
listed holds every channel of its arguments in place, so that something new
can cost freedom but never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gossamer.graph.channels import Channels, Factor, Layout, copy_label
from gossamer.graph.layouts import Layouts, Operand, Shape

Arguments = dict[str, Any]

_SAME = "clone _to_copy detach alias lift_fresh lift_fresh_copy contiguous pin_memory".split()
_ELEMENTWISE = (
    "copy copy_ hardswish_ hardswish _prelu_kernel masked_fill masked_fill_ native_dropout log_sigmoid_forward "
    "_to_copy bernoulli dropout feature_dropout"
).split()
_CONSTANT = (
    "empty empty_like new_empty zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full "
    "rand rand_like randn randn_like scalar_tensor empty_strided new_empty_strided"
).split()
_EVEN = (
    "view _unsafe_view expand slice select squeeze unsqueeze permute transpose t clone detach alias _to_copy repeat "
    "fill_ zero_ bernoulli_ uniform_ normal_ exponential_ bernoulli"
).split()
_FILLS = "fill_ zero_ bernoulli_ uniform_ normal_ exponential_ random_".split()
_REDUCTIONS = (
    "sum mean amax amin var std var_mean std_mean linalg_vector_norm norm logsumexp prod any all nansum count_nonzero"
).split()
_POOLS = (
    "avg_pool max_pool _adaptive_avg_pool adaptive_max_pool adaptive_avg_pool upsample _upsample reflection_pad "
    "replication_pad fractional_max_pool mkldnn_max_pool"
).split()
_BATCH_NORMS = (
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm _batch_norm_with_update "
    "_batch_norm_no_update batch_norm"
).split()


class Rules:
    """Follows the channels of one network through the operations that it performs."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.layouts = Layouts(channels)
        self._known = WeakTensorKeyDictionary()
        self._leaves = WeakTensorKeyDictionary()
        self._neutral = WeakTensorKeyDictionary()
        self._written: set[int] = set()
        self._storages: list[object] = []

    # What the network is made of

    def add_leaf(self, tensor: Tensor) -> None:
        """A parameter or buffer, whose channels are named when it is first used."""
        self._leaves[tensor] = None

    def leaf_layout(self, tensor: Tensor) -> Layout:
        """The layout that a parameter or buffer has come to; empty when it was never used."""
        return self._known.get(tensor) or ()

    def fix_remaining(self, why: str) -> None:
        """Hold whatever still exists in place: it leaves the network."""
        for tensor, layout in list(self._known.items()):
            if tensor not in self._leaves:
                self.channels.fix_all(layout, why)

    def hold(self, tensors: Iterable[Tensor], why: str) -> None:
        for tensor in tensors:
            self.channels.fix_all(self._layout(tensor), why)

    # What it does

    def observe(self, operation: Any, args: Sequence[Any], kwargs: Arguments, result: Any) -> None:
        """Follow one operation that has just been performed."""
        schema = operation._schema
        name: str = schema.name.split("::")[1]
        bound: Arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        bound["result"] = result
        outputs = _tensors(result)
        writes = bool(schema.is_mutable)
        if not outputs and not writes:
            return
        if name in _CONSTANT and bound.get("generator") is None:
            for tensor in outputs:
                self._make_neutral(tensor)
            return
        inputs = _tensors([value for key, value in bound.items() if key != "result"])
        if not any(self._tracked(tensor) for tensor in inputs):
            even = torch.Tag.pointwise in operation.tags or name in _EVEN
            self._untracked(inputs, outputs, writes, even)
            return
        rule = self._rule(operation, name, writes)
        found = None if rule is None else rule(bound, f"'{name.strip('_')}'")
        if found is None:
            self.hold(inputs, f"'{name.strip('_')}' is an operation whose effect on channels is not known")
            for tensor in inputs if writes else ():
                self._known[tensor] = ()
            return
        layouts: Sequence[Layout] = found if isinstance(found, list) else [found] * len(outputs)
        for tensor, layout in zip(outputs, layouts, strict=False):
            if layout and tensor not in self._known and tensor not in self._leaves:
                self._known[tensor] = layout

    def _rule(self, operation: Any, name: str, writes: bool) -> Callable[[Arguments, str], Any] | None:
        if torch.Tag.out in operation.tags:
            return None
        if name in _FILLS or name in _SAME:
            return self._same
        if torch.Tag.pointwise in operation.tags or name in _ELEMENTWISE:
            return self._in_place if writes else self._pointwise
        if name in _REDUCTIONS:
            return self._reduction
        if name in _BATCH_NORMS:
            return self._batch_norm
        if any(name.startswith(pool) for pool in _POOLS):
            return self._pool
        if name.startswith("_scaled_dot_product"):
            return self._attention
        if writes:
            return None
        return getattr(self, f"_op_{name.lstrip('_')}", None)

    def _untracked(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], writes: bool, even: bool) -> None:
        """Nothing moves here; but constants stay constants only while they are filled evenly and as a whole."""
        neutral = even and all(self._is_neutral(tensor) for tensor in inputs)
        if writes:
            for tensor in inputs:
                whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
                if not (neutral and whole):
                    self._spoil(tensor)
        elif neutral and inputs:
            for tensor in outputs:
                self._make_neutral(tensor)

    # Tensors

    def _tracked(self, tensor: Tensor) -> bool:
        return tensor in self._leaves or bool(self._known.get(tensor))

    def _layout(self, tensor: Tensor) -> Layout:
        known = self._known.get(tensor)
        if known is None and tensor in self._leaves:
            known = tuple(self.channels.fresh(dim, size) for dim, size in enumerate(tensor.shape) if size > 1)
            self._known[tensor] = known
        return known or ()

    def _pristine(self, tensor: Tensor) -> bool:
        return tensor in self._leaves and self._known.get(tensor) is None

    def _operand(self, tensor: Tensor) -> Operand:
        return Operand(self._layout(tensor), tuple(tensor.shape), self._is_neutral(tensor))

    def _make_neutral(self, tensor: Tensor) -> None:
        self._neutral[tensor] = None
        self._storages.append(tensor.untyped_storage())

    def _is_neutral(self, tensor: Tensor) -> bool:
        return tensor in self._neutral and _storage_key(tensor) not in self._written

    def _spoil(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        self._written.add(_storage_key(tensor))

    # Element by element

    def _pointwise(self, a: Arguments, why: str) -> Layout:
        operands = [self._operand(tensor) for tensor in _tensors([v for k, v in a.items() if k != "result"])]
        return self.layouts.combined(operands, tuple(_tensors(a["result"])[0].shape), _meeting(why))

    def _in_place(self, a: Arguments, why: str) -> Layout | None:
        """The tensor written to cannot take on channels that it has not: there may be views of it."""
        if not isinstance(a.get("self"), Tensor):
            return None
        target: Tensor = a["self"]
        own = self._layout(target)
        if not own:
            self._spoil(target)
        operands = [Operand(own, tuple(target.shape))]
        operands += [self._operand(v) for k, v in a.items() if k not in ("self", "result") and isinstance(v, Tensor)]
        held = {dim for factor in own for dim in factor.dims}
        for factor in self.layouts.combined(operands, tuple(target.shape), _meeting(why)):
            self.channels.fix(factor, [dim for dim in factor.dims if dim not in held], why)
        return own

    def _same(self, a: Arguments, why: str) -> Layout:
        return self._layout(a["self"])

    def _softmax(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        dim = a["dim"] % max(x.dim(), 1)
        for factor in self._layout(x):
            if dim in factor.dims:
                self.channels.fix(factor, [d for d in factor.dims if d != dim], why)
        return self._layout(x)

    _op_softmax = _op_log_softmax = _softmax

    def _op_glu(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        dim, half = a["dim"] % x.dim(), x.shape[a["dim"]] // 2
        shape = tuple(a["result"].shape)
        halves = [
            Operand(self.layouts.gathered(self._layout(x), dim, piece), shape)
            for piece in (slice(0, half), slice(half, 2 * half))
        ]
        return self.layouts.combined(halves, shape, why)

    # Structure

    def _view(self, a: Arguments, why: str) -> Layout:
        return self.layouts.viewed(self._layout(a["self"]), tuple(a["self"].shape), tuple(a["result"].shape), why)

    _op_view = _op_unsafe_view = _op_reshape = _op_view_copy = _op_reshape_alias = _op_squeeze = _op_unsqueeze = _view

    def _op_permute(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        order = [dim % x.dim() for dim in a["dims"]]
        return self.layouts.renamed(self._layout(x), order.index)

    def _op_transpose(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        swap = {a["dim0"] % x.dim(): a["dim1"] % x.dim()}
        swap |= {new: old for old, new in swap.items()}
        return self.layouts.renamed(self._layout(x), lambda dim: swap.get(dim, dim))

    def _op_t(self, a: Arguments, why: str) -> Layout:
        last = a["self"].dim() - 1
        return self.layouts.renamed(self._layout(a["self"]), lambda dim: last - dim)

    def _op_expand(self, a: Arguments, why: str) -> Layout:
        shift = a["result"].dim() - a["self"].dim()
        return self.layouts.renamed(self._layout(a["self"]), lambda dim: dim + shift)

    def _op_slice(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        piece = slice(a.get("start"), a.get("end"), a.get("step", 1))
        return self.layouts.gathered(self._layout(x), a.get("dim", 0) % x.dim(), piece)

    def _op_select(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        dim, index = a["dim"] % x.dim(), a["index"] % x.shape[a["dim"]]
        return _dropped(self.layouts.gathered(self._layout(x), dim, [index]), dim)

    def _op_unbind(self, a: Arguments, why: str) -> list[Layout]:
        x: Tensor = a["self"]
        dim = a["dim"] % x.dim()
        return [_dropped(self.layouts.gathered(self._layout(x), dim, [i]), dim) for i in range(x.shape[dim])]

    def _op_split(self, a: Arguments, why: str) -> list[Layout]:
        x: Tensor = a["self"]
        dim, first = a["dim"] % x.dim(), 0
        pieces: list[Layout] = []
        for part in a["result"]:
            last = first + part.shape[dim]
            pieces.append(self.layouts.gathered(self._layout(x), dim, slice(first, last)))
            first = last
        return pieces

    _op_split_with_sizes = _op_unsafe_split = _op_chunk = _op_unsafe_chunk = _op_split

    def _op_flip(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        layout = self._layout(x)
        for dim in a["dims"]:
            layout = self.layouts.gathered(layout, dim % x.dim(), slice(None, None, -1))
        return layout

    def _op_roll(self, a: Arguments, why: str) -> Layout | None:
        x: Tensor = a["self"]
        if not a["dims"]:
            return None
        layout = self._layout(x)
        for shift, dim in zip(a["shifts"], a["dims"], strict=True):
            layout = self.layouts.gathered(layout, dim % x.dim(), np.roll(np.arange(x.shape[dim]), shift))
        return layout

    def _op_repeat(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        shift = len(a["repeats"]) - x.dim()
        layout = self.layouts.renamed(self._layout(x), lambda dim: dim + shift)
        for dim, times in enumerate(a["repeats"]):
            layout = self.layouts.repeated(layout, dim, times)
        return layout

    def _op_cat(self, a: Arguments, why: str) -> Layout:
        tensors: list[Tensor] = [t for t in a["tensors"] if t.dim() > 1 or t.numel()]
        return self.layouts.joined([self._operand(t) for t in tensors], a["dim"] % tensors[0].dim(), _meeting(why))

    def _op_stack(self, a: Arguments, why: str) -> Layout:
        dim = a["dim"] % a["result"].dim()
        operands: list[Operand] = []
        for tensor in cast(list[Tensor], a["tensors"]):
            layout = self.layouts.renamed(self._layout(tensor), lambda d: d + (d >= dim))
            shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
            operands.append(Operand(layout, shape))
        return self.layouts.combined(operands, tuple(a["result"].shape), why)

    def _op_constant_pad_nd(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        layout, shape = self._layout(x), tuple(x.shape)
        for number, (before, after) in enumerate(zip(a["pad"][::2], a["pad"][1::2], strict=True)):
            dim = x.dim() - 1 - number
            if any(dim in factor.dims for factor in layout):
                if before < 0 or after < 0:
                    layout = self.layouts.gathered(layout, dim, slice(max(-before, 0), shape[dim] - max(-after, 0)))
                    shape = _resized(shape, dim, shape[dim] - max(-before, 0) - max(-after, 0))
                edges = [Operand((), _resized(shape, dim, max(size, 0)), neutral=True) for size in (before, after)]
                parts = [edges[0], Operand(layout, shape), edges[1]]
                layout = self.layouts.joined([part for part in parts if part.shape[dim]], dim, why)
            shape = _resized(shape, dim, int(a["result"].shape[dim]))
        return layout

    def _op_pixel_shuffle(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        factor: int = a["upscale_factor"]
        *lead, channels, height, width = x.shape
        n = len(lead)
        split = (*lead, channels // factor**2, factor, factor, height, width)
        layout = self.layouts.viewed(self._layout(x), tuple(x.shape), split, why)
        order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
        layout = self.layouts.renamed(layout, order.index)
        return self.layouts.viewed(layout, tuple(split[i] for i in order), tuple(a["result"].shape), why)

    def _op_channel_shuffle(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        groups: int = a["groups"]
        order = np.arange(x.shape[1]).reshape(groups, -1).T.reshape(-1)
        return self.layouts.gathered(self._layout(x), 1, order)

    _op_native_channel_shuffle = _op_channel_shuffle

    # Look-ups: what is looked up along a dimension must lie still there

    def _op_embedding(self, a: Arguments, why: str) -> Layout:
        weight: Tensor = a["weight"]
        if self._pristine(weight):
            self._known[weight] = (self.channels.fresh(1, weight.shape[1]),)
        self.hold([a["indices"]], why)
        layout = self._still(self._layout(weight), [0], why)
        shift = a["result"].dim() - 2
        return self.layouts.renamed(layout, lambda dim: dim + shift)

    def _op_index_select(self, a: Arguments, why: str) -> Layout:
        return self._still(self._layout(a["self"]), [a["dim"] % a["self"].dim()], why)

    def _op_index(self, a: Arguments, why: str) -> Layout | None:
        x: Tensor = a["self"]
        indexed = [dim for dim, index in enumerate(a["indices"]) if index is not None]
        if indexed != list(range(indexed[0], indexed[-1] + 1)):
            return None
        self.hold([a["indices"][dim] for dim in indexed], why)
        layout = self._still(self._layout(x), indexed, why)
        shift = a["result"].dim() - x.dim()
        return self.layouts.renamed(layout, lambda dim: dim if dim < indexed[0] else dim + shift)

    def _still(self, layout: Layout, dims: Sequence[int], why: str) -> Layout:
        """Hold factors along these dimensions in place; the others go on."""
        kept: list[Factor] = []
        for factor in layout:
            if set(factor.dims) & set(dims):
                self.channels.fix_all((factor,), why)
            else:
                kept.append(factor)
        return tuple(kept)

    # Sums over channels

    def _reduction(self, a: Arguments, why: str) -> Layout:
        x: Tensor = a["self"]
        dim = a.get("dim")
        chosen = [dim] if isinstance(dim, int) else list(cast(Sequence[int], dim or ()))
        reduced = {d % max(x.dim(), 1) for d in chosen} or set(range(x.dim()))
        kept: list[Factor] = []
        for factor in self._layout(x):
            inside = reduced & set(factor.dims)
            if not inside:
                kept.append(factor)
            else:
                self.channels.fix(factor, [d for d in factor.dims if d not in inside], why)
        if a.get("keepdim") or _tensors(a["result"])[0].dim() == x.dim():
            return tuple(kept)
        return self.layouts.renamed(tuple(kept), lambda d: d - sum(r < d for r in reduced))

    def _op_mm(self, a: Arguments, why: str) -> Layout:
        left, right = (a[key] for key in ("self", "mat2"))
        return self._product(self._operand(left), self._operand(right), why)

    _op_bmm = _op_mm

    def _op_addmm(self, a: Arguments, why: str) -> Layout:
        left, right = (a[key] for key in ("mat1", "mat2") if key in a)
        product = Operand(self._product(self._operand(left), self._operand(right), why), tuple(a["result"].shape))
        return self.layouts.combined([product, self._operand(a["self"])], product.shape, why)

    def _op_baddbmm(self, a: Arguments, why: str) -> Layout:
        return self._op_addmm({**a, "mat1": a["batch1"], "mat2": a["batch2"]}, why)

    def _op_linear(self, a: Arguments, why: str) -> Layout:
        x, weight, bias = a["input"], a["weight"], a.get("bias")
        rows = Operand(
            self.layouts.viewed(self._layout(x), tuple(x.shape), (x.numel() // x.shape[-1], x.shape[-1]), why),
            (x.numel() // x.shape[-1], x.shape[-1]),
        )
        columns = Operand(self.layouts.renamed(self._layout(weight), lambda d: 1 - d), tuple(weight.shape[::-1]))
        flat = Operand(self._product(rows, columns, why), (rows.shape[0], columns.shape[1]))
        if isinstance(bias, Tensor):
            flat = Operand(self.layouts.combined([flat, self._operand(bias)], flat.shape, why), flat.shape)
        return self.layouts.viewed(flat.layout, flat.shape, tuple(a["result"].shape), why)

    def _product(self, left: Operand, right: Operand, why: str) -> Layout:
        """Matrices, or stacks of them, are multiplied: what is summed over must agree."""
        ndim = len(left.shape)
        stacked, row, col = list(range(ndim - 2)), ndim - 2, ndim - 1
        result: list[Factor] = []
        summed: list[Operand] = []
        for operand, inner, outer in ((left, col, row), (right, row, col)):
            own: list[Factor] = []
            for factor in operand.layout:
                self.channels.fix(factor, [dim for dim in factor.dims if dim in stacked], why)
                if inner in factor.dims and outer in factor.dims:
                    self.channels.fix_all((factor,), why)
                elif inner in factor.dims:
                    own.append(factor.along([row if dim == inner else dim for dim in factor.dims]))
                elif outer in factor.dims:
                    result.append(factor)
            shape = (*operand.shape[: ndim - 2], operand.shape[inner])
            summed.append(Operand(tuple(own), shape))
        self.layouts.combined(summed, summed[0].shape, _meeting(why))
        return tuple(result)

    def _attention(self, a: Arguments, why: str) -> list[Layout] | None:
        query, key, value = (self._operand(a[name]) for name in ("query", "key", "value"))
        if query.shape[:2] != key.shape[:2] or key.shape[:2] != value.shape[:2]:
            return None
        if isinstance(a.get("attn_mask"), Tensor):
            self.hold([a["attn_mask"]], why)
        turned = Operand(self.layouts.renamed(key.layout, {0: 0, 1: 1, 2: 3, 3: 2}.__getitem__), _turned(key.shape))
        scores = self._product(query, turned, why)
        self.channels.fix_all(scores, why)
        weights = Operand((), (*query.shape[:3], key.shape[2]))
        return [self._product(weights, value, why)]

    # Layers

    def _op_convolution(self, a: Arguments, why: str) -> Layout | None:
        x, weight, bias = a["input"], a["weight"], a["bias"]
        groups, transposed = int(a["groups"]), bool(a["transposed"])
        where = self._still(self._layout(x), [d for d in range(x.dim()) if d != 1], why)
        where = tuple(factor for factor in where if factor.dims == (1,))
        entering = where[0] if where else None
        depthwise = groups > 1 and groups == x.shape[1]
        if depthwise:
            leaving = self._depthwise(entering, weight, a["result"].shape[1], why)
        elif groups == 1:
            leaving = self._dense(entering, weight, int(transposed), why)
        elif transposed:
            return None
        else:
            leaving = self._grouped(entering, weight, groups, why)
        if leaving is None:
            if isinstance(bias, Tensor):
                self.hold([bias], why)
            return ()
        layout = (leaving.along([1]),)
        if isinstance(bias, Tensor):
            flat = Operand((leaving.along([0]),), tuple(bias.shape))
            self.layouts.combined([flat, self._operand(bias)], flat.shape, why)
        return layout

    def _dense(self, entering: Factor | None, weight: Tensor, transposed: int, why: str) -> Factor | None:
        into, out = 1 - transposed, transposed
        if self._pristine(weight):
            self._known[weight] = tuple(self.channels.fresh(d, weight.shape[d]) for d in (0, 1) if weight.shape[d] > 1)
        layout = self._still(self._layout(weight), range(2, weight.dim()), why)
        inside = Operand(tuple(f.along([0]) for f in layout if f.dims == (into,)), (weight.shape[into],))
        self.channels.fix_all(tuple(factor for factor in layout if len(factor.dims) > 1), why)
        arriving = Operand(() if entering is None else (entering.along([0]),), inside.shape)
        self.layouts.combined([arriving, inside], inside.shape, _meeting(why))
        return next((factor for factor in layout if factor.dims == (out,)), None)

    def _depthwise(self, entering: Factor | None, weight: Tensor, outputs: int, why: str) -> Factor | None:
        """One filter or more for each channel: output c · k + r is copy r of channel c."""
        if self._pristine(weight):
            self._known[weight] = (self.channels.fresh(0, weight.shape[0]),)
        layout = self._still(self._layout(weight), range(1, weight.dim()), why)
        rows = Operand(tuple(factor for factor in layout if factor.dims == (0,)), (weight.shape[0],))
        if entering is None:
            self.channels.fix_all(rows.layout, why)
            return None
        inputs = entering.atoms.shape[0]
        times = weight.shape[0] // inputs
        copies = entering.along([0]).spread([0, 1], [inputs, times])
        each = Factor((0,), copies.atoms.reshape(-1), copies.copies.reshape(-1))
        self.layouts.combined([Operand((each,), rows.shape), rows], rows.shape, why)
        if outputs != weight.shape[0]:  # transposed: the filters of a channel lie along the second dimension
            copies = entering.along([0]).spread([0, 1], [inputs, outputs // inputs])
            return self.channels.register(Factor((0,), copies.atoms.reshape(-1), copies.copies.reshape(-1)))
        return self.channels.register(each)

    def _grouped(self, entering: Factor | None, weight: Tensor, groups: int, why: str) -> Factor | None:
        """Channels stay within their group; row o of the weight sees the channels of its own group only."""
        rows, width = weight.shape[:2]
        group = np.arange(rows) // (rows // groups)
        inside: Factor | None = None
        if entering is not None:
            split = Factor((0, 1), entering.atoms.reshape(groups, width), entering.copies.reshape(groups, width))
            self.channels.fix(split, [0], why)
            row = copy_label(np.arange(rows) % (rows // groups))
            inside = Factor((0, 1), split.atoms[group], split.copies[group] + row[:, None])
        if self._pristine(weight):
            out = self.channels.fresh(0, rows)
            self._known[weight] = (out,) if inside is None else (out, inside)
        else:
            layout = self._layout(weight)
            known = next((factor for factor in layout if factor.dims == (0, 1)), None)
            if known is not None and inside is not None:
                self.channels.unify(known, inside, why)
            else:
                self.channels.fix_all(tuple(factor for factor in layout if factor.dims != (0,)), why)
                if entering is not None:
                    self.channels.fix_all((entering,), why)
        out = next((factor for factor in self._layout(weight) if factor.dims == (0,)), None)
        if out is not None:
            halves = Factor((0, 1), out.atoms.reshape(groups, -1), out.copies.reshape(groups, -1))
            self.channels.fix(halves, [0], why)
        return out

    def _batch_norm(self, a: Arguments, why: str) -> list[Layout]:
        x: Tensor = a["input"]
        layout = self._still(self._layout(x), [d for d in range(x.dim()) if d != 1], why)
        inside = Operand(tuple(factor.along([0]) for factor in layout), (x.shape[1],))
        for tensor in _tensors([a.get(key) for key in ("weight", "bias", "running_mean", "running_var")]):
            self.layouts.combined([inside, self._operand(tensor)], inside.shape, _meeting(why))
        return [layout, *[inside.layout] * 4]

    def _op_native_layer_norm(self, a: Arguments, why: str) -> list[Layout]:
        x: Tensor = a["input"]
        first = x.dim() - len(a["normalized_shape"])
        layout = self._layout(x)
        for factor in layout:
            if max(factor.dims) >= first:
                self.channels.fix(factor, [d for d in factor.dims if d < first], why)
        operands = [Operand(layout, tuple(x.shape))]
        operands += [self._operand(t) for t in _tensors([a.get("weight"), a.get("bias")])]
        outside = tuple(factor for factor in layout if max(factor.dims) < first)
        return [self.layouts.combined(operands, tuple(x.shape), _meeting(why)), outside, outside]

    _op_fused_rms_norm = _op_rms_norm = _op_native_layer_norm

    def _op_native_group_norm(self, a: Arguments, why: str) -> list[Layout]:
        x: Tensor = a["input"]
        groups = int(a["group"])
        layout = self._still(self._layout(x), [d for d in range(x.dim()) if d != 1], why)
        for factor in layout:
            split = Factor((0, 1), factor.atoms.reshape(groups, -1), factor.copies.reshape(groups, -1))
            self.channels.fix(split, [0], why)
        inside = Operand(tuple(factor.along([0]) for factor in layout), (x.shape[1],))
        for tensor in _tensors([a.get("weight"), a.get("bias")]):
            self.layouts.combined([inside, self._operand(tensor)], inside.shape, _meeting(why))
        return [layout]

    def _pool(self, a: Arguments, why: str) -> Layout | None:
        x = next((a[key] for key in ("self", "input") if key in a), None)
        spatial = re.search(r"([123])d", why)
        if not isinstance(x, Tensor) or spatial is None:
            return None
        return self._still(self._layout(x), range(x.dim() - int(spatial[1]), x.dim()), why)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in cast(Sequence[Any], values) for tensor in _tensors(value)]
    return []


def _storage_key(tensor: Tensor) -> int:
    return int(cast(Any, tensor.untyped_storage())._cdata)


def _meeting(why: str) -> str:
    return f"{why} combines it with something that cannot be permuted"


def _dropped(layout: Layout, dim: int) -> Layout:
    return tuple(factor.along([d - (d > dim) for d in factor.dims]) for factor in layout)


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _turned(shape: Shape) -> Shape:
    return (*shape[:2], shape[3], shape[2])
