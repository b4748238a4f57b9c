"""Every number that a recipe or a config can hold has limits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Interval, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gossamer.create.schemas import RecipeVariables
from gossamer.modifiers.base import Modifier, registered
from gossamer.msbench import _classes  # pyright: ignore[reportPrivateUsage]
from gossamer.quantities import Values
from gossamer.runner.config import schema

CHECKED_ELSEWHERE = {
    "mask_type": "parse_pattern", "mask_structure": "parse_pattern", "param_groups": "the optimizer's groups",
    "lr_kwargs": "by key",
    "val": "Values", "init_val": "Values", "final_val": "Values", "distill_output_keys": "the model's outputs",
}  # fmt: skip
MODELS: list[type[BaseModel]] = [
    *(kind for kind in registered().values() if kind.__module__.startswith("gossamer.")),
    *(kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, schema.Part)),
    RecipeVariables,
]


def unbounded(annotation: Any, bounded: bool = False) -> Iterator[Any]:
    """The numbers inside an annotation that have no upper limit."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from unbounded(inner, bounded or any(is_limit(entry) for entry in metadata))
    elif annotation in (int, float) and not bounded:
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from unbounded(inner)


def is_limit(entry: Any) -> bool:
    if isinstance(entry, FieldInfo):
        return any(is_limit(inner) for inner in entry.metadata)
    return isinstance(entry, Le | Lt) or (isinstance(entry, Interval) and (entry.le or entry.lt) is not None)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_number_of_a_schema_has_an_upper_limit(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        bounded = any(is_limit(entry) for entry in field.metadata)
        if name not in CHECKED_ELSEWHERE:
            assert not list(unbounded(field.annotation, bounded)), f"{model.__name__}.{name}"


@pytest.mark.parametrize(
    "kind", [kind for part in _classes.values() for kind in part.values()], ids=lambda k: k.__name__
)
def test_every_number_of_an_msbench_config_has_an_upper_limit(kind: type) -> None:
    if kind.__module__.startswith("gossamer."):
        hints = get_type_hints(kind.__init__, include_extras=True)
        for name, parameter in inspect.signature(kind.__init__).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name in hints:
                assert not list(unbounded(hints[name])), f"{kind.__name__}.{name}"


def test_a_number_without_a_limit_is_found() -> None:
    class Plain(Modifier):
        strength: float = 1.0
        values: list[int]

    assert [list(unbounded(Plain.model_fields[name].annotation)) for name in ("strength", "values")] == [[float], [int]]
    assert get_origin(Values) is Annotated
