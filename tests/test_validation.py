"""Pydantic's errors become problems with the keys of the document."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from gossamer.errors import FieldError, Problem, SparsityError
from gossamer.validation import problems_of


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Coco(Part):
    type: Literal["coco"]
    path: str


class Digits(Part):
    type: Literal["digits", "numbers"]
    count: int = Field(default=8, ge=1, lt=100)


class Loader(Part):
    data: Annotated[Coco | Digits, Field(discriminator="type")]
    names: str | list[str] = "all"
    sparsity: float | dict[float, list[str]] = 0.5
    mode: Literal["linear", "cubic"] = "cubic"
    extra: Coco | None = Field(default=None, alias="also")
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high < self.low:
            raise FieldError(f"{self.high:g} is below low", "high")
        return self

    @field_validator("names")
    @classmethod
    def _given(cls, names: str | list[str]) -> str | list[str]:
        if names == []:
            raise FieldError("is empty", 0)
        if names == "none":
            raise ValueError("expected some names")
        if names == "nan":
            raise SparsityError("scores are NaN")
        return names


DIGITS = {"type": "digits"}


def problems(reported: tuple[str, ...] = (), **document: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Loader.model_validate(document)
    return [str(problem) for problem in problems_of(caught.value, document, Loader, reported=reported)]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, "data: missing field"),
        ({"data": {}}, "data.type: missing field; choose one of coco, digits, numbers"),
        ({"data": {"type": "digit"}}, "data.type: unknown type 'digit'; nearest: 'digits'; choose one of coco, digits"),
        ({"data": {"type": "coco"}}, "data.path: missing field"),
        ({"data": {"type": "coco", "path": "a", "pth": 1}}, "data.pth: unknown field; nearest: 'path'"),
        ({"data": {"type": "digits", "path": 1}}, "data.path: unknown field"),
        ({"data": {"type": "digits", "count": 0}}, "data.count: expected a number >= 1, found 0"),
        ({"data": {"type": "digits", "count": 100}}, "data.count: expected a number < 100, found 100"),
        ({"data": {"type": "digits", "count": 1.5}}, "data.count: expected a whole number, found 1.5"),
        ({"data": 3}, "data: expected a mapping, found 3"),
        ({"data": DIGITS, "naems": 1}, "naems: unknown field; nearest: 'names'"),
        ({"data": DIGITS, "als": 1}, "als: unknown field; nearest: 'also'"),
        ({"data": DIGITS, "names": 3}, "names: expected text or a list, found 3"),
        ({"data": DIGITS, "names": ["a", ["b"]]}, "names[1]: expected text, found ['b']"),
        ({"data": DIGITS, "names": []}, "names[0]: is empty"),
        ({"data": DIGITS, "names": "none"}, "names: expected some names"),
        ({"data": DIGITS, "names": "nan"}, "names: scores are NaN"),
        ({"data": DIGITS, "sparsity": {0.8: [3]}}, "sparsity.0.8[0]: expected text, found 3"),
        ({"data": DIGITS, "mode": "cubik"}, "mode: expected 'linear' or 'cubic', found 'cubik'; nearest: 'cubic'"),
        ({"data": DIGITS, "also": {"type": "coco", "path": None}}, "also.path: expected text, found nothing"),
        ({"data": DIGITS, "low": 2}, "high: 1 is below low"),
        ({"data": DIGITS, "low": "x" * 100}, "low: expected a number, found 'xxx"),
    ],
)
def test_each_error_is_one_problem_at_its_key(document: dict[str, Any], expected: str) -> None:
    [problem] = problems(**document)
    assert problem.startswith(expected)
    assert len(problem) < 120


def test_fields_whose_problems_are_known_are_left_out() -> None:
    assert problems(reported=("data",), low=2, mode="x") == ["mode: expected 'linear' or 'cubic', found 'x'"]
    assert problems(reported=("high",), data=DIGITS, low=2) == []


def test_a_value_without_a_model_has_no_key() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(str | list[int])
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python([1, "x"])
    assert problems_of(caught.value, [1, "x"]) == [Problem("expected a whole number, found 'x'", (1,))]
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(3)
    assert problems_of(caught.value, 3) == [Problem("expected text or a list, found 3")]


def test_an_error_without_a_plain_message_keeps_that_of_pydantic() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Annotated[list[int], Field(max_length=1)]).validate_python([1, 2])
    assert "at most 1 item" in str(problems_of(caught.value, [1, 2])[0])
