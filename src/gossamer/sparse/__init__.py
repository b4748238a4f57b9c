"""Patterns, scores, schedules and allocation: pure functions and frozen dataclasses over tensors."""

from gossamer.sparse.allocation import (
    energy,
    energy_kept,
    energy_removed,
    erdos_renyi,
    global_masks,
    uniform,
    within_reach,
)
from gossamer.sparse.masking import pack, unpack, zero_where
from gossamer.sparse.nm import NM, NM2d
from gossamer.sparse.patterns import Block, Channel, Filter, Pattern, Unstructured, parse_nm, parse_pattern
from gossamer.sparse.reparameterization import (
    hard_masks,
    initial_probabilities,
    logistic_noise,
    probability_gradient,
    project,
    pulled,
    relaxed_mask,
    soft_threshold,
    threshold_gradient,
    threshold_pull,
)
from gossamer.sparse.schedules import cosine, fraction, interpolate
from gossamer.sparse.scores import BlockFisher, filter_median_distance, filter_norm, filter_nuclear, magnitude, movement
from gossamer.sparse.selection import share_of_zeros, smallest, zero_count

__all__ = [
    "NM",
    "Block",
    "BlockFisher",
    "Channel",
    "Filter",
    "NM2d",
    "Pattern",
    "Unstructured",
    "cosine",
    "energy",
    "energy_kept",
    "energy_removed",
    "erdos_renyi",
    "filter_median_distance",
    "filter_norm",
    "filter_nuclear",
    "fraction",
    "global_masks",
    "hard_masks",
    "initial_probabilities",
    "interpolate",
    "logistic_noise",
    "magnitude",
    "movement",
    "pack",
    "parse_nm",
    "parse_pattern",
    "probability_gradient",
    "project",
    "pulled",
    "relaxed_mask",
    "share_of_zeros",
    "smallest",
    "soft_threshold",
    "threshold_gradient",
    "threshold_pull",
    "uniform",
    "unpack",
    "within_reach",
    "zero_count",
    "zero_where",
]
