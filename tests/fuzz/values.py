"""Malformed values, and mutations of a sound document made of dicts, lists and scalars."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.harness import CANARY

NUMBERS: list[Any] = [
    0, 1, -1, -5, 2**31, 2**53 + 1, 2**63, -(2**63), 2**200,
    0.0, -0.0, 0.5, 1.5, 1e-320, -1e-320, 1e-9, 1e9, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS: list[str] = [
    "", " ", "x", "1", "-1", "1e999", "nan", "true", "null", "~", "min", "\0", "\ud800", "é", "a" * 10_000,
    "..", "../../../x", "/", "/tmp/x", "~/x", "C:\\x", "con", "a/b", "file:///etc/passwd", "%s%n", "{0}", "${HOME}",
    "os:system", "os.system", f"{CANARY}:touch", f"{CANARY}.touch", "builtins:exec",
    "re:(.*)*x", "re:(a+)+$", "re:" + "(" * 500 + ")" * 500, "re:(", "re:", "__ALL__", "__ALL_PRUNABLE__",
    "!!python/object/apply:os.system [x]", "*a", "&a [*a]", "<<", "__class__", "__proto__", "weight", "0.weight",
]  # fmt: skip
SCALARS: list[Any] = [None, True, False, *NUMBERS, *TEXTS]


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


hostile: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(SCALARS),
    st.sampled_from([[], {}, [None], [[]], {"": None}, {1: 2}, {None: 1}, {"x": {"y": []}}]),
    st.sampled_from([10, 150]).map(nested),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.sampled_from(SCALARS), max_size=4),
)


@st.composite
def mutated(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any] = hostile, most: int = 3) -> Any:
    """A copy of a document in which one to `most` values are replaced, removed, repeated, moved or wrapped.

    Tensors and other leaves are replaced as wholes; give `values` that know them to mutate what is inside.
    """
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        holders = [holder for holder in _holders(result) if len(holder)]
        if not holders:
            return draw(values)
        holder = draw(st.sampled_from(holders))
        key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "rename", "move", "wrap"]))
        if action == "replace":
            holder[key] = copy.deepcopy(draw(values))
        elif action == "remove":
            del holder[key]
        elif action == "wrap":
            holder[key] = [holder[key]]
        elif action == "move":
            source = draw(st.sampled_from(holders))
            taken = draw(st.sampled_from(list(source.values()) if isinstance(source, dict) else source))
            holder[key] = copy.deepcopy(taken)
        elif isinstance(holder, dict):
            name = draw(st.sampled_from([*TEXTS[:20], "x", 1, None]))
            holder[name] = holder.pop(key) if action == "rename" else copy.deepcopy(draw(values))
        else:
            holder.insert(key, copy.deepcopy(holder[key] if action == "rename" else draw(values)))
    return result


def _holders(value: Any) -> list[Any]:
    """Every dict and list inside a value, itself included."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            found.append(value)
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return found
