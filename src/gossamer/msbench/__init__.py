"""Front end for MSBench: sparse training from a config.

    from gossamer.msbench import build_sparse_scheduler

    scheduler = build_sparse_scheduler(sparsity_config)
    model = scheduler.prepare_sparse_model(model)

Every config of MSBench's documentation runs unchanged. Custom mask generators, sparsers and schedulers are added with
`register` and named in the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar, cast

from gossamer.errors import GossamerError, within
from gossamer.msbench import generators, schedulers, sparsers
from gossamer.msbench.base import BaseScheduler
from gossamer.msbench.config import LOCATION, Config
from gossamer.msbench.generators import MaskGenerator
from gossamer.msbench.sparsers import FakeSparse

__all__ = ["PRESETS", "BaseScheduler", "FakeSparse", "MaskGenerator", "build_sparse_scheduler", "register"]

_BASES: dict[str, type] = {"mask_generator": MaskGenerator, "fake_sparse": FakeSparse, "scheduler": BaseScheduler}
_classes: dict[str, dict[str, type]] = {part: {} for part in _BASES}
K = TypeVar("K", bound=type)


def build_sparse_scheduler(sparsity_config: Mapping[str, Any]) -> BaseScheduler:
    """The scheduler that a config describes. The config is not changed, and all of its problems are raised together."""
    with within(location=LOCATION):
        config = Config(sparsity_config, _classes)
        return cast(BaseScheduler, config.types["scheduler"](config, **config.kwargs["scheduler"]))


def register(cls: K) -> K:
    """Class decorator that lets configs name this mask generator, sparser or scheduler by its class name.

    The keyword-only arguments of `__init__` are the arguments that a config may set in `kwargs`.
    """
    for part, base in _BASES.items():
        if isinstance(cls, type) and issubclass(cls, base):  # pyright: ignore[reportUnnecessaryIsInstance]
            _classes[part][cls.__name__] = cls
            return cls
    names = ", ".join(base.__name__ for base in _BASES.values())
    raise GossamerError(f"register: expected a subclass of one of {names}, found {cls!r}")


for _class in (
    generators.NormalMaskGenerator,
    generators.ProbMaskGenerator,
    generators.STRMaskGenerator,
    generators.NMMaskGenerator,
    generators.FPGMMaskGenerator,
    generators.NuclearMaskGenerator,
    FakeSparse,
    sparsers.ProbMaskFakeSparse,
    sparsers.STRFakeSparse,
    BaseScheduler,
    schedulers.AmbaLevelPruneScheduler,
    schedulers.AmpereScheduler,
    schedulers.ProbMaskPruneScheduler,
    schedulers.STRScheduler,
    schedulers.ADMMScheduler,
):
    register(_class)


class _Presets(Mapping[str, dict[str, Any]]):
    """Example configs; each access returns a copy."""

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
