"""Networks for images of 3 × 8 × 8 with layers that compute their weight, for configs of the runner."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.runner.nets import small


def weight_norm(num_classes: int = 10) -> nn.Sequential:
    model = small(num_classes)
    parametrizations.weight_norm(model[3])
    return model


def weight_norm_by_hook(num_classes: int = 10) -> nn.Sequential:
    model = small(num_classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        nn.utils.weight_norm(model[3])
    return model


def spectral_norm_by_hook(num_classes: int = 10) -> nn.Sequential:
    model = small(num_classes)
    nn.utils.spectral_norm(model[3])
    return model


def pruned_by_torch(num_classes: int = 10) -> nn.Sequential:
    model = small(num_classes)
    prune.l1_unstructured(model[3], "weight", 0.25)
    return model


def orthogonal(num_classes: int = 10) -> nn.Sequential:
    model = small(num_classes)
    parametrizations.orthogonal(model[9])
    return model
