"""The variables of a generated recipe: `RecipeVariables`, with a description of every field.

Each value is checked on its own; `choices.py` checks combinations.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from gossamer.errors import GossamerError, nearest
from gossamer.modifiers.pruning import MaskType
from gossamer.quantities import MAX_EPOCHS, MAX_FACTOR, MAX_RATE
from gossamer.validation import problems_of

TARGETS = ("vnni", "tensorrt")
_KEY = "recipe_variables"


def _number(value: Any) -> Any:
    """Any real number as a float; true and false are not numbers."""
    return float(value) if isinstance(value, Real) and value is not True and value is not False else value


Number = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]


class RecipeVariables(BaseModel):
    """The variables of a recipe. Given ones are kept; the others adapt to them.

    >>> RecipeVariables(num_epochs=30, target="vnni").sparsity
    0.8
    >>> RecipeVariables(sparsity=1.0)
    Traceback (most recent call last):
    gossamer.errors.GossamerError: recipe_variables.sparsity: expected a number < 1, found 1.0
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    num_epochs: Number = Field(default=20.0, gt=0, le=MAX_EPOCHS, description="The length of the recipe in epochs.")
    init_lr: Number = Field(default=1e-3, gt=0, le=MAX_RATE, description="The initial learning rate.")
    final_lr: Number = Field(default=1e-7, ge=0, le=MAX_RATE, description="The final learning rate.")
    target: str | None = Field(
        default=None,
        description="The target hardware: 'vnni' (CPUs with 8-bit vector instructions: blocks of "
        "four) or 'tensorrt' (NVIDIA GPUs: 2:4). It sets mask_type and the quantization scheme.",
    )
    sparsity: Number = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="The final share of zeros in the pruned layers, or of removed filters or channels.",
    )
    mask_type: MaskType = Field(
        default="unstructured",
        description="The shape of the zeros: 'unstructured', 'block4', [rows, cols], 'N:M' as in '2:4', 'filter', "
        "'channel'.",
    )
    global_sparsity: bool = Field(
        default=True,
        strict=True,
        description="Whether one threshold over all layers decides which weights are removed. Otherwise each layer has "
        "its own sparsity, by its size or by measurements on data.",
    )
    hardness: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description="With distillation: the weight of the teacher. 0 is the labels alone, 1 the teacher alone.",
    )
    temperature: Number = Field(
        default=2.0,
        ge=1e-3,
        le=MAX_FACTOR,
        description="With distillation: the temperature of the softmax that outputs are compared by.",
    )

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _error(error, given) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise _error(error, {name: value}) from None

    @field_validator("target")
    @classmethod
    def _known_target(cls, value: str | None) -> str | None:
        if value is not None and value not in TARGETS:
            raise ValueError(f"unknown target '{value}'{nearest(value, TARGETS)}; known: {', '.join(TARGETS)}")
        return value

    def given(self, name: str) -> bool:
        """Whether a variable was given and not left at its default.

        If all of them were given, as by `model_dump()`, those at their defaults count as left out.
        """
        fields = type(self).model_fields
        at_default = getattr(self, name) == fields[name].default
        return name in self.model_fields_set and not (at_default and self.model_fields_set == set(fields))


def as_variables(given: object) -> RecipeVariables:
    """The `recipe_variables` of a user, checked: None, a dict or a `RecipeVariables`."""
    if given is None:
        return RecipeVariables()
    if isinstance(given, RecipeVariables):
        return given
    if isinstance(given, Mapping):
        return RecipeVariables(**cast(Mapping[str, Any], given))
    raise GossamerError(f"expected a RecipeVariables or a dict, found {type(given).__name__}", _KEY)


def _error(error: ValidationError, given: Mapping[str, Any]) -> GossamerError:
    return GossamerError(problems_of(error, given, RecipeVariables, noun="variable"), _KEY)
