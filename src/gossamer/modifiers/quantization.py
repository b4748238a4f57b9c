"""Quantization-aware training: from an epoch on, the model emulates integer arithmetic (`gossamer.quantization`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from gossamer.errors import FieldError, GossamerError, Key, ModifierError, Problem
from gossamer.model import named_modules, prunable
from gossamer.model.tracing.tracer import batch_arguments
from gossamer.model.weights import check_values
from gossamer.modifiers.base import Modifier, Run, to_step
from gossamer.modifiers.state import Item, Spec, StateField, StateLayout
from gossamer.quantities import CountOrZero, Epoch
from gossamer.quantization import Rules, Scheme, scheme_of
from gossamer.quantization.schemes import BITS

if TYPE_CHECKING:
    from gossamer.quantization import Emulation

Bits = Annotated[int, Field(ge=BITS.start, le=BITS[-1])]
_SPARSE = 0.05
"""From this share of zeros on, a weight counts as sparse."""
_FLOATS = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, nn.EmbeddingBag)

logger = logging.getLogger("gossamer")


class QuantizationModifier(Modifier):
    """Quantization-aware training from `start_epoch` on; it has no end."""

    family: ClassVar[str] = "quantization"
    epoch_fields: ClassVar[tuple[str, ...]] = (
        "start_epoch",
        "end_epoch",
        "disable_quantization_observer_epoch",
        "freeze_bn_stats_epoch",
    )

    scheme: str | dict[str, Any] | None = None
    """`default` (= `deepsparse`), `vnni`, `tensorrt`, or a mapping."""
    scheme_overrides: dict[str, Any] | None = None
    ignore: list[str] | None = None
    disable_quantization_observer_epoch: Epoch | None = None
    freeze_bn_stats_epoch: Epoch | None = None
    num_calibration_steps: CountOrZero | None = None
    model_fuse_fn_name: str | None = None
    model_fuse_fn_kwargs: dict[str, Any] | None = None
    submodules: list[str] | None = None
    activation_bits: Bits | None = None
    weight_bits: Bits = 8
    reduce_range: bool | None = None
    """Whether weights use one bit less; None: as the scheme says."""
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
    def _consistent(self) -> Self:
        if self.end_epoch != -1:
            raise FieldError(
                f"quantization cannot be turned off again; expected -1, found {self.end_epoch:g}", "end_epoch"
            )
        if self.tensorrt and self.scheme not in (None, "tensorrt"):
            raise FieldError(f"true contradicts scheme {self.scheme!r}; remove one of the two", "tensorrt")
        if self.scheme is not None:
            older = {"activation_bits", "weight_bits"} & self.model_fields_set
            if older and isinstance(self.scheme, dict):
                field = min(older)
                raise FieldError("the scheme has its own num_bits; remove one of the two", field)
        for field in ("disable_quantization_observer_epoch", "freeze_bn_stats_epoch"):
            epoch = getattr(self, field)
            if epoch is not None and -1 < epoch < self.start_epoch:
                raise FieldError(f"{epoch:g} is before start_epoch {self.start_epoch:g}", field)
        try:
            _ = self.rules
        except ModifierError as error:
            raise FieldError(error.problems) from None
        return self

    @property
    def updates_every(self) -> float | None:
        return -1.0

    @property
    def rules(self) -> Rules:
        """The schemes by class and module name; raises `ModifierError` for an invalid scheme."""
        base = self._base()
        for given in (self.scheme_overrides or {}).values():
            scheme_of(given, "scheme_overrides", base)
        ignore = [*(self.ignore or []), *(self.exclude_module_types or [])]
        if not self.quantize_embeddings:
            ignore.append("Embedding")
        return Rules(
            base,
            self.scheme_overrides or {},
            ignore,
            self.submodules or [],
            self.custom_quantizable_module_types or [],
        )

    def _base(self) -> Scheme:
        scheme = scheme_of("tensorrt" if self.tensorrt else self.scheme, "scheme")
        inputs, weights = scheme.inputs, scheme.weights
        if inputs is not None and self.activation_bits is not None:
            inputs = replace(inputs, bits=self.activation_bits)
        if weights is not None and "weight_bits" in self.model_fields_set:
            weights = replace(weights, bits=self.weight_bits, reduced=weights.reduced and self.weight_bits == 8)
        if weights is not None and self.reduce_range is not None:
            weights = replace(weights, reduced=self.reduce_range)
            if weights.bounds[1] < 1:
                raise ModifierError(
                    f"not supported with weight_bits {weights.bits}; remove one of the two", "reduce_range"
                )
        return replace(scheme, inputs=inputs, weights=weights, before_curves=self.quantize_conv_activations)

    def warnings(self) -> list[Problem]:
        idle = {
            "model_fuse_fn_name": "no fusing is needed",
            "model_fuse_fn_kwargs": "no fusing is needed",
            "activation_qconfig_kwargs": "use scheme",
            "weight_qconfig_kwargs": "use scheme",
        }
        problems = [
            Problem(f"has no effect in Gossamer: {why}", (field,))
            for field, why in idle.items()
            if getattr(self, field) is not None
        ]
        schemes: dict[Key, Any] = {("scheme",): self.scheme}
        schemes |= {("scheme_overrides", name): scheme for name, scheme in (self.scheme_overrides or {}).items()}
        message = "false has no effect in Gossamer: weights are symmetric, so that 0 is 0"
        asymmetric = [key for key, scheme in schemes.items() if _asymmetric_weights(scheme)]
        problems += [Problem(message, (*key, "weights", "symmetric")) for key in asymmetric]
        return super().warnings() + problems

    def bind(self, run: Run) -> list[str]:
        rules = self.rules
        try:
            check_values(run.module, "model")
        except GossamerError as error:
            raise ModifierError(error.problems) from None
        for path, layer in named_modules(run.module):
            if isinstance(layer, torch.jit.ScriptModule):
                run.log.skip(path, "TorchScript modules cannot be quantized")
            if isinstance(layer, _FLOATS):
                run.log.skip(
                    path, f"quantization of {type(layer).__name__} is not supported; it stays in floating point"
                )
        run.plan["schemes"] = rules.schemes(run.module)
        for field, name in rules.idle(run.module):
            # To ignore a torch class that the model does not use is not a mistake.
            level = logging.INFO if field == "ignore" and hasattr(nn, name) else logging.WARNING
            logger.log(level, "%s: %s: '%s' matches no module of the model", self.name, field, name)
        weights = [path for path, layer in named_modules(run.module) if _has_weights(layer)]
        if not any(run.plan["schemes"].get(path) is not None for path in weights):
            raise ModifierError("nothing to quantize: every weight of two or more dimensions is excluded")
        return []

    def state_fields(self, run: Run) -> Mapping[str, StateField]:
        return {"ranges": StateField(_ranges)}

    def start(self, run: Run) -> None:
        from gossamer.quantization import emulation_of

        before = emulation_of(run.module)
        run.scratch["before"] = before
        run.state["ranges"] = {} if before is None else dict(before.ranges)
        self.restore(run)
        self._calibrate(run)
        logger.info("%s: emulating integers from step %d on", self.name, run.clock.step)

    def restore(self, run: Run) -> None:
        from gossamer.quantization import Emulation, emulation_of

        ranges = cast(dict[str, Tensor], run.state.setdefault("ranges", {}))
        before = emulation_of(run.module)
        earlier: Mapping[str, Scheme | None] = {} if before is None else before.schemes
        # Layers that another modifier has quantized keep their scheme.
        schemes = {path: scheme or earlier.get(path) for path, scheme in run.plan["schemes"].items()}
        run.scratch["emulation"] = Emulation(run.module, schemes, ranges)
        self.update(run)

    def update(self, run: Run) -> None:
        emulation = self._emulation(run)
        emulation.frozen = _reached(self.disable_quantization_observer_epoch, run)
        emulation.norms_frozen = _reached(self.freeze_bn_stats_epoch, run)

    def before_step(self, run: Run) -> None:
        if not run.scratch.get("warned"):
            run.scratch["warned"] = True
            self._warn_of_unmasked_zeros(run)  # not in `start`: other modifiers may start at the same step

    def after_step(self, run: Run) -> None:
        """Ranks see different batches and must round with the same ranges."""
        emulation = self._emulation(run)
        if not emulation.frozen:
            run.distributed.average_named(emulation.ranges)

    def undo(self, run: Run) -> None:
        from gossamer.quantization import withdraw

        withdraw(run.module)
        if (before := run.scratch.pop("before", None)) is not None:
            before.install(run.module)

    def finish(self, run: Run) -> None:
        """The model keeps emulating quantization, with its present ranges."""
        self._emulation(run).frozen = True

    @staticmethod
    def _emulation(run: Run) -> Emulation:
        return cast("Emulation", run.scratch["emulation"])

    def _calibrate(self, run: Run) -> None:
        """Initialize the ranges from calibration batches, in evaluation mode."""
        batches = run.data.calibration
        if batches is None or self.num_calibration_steps == 0:
            if self.num_calibration_steps:
                logger.warning(
                    "%s: num_calibration_steps has no effect without calibration_data; pass it to modify", self.name
                )
            return
        emulation, module = self._emulation(run), run.module
        modes = [(layer, layer.training) for layer in module.modules()]
        module.eval()
        try:
            with emulation.calibration(), torch.no_grad():
                count = 0
                for batch in islice(batches, self.num_calibration_steps):
                    _call(module, batch)
                    count += 1
            if not count:
                logger.warning("%s: calibration_data is empty and has no effect", self.name)
        finally:
            for layer, training in modes:
                layer.training = training
        run.distributed.average_named(emulation.ranges)

    def _warn_of_unmasked_zeros(self, run: Run) -> None:
        held = set(run.masks.names())
        unmasked: list[tuple[str, float]] = []
        for name in prunable(run.module):
            zeros, total = run.weights.zeros(name)
            if name not in held and total and zeros / total >= _SPARSE:
                unmasked.append((name, zeros / total))
        if unmasked:
            name, share = unmasked[0]
            more = f" and {len(unmasked) - 1} more" if len(unmasked) > 1 else ""
            logger.warning(
                "%s starts on a sparse model whose zeros are not masked ('%s', %.0f %% zero%s): training will regrow "
                "them; add a ConstantPruningModifier, or set leave_enabled: true in the pruning modifier",
                self.name,
                name,
                100 * share,
                more,
            )


def _ranges(item: Item, layout: StateLayout) -> dict[str, Tensor]:
    """By call site: the minimum and maximum."""
    return {site: entry.tensor(Spec((2,), torch.float32, layout.device)) for site, entry in item.entries().items()}


def _asymmetric_weights(scheme: Any) -> bool:
    weights: Any = cast(Mapping[str, Any], scheme).get("weights") if isinstance(scheme, Mapping) else None
    return isinstance(weights, Mapping) and cast(Mapping[str, Any], weights).get("symmetric") is False


def _has_weights(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))


def _reached(epoch: float | None, run: Run) -> bool:
    return epoch is not None and epoch != -1 and run.clock.step >= to_step(epoch, run.clock.steps_per_epoch)


def _call(module: nn.Module, batch: Any) -> None:
    try:
        args, kwargs = batch_arguments(batch, module)
        module(*args, **kwargs)
    except (TypeError, RuntimeError) as error:
        raise ModifierError(
            f"calibration_data: the model does not accept a batch ({error}); pass tensors, pairs of inputs and "
            "labels, or dicts of the arguments of forward"
        ) from error
