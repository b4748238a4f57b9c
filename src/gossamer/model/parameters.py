"""The parameters of a model, by the names that its author gave them.

Prefixes that wrappers (DDP, torch.compile, FSDP) put into names are removed, so that a recipe is the same with and
without them. Parameters are looked up by name at each use and never kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import Tensor, nn

from gossamer.errors import MAX_SUGGESTED, GossamerError, ModifierError, nearest
from gossamer.model.regex import PREFIX, PatternError, matching, problem_of
from gossamer.model.weights import Stored, by_norm, is_conv1d, layer_path, opaque, unprunable, weights_of, with_one_kept

ALL = "__ALL__"
ALL_PRUNABLE = "__ALL_PRUNABLE__"
DEPTHWISE = "__DEPTHWISE__"
KEYWORDS = (ALL_PRUNABLE, ALL)
KEYWORDS_TO_EXCLUDE = (*KEYWORDS, DEPTHWISE)
_KEYWORD = re.compile(r"__\w+__")
TIED = "shared with an embedding, of which each row is a token"
"""Why the weight of a layer is left dense that could be pruned."""
_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
_COMPILED, _SHARDED = "_orig_mod", "_fsdp_wrapped_module"
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "AveragedModel"})
_NORMALISATION = re.compile(r"(Norm|LRN|NormOnly)(\d?d)?$")


@dataclass(frozen=True)
class Matches:
    """What the names of a recipe match: parameters to act on, and those skipped with the reason."""

    names: list[str]
    skipped: dict[str, str]
    exact: set[str]
    """Those of `names` that were named exactly."""


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own model inside DDP, DataParallel, torch.compile or an average of it."""
    while True:
        children = module._modules  # pyright: ignore[reportPrivateUsage]  # hasattr would take ten times as long
        if _COMPILED in children:
            inner = children[_COMPILED]
        elif _SHARDED in children:
            inner = children[_SHARDED]
        elif type(module).__name__ in _WRAPPERS:
            inner = module.module
        else:
            return module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def expects_every_gradient(module: nn.Module) -> bool:
    """Whether DDP is around the model and fails when a parameter drops out of the backward pass."""
    return type(module).__name__ == "DistributedDataParallel" and not getattr(module, "find_unused_parameters", False)


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module by each of its names, wrappers inside the model left out."""
    owner = unwrap(module)
    yield "", owner
    for name, child in owner.named_children():
        if "." in name:
            raise GossamerError(f"model: the module name '{name}' has a dot, which torch reads as a path; rename it")
        for path, inner in named_modules(child):
            yield f"{name}.{path}" if path else name, inner


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, by its clean name; a tied weight under its first name."""
    seen: set[int] = set()
    for name, parameter in _all_names(module):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def _all_names(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, owner in named_modules(module):
        for leaf, parameter in owner.named_parameters(recurse=False):
            yield f"{path}.{leaf}" if path else leaf, parameter


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, by its clean name."""
    seen: set[int] = set()
    for path, owner in named_modules(module):
        held = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        for leaf, tensor in held:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{leaf}" if path else leaf, tensor


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under the names that `torch.func.functional_call` takes, shared ones under each.

    A module that is reached twice counts once, for what is replaced twice is not put back; with `tie_weights=False`.
    """
    return [
        (_joined(path, leaf), tensor)
        for path, owner in cast(Iterator[tuple[str, nn.Module]], module.named_modules())
        for leaf, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    ]


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name that a parameter goes by, to its first name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in _all_names(module)}


def get_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter that has this clean name now."""
    path, _, leaf = name.rpartition(".")
    return cast(nn.Parameter, getattr(get_module(module, path), leaf))


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer that has this clean name now."""
    return get_parameter(module, name)


def get_module(module: nn.Module, name: str) -> nn.Module:
    """The module that has this clean name now; the model itself for an empty one."""
    owner = unwrap(module)
    if name:
        for part in name.split("."):
            children = owner._modules  # pyright: ignore[reportPrivateUsage]  # quicker than Module.__getattr__
            child = children[part] if part in children else getattr(owner, part)
            owner = unwrap(cast(nn.Module, child))
    return owner


def has_parameter(module: nn.Module, name: str) -> bool:
    """Whether the parameter is in the model now; the layer that held it may have been taken out."""
    try:
        get_parameter(module, name)
    except AttributeError:
        return False
    return True


def owner_of(module: nn.Module, name: str) -> nn.Module:
    """The layer that a parameter belongs to, also where a parametrization of the layer holds it."""
    return get_module(module, layer_path(name))


def is_transposed(module: nn.Module, name: str) -> bool:
    """Whether the weight is stored `(in, out, …)`: transposed convolutions, and the Conv1D of Transformers."""
    owner = owner_of(module, name)
    transposed = isinstance(owner, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return transposed or is_conv1d(owner)


def match(module: nn.Module, patterns: str | Sequence[str], *, field: str = "params", strict: bool = True) -> list[str]:
    """Clean names of the parameters that the patterns of a recipe match, in the model's order.

    Raises `ModifierError` with the nearest names when a name or pattern matches nothing, or, when not
    `strict`, when none of them does.
    """
    return _Resolver(module, field, strict).resolve([patterns] if isinstance(patterns, str) else list(patterns))[0]


def match_prunable(
    module: nn.Module, patterns: str | Sequence[str], *, field: str = "params", strict: bool = True
) -> Matches:
    """As `match`, for pruning: biases and normalisation that are not named exactly are left alone and listed."""
    items = [patterns] if isinstance(patterns, str) else list(patterns)
    names, exact = _Resolver(module, field, strict).resolve(items)
    dense, kept = left_dense(module), list[str]()
    skipped: dict[str, str] = dict(dense) if ALL_PRUNABLE in items else {}
    for name in names:
        impossible = unprunable(get_parameter(module, name))
        if impossible and name in exact:
            raise ModifierError(f"'{name}' cannot be pruned: {impossible}", field)
        reason = impossible or (None if name in exact else dense.get(name) or _not_for_pruning(module, name))
        if reason is None:
            kept.append(name)
        else:
            skipped[name] = reason
    if not kept:
        shown = patterns if isinstance(patterns, str) else ", ".join(patterns)
        if (name := next((name for name in skipped if name in (*dense, *prunable(module))), None)) is not None:
            raise ModifierError(f"nothing that {shown!r} matches can be pruned; '{name}': {skipped[name]}", field)
        raise ModifierError(
            f"{shown!r} matches only biases and normalisation parameters, which are pruned "
            f"only when named exactly; name a weight{nearest('weight', prunable(module))}",
            field,
        )
    return Matches(kept, skipped, exact)


def problem_of_name(item: str, keywords: Sequence[str]) -> str | None:
    """What is wrong with a name of a recipe, whatever the model is: an unknown keyword, or an unusable pattern."""
    if item.startswith(PREFIX):
        return problem_of(item)
    if _KEYWORD.fullmatch(item) and item not in keywords:
        shown = item if len(item) <= 80 else f"{item[:77]}..."
        close = nearest(item, keywords) or f"; known: {', '.join(keywords)}"
        return f"unknown keyword '{shown}'{close}"
    return None


def hint(item: str, keywords: Sequence[str]) -> str:
    """What an item that names nothing was probably meant to be, ready to append to a message: a keyword or a pattern.

    >>> hint("all", [ALL]), hint("*.weight", [ALL])
    ("; nearest: '__ALL__'", "; a pattern begins with 're:'")
    """
    keyword = f"__{item.strip('_').upper()}__"
    if item.startswith("_") or item.isupper() or keyword in keywords:
        return nearest(keyword, keywords)
    is_pattern = re.search(r"[*?+\[\]()|^$\\]", item) and not item.startswith(PREFIX)
    return "; a pattern begins with 're:'" if is_pattern else ""


def match_excluded(module: nn.Module, patterns: str | Sequence[str], *, field: str) -> tuple[list[str], list[str]]:
    """Names of the parameters to leave out, and those of the `re:` patterns that match nothing.

    `__DEPTHWISE__` stands for the depth-wise convolutions. A plain name that is not there is an error.
    """
    weights = {name: layer_path(name) for name in prunable(module)}
    found: list[str] = []
    idle: list[str] = []
    for item in [patterns] if isinstance(patterns, str) else patterns:
        if item == DEPTHWISE:
            found += [name for name in weights if is_depthwise(module, name)]
            continue
        layers = [name for name, layer in weights.items() if layer in list(_without_prefixes(item))]
        try:
            found += layers or match(module, item, field=field)
        except PatternError:
            raise
        except ModifierError:
            if not item.startswith(PREFIX):
                close = hint(item, KEYWORDS_TO_EXCLUDE) or nearest(item, weights.values())
                raise ModifierError(f"the model has no layer '{item}'{close}", field) from None
            idle.append(item)
    return list(dict.fromkeys(found)), idle


def is_depthwise(module: nn.Module, name: str) -> bool:
    """Whether the weight belongs to a convolution in which each output channel sees one input channel of several."""
    owner = owner_of(module, name)
    groups, channels = getattr(owner, "groups", 1), getattr(owner, "in_channels", 0)
    return groups > 1 and groups == channels


def prunable(module: nn.Module) -> list[str]:
    """Weights of convolutions, linear layers and attention projections that can be pruned, by clean name.

    Where a layer computes its weight (spectral norm, weight norm, `torch.nn.utils.prune`), the name is that of the
    tensor whose zeros are zeros of the weight.
    """
    return [name for name, reason in _weights(module).items() if reason is None]


def left_dense(module: nn.Module) -> dict[str, str]:
    """The weights of such layers that cannot be pruned, by clean name, each with the reason and a fix."""
    return {name: reason for name, reason in _weights(module).items() if reason is not None}


def _weights(module: nn.Module) -> dict[str, str | None]:
    known, found = first_names(module), dict[str, str | None]()
    for path, layer in named_modules(module):
        if (reason := opaque(layer)) is not None:
            found[_joined(path, "weight")] = reason
            continue
        for weight in weights_of(layer):
            alias = _joined(path, weight.leaf)
            if alias not in known:
                found[alias] = "it is a buffer or a plain attribute; make it an nn.Parameter to prune it"
            else:
                name, parameter = known[alias], get_parameter(module, known[alias])
                # A weight on the meta device can be planned for; who prunes it asks `unprunable`.
                found.setdefault(name, weight.reason or (None if parameter.is_meta else unprunable(parameter)))
    return found


def stored_weight(module: nn.Module, name: str) -> Stored | None:
    """How a layer computes the weight that this parameter is stored for; None for other parameters."""
    path = layer_path(name)
    leaf = name[len(path) + 1 :] if path else name
    return next((weight for weight in weights_of(get_module(module, path)) if weight.leaf == leaf), None)


def weight_of(module: nn.Module, name: str) -> Tensor:
    """The values of a parameter, without gradient; zero where a mask of `torch.nn.utils.prune` says so."""
    values = get_parameter(module, name).detach()
    mask = torch_mask(module, name)
    return values if mask is None else values * mask


def bias_beside(module: nn.Module, name: str) -> str | None:
    """The name that the bias of a weight's layer has, if it has one; `in_proj_weight` goes with `in_proj_bias`."""
    path, source = layer_path(name), stored_weight(module, name)
    leaf = name.rpartition(".")[2] if source is None else source.weight
    return _joined(path, f"{leaf.removesuffix('weight')}bias") if leaf.endswith("weight") else None


def torch_mask(module: nn.Module, name: str) -> Tensor | None:
    """What `torch.nn.utils.prune` multiplies the parameter by; None where it does not."""
    weight = stored_weight(module, name) if name.endswith("_orig") else None
    return None if weight is None or weight.mask is None else cast(Tensor, getattr(owner_of(module, name), weight.mask))


def embedding_tables(module: nn.Module) -> list[str]:
    """The first names of the weights of all embeddings, also of those that linear layers share."""
    known = first_names(module)
    layers = [path for path, layer in named_modules(module) if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    return list(dict.fromkeys(known[name] for path in layers if (name := _joined(path, "weight")) in known))


def with_norms_kept(module: nn.Module, name: str, scores: Tensor) -> Tensor:
    """Scores of a weight, with one for each norm that its layer divides by made infinite, so that none becomes zero."""
    weight = stored_weight(module, name)
    return scores if weight is None or weight.norm is None else with_one_kept(scores, weight.norm)


def empties_a_norm(module: nn.Module, name: str, keep: Tensor) -> bool:
    """Whether a mask leaves nothing of a row that the layer divides by the norm of."""
    weight = stored_weight(module, name)
    return weight is not None and weight.norm is not None and not bool(by_norm(keep, weight.norm).any(1).all())


def nothing_to_prune(module: nn.Module, purpose: str = "to prune") -> str:
    """The message for a model without a weight that could be pruned."""
    dense = left_dense(module)
    if not dense:
        return f"the model has no convolution or linear layer {purpose}{_exported_hint(module)}"
    name, reason = next(iter(dense.items()))
    return f"no weight of the model can be pruned; '{name}': {reason}"


def _joined(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf


def _not_for_pruning(module: nn.Module, name: str) -> str | None:
    layer, leaf = owner_of(module, name), name.removeprefix(f"{layer_path(name)}.")
    if any(leaf in weight.unpruned for weight in weights_of(layer)):
        return "the magnitudes of weight norm: a zero there would empty a whole row of the weight"
    if get_parameter(module, name).dim() < 2:
        return "fewer than two dimensions; name it exactly to prune it"
    if _NORMALISATION.search(type(layer).__name__):
        return "a normalisation parameter; name it exactly to prune it"
    return None


class _Resolver:
    """Turns one recipe field into parameter names."""

    def __init__(self, module: nn.Module, field: str, strict: bool) -> None:
        self.strict = strict
        self.module = unwrap(module)
        self.field = field
        self.names = [name for name, _ in named_parameters(module)]
        self.canonical = first_names(self.module)

    @cached_property
    def computed(self) -> dict[str, str]:
        """The names of weights that layers compute, such as `fc.weight`, to those of the parameters to prune."""
        return {
            _joined(path, weight.weight): _joined(path, weight.leaf)
            for path, layer in named_modules(self.module)
            for weight in weights_of(layer)
            if weight.leaf != weight.weight
        }

    def resolve(self, patterns: Sequence[str]) -> tuple[list[str], set[str]]:
        """All matched names in the model's order, and those that were named exactly."""
        found: set[str] = set()
        exact: set[str] = set()
        missed: list[str] = []
        for item in patterns:
            names, is_exact = self._one(item)
            if not names:
                missed.append(item)
            found.update(names)
            if is_exact:
                exact.update(names)
        if missed and (self.strict or not found):
            raise ModifierError([self._nothing(item) for item in missed[:MAX_SUGGESTED]], self.field)
        if not found:
            raise ModifierError(f"no parameter is named; list names, or write {ALL_PRUNABLE}", self.field)
        return [name for name in self.names if name in found], exact

    def _one(self, item: str) -> tuple[list[str], bool]:
        if item == ALL:
            return self.names, False
        if item == ALL_PRUNABLE:
            return prunable(self.module), False
        if item.startswith(PREFIX):
            return self._pattern(item), False
        for name in _without_prefixes(item):
            if name in self.canonical:
                return [self.canonical[name]], True
            if f"{name}.weight" in self.canonical:
                return [self.canonical[f"{name}.weight"]], True
            weight = self._computed(name)
            if weight is not None and weight not in left_dense(self.module):
                return [self.canonical[weight]], True
        return [], False

    def _computed(self, name: str) -> str | None:
        """The parameter to prune for a weight that its layer computes."""
        return self.computed.get(name) or self.computed.get(f"{name}.weight")

    def _pattern(self, item: str) -> list[str]:
        computed = {alias: self.canonical[name] for alias, name in self.computed.items()}
        targets = computed | self.canonical
        names = {targets[alias] for alias in matching(item, list(targets), field=self.field)}
        if not names and item.removeprefix(PREFIX).startswith(_PREFIXES):
            return self._pattern(PREFIX + next(_without_prefixes(item.removeprefix(PREFIX), only_shortened=True)))
        return [name for name in self.names if name in names]

    def _nothing(self, item: str) -> str:
        """Why an item names no parameter, with the nearest that there are."""
        if item == ALL_PRUNABLE:
            return nothing_to_prune(self.module)
        dense = left_dense(self.module)
        for weight in map(self._computed, _without_prefixes(item)):
            if weight in dense:
                return f"'{item}' cannot be pruned: {dense[weight]}"
        if "/" in item:
            return f"'{item}' is a TensorFlow-style name, and this is the PyTorch engine; PyTorch names have dots"
        plain = re.sub(r"[\\^$*+?()\[\]|]", "", item.removeprefix(PREFIX))
        close = hint(item, KEYWORDS) or nearest(plain, [*self.names, *prunable(self.module)])
        return f"'{item}' matches none of {len(self.names)} parameters{close}"


def _without_prefixes(name: str, only_shortened: bool = False) -> Iterator[str]:
    """The name, then the name without each wrapper prefix in turn."""
    if not only_shortened:
        yield name
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
        yield name


def _exported_hint(module: nn.Module) -> str:
    made = any(kind.__module__.startswith("torch.export") for kind in type(module).__mro__)
    return "; give the module that torch.export.export was called with" if made else ""
