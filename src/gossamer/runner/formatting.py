"""Formats losses, learning rates, times, metrics, counts and sizes for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MAIN_METRICS = ("top1", "mAP", "mAP50", "top5", "mAP75")
"""The most important metrics, in order."""


def format_number(value: float) -> str:
    """About four significant digits.

    >>> format_number(0.53217), format_number(12.3456), format_number(0.000012), format_number(float("nan"))
    ('0.5322', '12.35', '1.2e-05', 'nan')
    """
    if value and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1e4 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(72), format_duration(3 * 3600 + 62), format_duration(50 * 3600)
    ('1:12', '3:01:02', '2 d 2 h')
    """
    whole = max(round(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_metric(name: str, value: float) -> str:
    """A metric's value: top-k in percent, COCO's from 0 to 1.

    >>> format_metric("top1", 91.234), format_metric("mAP50", 0.61234)
    ('91.23', '0.612')
    """
    return f"{value:.2f}" if name.startswith("top") else f"{value:.3f}"


def format_metrics(metrics: Mapping[str, float], most: int | None = None) -> str:
    """
    >>> format_metrics({"top5": 99.0, "top1": 91.5})
    'top1 91.50, top5 99.00'
    """
    return ", ".join(f"{name} {format_metric(name, metrics[name])}" for name in sort_metrics(metrics)[:most])


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Metrics by importance."""
    return sorted(names, key=lambda name: MAIN_METRICS.index(name) if name in MAIN_METRICS else len(MAIN_METRICS))


def format_count(value: int) -> str:
    """
    >>> format_count(950), format_count(11_173_962)
    ('950', '11.17 M')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return str(value)


def format_size(count: int) -> str:
    """A number of bytes.

    >>> format_size(44_775_912), format_size(445_112), format_size(1200), format_size(0)
    ('44.8 MB', '0.45 MB', '1.2 kB', '0.0 kB')
    """
    if count < 1e5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.2f} MB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def zero_share(weights: Mapping[str, tuple[int, int]]) -> float:
    """The sparsity of a model from counts `(weights, not zero)` by kind of layer.

    >>> zero_share({"linear": (100, 50), "convolution": (100, 100)})
    0.25
    """
    total = sum(entry[0] for entry in weights.values())
    return 1 - sum(entry[1] for entry in weights.values()) / total if total else 0.0


def known_counts(weights: Mapping[str, tuple[int, int]], pruned: float | None) -> Mapping[str, tuple[int, int]]:
    """The counts, or an empty mapping if they do not show the sparsity of the pruned layers.

    Removed filters are not counted as zeros, and some methods write their zeros when the model is exported.

    >>> known_counts({"linear": (100, 100)}, 0.8), known_counts({"linear": (100, 20)}, 0.8)
    ({}, {'linear': (100, 20)})
    """
    return {} if pruned and pruned > 0.05 and zero_share(weights) < 0.01 else weights
