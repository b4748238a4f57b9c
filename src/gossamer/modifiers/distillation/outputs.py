"""What a model returns: the tensors in it, by key, and the same thing with other tensors in their places.

Tensors, tuples, lists, named tuples, mappings and dataclasses are understood,
inside each other too. Knows nothing of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, cast

from torch import Tensor

from gossamer.errors import ModifierError, nearest

Key = str | int
Path = tuple[Key, ...]
"""The keys that lead to a tensor; empty when the output is one."""

_FIELD = "distill_output_keys"


def tensors(output: Any) -> dict[Path, Tensor]:
    """Every tensor in an output.

    >>> sorted(tensors({"a": Tensor([1.0]), "b": (Tensor([2.0]), None)}))
    [('a',), ('b', 0)]
    """
    if isinstance(output, Tensor):
        return {(): output}
    return {(key, *path): found for key, value in _entries(output).items() for path, found in tensors(value).items()}


def replaced(output: Any, new: Mapping[Path, Tensor]) -> Any:
    """The same output with these tensors in it; the original is left as it is."""
    if () in new:
        return new[()]
    inner: dict[Key, dict[Path, Tensor]] = {}
    for (key, *rest), tensor in new.items():
        inner.setdefault(key, {})[tuple(rest)] = tensor
    entries = _entries(output)
    changed = {key: replaced(entries[key], below) for key, below in inner.items()}
    return _rebuilt(output, changed) if changed else output


def pairs(student: Any, teacher: Any, keys: Sequence[Key] | None) -> dict[Path, tuple[Tensor, Tensor]]:
    """The outputs that a student learns, each with the teacher's; `ModifierError` when they do not go together.

    Without keys: all that both have, of floating point and with two or more dimensions.
    """
    found = _named(student, teacher, keys) if keys else _common(student, teacher)
    for path, (ours, theirs) in found.items():
        if ours.shape != theirs.shape:
            raise ModifierError(
                f"cannot distil {_told(path)}: the model's has shape {tuple(ours.shape)} and the teacher's "
                f"{tuple(theirs.shape)}; take a teacher with the same outputs, or name others in {_FIELD}",
                _FIELD,
            )
    return found


def _common(student: Any, teacher: Any) -> dict[Path, tuple[Tensor, Tensor]]:
    ours, theirs = _suitable(student), _suitable(teacher)
    if not ours:
        raise ModifierError(
            f"finds nothing to distil in the model's output ({_kind(student)}): it needs a tensor of floating point "
            "with two or more dimensions; return the logits too, and train on manager.loss(loss, outputs)"
        )
    if not theirs:
        raise ModifierError(f"finds nothing to learn from in the teacher's output ({_kind(teacher)})")
    if isinstance(student, Tensor):
        return {(): (student, next(iter(theirs.values())))}
    if isinstance(teacher, Tensor):
        # Some models, such as Inception, return less in evaluation mode.
        alike = [key for key, value in ours.items() if value.shape == teacher.shape]
        key = (alike or list(ours))[0]
        return {(key,): (ours[key], teacher)}
    both = [key for key in ours if key in theirs]
    if both:
        return {(key,): (ours[key], theirs[key]) for key in both}
    if isinstance(student, tuple | list) or isinstance(teacher, tuple | list):
        return {(key,): (ours[key], other) for key, other in zip(ours, theirs.values(), strict=False)}
    raise ModifierError(
        f"finds no output that both have: the model returns {_listed(student)} and the teacher {_listed(teacher)}"
    )


def _named(student: Any, teacher: Any, keys: Sequence[Key]) -> dict[Path, tuple[Tensor, Tensor]]:
    found: dict[Path, tuple[Tensor, Tensor]] = {}
    for key in keys:
        path, ours = _look_up(student, key, "model's")
        lone = isinstance(teacher, Tensor) and len(keys) == 1
        theirs = teacher if lone else _look_up(teacher, key, "teacher's")[1]
        for value, whose in ((ours, "model's"), (theirs, "teacher's")):
            if not _is_suitable(value):
                raise ModifierError(
                    f"{_FIELD}: '{key}' of the {whose} output is {_kind(value)}; expected a tensor of floating point "
                    "with two or more dimensions",
                    _FIELD,
                )
        found[path] = (ours, theirs)
    return found


def _look_up(output: Any, key: Key, whose: str) -> tuple[Path, Any]:
    if isinstance(output, Tensor) and key == 0:
        return (), output
    entries = _entries(output)
    if key in entries:
        return (key,), entries[key]
    if isinstance(key, int) and 0 <= key < len(entries):
        name = list(entries)[key]
        return (name,), entries[name]
    close = nearest(str(key), [str(name) for name in entries])
    raise ModifierError(f"{_FIELD}: the {whose} output has no '{key}': it is {_listed(output)}{close}", _FIELD)


def _suitable(output: Any) -> dict[Key, Tensor]:
    if isinstance(output, Tensor):
        return {0: output} if _is_suitable(output) else {}
    return {key: value for key, value in _entries(output).items() if _is_suitable(value)}


def _is_suitable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def _entries(output: Any) -> dict[Key, Any]:
    """What a container holds, by key; nothing for what is no container."""
    if isinstance(output, Mapping):
        return dict(cast(Mapping[Key, Any], output))
    if isinstance(output, tuple | list):
        items = list(cast(Sequence[Any], output))
        names: Sequence[str] | None = getattr(cast(Any, output), "_fields", None)
        return dict(zip(names, items, strict=True)) if names is not None else dict(enumerate(items))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return {}


def _rebuilt(output: Any, changed: Mapping[Key, Any]) -> Any:
    if isinstance(output, tuple):
        if hasattr(cast(Any, output), "_replace"):
            return cast(Any, output)._replace(**{str(name): value for name, value in changed.items()})
        items = [changed.get(index, value) for index, value in enumerate(cast(tuple[Any, ...], output))]
        return type(cast(Any, output))(items)
    keyed = isinstance(output, Mapping | list)
    other: Any = copy(output)
    for key, value in changed.items():
        if keyed:
            other[key] = value
        else:
            object.__setattr__(other, cast(str, key), value)
    return other


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
    return _listed(value) if _entries(value) else f"of type {type(value).__name__}"


def _listed(output: Any) -> str:
    entries = _entries(output)
    if isinstance(output, Tensor) or not entries:
        return _kind(output)
    return f"a {type(output).__name__} of " + ", ".join(repr(key) for key in entries)


def _told(path: Path) -> str:
    return "the output" if not path else "output " + ".".join(repr(key) for key in path)
