"""Quantization schemes: bit widths, symmetry, the named schemes, and the rules that assign schemes to modules.

A scheme describes the hardware that will run the model, not the machine that trains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from gossamer.errors import Key, ModifierError, nearest
from gossamer.model import named_modules, unwrap
from gossamer.model.name_patterns import PREFIX, matching

BITS = range(2, 17)


@dataclass(frozen=True)
class Numbers:
    """The integer format of a tensor.

    >>> Numbers(8, symmetric=False).bounds, Numbers(8, symmetric=True).bounds
    ((0, 255), (-127, 127))
    >>> Numbers(8, symmetric=True, reduced=True).bounds
    (-63, 63)
    """

    bits: int = 8
    symmetric: bool = True
    reduced: bool = False
    """Use one bit less, so that 8-bit CPU instructions do not saturate when they add products."""
    by_channel: bool = True
    """Weights only: one scale per output channel."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest integer; symmetric formats have the same magnitude on both sides."""
        if not self.symmetric:
            return 0, 2 ** (self.bits - self.reduced) - 1
        most = 2 ** (self.bits - 1 - self.reduced) - 1
        return -most, most


@dataclass(frozen=True)
class Scheme:
    """The integer formats of a layer's tensors; None leaves a tensor in floating point."""

    inputs: Numbers | None
    weights: Numbers | None
    outputs: Numbers | None = None
    before_curves: bool = True
    """Whether the output of a convolution is rounded before a floating-point activation function such as SiLU."""


_ACTIVATIONS = Numbers(symmetric=False)

SCHEMES: Mapping[str, Scheme] = {
    "default": Scheme(_ACTIVATIONS, Numbers(reduced=True)),
    "vnni": Scheme(_ACTIVATIONS, Numbers()),
    "tensorrt": Scheme(Numbers(), Numbers()),
}
"""`default` is correct on every CPU; `vnni` needs instructions that do not saturate; `tensorrt` is symmetric."""
_ALIASES = {"deepsparse": "default"}


def scheme_of(given: Any, field: str, base: Scheme = SCHEMES["default"]) -> Scheme:
    """A scheme from its name or from a mapping of `input_activations`, `weights` and `output_activations`.

    Keys that a mapping omits are those of `base`; null turns rounding off.
    """
    if given is None:
        return base
    if isinstance(given, str):
        name = _ALIASES.get(given.lower(), given.lower())
        if name not in SCHEMES:
            known = [*SCHEMES, *_ALIASES]
            close = nearest(given, known) or f"; known: {', '.join(known)}"
            raise ModifierError(f"unknown scheme '{given}'{close}", field)
        return replace(SCHEMES[name], before_curves=base.before_curves)
    if not isinstance(given, Mapping):
        raise ModifierError(f"expected the name of a scheme or a mapping, found {given!r}", field)
    parts = {"input_activations": "inputs", "weights": "weights", "output_activations": "outputs"}
    defaults = {"inputs": _ACTIVATIONS, "weights": SCHEMES["default"].weights, "outputs": _ACTIVATIONS}
    entries = cast(Mapping[str, Any], given)
    scheme = SCHEMES.get(str(entries.get("target_hardware")), base)
    for key, value in entries.items():
        if key == "target_hardware":
            continue
        if key not in parts:
            raise ModifierError(f"unknown key '{key}'{nearest(str(key), parts)}; {_EXPECTED}", field)
        numbers = _numbers(value, (field, key), getattr(scheme, parts[key]) or defaults[parts[key]])
        scheme = replace(scheme, **{parts[key]: numbers})
    return scheme


_EXPECTED = "expected input_activations, weights or output_activations, each with num_bits and symmetric, or null"


def _numbers(given: Any, path: Key, base: Numbers | None) -> Numbers | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ModifierError(f"expected a mapping with num_bits and symmetric, or null, found {given!r}", *path)
    numbers = base or Numbers()
    entries = cast(Mapping[str, Any], given)
    for key, value in entries.items():
        match key:
            case "num_bits" if type(value) is int and value in BITS:
                numbers = replace(numbers, bits=value)
            case "symmetric" if isinstance(value, bool):
                # Weights are always symmetric, so that zeros stay zeros and batch norm can be folded exactly.
                numbers = replace(numbers, symmetric=value or path[-1] == "weights")
            case "reduce_range" if isinstance(value, bool):
                numbers = replace(numbers, reduced=value)
            case "strategy" if value in ("channel", "tensor"):
                numbers = replace(numbers, by_channel=value == "channel")
            case "kwargs" | "dtype":
                continue
            case "num_bits":
                raise ModifierError(f"expected a whole number from 2 to 16, found {value!r}", *path, key)
            case "strategy":
                raise ModifierError(f"expected channel or tensor, found {value!r}", *path, key)
            case "symmetric" | "reduce_range":
                raise ModifierError(f"expected true or false, found {value!r}", *path, key)
            case _:
                known = ("num_bits", "symmetric", "strategy", "reduce_range")
                raise ModifierError(f"unknown key '{key}'{nearest(str(key), known)}", *path)
    if "reduce_range" not in entries:
        numbers = replace(numbers, reduced=numbers.reduced and numbers.bits == 8)
    if numbers.bounds[1] < 1:
        raise ModifierError(f"not supported with {numbers.bits} bits; remove it", *path, "reduce_range")
    return numbers


@dataclass(frozen=True)
class Rules:
    """Assigns a scheme to each module, from the fields of a `QuantizationModifier`."""

    base: Scheme
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """By class or module name: the scheme, or None for floating point."""
    ignore: Sequence[str] = ()
    """Classes, module names and `re:` patterns that stay in floating point, with their submodules."""
    submodules: Sequence[str] = ()
    """Module names; if not empty, all other modules stay in floating point."""
    outputs_of: Sequence[str] = ()
    """Classes whose outputs are also rounded."""

    def schemes(self, module: nn.Module) -> dict[str, Scheme | None]:
        """By module name: the scheme, or None for floating point."""
        self._check(module)
        schemes = {
            name: None if given is None else scheme_of(given, "scheme_overrides", self.base)
            for name, given in self.overrides.items()
        }
        found: dict[str, Scheme | None] = {}
        ignored = self._ignored(module)
        layers = list(named_modules(module))
        named = _named(schemes, layers, "scheme_overrides")
        for path, layer in layers:
            outside = bool(self.submodules) and not any(_within(path, name) for name in self.submodules)
            if outside or id(layer) in ignored:
                found[path] = None
                continue
            # Precedence: class name, pattern, then module names, the longest last.
            applying = [name for name in schemes if path in named[name] or _within(path, name)]
            hits = sorted(applying, key=lambda name: _closeness(name, path))
            scheme = schemes[hits[-1]] if hits else self.base
            if scheme is not None and type(layer).__name__ in self.outputs_of:
                scheme = replace(scheme, outputs=scheme.outputs or scheme.inputs)
            found[path] = scheme
        if all(scheme is None for path, scheme in found.items() if path or len(found) == 1):
            field = "scheme_overrides" if self.overrides and not self.ignore else "ignore"
            raise ModifierError("excludes every module, so that nothing would be quantized; exclude fewer", field)
        return found

    def idle(self, module: nn.Module) -> list[tuple[str, str]]:
        """(field, name) pairs that match no module of the model."""
        layers = list(named_modules(module))
        return [
            (field, name)
            for field, given in (("ignore", self.ignore), ("scheme_overrides", self.overrides))
            for name, paths in _named(given, layers, field).items()
            if not paths and not any(_within(path, name) for path, _ in layers)
        ]

    def _ignored(self, module: nn.Module) -> set[int]:
        """The ids of ignored modules (a module may have several names); never the model itself."""
        paths: set[str] = set()
        found: set[int] = set()
        every = list(cast(Iterable[tuple[str, nn.Module]], unwrap(module).named_modules(remove_duplicate=False)))
        named = set[str]().union(*_named(self.ignore, every, "ignore").values())
        for path, layer in every:
            if path and (path.rpartition(".")[0] in paths or path in named):
                paths.add(path)
                found.add(id(layer))
        return found

    def _check(self, module: nn.Module) -> None:
        names = [path for path, _ in named_modules(module) if path]
        for name in self.submodules:
            if name not in names:
                close = nearest(name, names) or ""
                raise ModifierError(f"the model has no module '{name}'{close}", "submodules")


def _within(path: str, name: str) -> bool:
    return bool(name) and (path == name or path.startswith(f"{name}."))


def _named(given: Iterable[str], layers: Sequence[tuple[str, nn.Module]], field: str) -> dict[str, set[str]]:
    """By class name, module name or pattern: the paths of matching modules."""
    return {
        name: set(matching(name, [path for path, _ in layers], field=field))
        if name.startswith(PREFIX)
        else {path for path, layer in layers if name in (path, type(layer).__name__)}
        for name in given
    }


def _closeness(name: str, path: str) -> int:
    """The precedence of an override: 0 for a class, 1 for a pattern, more for longer module names."""
    if name.startswith(PREFIX):
        return 1
    return len(name) + 2 if _within(path, name) else 0
