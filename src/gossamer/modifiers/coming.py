"""Modifiers that recipes may contain and that a later part of Gossamer runs.

They are read and checked in full, so that such a recipe loads, shows and
plots; attaching one to a model says which part will bring it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from gossamer.modifiers.base import Epoch, Modifier, register


@register
class QuantizationModifier(Modifier):
    """Quantization-aware training from an epoch on."""

    family: ClassVar[str] = "quantization"
    unavailable: ClassVar[str | None] = "quantization-aware training comes with Gossamer's `create` part"
    epoch_fields: ClassVar[tuple[str, ...]] = (
        "start_epoch",
        "end_epoch",
        "disable_quantization_observer_epoch",
        "freeze_bn_stats_epoch",
    )

    scheme: str | dict[str, Any] | None = None
    scheme_overrides: dict[str, Any] | None = None
    ignore: list[str] | None = None
    disable_quantization_observer_epoch: Epoch | None = None
    freeze_bn_stats_epoch: Epoch | None = None
    num_calibration_steps: int | None = None
    model_fuse_fn_name: str | None = None
    model_fuse_fn_kwargs: dict[str, Any] | None = None
    submodules: list[str] | None = None
    activation_bits: Annotated[int, Field(ge=2, le=16)] | None = None
    weight_bits: Annotated[int, Field(ge=2, le=16)] = 8
    reduce_range: bool = False
    quantize_embeddings: bool = True
    quantize_linear_activations: bool = True
    quantize_conv_activations: bool = True
    quantize_embedding_activations: bool = True
    exclude_module_types: list[str] | None = None
    custom_quantizable_module_types: list[str] | None = None
    exclude_batchnorm: bool = True
    activation_qconfig_kwargs: dict[str, Any] | None = None
    weight_qconfig_kwargs: dict[str, Any] | None = None
    tensorrt: bool = False

    @model_validator(mode="after")
    def _never_ends(self) -> Self:
        if self.end_epoch != -1:
            raise ValueError(
                f"end_epoch: quantization cannot be switched off again; expected -1, found {self.end_epoch:g}"
            )
        return self


_DISTILLATION = "distillation comes with Gossamer's `create` part"


@register
class DistillationModifier(Modifier):
    """Learn from a teacher's outputs as well as from the labels."""

    family: ClassVar[str] = "distillation"
    unavailable: ClassVar[str | None] = _DISTILLATION

    hardness: Annotated[float, Field(ge=0, le=1)] = 0.5
    temperature: Annotated[float, Field(gt=0)] = 2.0
    distill_output_keys: list[str | int] | None = None
    teacher_input_keys: list[str] | None = None


@register
class PerLayerDistillationModifier(Modifier):
    """Learn from a teacher's features layer by layer."""

    family: ClassVar[str] = "distillation"
    unavailable: ClassVar[str | None] = _DISTILLATION

    gain: Annotated[float, Field(ge=0)] = 1.5
    normalize: bool = True
    project_features: bool = True
    student_layer_names: list[str] | None = None
    teacher_layer_names: list[str] | None = None
    distill_output_keys: list[str | int] | None = None
    teacher_input_keys: list[str] | None = None
    epsilon: float | None = None
