"""The door for people who come from MSBench: sparse training from a config.

    from gossamer.msbench import build_sparse_scheduler

    scheduler = build_sparse_scheduler(sparsity_config)
    model = scheduler.prepare_sparse_model(model)

Every configuration of MSBench's documentation runs as printed there. Parts of
one's own (a mask generator, a sparser, a scheduler) are registered and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar, cast

from gossamer.errors import GossamerError
from gossamer.msbench import generators, levels, methods, sparsers
from gossamer.msbench.config import Config
from gossamer.msbench.generators import MaskGenerator
from gossamer.msbench.lowering import told_of_config
from gossamer.msbench.schedulers import BaseScheduler
from gossamer.msbench.sparsers import FakeSparse

__all__ = ["PRESETS", "BaseScheduler", "FakeSparse", "MaskGenerator", "build_sparse_scheduler", "register"]

_classes: dict[str, dict[str, type]] = {
    "mask_generator": {
        kind.__name__: kind
        for kind in (
            generators.NormalMaskGenerator,
            generators.ProbMaskGenerator,
            generators.STRMaskGenerator,
            generators.NMMaskGenerator,
            generators.FPGMMaskGenerator,
            generators.NuclearMaskGenerator,
        )
    },
    "fake_sparse": {
        kind.__name__: kind for kind in (sparsers.FakeSparse, sparsers.ProbMaskFakeSparse, sparsers.STRFakeSparse)
    },
    "scheduler": {
        kind.__name__: kind
        for kind in (
            BaseScheduler,
            levels.AmbaLevelPruneScheduler,
            methods.AmpereScheduler,
            methods.ProbMaskPruneScheduler,
            methods.STRScheduler,
            methods.ADMMScheduler,
        )
    },
}
_BASES: dict[str, type] = {"mask_generator": MaskGenerator, "fake_sparse": FakeSparse, "scheduler": BaseScheduler}
K = TypeVar("K", bound=type)


def build_sparse_scheduler(sparsity_config: Mapping[str, Any]) -> BaseScheduler:
    """The scheduler that a config describes. The config is not changed; all its mistakes are told together."""
    config = Config(sparsity_config, _classes)
    with told_of_config():
        return cast(BaseScheduler, config.types["scheduler"](config, **config.kwargs["scheduler"]))


def register(cls: K) -> K:
    """Class decorator: configs may name this mask generator, sparser or scheduler by its class name.

    Keyword-only arguments of `__init__` are what a config's `kwargs` may give.
    """
    for part, base in _BASES.items():
        if isinstance(cls, type) and issubclass(cls, base):  # pyright: ignore[reportUnnecessaryIsInstance]
            _classes[part][cls.__name__] = cls
            return cls
    names = ", ".join(base.__name__ for base in _BASES.values())
    raise GossamerError(f"register: {cls!r} is a subclass of none of {names}")


class _Presets(Mapping[str, dict[str, Any]]):
    """Configs to start from; each access gives a copy to change at will."""

    def __init__(self, configs: dict[str, dict[str, Any]]) -> None:
        self._configs = configs

    def __getitem__(self, name: str) -> dict[str, Any]:
        return deepcopy(self._configs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)


_MASKS = {"mask_generator": {"type": "NormalMaskGenerator"}, "fake_sparse": {"type": "FakeSparse"}}

PRESETS: Mapping[str, dict[str, Any]] = _Presets(
    {
        "Ampere": {
            "scheduler": {
                "type": "AmpereScheduler",
                "kwargs": {
                    "mask_calculator": "m4n2_1d",
                    "allow_recompute_mask": False,
                    "allow_permutation": True,
                    "verbosity": 1,
                },
            }
        },
        "Ambarella": {
            **_MASKS,
            "scheduler": {
                "type": "AmbaLevelPruneScheduler",
                "kwargs": {
                    "total_iters": 10000,
                    "sparsity_table": [30, 40, 50, 60, 70, 80, 90],
                    "prun_algo": 1,
                    "dw_no_prune": True,
                },
            },
        },
        "unstructured": {
            **_MASKS,
            "scheduler": {
                "type": "AmbaLevelPruneScheduler",
                "kwargs": {"total_iters": 10000, "sparsity_table": [50, 70, 80, 90], "prun_algo": "erk"},
            },
        },
    }
)
"""Ready-made configs per backend: Ampere (2:4), Ambarella (levels by energy), unstructured (levels by ERK)."""
