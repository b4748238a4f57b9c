"""Documents as YAML text, and text-level mutations of YAML."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.values import TEXTS

INSERTED = [
    "!!python/object/apply:os.system ['x']", "!!binary aGk=", "!Unknown", "!GMPruningModifier", "!", "!!str", "!!float",
    "&a", "*a", "<<: *a", "<<: [*a, *a]", "&a [*a]", "? [x]", "- ", ": ", "---", "...", "%YAML 1.1", "# x", "|", ">",
    "\t", "'",
    '"', "{", "}", "[", "]", ",", "null", "~", ".nan", ".inf", "-.inf", "0x1F", "0o17", "1_000", "1e999", "12:30:45",
    "2026-01-01",
    "eval(1/0)", "eval(2**9999)", "eval(x)", "eval(__import__('os'))", "eval(min())", "eval((((1))))",
    "eval(-1e308*10)",
    "eval(int(1e300))", "eval(round(1.5, 99))", "x: eval(y)\ny: eval(x)", "!include x.yaml", "!include /etc/passwd",
    "\u2028", "\ufeff",
]  # fmt: skip


def yaml_text(value: Any) -> str:
    """YAML in flow style. A mapping with the one key `!Name` is a tagged value."""
    if isinstance(value, dict):
        if (
            len(value) == 1
            and isinstance(name := next(iter(value)), str)
            and name.startswith("!")
            and name[1:].isalnum()
        ):
            return f"{name} {yaml_text(value[name])}"
        return "{" + ", ".join(f"{yaml_text(key)}: {yaml_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_text(inner) for inner in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


def block_text(document: Any) -> str:
    """The same with the outermost mappings and lists of a document in block style."""
    if not isinstance(document, dict) or not document:
        return yaml_text(document)
    lines: list[str] = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            lines += [f"{yaml_text(key)}:", *(f"  - {yaml_text(item)}" for item in value)]
        else:
            lines.append(f"{yaml_text(key)}: {yaml_text(value)}")
    return "\n".join(lines) + "\n"


@st.composite
def mangled(draw: st.DrawFn, text: str) -> str:
    """A text with one to four changes to its lines and characters."""
    for _ in range(draw(st.integers(1, 4))):
        lines = text.split("\n")
        place = draw(st.integers(0, len(lines) - 1))
        at = draw(st.integers(0, len(text)))
        action = draw(
            st.sampled_from(["insert", "insert", "value", "drop", "twice", "indent", "dedent", "cut", "fence"])
        )
        if action == "insert":
            text = text[:at] + draw(st.sampled_from([*INSERTED, *TEXTS])) + text[at:]
            continue
        if action == "cut":
            text = text[:at] + text[at + draw(st.integers(1, 40)) :]
            continue
        if action == "drop":
            del lines[place]
        elif action == "twice":
            lines.insert(place, lines[place])
        elif action == "indent":
            lines[place] = draw(st.sampled_from([" ", "  ", "\t"])) + lines[place]
        elif action == "dedent":
            lines[place] = lines[place].removeprefix("  ")
        elif action == "fence":
            lines.insert(place, "---")
        else:
            key, colon, _ = lines[place].partition(":")
            lines[place] = f"{key}{colon} {draw(st.sampled_from([*INSERTED, *TEXTS]))}"
        text = "\n".join(lines)
    return text


FACTORS = [0, 0.1, 0.5, 0.9, 1.1, 2, 10, 1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-12, -1]
"""What numbers are multiplied by."""


@st.composite
def tweaked(draw: st.DrawFn, document: Any) -> Any:
    """A copy of a document in which one or two values are others of the same kind, so that many are accepted."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        places = [(holder, key) for holder in _holders(result) for key in _keys(holder) if _is_leaf(holder[key])]
        if not places:
            return result
        holder, key = draw(st.sampled_from(places))
        value = holder[key]
        if isinstance(value, bool):
            holder[key] = not value
        elif isinstance(value, int | float):
            changed = value * draw(st.sampled_from(FACTORS))
            holder[key] = int(changed) if isinstance(value, int) and draw(st.booleans()) else changed
        else:
            texts = [other[inner] for other, inner in places if isinstance(other[inner], str)]
            holder[key] = draw(st.sampled_from([*texts, "__ALL__", "re:.*", "re:(?!0).*", "filter", "2:4", "linear"]))
    return result


def _holders(value: Any) -> list[Any]:
    inner = [part for key in _keys(value) for part in _holders(value[key])]
    return [value, *inner] if isinstance(value, dict | list) else []


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder))) if isinstance(holder, list) else []


def _is_leaf(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
