"""What a recipe can do: one family per file, one class per modifier."""

from gossamer.modifiers.base import Modifier, Run, find, register, registered
from gossamer.modifiers.coming import DistillationModifier, PerLayerDistillationModifier, QuantizationModifier
from gossamer.modifiers.dynamic import ACDCPruningModifier, RigLPruningModifier, TopKASTPruningModifier
from gossamer.modifiers.learning_rate import (
    LearningRateFunctionModifier,
    LearningRateModifier,
    RateModifier,
    SetLearningRateModifier,
)
from gossamer.modifiers.other import EpochRangeModifier, SparsificationLoggingModifier
from gossamer.modifiers.parameters import (
    GradualParamModifier,
    SetParamModifier,
    SetWeightDecayModifier,
    TrainableParamsModifier,
)
from gossamer.modifiers.pruning import (
    ConstantPruningModifier,
    GlobalMagnitudePruningModifier,
    GMPruningModifier,
    MagnitudePruningModifier,
    MovementPruningModifier,
    PruningModifier,
)
from gossamer.modifiers.second_order import MFACPruningModifier, OBSPruningModifier
from gossamer.modifiers.structure import LayerPruningModifier, LayerThinningModifier, StructuredPruningModifier

__all__ = [
    "ACDCPruningModifier",
    "ConstantPruningModifier",
    "DistillationModifier",
    "EpochRangeModifier",
    "GMPruningModifier",
    "GlobalMagnitudePruningModifier",
    "GradualParamModifier",
    "LayerPruningModifier",
    "LayerThinningModifier",
    "LearningRateFunctionModifier",
    "LearningRateModifier",
    "MFACPruningModifier",
    "MagnitudePruningModifier",
    "Modifier",
    "MovementPruningModifier",
    "OBSPruningModifier",
    "PerLayerDistillationModifier",
    "PruningModifier",
    "QuantizationModifier",
    "RateModifier",
    "RigLPruningModifier",
    "Run",
    "SetLearningRateModifier",
    "SetParamModifier",
    "SetWeightDecayModifier",
    "SparsificationLoggingModifier",
    "StructuredPruningModifier",
    "TopKASTPruningModifier",
    "TrainableParamsModifier",
    "find",
    "register",
    "registered",
]
