"""What may be chosen about a recipe: `RecipeVariables`, with help text on every field.

The values are checked one by one here. Whether they go together depends on the
method and the target, and is seen to in `choices.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from gossamer.errors import GossamerError, nearest
from gossamer.modifiers.masked import MaskType
from gossamer.quantities import MAX_EPOCHS, MAX_FACTOR, MAX_RATE
from gossamer.recipe.wording import complaint_words, found_words

TARGETS = ("vnni", "tensorrt")


def _number(value: Any) -> Any:
    """Any real number as a float; true and false are none."""
    return float(value) if isinstance(value, Real) and value is not True and value is not False else value


Number = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]


class RecipeVariables(BaseModel):
    """The numbers of a recipe. Those that are left out adapt to each other; those that are given are kept to.

    >>> RecipeVariables(num_epochs=30, target="vnni").sparsity
    0.8
    >>> RecipeVariables(sparsity=1.0)
    Traceback (most recent call last):
    gossamer.errors.GossamerError: recipe_variables.sparsity: expected a number < 1, found 1.0
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, hide_input_in_errors=True)

    num_epochs: Number = Field(default=20.0, gt=0, le=MAX_EPOCHS, description="How many epochs the recipe takes.")
    init_lr: Number = Field(default=1e-3, gt=0, le=MAX_RATE, description="The learning rate at the beginning.")
    final_lr: Number = Field(default=1e-7, ge=0, le=MAX_RATE, description="The learning rate at the end.")
    target: str | None = Field(
        default=None,
        description="The hardware to make the model fast on: 'vnni' (CPUs with 8-bit vector instructions: blocks of "
        "four) or 'tensorrt' (NVIDIA GPUs: 2:4). It sets mask_type, and how the model is quantized.",
    )
    sparsity: Number = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="The share of zeros in the end, over all layers that take part; where whole filters or channels "
        "go, the share of those.",
    )
    mask_type: MaskType = Field(
        default="unstructured",
        description="The shape of the zeros: 'unstructured', 'block4', [rows, cols], 'N:M' as in '2:4', 'filter', "
        "'channel'.",
    )
    global_sparsity: bool = Field(
        default=True,
        strict=True,
        description="Whether one threshold over all layers says which weights go, so that layers which can spare more "
        "give more. Otherwise each layer has a share of its own, by its size or by what data says.",
    )
    hardness: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description="With distillation: how much the teacher counts. 0 is the labels alone, 1 the teacher alone.",
    )
    temperature: Number = Field(
        default=2.0,
        ge=1e-3,
        le=MAX_FACTOR,
        description="With distillation: how soft the outputs are made before they are compared.",
    )

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _reworded(error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise _reworded(error) from None

    @field_validator("target")
    @classmethod
    def _known_target(cls, value: str | None) -> str | None:
        if value is not None and value not in TARGETS:
            raise ValueError(f"unknown target '{value}'{nearest(value, TARGETS)}; known: {', '.join(TARGETS)}")
        return value

    def given(self, name: str) -> bool:
        """Whether a variable was given, rather than left at its default.

        Where all of them are given, as in a `model_dump()`, those at their defaults count as left there.
        """
        fields = type(self).model_fields
        at_default = getattr(self, name) == fields[name].default
        return name in self.model_fields_set and not (at_default and self.model_fields_set == set(fields))


def as_variables(given: object) -> RecipeVariables:
    """What a user passes as `recipe_variables`, checked: None, a dict or a `RecipeVariables`."""
    if given is None:
        return RecipeVariables()
    if isinstance(given, RecipeVariables):
        return given
    if isinstance(given, Mapping):
        entries = cast(Mapping[Any, Any], given)
        if wrong := [key for key in entries if not isinstance(key, str)]:
            raise GossamerError(f"recipe_variables: expected names of variables, found {wrong[0]!r}")
        return RecipeVariables(**entries)
    raise GossamerError(f"recipe_variables: expected a RecipeVariables or a dict, found {type(given).__name__}")


def _reworded(error: ValidationError) -> GossamerError:
    """All that is wrong, a sentence each."""
    found: dict[str, list[str]] = {}
    for details in error.errors(include_url=False):
        name = str(details["loc"][0]) if details["loc"] else ""
        if details["type"] == "extra_forbidden":
            close = nearest(name, RecipeVariables.model_fields) or f"; known: {', '.join(RecipeVariables.model_fields)}"
            found[name] = [f"recipe_variables: unknown variable '{name}'{close}"]
            continue
        expected, sentence = complaint_words(details)
        told = sentence or f"expected {expected}, found {found_words(details['input'])}"
        found.setdefault(name, []).append(f"recipe_variables.{name}: {told}")
    return GossamerError("\n".join(_joined(sentences) for sentences in found.values()))


def _joined(sentences: list[str]) -> str:
    """The complaints of a union's branches as one: `expected text or a list, found 3`."""
    head, tail = sentences[0].partition(": expected ")[0], sentences[0].rpartition(", found ")[2]
    if len(sentences) == 1 or not all(": expected " in sentence for sentence in sentences):
        return sentences[0]
    wanted = [s.partition(": expected ")[2].rpartition(", found ")[0] for s in sentences]
    return f"{head}: expected {' or '.join(dict.fromkeys(wanted))}, found {tail}"
