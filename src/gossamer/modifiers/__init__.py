"""What a recipe can do: one family per file, one class per modifier."""

from gossamer.modifiers.admm import ADMMPruningModifier
from gossamer.modifiers.base import Modifier, Run, find, register, registered
from gossamer.modifiers.distillation import DistillationModifier, PerLayerDistillationModifier
from gossamer.modifiers.dynamic import ACDCPruningModifier, RigLPruningModifier, TopKASTPruningModifier
from gossamer.modifiers.learned import ProbMaskPruningModifier, STRPruningModifier
from gossamer.modifiers.learning_rate import (
    LearningRateFunctionModifier,
    LearningRateModifier,
    RateModifier,
    SetLearningRateModifier,
)
from gossamer.modifiers.levels import LevelPruningModifier
from gossamer.modifiers.other import EpochRangeModifier, SparsificationLoggingModifier
from gossamer.modifiers.outlook import Outlook
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
from gossamer.modifiers.quantization import QuantizationModifier
from gossamer.modifiers.second_order import MFACPruningModifier, OBSPruningModifier
from gossamer.modifiers.structure import LayerPruningModifier, LayerThinningModifier, StructuredPruningModifier

__all__ = [
    "ACDCPruningModifier",
    "ADMMPruningModifier",
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
    "SparsificationLoggingModifier",
    "StructuredPruningModifier",
    "TopKASTPruningModifier",
    "TrainableParamsModifier",
    "find",
    "register",
    "registered",
]
