"""What a recipe can do: one kind of method per file, one class per modifier. Classes are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

from gossamer.modifiers.base import BUILT_IN, Modifier, Outlook, modifier_class, register, registered
from gossamer.modifiers.run import Run

if TYPE_CHECKING:
    from gossamer.modifiers.distillation import DistillationModifier, PerLayerDistillationModifier
    from gossamer.modifiers.dynamic import (
        ACDCPruningModifier,
        ADMMPruningModifier,
        RigLPruningModifier,
        TopKASTPruningModifier,
    )
    from gossamer.modifiers.gradual import (
        GlobalMagnitudePruningModifier,
        GMPruningModifier,
        LevelPruningModifier,
        MagnitudePruningModifier,
        MFACPruningModifier,
        MovementPruningModifier,
        OBSPruningModifier,
    )
    from gossamer.modifiers.learned import ProbMaskPruningModifier, STRPruningModifier
    from gossamer.modifiers.oneshot import (
        ALPSPruningModifier,
        GPTQModifier,
        SmoothQuantModifier,
        SparseGPTModifier,
        WandaPruningModifier,
    )
    from gossamer.modifiers.pruning import ConstantPruningModifier, PruningModifier
    from gossamer.modifiers.quantization import QuantizationModifier
    from gossamer.modifiers.structure import LayerPruningModifier, LayerThinningModifier, StructuredPruningModifier
    from gossamer.modifiers.training import (
        EpochRangeModifier,
        GradualParamModifier,
        LearningRateFunctionModifier,
        LearningRateModifier,
        RateModifier,
        SetLearningRateModifier,
        SetParamModifier,
        SetWeightDecayModifier,
        SparsificationLoggingModifier,
        TrainableParamsModifier,
    )

__all__ = [
    "ACDCPruningModifier",
    "ADMMPruningModifier",
    "ALPSPruningModifier",
    "ConstantPruningModifier",
    "DistillationModifier",
    "EpochRangeModifier",
    "GMPruningModifier",
    "GPTQModifier",
    "GlobalMagnitudePruningModifier",
    "GradualParamModifier",
    "LayerPruningModifier",
    "LayerThinningModifier",
    "LearningRateFunctionModifier",
    "LearningRateModifier",
    "LevelPruningModifier",
    "MFACPruningModifier",
    "MagnitudePruningModifier",
    "Modifier",
    "MovementPruningModifier",
    "OBSPruningModifier",
    "Outlook",
    "PerLayerDistillationModifier",
    "ProbMaskPruningModifier",
    "PruningModifier",
    "QuantizationModifier",
    "RateModifier",
    "RigLPruningModifier",
    "Run",
    "STRPruningModifier",
    "SetLearningRateModifier",
    "SetParamModifier",
    "SetWeightDecayModifier",
    "SmoothQuantModifier",
    "SparseGPTModifier",
    "SparsificationLoggingModifier",
    "StructuredPruningModifier",
    "TopKASTPruningModifier",
    "TrainableParamsModifier",
    "WandaPruningModifier",
    "modifier_class",
    "register",
    "registered",
]


_BASES = {"PruningModifier": "pruning", "RateModifier": "training"}


def __getattr__(name: str) -> object:
    module = BUILT_IN.get(name) or _BASES.get(name)
    if module is None:
        raise AttributeError(f"module 'gossamer.modifiers' has no attribute '{name}'")
    return getattr(import_module(f"gossamer.modifiers.{module}"), name)
