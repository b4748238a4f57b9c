"""Configs from files: YAML, JSON, or the dict that a Python script assigns. Nothing in a file is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gossamer.errors import GossamerError
from gossamer.recipe.nodes import check_tags, compose
from gossamer.recipe.source import Problems, open_source
from gossamer.recipe.values import unevaluated

_PYTHON = (".py",)
_DATA = (".yaml", ".yml", ".json")


def read_config(path: Path) -> dict[str, Any]:
    """The config in a file. In a script, it is the first dict literal with the key `scheduler` or `asp`."""
    source = open_source(path)
    if path.suffix in _PYTHON:
        return _from_python(path, source.text)
    if path.suffix not in _DATA:
        raise GossamerError(f"{path}: expected a file that ends in {', '.join((*_DATA, *_PYTHON))}")
    problems = Problems(source)
    root = compose(source, problems, what="config")
    check_tags(root, problems, known=frozenset())
    found = unevaluated(root, problems)
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
            return _literal(path, node, _constants(tree))
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


def _literal(path: Path, node: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    if isinstance(node, ast.Dict):
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = _literal(path, value, constants)
            if key is not None:
                name = _literal(path, key, constants)
                if isinstance(name, dict | list | set):
                    raise GossamerError(f"{path}:{key.lineno}: expected a name as key, found '{ast.unparse(key)}'")
                found[name] = inner
            elif isinstance(inner, dict):  # {**others}
                found |= inner
        return found
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(path, item, constants) for item in node.elts]
    if isinstance(node, ast.Name) and node.id in constants:
        return _literal(path, constants[node.id], {k: v for k, v in constants.items() if k != node.id})
    if isinstance(node, ast.Attribute) and re.fullmatch(r"(torch|nn)(\.\w+)+", ast.unparse(node)):
        return node.attr  # torch.nn.Linear in a whitelist
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise GossamerError(
            f"{path}:{node.lineno}: '{ast.unparse(node)}' is code, and scripts are not executed; write the value there"
        ) from None
