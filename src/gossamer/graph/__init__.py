"""What a model is: its parameters by the names its author knows."""

from gossamer.graph.parameters import (
    ALL,
    ALL_PRUNABLE,
    Matches,
    expects_every_gradient,
    first_names,
    get_module,
    get_parameter,
    has_parameter,
    is_transposed,
    match,
    match_prunable,
    named_modules,
    named_parameters,
    owner_of,
    prunable,
    unwrap,
)

__all__ = [
    "ALL",
    "ALL_PRUNABLE",
    "Matches",
    "expects_every_gradient",
    "first_names",
    "get_module",
    "get_parameter",
    "has_parameter",
    "is_transposed",
    "match",
    "match_prunable",
    "named_modules",
    "named_parameters",
    "owner_of",
    "prunable",
    "unwrap",
]
