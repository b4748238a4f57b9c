"""The reference of the runner's configs: every key of the schema has its row, with its default."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from gossamer.runner.config.schema import AnySource, Config, Part, Source

PAGE = (Path(__file__).parents[2] / "docs" / "runner.md").read_text("utf-8")
SOURCES: tuple[type[Source], ...] = typing.get_args(typing.get_args(AnySource)[0])


def parts(part: type[Part] = Config, path: str = "") -> Iterator[tuple[str, type[Part]]]:
    """Each part of a config that is not chosen by its type, with its dotted name."""
    yield path or "The top", part
    for name, field in part.model_fields.items():
        alternatives = () if typing.get_origin(field.annotation) is list else typing.get_args(field.annotation)
        for kind in filter(_is_part, (field.annotation, *alternatives)):
            yield from parts(kind, f"{path}.{name}" if path else name)


def _is_part(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Part)


def rows(title: str) -> dict[str, str]:
    """The key and the default of each row in the tables of a section."""
    section = re.search(rf"^### `?{re.escape(title)}`?\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None, f"the page has no section '{title}'"
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section[1], re.MULTILINE))


def written(default: Any) -> str:
    """A default as the page has it; that of a whole part is in its own section."""
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, Part):
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, list):
        return f"`[{', '.join(map(str, default))}]`"
    if isinstance(default, dict):
        return "`{" + ", ".join(f"{key}: {value}" for key, value in default.items()) + "}`"
    return f"`{default}`"


@pytest.mark.parametrize(("title", "part"), [*parts(), ("dataset.train", Source)])
def test_every_key_has_a_row_with_its_default(title: str, part: type[Part]) -> None:
    wanted = {name: written(field.default) for name, field in part.model_fields.items()}
    if part is Source:
        wanted["type"] = "required"
    assert rows(title) == wanted


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_data_has_a_row_with_its_own_settings(source: type[Source]) -> None:
    (kind,) = typing.get_args(source.model_fields["type"].annotation)
    row = re.search(rf"^\| `{kind}` \| (?:classification|detection) \| (.*) \|$", PAGE, re.MULTILINE)
    assert row is not None, f"the page has no row for '{kind}'"
    own = {name: field for name, field in source.model_fields.items() if name not in Source.model_fields}
    for name, field in own.items():
        if name != "type":
            assert f"`{name}`" in row[1]
            if not field.is_required() and field.default is not None:
                assert f"`{name}` (`{field.default}`)" in row[1]
