"""Read the config of MSBench, or the arguments of ASP, from a file.

Files are YAML, JSON, or Python scripts that assign the config. Scripts are never run: literals and names of constants
are evaluated here, because `ast.literal_eval` has no names and no limits on size and depth.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError, Location, Problem, within
from gossamer.recipe.nodes import MAX_DEPTH, MAX_NODES, check_tags, parse, plain_value
from gossamer.recipe.source import SourceProblems, open_source

_SUFFIXES = (".yaml", ".yml", ".json", ".py")
_MAX_SHOWN = 60
_MAX_BITS = 1024


def read_config(path: Path) -> dict[str, Any]:
    """The config in a file. In a script, it is the first dict literal with the key `scheduler` or `asp`."""
    with within(location=Location(str(path))):
        if path.suffix not in _SUFFIXES:
            raise GossamerError(f"expected a file that ends in {', '.join(_SUFFIXES)}")
        source = open_source(path)
        if path.suffix == ".py":
            return _read_script(path, source.text)
        problems = SourceProblems(source)
        root = parse(source, problems, what="config")
        check_tags(root, problems, known=frozenset())
        config = plain_value(root, problems)
        problems.raise_if_any()
        if not isinstance(config, Mapping):
            raise GossamerError(f"expected a mapping with the key 'scheduler', found {type(config).__name__}")
        return {str(key): value for key, value in cast(Mapping[Any, Any], config).items()}


def _read_script(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        location = Location(str(path), error.lineno)
        raise GossamerError(Problem(f"not valid Python: {error.msg}", location=location)) from None
    except (RecursionError, MemoryError):
        raise GossamerError("nested too deeply") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if "scheduler" in keys or "asp" in keys:
                return _Script(path, text, _constants(tree)).value(node)
    raise GossamerError("no dict with the key 'scheduler'; assign one, as in sparsity_config = {…}")


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the script assigns at its top level, such as `max_iter = 10000`."""
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }


class _Script:
    """Evaluates literals of a script, with names of constants expanded, up to a size and a depth."""

    def __init__(self, path: Path, text: str, constants: Mapping[str, ast.expr]) -> None:
        self._path = path
        self._text = text
        self._constants = constants
        self._left = MAX_NODES
        self._depth = 0
        self._expanding: set[str] = set()

    def value(self, node: ast.expr) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error(node, f"the config has more than {MAX_NODES:,} values when its names are expanded")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(node, f"the config is nested more than {MAX_DEPTH} levels deep")
        value = self._value(node)
        self._depth -= 1
        return value

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Dict):
            return self._dict(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Set):
            return {self._hashable(item, "a name") for item in node.elts}
        if isinstance(node, ast.Name) and node.id in self._constants and node.id not in self._expanding:
            self._expanding.add(node.id)
            value = self.value(self._constants[node.id])
            self._expanding.remove(node.id)
            return value
        if isinstance(node, ast.Attribute) and _is_torch_name(node):
            return node.attr  # torch.nn.Linear in a whitelist
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError):
            message = f"'{self._shown(node)}' is code, and scripts are not executed"
            raise self._error(node, message, fix="write the value there") from None
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise self._error(node, f"expected a number, found one of {value.bit_length():,} bits")
        return value

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        entries: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value)
            if key is not None:
                entries[self._hashable(key, "a name as key")] = inner
            elif isinstance(inner, dict):  # {**others}
                entries |= inner
            else:
                raise self._error(value, f"expected a dict after '**', found '{self._shown(value)}'")
        return entries

    def _hashable(self, node: ast.expr, expected: str) -> Any:
        value = self.value(node)
        if isinstance(value, dict | list | set):
            raise self._error(node, f"expected {expected}, found '{self._shown(node)}'")
        return value

    def _shown(self, node: ast.expr) -> str:
        written = " ".join((ast.get_source_segment(self._text, node) or "").split())
        return written if len(written) <= _MAX_SHOWN else f"{written[: _MAX_SHOWN - 3]}..."

    def _error(self, node: ast.expr, message: str, fix: str = "") -> GossamerError:
        return GossamerError(Problem(message, location=Location(str(self._path), node.lineno), fix=fix))


def _is_torch_name(node: ast.Attribute) -> bool:
    """Whether it is a dotted name that begins with `torch` or `nn`."""
    part: ast.expr = node
    while isinstance(part, ast.Attribute):
        part = part.value
    return isinstance(part, ast.Name) and part.id in ("torch", "nn")
