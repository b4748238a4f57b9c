"""The tensors in a model's output, by key, and replacing them.

Outputs are tensors, tuples, lists, named tuples, mappings and dataclasses, also nested.
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
_SUITABLE = "a tensor of floating point with two or more dimensions and two or more classes"


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

    Without keys: all that both have, of floating point and with two or more dimensions and classes.
    """
    found = _named(student, teacher, keys) if keys else _common(student, teacher)
    for path, (ours, theirs) in found.items():
        if ours.shape != theirs.shape:
            raise ModifierError(
                f"cannot distil {_describe(path)}: the model's has shape {tuple(ours.shape)} and the teacher's "
                f"{tuple(theirs.shape)}; take a teacher with the same outputs, or name others in {_FIELD}",
                _FIELD,
            )
    return found


def classes(logits: Tensor) -> int:
    """The dimension of classes: the last, or the second of four or more, as in `(batch, classes, height, width)`."""
    return 1 if logits.dim() >= 4 else -1


def _common(student: Any, teacher: Any) -> dict[Path, tuple[Tensor, Tensor]]:
    ours, theirs = _suitable(student), _suitable(teacher)
    for output, suitable, whose in ((student, ours, "model's"), (teacher, theirs, "teacher's")):
        if not suitable:
            raise ModifierError(
                f"finds nothing to distil in the {whose} output ({_kind(output)}): it needs {_SUITABLE}; return the "
                f"logits too, and train on manager.loss(loss, outputs){_one_class(output)}"
            )
    if isinstance(student, Tensor):
        alike = [value for value in theirs.values() if value.shape == student.shape] or list(theirs.values())
        if len(alike) == 1:
            return {(): (student, alike[0])}
    elif isinstance(teacher, Tensor):
        # Some models, such as Inception, return less in evaluation mode.
        key = next((key for key, value in ours.items() if value.shape == teacher.shape), next(iter(ours)))
        return {(key,): (ours[key], teacher)}
    elif both := [key for key in ours if key in theirs]:
        return {(key,): (ours[key], theirs[key]) for key in both}
    elif len(ours) == len(theirs) and (isinstance(student, tuple | list) or isinstance(teacher, tuple | list)):
        return {(key,): (ours[key], other) for key, other in zip(ours, theirs.values(), strict=True)}
    raise ModifierError(
        f"cannot tell which outputs go together: the model returns {_listed(student)} and the teacher "
        f"{_listed(teacher)}; name those to learn in {_FIELD}",
        _FIELD,
    )


def _named(student: Any, teacher: Any, keys: Sequence[Key]) -> dict[Path, tuple[Tensor, Tensor]]:
    found: dict[Path, tuple[Tensor, Tensor]] = {}
    for key in keys:
        # A tensor that stands alone needs no key when the other side has it.
        alone = len(keys) == 1 and isinstance(student, Tensor) != isinstance(teacher, Tensor)
        path, ours = ((), student) if alone and isinstance(student, Tensor) else _look_up(student, key, "model's")
        theirs = teacher if alone and isinstance(teacher, Tensor) else _look_up(teacher, key, "teacher's")[1]
        for value, whose in ((ours, "model's"), (theirs, "teacher's")):
            if not _is_suitable(value):
                raise ModifierError(
                    f"'{key}' of the {whose} output is {_kind(value)}; expected {_SUITABLE}{_one_class(value)}",
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
    raise ModifierError(f"the {whose} output has no '{key}': it is {_listed(output)}{close}", _FIELD)


def _suitable(output: Any) -> dict[Key, Tensor]:
    if isinstance(output, Tensor):
        return {0: output} if _is_suitable(output) else {}
    return {key: value for key, value in _entries(output).items() if _is_suitable(value)}


def _is_suitable(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return False
    return value.shape[classes(value)] != 1


def _one_class(output: Any) -> str:
    """The way out for a single logit, whose softmax is 1 whatever it is."""
    single = any(value.dim() >= 2 and value.shape[classes(value)] == 1 for value in tensors(output).values())
    return "; for a single logit return two, (0, logit), or use PerLayerDistillationModifier" if single else ""


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


def _describe(path: Path) -> str:
    return "the output" if not path else "output " + ".".join(repr(key) for key in path)
