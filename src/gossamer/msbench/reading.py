"""Configs from files: YAML, JSON, or the dict that a Python script assigns. Nothing in a file is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError
from gossamer.recipe.nodes import MAX_DEPTH, MAX_NODES, check_tags, parse, plain_value
from gossamer.recipe.source import SourceProblems, open_source

_PYTHON = (".py",)
_DATA = (".yaml", ".yml", ".json")
_MAX_SHOWN = 60
_MAX_BITS = 1024


def read_config(path: Path) -> dict[str, Any]:
    """The config in a file. In a script, it is the first dict literal with the key `scheduler` or `asp`."""
    source = open_source(path)
    if path.suffix in _PYTHON:
        return _from_python(path, source.text)
    if path.suffix not in _DATA:
        raise GossamerError(f"{path}: expected a file that ends in {', '.join((*_DATA, *_PYTHON))}")
    problems = SourceProblems(source)
    root = parse(source, problems, what="config")
    check_tags(root, problems, known=frozenset())
    found = plain_value(root, problems)
    problems.raise_if_any()
    if not isinstance(found, Mapping):
        raise GossamerError(f"{path}: expected a mapping with the key 'scheduler', found {type(found).__name__}")
    return {str(key): value for key, value in cast(Mapping[Any, Any], found).items()}


def _from_python(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise GossamerError(f"{path}:{error.lineno}: is no Python: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise GossamerError(f"{path}: is nested too deeply") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and {"scheduler", "asp"} & {_key(key) for key in node.keys}:
            return _Script(path, text, _constants(tree)).value(node)
    raise GossamerError(f"{path}: holds no dict with the key 'scheduler'; assign one, as in sparsity_config = {{…}}")


def _key(key: ast.expr | None) -> object:
    return key.value if isinstance(key, ast.Constant) else None


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the script assigns once at its top, such as `max_iter = 10000`."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


class _Script:
    """Computes literals of a script; names stand for what the script assigns to them, up to a size when written out."""

    def __init__(self, path: Path, text: str, constants: Mapping[str, ast.expr]) -> None:
        self._path = path
        self._text = text
        self._constants = constants
        self._left = MAX_NODES
        self._depth = 0
        self._under_way: set[str] = set()

    def value(self, node: ast.expr) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._error(node, f"the config has more than {MAX_NODES:,} values when its names are written out")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(node, f"the config is nested more than {MAX_DEPTH} levels deep")
        found = self._value(node)
        self._depth -= 1
        return found

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Dict):
            return self._dict(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Set):
            return {self._hashable(item, "a name") for item in node.elts}
        if isinstance(node, ast.Name) and node.id in self._constants and node.id not in self._under_way:
            self._under_way.add(node.id)
            found = self.value(self._constants[node.id])
            self._under_way.remove(node.id)
            return found
        if isinstance(node, ast.Attribute) and _is_of_torch(node):
            return node.attr  # torch.nn.Linear in a whitelist
        try:
            found = ast.literal_eval(node)
        except (ValueError, TypeError):
            shown = self._shown(node)
            message = f"'{shown}' is code, and scripts are not executed; write the value there"
            raise self._error(node, message) from None
        if isinstance(found, int) and found.bit_length() > _MAX_BITS:
            raise self._error(node, f"expected a number, found one of {found.bit_length():,} bits")
        return found

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value)
            if key is not None:
                found[self._hashable(key, "a name as key")] = inner
            elif isinstance(inner, dict):  # {**others}
                found |= inner
        return found

    def _hashable(self, node: ast.expr, expected: str) -> Any:
        found = self.value(node)
        if isinstance(found, dict | list | set):
            raise self._error(node, f"expected {expected}, found '{self._shown(node)}'")
        return found

    def _shown(self, node: ast.expr) -> str:
        written = " ".join((ast.get_source_segment(self._text, node) or "").split())
        return written if len(written) <= _MAX_SHOWN else f"{written[: _MAX_SHOWN - 3]}..."

    def _error(self, node: ast.expr, message: str) -> GossamerError:
        return GossamerError(f"{self._path}:{node.lineno}: {message}")


def _is_of_torch(node: ast.Attribute) -> bool:
    """Whether it is a dotted name that begins with `torch` or `nn`."""
    part: ast.expr = node
    while isinstance(part, ast.Attribute):
        part = part.value
    return isinstance(part, ast.Name) and part.id in ("torch", "nn")
