"""Outputs of Transformers' models without Transformers: a mapping whose values are attributes and items by number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

import torch.utils._pytree as pytree

_MODULE = "transformers.modeling_outputs"


class ModelOutput(dict[str, Any]):
    """What a saved engine returns for a class of Transformers that is not installed.

    >>> output = ModelOutput(logits=1, hidden=2)
    >>> output.logits, output["hidden"], output[0], output.to_tuple()
    (1, 2, 1, (1, 2))
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the output has no '{name}', only {', '.join(self)}")

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """All values."""
        return tuple(self.values())


def _flatten(output: ModelOutput) -> tuple[list[Any], list[str]]:
    return list(output.values()), list(output)


def _unflatten(values: Any, names: Any) -> ModelOutput:
    return ModelOutput(zip(cast(Sequence[str], names), values, strict=True))


_NAME = "gossamer.runtime.ModelOutput"
pytree.register_pytree_node(ModelOutput, _flatten, _unflatten, serialized_type_name=_NAME)


def load_structure(text: str) -> Any:
    """The structure of outputs in a file, with `ModelOutput` for a class that is not known here.

    Of other libraries only `transformers.modeling_outputs` is imported, never a module that a file names: torch imports
    those that contexts with JSON objects name, so these are refused.
    """
    protocol, found = json.loads(text)
    return pytree.treespec_loads(json.dumps([protocol, _known(found)]))


def _known(entry: dict[str, Any]) -> dict[str, Any]:
    kind, context = entry["type"], entry["context"]
    if context is not None and (not isinstance(context, str) or "{" in context):
        raise ValueError(f"there is a {kind} in it")
    if isinstance(kind, str) and kind.startswith("transformers."):
        module, _, name = kind.rpartition(".")
        found = None
        if module == _MODULE:
            with suppress(ImportError):
                found = getattr(import_module(_MODULE), name, None)
        if not isinstance(found, type) or not issubclass(found, dict):
            names = json.loads(context or "null")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in cast(list[Any], names)):
                raise ValueError(f"'{kind}' has no names")
            kind = _NAME
    return {"type": kind, "context": context, "children_spec": [_known(child) for child in entry["children_spec"]]}
