"""What a recipe does over its epochs: sparsity, learning rate and active modifiers, sampled from the modifiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gossamer.engine.timing import Timing
from gossamer.modifiers.base import Modifier
from gossamer.recipe import Recipe

SAMPLES = 2000
"""Number of samples of a schedule."""

LANES = {
    "pruning": "pruning",
    "constant": "constant pruning",
    "quantization": "quantization",
    "distillation": "distillation",
    "learning_rate": "learning rate",
    "optimizer": "optimizer",
    "parameters": "parameters",
    "logging": "logging",
    "other": "other",
}
"""Families of modifiers in display order, with their labels."""


@dataclass(frozen=True)
class Schedule:
    """A value over epochs: `values[i]` applies from `epochs[i]` to the next one; None means no value."""

    label: str
    epochs: tuple[float, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Span:
    """Modifiers of one family that are active between two epochs; `held` if only their masks still apply."""

    family: str
    start: float
    end: float
    held: bool
    label: str


@dataclass(frozen=True)
class Timeline:
    """Everything that a plot of a recipe shows."""

    name: str
    epochs: float
    sparsity: tuple[Schedule, ...]
    learning_rate: tuple[Schedule, ...]
    """One, or one for each set of parameter groups with its own schedule."""
    spans: tuple[Span, ...]

    def as_data(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def timeline(recipe: Recipe, steps_per_epoch: float = 100, initial_lr: float | None = None) -> Timeline:
    """Sample what every modifier of `recipe` does at each epoch.

    `initial_lr` is the learning rate of the optimizer, for recipes that scale it without setting it; without it, such
    learning rates are relative to 1.

    >>> from gossamer.recipe import load
    >>> schedule = timeline(load("builtin:gmp-90")).sparsity[0]
    >>> schedule.label, schedule.values[-1]
    ('GMPruningModifier to 90 %', 0.9)
    """
    horizon = float(max(recipe.max_epochs, 1))
    pruning = [modifier for modifier in recipe.modifiers if modifier.prunes]
    rates = [modifier for modifier in recipe.modifiers if modifier.family == "learning_rate"]
    curves = [(modifier, _sparsity(modifier, horizon, steps_per_epoch)) for modifier in pruning]
    scheduled = [(modifier, curve) for modifier, curve in curves if any(value is not None for _, value in curve)]
    return Timeline(
        name=recipe.name,
        epochs=horizon,
        sparsity=_grouped(scheduled),
        learning_rate=_learning_rate(rates, horizon, steps_per_epoch, initial_lr),
        spans=_spans(recipe.modifiers, {id(modifier) for modifier, _ in scheduled}, horizon),
    )


Steps = tuple[tuple[float, float | None], ...]
"""Epochs, and the value from each of them on."""


def _sparsity(modifier: Modifier, horizon: float, steps_per_epoch: float) -> Steps:
    """The sparsity of the last update, sampled at the steps where training updates the masks."""
    timing, last = Timing.of(modifier, steps_per_epoch), round(horizon * steps_per_epoch)
    stride = max(1, last // SAMPLES)
    sampled: dict[float, float | None] = {0.0: None}
    step = timing.next_after(-1)
    while step is not None and step <= last:
        sampled[step / steps_per_epoch] = modifier.sparsity_at(step / steps_per_epoch)
        near = step + stride - 1
        step = timing.next_after(near if timing.end is None or near < timing.end else max(step, timing.end - 1))
    return _changes([*sampled.items(), (horizon, modifier.sparsity_at(horizon))])


def _grouped(curves: Sequence[tuple[Modifier, Steps]]) -> tuple[Schedule, ...]:
    """One schedule for all modifiers with equal steps, ordered by start and final sparsity."""
    groups: dict[Steps, list[Modifier]] = {}
    for modifier, curve in curves:
        groups.setdefault(curve, []).append(modifier)
    ordered = sorted(groups, key=lambda curve: (next(e for e, value in curve if value is not None), -_final(curve)))
    labels = [_label(groups[curve], f"to {_percent(_final(curve))}") for curve in ordered]
    distinct = [
        label if labels.count(label) == 1 else f"{label}, {_epochs(groups[curve][0])}"
        for label, curve in zip(labels, ordered, strict=True)
    ]
    return tuple(_schedule(label, curve) for label, curve in zip(distinct, ordered, strict=True))


def _learning_rate(
    rates: Sequence[Modifier], horizon: float, steps_per_epoch: float, initial: float | None
) -> tuple[Schedule, ...]:
    """The learning rates of the parameter groups in the recipe; groups with the same modifiers share one."""
    named = sorted({index for modifier in rates for index in modifier.learning_rate_groups or ()})
    together: dict[tuple[int, ...], list[int]] = {}
    for group in named or [0]:
        chosen = [i for i, m in enumerate(rates) if m.learning_rate_groups is None or group in m.learning_rate_groups]
        together.setdefault(tuple(chosen), []).append(group)
    schedules: list[Schedule] = []
    for chosen, groups in together.items():
        own = [rates[index] for index in chosen]
        if own:
            series = _one_rate(own, horizon, steps_per_epoch, initial)
            of = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
            schedules.append(replace(series, label=f"{series.label}, {of}") if len(together) > 1 else series)
    return tuple(schedules)


def _one_rate(rates: Sequence[Modifier], horizon: float, steps_per_epoch: float, initial: float | None) -> Schedule:
    """The learning rate that these modifiers set, from the first epoch at which it is known."""
    if initial is not None:
        return _schedule("learning rate", _rates(rates, horizon, steps_per_epoch, initial))
    first = min(max(modifier.start_epoch, 0.0) for modifier in rates)
    curve, doubled = (
        [(epoch, rate if epoch >= first else None) for epoch, rate in _rates(rates, horizon, steps_per_epoch, guess)]
        for guess in (1.0, 2.0)
    )
    # A learning rate that doubles with that of the optimizer is only known relative to it.
    return _schedule("learning rate" if curve == doubled else "learning rate, relative to the optimizer's", curve)


def _sampled(rates: Iterable[Modifier], horizon: float, steps_per_epoch: float) -> list[float]:
    """Epochs to sample: every step if there are few, and every start and end."""
    steps = max(1, round(horizon * steps_per_epoch))
    points = {step / steps_per_epoch for step in range(0, steps + 1, max(1, steps // SAMPLES))}
    for modifier in rates:
        points |= {epoch for epoch in (modifier.start_epoch, modifier.end_epoch) if epoch >= 0}
    return sorted(point for point in points if point < horizon)


def _rates(
    rates: Sequence[Modifier], horizon: float, steps_per_epoch: float, initial: float
) -> list[tuple[float, float]]:
    """The learning rate at each epoch; of two modifiers, the one that started later wins."""
    ordered = sorted(rates, key=lambda modifier: max(modifier.start_epoch, 0.0))
    started: dict[int, float] = {}
    current, sampled = initial, list[tuple[float, float]]()
    for epoch in _sampled(rates, horizon, steps_per_epoch):
        for index, modifier in enumerate(ordered):
            if max(modifier.start_epoch, 0.0) <= epoch:
                started.setdefault(index, current)
                rate = modifier.learning_rate_at(epoch, steps_per_epoch, started[index])
                current = current if rate is None else rate
        sampled.append((epoch, current))
    return [*sampled, (horizon, current)]


def _spans(modifiers: Iterable[Modifier], scheduled: set[int], horizon: float) -> tuple[Span, ...]:
    groups: dict[tuple[str, float, float, bool], list[Modifier]] = {}
    for modifier in modifiers:
        family = modifier.family if modifier.family in LANES else "other"
        if modifier.family == "epoch":
            continue
        if modifier.prunes and id(modifier) not in scheduled:
            family = "constant"
        start = max(modifier.start_epoch, 0.0)
        end = horizon if modifier.end_epoch == -1 else modifier.end_epoch
        groups.setdefault((family, start, end, False), []).append(modifier)
        if id(modifier) in scheduled and modifier.released_epoch is None:
            groups.setdefault((family, end, horizon, True), []).append(modifier)
    order = list(LANES)
    spans = [Span(*key, _label(group)) for key, group in groups.items() if key[2] > key[1] or not key[3]]
    return tuple(sorted(spans, key=lambda span: (order.index(span.family), not span.held, span.start, span.end)))


def _label(group: Sequence[Modifier], after: str = "") -> str:
    """`3 × GMPruningModifier to 85 %`."""
    names = list(dict.fromkeys(modifier.name for modifier in group))
    count = f"{len(group)} × " if len(group) > 1 and len(names) == 1 else ""
    return f"{count}{', '.join(names)} {after}".strip()


def _epochs(modifier: Modifier) -> str:
    end = "the end" if modifier.end_epoch == -1 else f"{modifier.end_epoch:g}"
    return f"epochs {max(modifier.start_epoch, 0):g} to {end}"


def _changes(curve: Sequence[tuple[float, float | None]]) -> Steps:
    """The first and last point, and those at which the value changes."""
    last = len(curve) - 1
    return tuple(point for i, point in enumerate(curve) if i in (0, last) or point[1] != curve[i - 1][1])


def _schedule(label: str, curve: Sequence[tuple[float, float | None]]) -> Schedule:
    epochs, values = zip(*_changes(curve), strict=True)
    return Schedule(label, epochs, values)


def _final(curve: Steps) -> float:
    return next(value for _, value in reversed(curve) if value is not None)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.4g} %"
