"""Which modules of a model are rounded, and by which scheme: names, classes and patterns from a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from gossamer.errors import ModifierError, nearest
from gossamer.model import named_modules, unwrap
from gossamer.model.regex import PREFIX, matching
from gossamer.quantization.schemes import Scheme, scheme_of


@dataclass(frozen=True)
class Rules:
    """What a recipe says about where to round."""

    base: Scheme
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """By class or module name: the scheme there, or None for floats."""
    ignore: Sequence[str] = ()
    """Classes, module names and `re:` patterns that compute in floats, with all that is inside."""
    submodules: Sequence[str] = ()
    """Module names; when there are any, everything outside computes in floats."""
    outputs_of: Sequence[str] = ()
    """Classes whose outputs are rounded too."""

    def schemes(self, module: nn.Module) -> dict[str, Scheme | None]:
        """By module name: the scheme, or None where nothing is rounded."""
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
            # A class first, then a module that holds this one, then the module itself.
            applying = [name for name in schemes if path in named[name] or _within(path, name)]
            hits = sorted(applying, key=lambda name: _closeness(name, path))
            scheme = schemes[hits[-1]] if hits else self.base
            if scheme is not None and type(layer).__name__ in self.outputs_of:
                scheme = replace(scheme, outputs=scheme.outputs or scheme.inputs)
            found[path] = scheme
        if all(scheme is None for path, scheme in found.items() if path or len(found) == 1):
            field = "scheme_overrides" if self.overrides and not self.ignore else "ignore"
            raise ModifierError("everything is left out, nothing would be quantized; leave less out", field)
        return found

    def idle(self, module: nn.Module) -> list[tuple[str, str]]:
        """Fields and names that match nothing in the model."""
        layers = list(named_modules(module))
        return [
            (field, name)
            for field, given in (("ignore", self.ignore), ("scheme_overrides", self.overrides))
            for name, paths in _named(given, layers, field).items()
            if not paths and not any(_within(path, name) for path, _ in layers)
        ]

    def _ignored(self, module: nn.Module) -> set[int]:
        """The ids of modules to leave out, for a module may have several names; never the model itself."""
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
                raise ModifierError(f"'{name}' is no module of the model{close}", "submodules")


def _within(path: str, name: str) -> bool:
    return bool(name) and (path == name or path.startswith(f"{name}."))


def _named(given: Iterable[str], layers: Sequence[tuple[str, nn.Module]], field: str) -> dict[str, set[str]]:
    """By class name, module name or pattern: the modules that it means."""
    return {
        name: set(matching(name, [path for path, _ in layers], field=field))
        if name.startswith(PREFIX)
        else {path for path, layer in layers if name in (path, type(layer).__name__)}
        for name in given
    }


def _closeness(name: str, path: str) -> int:
    """How closely a name means a module: by class 0, by pattern 1, by name the longer the closer."""
    if name.startswith(PREFIX):
        return 1
    return len(name) + 2 if _within(path, name) else 0
